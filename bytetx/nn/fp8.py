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
from bytetx.nn.blocks import (
    ColumnWeight,
    Fp8InnerWeight,
    LocalBlocks,
    OutWeight,
    Rows,
)
from bytetx.nn.layers import LayerWeights
from bytetx.ops.fp8_linear import Fp8LinearWeight, fp8_linear, prepare_fp8_linear
from bytetx.ops.linear import LinearWeight, fuses_residual, linear
from bytetx.ops.norm import layer_norm
from bytetx.ops.quantize import quantize_rows
from bytetx.ops.row_norm import LayerNorm, RowNorm

FP8_MAX = 448.0
# Between the bound in exact arithmetic and what rounded weights and rows may give.
_MARGIN = 1.1


def takes_fp8(spec: ModelSpec) -> bool:
    """Whether _Fp8Rows computes the layers: post-norm ones of layer norms, without a gate."""
    layers = spec.layer_spec
    is_gated = spec.is_gated
    is_plain = layers.convolution is None and spec.experts is None and not is_gated
    return layers.norm_placement == "post" and layers.norm == "layer_norm" and is_plain


class Fp8Norm(LayerNorm):
    """A norm whose rows an FP8 GEMM reads: it writes them in E4M3 as well."""

    __slots__ = ()


class Fp8Blocks(LocalBlocks):
    """Post-norm layers of quantize_layer."""

    def __init__(self, spec: ModelSpec):
        super().__init__(spec)
        self._spec = spec

    def begin(self, total_tokens: int) -> Rows:
        return _Fp8Rows(self._spec)


class _Fp8Rows(LocalBlocks):
    """The rows of one pass, and the E4M3 copy of those that FP8 GEMMs read next."""

    def __init__(self, spec: ModelSpec):
        super().__init__(spec)
        self._source: Tensor | None = None  # rows that `_copy` was quantized from
        self._copy: tuple[Tensor, Tensor] | None = None  # E4M3 [m, k], f32 scales [m]

    def column_parallel(self, x: Tensor, w: ColumnWeight, *, activation: str = "none") -> Tensor:
        if x is not self._source or self._copy is None:
            self._source, self._copy = x, quantize_rows(x)
        if isinstance(w, Fp8InnerWeight):
            return fp8_linear(*self._copy, w.linear, activation=activation, out_scale=w.out_scale)
        assert isinstance(w, Fp8LinearWeight)
        return fp8_linear(*self._copy, w, activation=activation)

    def row_parallel_post_norm(
        self, x: Tensor, w: OutWeight, *, residual: Tensor, norm: RowNorm
    ) -> Tensor:
        """The norm's result overwrites the sum, and its E4M3 copy that of the residual."""
        if isinstance(w, Fp8LinearWeight):
            is_fused, d = False, fp8_linear(x, None, w)
        else:
            assert isinstance(w, LinearWeight)
            is_fused = fuses_residual(x.shape[0], w)
            d = linear(x, w, residual=residual if is_fused else None)
        copy = self._copy if isinstance(norm, Fp8Norm) else None
        rest = None if is_fused else residual
        layer_norm(d, norm.weight, norm.bias, eps=norm.eps, residual=rest, out=d, fp8_out=copy)
        self._source, self._copy = d, copy
        return d


def quantize_layer(w: LayerWeights, *, is_last: bool) -> LayerWeights:
    """A layer that multiplies E4M3; plain weights come in, f16 or bf16."""
    # FP8 is for dense post-norm layers, which have all of these.
    assert isinstance(w.ffn_in, LinearWeight) and w.ffn_norm is not None
    assert w.ffn_out is not None and w.attn_norm is not None
    inner_scale = inner_bound(w.ffn_in, w.attn_norm) * _MARGIN / FP8_MAX
    out = _quantized(w.ffn_out)
    # No GEMM reads the rows of the last layer's norm: it needs no E4M3 copy.
    ffn_norm = w.ffn_norm
    return LayerWeights(
        qkv=_quantized(w.qkv),
        attn_out=w.attn_out,
        attn_norm=_fp8_norm(w.attn_norm),
        ffn_in=Fp8InnerWeight(_quantized(w.ffn_in), inner_scale),
        ffn_out=replace(out, scale=out.scale * inner_scale),
        ffn_norm=ffn_norm if is_last else _fp8_norm(ffn_norm),
        pos_k=w.pos_k,
        pos_q=w.pos_q,
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


def _quantized(w: ColumnWeight | OutWeight) -> Fp8LinearWeight:
    assert isinstance(w, LinearWeight) and not w.is_prepacked
    return prepare_fp8_linear(w.weight, w.bias)
