"""An encoder's layers with GEMMs of 8-bit integers on a CPU: which layers, and their weights.

All linear layers of a layer: rows are rounded one by one as a GEMM reads them, so that nothing is
calibrated and a text's result depends on no other text. Heads and embeddings stay as they are.
"""

from dataclasses import replace

import torch

from bytetx.checkpoint.spec import ModelSpec
from bytetx.nn.blocks import ColumnWeight, OutWeight
from bytetx.nn.layers import LayerWeights
from bytetx.ops.gated import GatedWeight
from bytetx.ops.linear import LinearWeight, has_cpu_bf16, quantize_linear


def takes_int8(spec: ModelSpec) -> bool:
    """Whether int8 is offered: encoders without experts.

    Rows of causal models have a few features that are hundreds of times larger than the others,
    which one scale a row does not hold.
    """
    return not spec.is_causal and spec.experts is None


def int8_activation_dtype() -> torch.dtype:
    """The dtype of everything outside of GEMMs: bfloat16 where the CPU computes with it."""
    return torch.bfloat16 if has_cpu_bf16() else torch.float32


def quantize_layer(w: LayerWeights) -> LayerWeights:
    """A layer that multiplies 8-bit integers; plain weights come in, f32 or bf16."""
    assert w.ffn_in is not None and w.ffn_out is not None  # models with experts are refused
    return replace(
        w,
        qkv=_quantized(w.qkv),
        attn_out=_quantized_out(w.attn_out),
        ffn_in=_quantized(w.ffn_in),
        ffn_out=_quantized_out(w.ffn_out),
    )


def _quantized(w: ColumnWeight) -> ColumnWeight:
    if isinstance(w, GatedWeight):
        return replace(w, fused=quantize_linear(w.fused))
    assert isinstance(w, LinearWeight)
    return quantize_linear(w)


def _quantized_out(w: OutWeight) -> OutWeight:
    assert isinstance(w, LinearWeight)
    return quantize_linear(w)
