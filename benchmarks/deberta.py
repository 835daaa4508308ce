"""DeBERTa, whole models of random weights: ours, transformers' and disentangled-flash's."""

import copy
from typing import Any, cast

import torch
from torch import Tensor

from benchmarks.gpu import left_out
from benchmarks.rivals import BATCH_SIZE, quiet
from benchmarks.token_inputs import Forward, TokenInputs, padded_run
from bytetx.checkpoint.spec import build_spec
from bytetx.errors import BytetxError
from bytetx.nn.transformer import Transformer

_PACKED = "disentangled-flash-packed"
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


class Deberta:
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
        self.padded = model.to(dtype).eval()
        self.is_cpu = torch.device(device).type == "cpu"
        self.packed: Any = None
        try:
            self.packed = _disentangled_flash(
                self.padded, backend="torch" if self.is_cpu else "triton"
            )
        except Exception as error:  # a rival may raise anything, and costs no other number
            notes.append(left_out(_PACKED, error))
        self.spec = build_spec(config.to_dict())
        self.transformer = Transformer.from_tensors(
            self.spec, self.padded.state_dict(), dtype=dtype, device=device, prepack=True
        )

    def runs(self, inputs: TokenInputs) -> dict[str, Forward]:
        """The forward passes; transformers has batches in the order given, as its users have."""
        batch_size = _CPU_BATCH_SIZE if self.is_cpu else BATCH_SIZE
        found: dict[str, Forward] = {
            "ours": lambda: self.transformer.forward(inputs.batch),
            "transformers": padded_run(self.padded, inputs, batch_size=batch_size),
        }
        return found if self.packed is None else found | {_PACKED: self._packed_run(inputs)}

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
