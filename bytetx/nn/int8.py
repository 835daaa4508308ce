"""An encoder's layers with GEMMs of 8-bit integers on a CPU: which layers, and their weights.

All linear layers of a layer: rows are rounded one by one as a GEMM reads them, so that nothing is
calibrated and a text's result depends on no other text. Heads and embeddings stay as they are.
"""

import torch

from bytetx.checkpoint.spec import ModelSpec
from bytetx.errors import OptionError
from bytetx.nn.layer import LayerWeights
from bytetx.ops.int8_linear import prepare_int8_linear, why_no_int8_linear
from bytetx.ops.linear import has_cpu_bf16


def check(spec: ModelSpec) -> None:
    """Raises OptionError where an encoder cannot run so on this CPU."""
    if spec.experts is not None:
        raise OptionError(f"dtype int8 is not for the experts of {spec.family}; use bfloat16")
    reason = why_no_int8_linear()
    if reason is not None:
        raise OptionError(f"dtype int8 cannot run on this machine: {reason}; use float32")


def activation_dtype() -> torch.dtype:
    """The dtype of everything outside of GEMMs: bfloat16 where the CPU computes with it."""
    return torch.bfloat16 if has_cpu_bf16() else torch.float32


def quantize(layer: LayerWeights) -> LayerWeights:
    """A layer of a model that check lets pass; plain weights come in, f32 or bf16."""
    return layer.converted(prepare_int8_linear)
