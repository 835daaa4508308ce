"""ModernBERT on a GPU, whole models of random weights: ours and transformers', from token ids."""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from bytetx.bench.flash_attn import flash_attn_package
from bytetx.bench.gpu import left_out
from bytetx.bench.lengths import prefix_sums
from bytetx.bench.rivals import quiet
from bytetx.checkpoint.spec import build_spec
from bytetx.nn.transformer import Transformer
from bytetx.packed import PackedBatch, pack

# transformers' packed tokens: position ids that start again with each sequence.
_PACKED = "transformers-fa2-packed"
MODERNBERT_SIZES: dict[str, dict[str, int]] = {
    "modernbert-base": {},
    "modernbert-large": {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "intermediate_size": 2624,
    },
}


class ModernBert:
    """One set of weights as ours and as transformers' model with each attention that it has."""

    def __init__(self, size: str, dtype: torch.dtype, notes: list[str]):
        """size: a key of MODERNBERT_SIZES.  notes: gets a line for a rival that does not load."""
        from transformers import ModernBertConfig

        torch.manual_seed(0)
        config: Any = ModernBertConfig.from_dict(MODERNBERT_SIZES[size])
        self.padded = _random_model(config, dtype)
        weights = self.padded.state_dict()
        self.packed: Any = None
        try:
            with flash_attn_package():
                config._attn_implementation = "flash_attention_2"
                self.packed = _random_model(config, dtype)
            self.packed.load_state_dict(weights)
        except Exception as error:  # a rival may raise anything, and costs no other number
            notes.append(left_out(_PACKED, error))
        self.spec = build_spec(config.to_dict())
        self.transformer = Transformer.from_tensors(
            self.spec, weights, dtype=dtype, device="cuda", prepack=True
        )

    def runs(self, inputs: "TokenInputs") -> dict[str, Callable[[], Tensor]]:
        """The forward passes; transformers' own answers with the padded rectangle."""

        def padded() -> Tensor:
            out = self.padded(input_ids=inputs.padded_ids, attention_mask=inputs.mask)
            return cast(Tensor, out.last_hidden_state)

        def packed() -> Tensor:
            out = self.packed(input_ids=inputs.packed_ids, position_ids=inputs.position_ids)
            return cast(Tensor, out.last_hidden_state[0])

        found: dict[str, Callable[[], Tensor]] = {
            "ours": lambda: self.transformer.forward(inputs.batch),
            "transformers": padded,
        }
        return found if self.packed is None else found | {_PACKED: packed}


def _random_model(config: Any, dtype: torch.dtype) -> Any:
    from transformers import ModernBertModel

    with quiet(), torch.device("cuda"):
        model: Any = ModernBertModel(config)
        return model.to(dtype).eval()


class TokenInputs:
    """Random token ids of sequences of the given lengths, packed and padded."""

    def __init__(self, lengths: np.ndarray, *, vocab_size: int):
        rng = np.random.default_rng(0)
        ids = [rng.integers(5, vocab_size, length).astype(np.int32) for length in lengths]
        self.lengths, self.max_seqlen = lengths, int(lengths.max())
        self.batch: PackedBatch = pack(ids, has_token_types=False, device="cuda")
        self.cu_seqlens = prefix_sums(lengths)
        self.packed_ids = torch.from_numpy(np.concatenate(ids)).long().cuda()[None]
        self.position_ids = torch.cat([torch.arange(n) for n in lengths]).cuda()[None]
        self.mask = self.is_real().long()
        self.padded_ids = torch.zeros_like(self.mask)
        self.padded_ids[self.is_real()] = self.packed_ids[0]

    def is_real(self) -> Tensor:
        """bool [batch_size, max_seqlen]: which positions of the padded batch hold a token."""
        places = torch.arange(self.max_seqlen, device="cuda")
        return places < self.cu_seqlens.diff().unsqueeze(1)
