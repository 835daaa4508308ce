"""Whole models of random weights from token ids: ours, transformers' and packed rivals'."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from benchmarks.flash_attn import flash_attn_package
from benchmarks.gpu import left_out
from benchmarks.lengths import prefix_sums
from benchmarks.rivals import BATCH_SIZE, padded, quiet
from bytetx.checkpoint.spec import ModelSpec, build_spec
from bytetx.errors import BytetxError
from bytetx.nn.transformer import Transformer
from bytetx.packed import PackedBatch, pack

# transformers' packed tokens: position ids that start again with each sequence.
_FA2_PACKED = "transformers-fa2-packed"
_DISENTANGLED = "disentangled-flash-packed"
_CPU_BATCH_SIZE = 8  # of transformers' padded batches: less padding than in 32, as fast a GEMM
# What DeBERTa-v3-base's config.json says.
_V3: dict[str, object] = {
    "vocab_size": 128100,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
    "type_vocab_size": 0,
    "relative_attention": True,
    "position_buckets": 256,
    "max_relative_positions": -1,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": "p2c|c2p",
    "position_biased_input": False,
}
DEBERTA_SIZES: dict[str, dict[str, int]] = {"deberta-v3-base": {}}
MODERNBERT_SIZES: dict[str, dict[str, int]] = {
    "modernbert-base": {},
    "modernbert-large": {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "intermediate_size": 2624,
    },
}
WHOLE_MODELS = (*MODERNBERT_SIZES, *DEBERTA_SIZES)


Forward = Callable[[], Tensor]


class WholeModel(Protocol):
    """One set of weights as ours and as the rivals' models."""

    @property
    def spec(self) -> ModelSpec: ...

    def runs(self, inputs: "TokenInputs") -> dict[str, Forward]:
        """Each engine's forward pass to hidden states [total_tokens, hidden_size]; "ours" first."""
        ...


class PaddedBatch(NamedTuple):
    """Some of the sequences, padded with id 0 to the longest of them."""

    input_ids: Tensor  # int64 [batch_size, max_seqlen]
    mask: Tensor  # int64 [batch_size, max_seqlen]
    rows: Tensor  # int64 [total_tokens], where real tokens lie in the flattened batch


class TokenInputs:
    """Random token ids of sequences of the given lengths, packed and padded."""

    def __init__(
        self, lengths: np.ndarray, *, vocab_size: int, device: torch.device | str = "cuda"
    ):
        rng = np.random.default_rng(0)
        self._ids = [rng.integers(5, vocab_size, length).astype(np.int32) for length in lengths]
        self._lay_out(device)

    def taken(self, order: np.ndarray) -> "TokenInputs":
        """The same sequences in another order.  order: int64 [batch_size]."""
        found = copy.copy(self)
        found._ids = [self._ids[i] for i in order]
        found._lay_out(self.device)
        return found

    def _lay_out(self, device: torch.device | str) -> None:
        self.lengths = lengths = np.array(list(map(len, self._ids)))
        self.max_seqlen, self.device = int(lengths.max()), device
        self.batch: PackedBatch = pack(self._ids, has_token_types=False, device=device)
        self.cu_seqlens = prefix_sums(lengths, device)
        self.packed_ids = torch.from_numpy(np.concatenate(self._ids)).long().to(device)[None]
        self.position_ids = torch.cat([torch.arange(n) for n in lengths]).to(device)[None]

    def padded(self, batch_size: int) -> list[PaddedBatch]:
        """All sequences in the order given, in batches of batch_size."""
        starts = range(0, len(self._ids), batch_size)
        return [self._pad(self._ids[start : start + batch_size]) for start in starts]

    def _pad(self, ids: list[np.ndarray]) -> PaddedBatch:
        input_ids, mask = padded([sequence.tolist() for sequence in ids])
        rows = mask.flatten().nonzero().flatten()
        return PaddedBatch(*(tensor.to(self.device) for tensor in (input_ids, mask, rows)))


def padded_run(model: Any, inputs: TokenInputs, *, batch_size: int) -> Forward:
    """transformers' forward pass over padded batches in the order given.

    model: one of transformers' base models.
    """
    batches = inputs.padded(batch_size)

    def run() -> Tensor:
        found = []
        for batch in batches:
            out = model(input_ids=batch.input_ids, attention_mask=batch.mask).last_hidden_state
            found.append(out.flatten(0, 1).index_select(0, batch.rows))
        return torch.cat(found)

    return run


def load_whole_model(
    size: str, dtype: torch.dtype, notes: list[str], *, device: torch.device | str
) -> WholeModel:
    """size: one of WHOLE_MODELS.  notes: gets a line for each rival that does not load."""
    made = Deberta if size in DEBERTA_SIZES else ModernBert
    return made(size, dtype, notes, device=device)


class Ours:
    """Our engine with the weights of transformers' model, and the way that transformers runs it."""

    def __init__(self, config: Any, model: Any, dtype: torch.dtype, device: torch.device | str):
        self.padded = model
        self.is_cpu = torch.device(device).type == "cpu"
        self.packed: Any = None
        self.spec = build_spec(config.to_dict())
        self.transformer = Transformer.from_tensors(
            self.spec, model.state_dict(), dtype=dtype, device=device, prepack=True
        )

    def _runs(self, inputs: "TokenInputs", *, batch_size: int) -> dict[str, Forward]:
        size = _CPU_BATCH_SIZE if self.is_cpu else batch_size
        return {
            "ours": lambda: self.transformer.forward(inputs.batch),
            "transformers": padded_run(self.padded, inputs, batch_size=size),
        }


class ModernBert(Ours):
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
        super().__init__(config, _random_model(config, dtype, device), dtype, device)
        if not self.is_cpu:  # where there is no FlashAttention-2
            self._load_packed(config, dtype, notes)

    def runs(self, inputs: TokenInputs) -> dict[str, Forward]:
        """The forward passes; on a GPU transformers pads all sequences into one batch."""

        def packed() -> Tensor:
            out = self.packed(input_ids=inputs.packed_ids, position_ids=inputs.position_ids)
            return cast(Tensor, out.last_hidden_state[0])

        found = self._runs(inputs, batch_size=len(inputs.lengths))
        return found if self.packed is None else found | {_FA2_PACKED: packed}

    def _load_packed(self, config: Any, dtype: torch.dtype, notes: list[str]) -> None:
        try:
            with flash_attn_package():
                config._attn_implementation = "flash_attention_2"
                packed = _random_model(config, dtype, "cuda")
            packed.load_state_dict(self.padded.state_dict())
            self.packed = packed
        except Exception as error:  # a rival may raise anything, and costs no other number
            notes.append(left_out(_FA2_PACKED, error))


def _random_model(config: Any, dtype: torch.dtype, device: torch.device | str) -> Any:
    from transformers import ModernBertModel

    with quiet(), torch.device(device):
        model: Any = ModernBertModel(config)
        return model.to(dtype).eval()


class Deberta(Ours):
    """One set of weights as ours, as transformers' model and under disentangled-flash's encoder."""

    def __init__(
        self,
        size: str,
        dtype: torch.dtype,
        notes: list[str],
        *,
        device: torch.device | str = "cuda",
    ):
        """size: a key of DEBERTA_SIZES.  notes: gets a line for a rival that does not load."""
        from transformers import DebertaV2Config, DebertaV2Model

        torch.manual_seed(0)
        config: Any = DebertaV2Config.from_dict(_V3 | DEBERTA_SIZES[size])
        with quiet(), torch.device(device):
            model: Any = DebertaV2Model(config)
        super().__init__(config, model.to(dtype).eval(), dtype, device)
        try:
            self.packed = _disentangled_flash(
                self.padded, backend="torch" if self.is_cpu else "triton"
            )
        except Exception as error:  # a rival may raise anything, and costs no other number
            notes.append(left_out(_DISENTANGLED, error))

    def runs(self, inputs: TokenInputs) -> dict[str, Forward]:
        """The forward passes; transformers has batches in the order given, as its users have."""
        found = self._runs(inputs, batch_size=BATCH_SIZE)
        return found if self.packed is None else found | {_DISENTANGLED: self._packed_run(inputs)}

    def _packed_run(self, inputs: TokenInputs) -> Forward:
        from disentangled_flash import validate_cu_seqlens

        total_tokens = inputs.batch.total_tokens
        info = validate_cu_seqlens(inputs.cu_seqlens, total_tokens, inputs.max_seqlen)

        def run() -> Tensor:
            # Without a mask or positions: these models add none to the words.
            x = self.packed.embeddings(input_ids=inputs.packed_ids)[0]
            out = self.packed.encoder.forward_packed(
                x,
                inputs.cu_seqlens,
                inputs.max_seqlen,
                output_hidden_states=False,
                packed_info=info,
            )
            return cast(Tensor, out.last_hidden_state)

        return run


def _disentangled_flash(model: Any, *, backend: str) -> Any:
    """A copy of transformers' model with the encoder of the package disentangled-flash.

    backend: "triton", or "torch" where there is no GPU.
    Raises BytetxError where the package leaves the model as it is.
    """
    from disentangled_flash import optimize_deberta

    found: Any = optimize_deberta(copy.deepcopy(model), backend=backend)
    if type(found.encoder) is type(model.encoder):
        raise BytetxError(f"disentangled-flash has no {backend} kernels for this model here")
    return found
