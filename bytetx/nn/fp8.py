"""An encoder's layers with GEMMs of E4M3 rows: what is rounded where.

Three of a layer's four GEMMs: attention's output projection stays in 16 bits, which is faster
there, too: it has a quarter of QKV's products and no norm before it that could round its rows.

Rows that a norm writes get a scale each, from the norm's kernel. The inner rows of a feed-forward
layer get one for all, so that the GEMM that makes them can round them: a bound that follows from
the weights alone (inner_bound). E4M3 is a floating-point format: a scale that is ten times too
large costs three of the 15 binary orders of magnitude that it spans, and no digit.
"""

from dataclasses import replace

import torch
from torch import Tensor

from bytetx.checkpoint.spec import ModelSpec
from bytetx.errors import OptionError
from bytetx.nn.layer import LayerWeights
from bytetx.ops import native
from bytetx.ops.fp8_linear import (
    Fp8LinearWeight,
    keep_e4m3_copy,
    move_e4m3_copy,
    prepare_fp8_linear,
)
from bytetx.ops.linear import LinearWeight, fuses_residual
from bytetx.ops.norm import LayerNorm, RowNorm
from bytetx.ops.weight import Weight

FP8_MAX = 448.0
# Between the bound in exact arithmetic and what rounded weights and rows may give.
_MARGIN = 1.1


def takes_fp8(spec: ModelSpec) -> bool:
    """Whether FP8 weights compute the layers: post-norm ones of layer norms, without a gate."""
    layers = spec.layer_spec
    is_gated = spec.is_gated
    is_plain = layers.convolution is None and spec.experts is None and not is_gated
    return layers.norm_placement == "post" and layers.norm == "layer_norm" and is_plain


def check(spec: ModelSpec, device: torch.device) -> None:
    """Raises OptionError where the model cannot run so on the device."""
    if spec.is_causal:
        raise OptionError(
            f"dtype fp8 is for encoders, and {spec.family} is a causal model; use bfloat16"
        )
    if not takes_fp8(spec):
        raise OptionError(f"dtype fp8 is not for layers as those of {spec.family}; use bfloat16")
    reason = native.why_no_kernel("fp8_linear", device)
    if reason is not None:
        raise OptionError(f"dtype fp8 cannot run on {device}: {reason}; use dtype float16")


class Fp8Norm(LayerNorm):
    """A norm whose rows an FP8 GEMM reads: it writes them in E4M3 as well."""

    __slots__ = ()

    def after_linear(self, x: Tensor, w: Weight, *, residual: Tensor) -> Tensor:
        """The norm's result overwrites the sum, and its E4M3 copy that of the residual."""
        adds = w.has_kernel and fuses_residual(x.shape[0], w.dense)
        d = w.matmul(x, residual=residual if adds else None)
        copy = move_e4m3_copy(residual)
        rest = None if adds else residual
        self(d, residual=rest, out=d, fp8_out=copy)
        keep_e4m3_copy(d, copy)
        return d


def quantize(w: LayerWeights, is_last: bool) -> LayerWeights:
    """A layer of a model that check lets pass; plain weights come in, f16 or bf16."""
    assert w.attn_norm is not None and w.ffn_norm is not None  # those of post-norm layers
    inner_scale = inner_bound(w.feed_forward.linears[0].dense, w.attn_norm) * _MARGIN / FP8_MAX

    def quantized_out(out: Weight) -> Fp8LinearWeight:
        plain = _quantized(out)
        return replace(plain, scale=plain.scale * inner_scale)

    return replace(
        w,
        qkv=_quantized(w.qkv),
        attn_norm=_fp8_norm(w.attn_norm),
        feed_forward=w.feed_forward.mapped(
            lambda first: replace(_quantized(first), out_scale=inner_scale), quantized_out
        ),
        # No GEMM reads the rows of the last layer's norm: it needs no E4M3 copy.
        ffn_norm=w.ffn_norm if is_last else _fp8_norm(w.ffn_norm),
    )


def inner_bound(w: LinearWeight, norm: RowNorm) -> float:
    """No |x @ w.T + bias| is larger where x is a row of this layer norm, nor its activation.

    x = z * weight + bias, z with k elements of sum 0 and of square sum k at most: an output is
    z @ v + c, at most sqrt(k) * |v - mean(v)| + |c| by the inequality of Cauchy and Schwarz.
    """
    weight = w.weight.float()
    v = weight * norm.weight.float()
    c = torch.zeros_like(v[:, 0]) if w.bias is None else w.bias.float()
    if norm.bias is not None:
        c = c + weight @ norm.bias.float()
    v = v - v.mean(1, keepdim=True)
    bounds = w.k**0.5 * v.norm(dim=1) + c.abs()
    return float(bounds.max().clamp(min=2.0**-60))


def _fp8_norm(norm: RowNorm) -> Fp8Norm:
    return Fp8Norm(norm.weight, norm.bias, norm.eps)


def _quantized(w: Weight) -> Fp8LinearWeight:
    return prepare_fp8_linear(w.dense.weight, w.dense.bias)
