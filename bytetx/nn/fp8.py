"""Layers with GEMMs of E4M3 rows: what is rounded where.

A causal model's four GEMMs all run so, and those of its experts, whose routers stay as they are.
Every row of theirs gets a scale of its own: those that a norm writes from the norm's kernel, the
others before they are read.

An encoder runs three of a layer's four GEMMs so: attention's output projection stays in 16 bits,
which is faster there, too: it has a quarter of QKV's products and no norm before it that could
round its rows.

Rows that its norms write get a scale each, from the norm's kernel. The inner rows of a feed-forward
layer get one for all, so that the GEMM that makes them can round them: a bound that follows from
the weights alone (inner_bound). E4M3 is a floating-point format: a scale that is ten times too
large costs three of the 15 binary orders of magnitude that it spans, and no digit.
"""

from dataclasses import replace

import torch
from torch import Tensor

from bytetx.checkpoint.spec import ModelSpec
from bytetx.errors import OptionError
from bytetx.nn.layer import ExpertFeedForward, LayerWeights
from bytetx.ops import native
from bytetx.ops.fp8_linear import (
    Fp8LinearWeight,
    keep_e4m3_copy,
    prepare_fp8_linear,
)
from bytetx.ops.gated import GatedWeight
from bytetx.ops.linear import LinearWeight
from bytetx.ops.norm import LayerNorm, RmsNorm, RowNorm
from bytetx.ops.quantize import empty_fp8_rows
from bytetx.ops.weight import Weight

FP8_MAX = 448.0
# Between the bound in exact arithmetic and what rounded weights and rows may give.
_MARGIN = 1.1


def takes_fp8(spec: ModelSpec) -> bool:
    """Whether FP8 weights compute an encoder's layers: post-norm, of layer norms, no gate."""
    layers = spec.layer_spec
    is_gated = spec.is_gated
    is_plain = layers.convolution is None and spec.experts is None and not is_gated
    return layers.norm_placement == "post" and layers.norm == "layer_norm" and is_plain


def check(spec: ModelSpec, device: torch.device) -> None:
    """Raises OptionError where the model cannot run so on the device."""
    if spec.experts is not None and not spec.is_causal:
        raise OptionError(f"dtype fp8 is not for the experts of {spec.family}; use bfloat16")
    if spec.layer_spec.mixer is not None:
        raise OptionError(
            f"dtype fp8 is not for the layers without attention of {spec.family}; use bfloat16"
        )
    if not spec.is_causal and not takes_fp8(spec):
        raise OptionError(f"dtype fp8 is not for layers as those of {spec.family}; use bfloat16")
    reason = native.why_no_kernel("fp8_linear", device)
    if reason is not None:
        raise OptionError(f"dtype fp8 cannot run on {device}: {reason}; use dtype float16")


class _RoundingNorm(RowNorm):
    """A norm that leaves an E4M3 copy of its rows on them, for the GEMMs that read them."""

    __slots__ = ()

    def __call__(
        self,
        x: Tensor,
        *,
        residual: Tensor | None = None,
        out: Tensor | None = None,
        sum_out: Tensor | None = None,
        fp8_out: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        copy = empty_fp8_rows(x) if fp8_out is None else fp8_out
        normed = super().__call__(x, residual=residual, out=out, sum_out=sum_out, fp8_out=copy)
        keep_e4m3_copy(normed, copy)
        return normed

    # The kernels of a product with its norm leave no copy.
    def parts_plan(self, x: Tensor, w: LinearWeight, residual: Tensor) -> None:
        return None

    def after_linear(self, x: Tensor, w: Weight, *, residual: Tensor) -> Tensor:
        return RowNorm.after_linear(self, x, w, residual=residual)


class RoundingLayerNorm(_RoundingNorm, LayerNorm):
    """Layer norm with an E4M3 copy."""

    __slots__ = ()


class RoundingRmsNorm(_RoundingNorm, RmsNorm):
    """Root mean square norm with an E4M3 copy."""

    __slots__ = ()


_ROUNDING: dict[type[RowNorm], type[RowNorm]] = {
    LayerNorm: RoundingLayerNorm,
    RmsNorm: RoundingRmsNorm,
}


def quantize_causal(w: LayerWeights, is_last: bool) -> LayerWeights:
    """A causal model's layer; weights are plain, f16 or bf16, or in E4M3 already."""
    half = w.feed_forward
    is_mixture = isinstance(half, ExpertFeedForward)
    return replace(
        w,
        qkv=_in_fp8(w.qkv),
        attn_out=_in_fp8(w.attn_out),
        feed_forward=half.converted(_quantized) if is_mixture else half.mapped(_in_fp8, _in_fp8),
        attn_norm=_rounding(w.attn_norm),
        ffn_norm=_rounding(w.ffn_norm),
    )


def _in_fp8(w: Weight) -> Weight:
    matrix = w.fused if isinstance(w, GatedWeight) else w
    return w if isinstance(matrix, Fp8LinearWeight) else w.with_matrix(_quantized(w))


def _rounding(norm: RowNorm | None) -> RowNorm | None:
    return None if norm is None else _ROUNDING[type(norm)](norm.weight, norm.bias, norm.eps)


def quantize(w: LayerWeights, is_last: bool) -> LayerWeights:
    """An encoder's layer, where check lets it pass; plain weights come in, f16 or bf16."""
    assert w.attn_norm is not None and w.ffn_norm is not None  # those of post-norm layers
    inner_scale = inner_bound(w.feed_forward.linears[0].dense, w.attn_norm) * _MARGIN / FP8_MAX

    def quantized_out(out: Weight) -> Fp8LinearWeight:
        plain = _quantized(out)
        return replace(plain, scale=plain.scale * inner_scale)

    return replace(
        w,
        qkv=_quantized(w.qkv),
        attn_norm=_rounding(w.attn_norm),
        feed_forward=w.feed_forward.mapped(
            lambda first: replace(_quantized(first), out_scale=inner_scale), quantized_out
        ),
        # No GEMM reads the rows of the last layer's norm: it needs no E4M3 copy.
        ffn_norm=w.ffn_norm if is_last else _rounding(w.ffn_norm),
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


def _quantized(w: Weight) -> Fp8LinearWeight:
    return prepare_fp8_linear(w.dense.weight, w.dense.bias)
