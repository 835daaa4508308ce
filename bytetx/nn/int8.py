"""An encoder's layers with GEMMs of 8-bit integers on a CPU: which layers, and their weights.

All linear layers of a layer: rows are rounded one by one as a GEMM reads them, so that nothing is
calibrated and a text's result depends on no other text. Heads and embeddings stay as they are.
"""

from dataclasses import replace

import torch

from bytetx.checkpoint.spec import ModelSpec
from bytetx.nn.layers import LayerWeights
from bytetx.ops.linear import has_cpu_bf16, quantize_linear


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
    linears = (w.qkv, w.attn_out, w.ffn_in, w.ffn_out)
    qkv, attn_out, ffn_in, ffn_out = (
        None if one is None else one.with_dense(quantize_linear(one.dense)) for one in linears
    )
    assert qkv is not None and attn_out is not None  # every layer has them
    return replace(w, qkv=qkv, attn_out=attn_out, ffn_in=ffn_in, ffn_out=ffn_out)
