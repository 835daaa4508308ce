"""An encoder's layers with GEMMs of 8-bit integers on a CPU: which layers, and their weights.

All linear layers of a layer: rows are rounded one by one as a GEMM reads them, so that nothing is
calibrated and a text's result depends on no other text. Heads and embeddings stay as they are.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from bytetx.checkpoint.spec import ModelSpec
from bytetx.errors import OptionError
from bytetx.nn.layers import LayerWeights
from bytetx.ops.int8_linear import why_no_int8_linear
from bytetx.ops.linear import has_cpu_bf16, quantize_linear


def takes_int8(spec: ModelSpec) -> bool:
    """Whether int8 is offered: encoders without experts.

    Rows of causal models have a few features that are hundreds of times larger than the others,
    which one scale a row does not hold.
    """
    return not spec.is_causal and spec.experts is None


def check(spec: ModelSpec, device: torch.device) -> None:
    """Raises OptionError where the model cannot run so on the device."""
    if device.type != "cpu":
        raise OptionError(f"dtype int8 runs on CPUs, not on {device}; use float16 or fp8")
    if spec.is_causal:
        raise OptionError(
            f"dtype int8 is for encoders, and {spec.family} is a causal model; use bfloat16"
        )
    if not takes_int8(spec):
        raise OptionError(f"dtype int8 is not for the experts of {spec.family}; use bfloat16")
    reason = why_no_int8_linear()
    if reason is not None:
        raise OptionError(f"dtype int8 cannot run on this machine: {reason}; use float32")


def activation_dtype() -> torch.dtype:
    """The dtype of everything outside of GEMMs: bfloat16 where the CPU computes with it."""
    return torch.bfloat16 if has_cpu_bf16() else torch.float32


def quantize(layers: Sequence[LayerWeights]) -> list[LayerWeights]:
    """The layers of a model that check lets pass."""
    return [_quantize_layer(layer) for layer in layers]


def _quantize_layer(w: LayerWeights) -> LayerWeights:
    """A layer that multiplies 8-bit integers; plain weights come in, f32 or bf16."""
    linears = (w.qkv, w.attn_out, w.ffn_in, w.ffn_out)
    qkv, attn_out, ffn_in, ffn_out = (
        None if one is None else one.with_dense(quantize_linear(one.dense)) for one in linears
    )
    assert qkv is not None and attn_out is not None  # every layer has them
    return replace(w, qkv=qkv, attn_out=attn_out, ffn_in=ffn_in, ffn_out=ffn_out)
