"""ModernBERT, whole models of random weights: ours and transformers', from token ids."""

from typing import Any, cast

import torch
from torch import Tensor

from benchmarks.flash_attn import flash_attn_package
from benchmarks.gpu import left_out
from benchmarks.rivals import quiet
from benchmarks.token_inputs import Forward, TokenInputs, padded_run
from bytetx.checkpoint.spec import build_spec
from bytetx.nn.transformer import Transformer

# transformers' packed tokens: position ids that start again with each sequence.
_PACKED = "transformers-fa2-packed"
_CPU_BATCH_SIZE = 8  # of transformers' padded batches: less padding than in 32, as fast a GEMM
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

    def __init__(
        self,
        size: str,
        dtype: torch.dtype,
        notes: list[str],
        *,
        device: torch.device | str = "cuda",
    ):
        """size: a key of MODERNBERT_SIZES.  notes: gets a line for a rival that does not load."""
        from transformers import ModernBertConfig

        torch.manual_seed(0)
        config: Any = ModernBertConfig.from_dict(MODERNBERT_SIZES[size])
        self.padded = _random_model(config, dtype, device)
        weights = self.padded.state_dict()
        self.is_cpu = torch.device(device).type == "cpu"
        self.packed: Any = None
        if not self.is_cpu:  # where there is no FlashAttention-2
            self._load_packed(config, dtype, notes)
        self.spec = build_spec(config.to_dict())
        self.transformer = Transformer.from_tensors(
            self.spec, weights, dtype=dtype, device=device, prepack=True
        )

    def runs(self, inputs: TokenInputs) -> dict[str, Forward]:
        """The forward passes; on a GPU transformers pads all sequences into one batch."""

        def packed() -> Tensor:
            out = self.packed(input_ids=inputs.packed_ids, position_ids=inputs.position_ids)
            return cast(Tensor, out.last_hidden_state[0])

        batch_size = _CPU_BATCH_SIZE if self.is_cpu else len(inputs.lengths)
        found: dict[str, Forward] = {
            "ours": lambda: self.transformer.forward(inputs.batch),
            "transformers": padded_run(self.padded, inputs, batch_size=batch_size),
        }
        return found if self.packed is None else found | {_PACKED: packed}

    def _load_packed(self, config: Any, dtype: torch.dtype, notes: list[str]) -> None:
        try:
            with flash_attn_package():
                config._attn_implementation = "flash_attention_2"
                packed = _random_model(config, dtype, "cuda")
            packed.load_state_dict(self.padded.state_dict())
            self.packed = packed
        except Exception as error:  # a rival may raise anything, and costs no other number
            notes.append(left_out(_PACKED, error))


def _random_model(config: Any, dtype: torch.dtype, device: torch.device | str) -> Any:
    from transformers import ModernBertModel

    with quiet(), torch.device(device):
        model: Any = ModernBertModel(config)
        return model.to(dtype).eval()
