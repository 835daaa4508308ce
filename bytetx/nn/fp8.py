"""An encoder's layers with GEMMs of E4M3 rows: what is rounded where, and the pass over them.

Three of a layer's four GEMMs: attention's output projection stays in 16 bits, where it is the
faster way, too: it has a quarter of QKV's products and no norm before it that could round its rows.

Rows that a norm writes get a scale each, from the norm's kernel. The inner rows of a feed-forward
layer get one for all, so that the GEMM that makes them can round them: a bound that follows from
the weights alone (inner_bound). E4M3 is a floating-point format: a scale that is ten times too
large costs three of the 15 binary orders of magnitude that it spans, and no digit.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bytetx.nn.tensors import NormWeight
from bytetx.ops.fp8_linear import Fp8LinearWeight, fp8_linear, prepare_fp8_linear
from bytetx.ops.linear import LinearWeight, fuses_residual, linear
from bytetx.ops.norm import layer_norm
from bytetx.ops.quantize import empty_fp8_rows, quantize_rows

FP8_MAX = 448.0
# Between the bound in exact arithmetic and what rounded weights and rows may give.
_MARGIN = 1.1

Rows = tuple[Tensor, Tensor]  # E4M3 [m, k], f32 scales [m]


@dataclass(frozen=True, slots=True)
class Fp8Layer:
    """A post-norm layer. inner_scale: of ffn_in's E4M3 rows, which ffn_out's scales contain."""

    qkv: Fp8LinearWeight
    attn_out: LinearWeight
    attn_norm: NormWeight
    ffn_in: Fp8LinearWeight
    ffn_out: Fp8LinearWeight
    ffn_norm: NormWeight
    inner_scale: float


def quantize_layer(
    qkv: LinearWeight,
    attn_out: LinearWeight,
    attn_norm: NormWeight,
    ffn_in: LinearWeight,
    ffn_out: LinearWeight,
    ffn_norm: NormWeight,
) -> Fp8Layer:
    """A layer that multiplies E4M3; plain weights come in, f16 or bf16."""
    inner_scale = inner_bound(ffn_in, attn_norm) * _MARGIN / FP8_MAX
    out = _quantized(ffn_out)
    return Fp8Layer(
        qkv=_quantized(qkv),
        attn_out=attn_out,
        attn_norm=attn_norm,
        ffn_in=_quantized(ffn_in),
        ffn_out=replace(out, scale=out.scale * inner_scale),
        ffn_norm=ffn_norm,
        inner_scale=inner_scale,
    )


def inner_bound(w: LinearWeight, norm: NormWeight) -> float:
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
    return (w.k**0.5 * v.norm(dim=1) + c.abs()).max().clamp(min=2.0**-60).item()


def run_layers(
    x: Tensor,
    layers: Sequence[Fp8Layer],
    attend: Callable[[Tensor], Tensor],
    *,
    activation: str,
    eps: float,
    on_layer: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """Hidden states of the last layer.  x: the embedding.  attend: qkv -> attended rows."""
    rows = quantize_rows(x)
    for i, layer in enumerate(layers):
        x, rows = _attention(x, rows, layer, attend, eps)
        is_last = i == len(layers) - 1
        x, rows = _feed_forward(x, rows, layer, activation, eps=eps, is_last=is_last)
        if on_layer:
            on_layer(x)
    return x


def _attention(
    x: Tensor, rows: Rows, layer: Fp8Layer, attend: Callable[[Tensor], Tensor], eps: float
) -> tuple[Tensor, Rows]:
    attended = attend(fp8_linear(*rows, layer.qkv))
    is_fused = fuses_residual(x.shape[0], layer.attn_out)
    d = linear(attended, layer.attn_out, residual=x if is_fused else None)
    return _norm(d, layer.attn_norm, eps, residual=None if is_fused else x, rows=empty_fp8_rows(d))


def _feed_forward(
    x: Tensor, rows: Rows, layer: Fp8Layer, activation: str, *, eps: float, is_last: bool
) -> tuple[Tensor, Rows]:
    """`rows` of the last layer are what they were: nothing reads them."""
    inner = fp8_linear(*rows, layer.ffn_in, activation=activation, out_scale=layer.inner_scale)
    d = fp8_linear(inner, None, layer.ffn_out)
    normed, _ = _norm(d, layer.ffn_norm, eps, residual=x, rows=None if is_last else rows)
    return normed, rows


def _norm(
    d: Tensor, norm: NormWeight, eps: float, *, residual: Tensor | None, rows: Rows | None
) -> tuple[Tensor, Rows | None]:
    """norm(d + residual) in d's place, and its E4M3 rows in those given."""
    options = {"residual": residual, "out": d, "fp8_out": rows}
    return layer_norm(d, norm.weight, norm.bias, eps=eps, **options), rows


def _quantized(w: LinearWeight) -> Fp8LinearWeight:
    assert not w.is_prepacked
    return prepare_fp8_linear(w.weight, w.bias)
