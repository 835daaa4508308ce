"""An encoder's layers with GEMMs of E4M3 rows: what is rounded where, and the pass over them.

Rows that a norm writes get a scale each, from the norm's kernel. The inner rows of a feed-forward
layer get one for all, so that the GEMM that makes them can round them: a bound that follows from
the weights alone (inner_bound). E4M3 is a floating-point format: a scale that is ten times too
large costs three of the 15 binary orders of magnitude that it spans, and no digit.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bytetx.ops.fp8_linear import Fp8LinearWeight, fp8_linear, prepare_fp8_linear
from bytetx.ops.linear import LinearWeight, fuses_residual, linear
from bytetx.ops.norm import layer_norm
from bytetx.ops.quantize import empty_fp8_rows, quantize_rows
from bytetx.tensors import NormWeight

FP8_MAX = 448.0
SITES = ("qkv", "attn_out", "ffn_in", "ffn_out")
# Between the bound in exact arithmetic and what rounded weights and rows may give.
_MARGIN = 1.1

Rows = tuple[Tensor, Tensor]  # E4M3 [m, k], f32 scales [m]
Gemm = LinearWeight | Fp8LinearWeight
ToNorm = tuple[Tensor, Tensor | None]  # a projection, and a residual that is still to be added


@dataclass(frozen=True, slots=True)
class Fp8Layer:
    """A post-norm layer. inner_scale: of ffn_in's E4M3 rows, which ffn_out's scales contain."""

    qkv: Gemm
    attn_out: Gemm
    attn_norm: NormWeight
    ffn_in: Gemm
    ffn_out: Gemm
    ffn_norm: NormWeight
    inner_scale: float | None


def quantize_layer(
    qkv: LinearWeight,
    attn_out: LinearWeight,
    attn_norm: NormWeight,
    ffn_in: LinearWeight,
    ffn_out: LinearWeight,
    ffn_norm: NormWeight,
    *,
    sites: Collection[str] = SITES,
) -> Fp8Layer:
    """A layer whose GEMMs named in `sites` multiply E4M3; plain weights come in, f16 or bf16."""
    assert "ffn_out" not in sites or "ffn_in" in sites
    inner_scale, out = None, ffn_out
    if "ffn_out" in sites:
        inner_scale = inner_bound(ffn_in, attn_norm) * _MARGIN / FP8_MAX
        rounded = _quantized(ffn_out)
        out = replace(rounded, scale=rounded.scale * inner_scale)
    return Fp8Layer(
        qkv=_quantized(qkv) if "qkv" in sites else qkv,
        attn_out=_quantized(attn_out) if "attn_out" in sites else attn_out,
        attn_norm=attn_norm,
        ffn_in=_quantized(ffn_in) if "ffn_in" in sites else ffn_in,
        ffn_out=out,
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
    rows = _rows_for(layers[0].qkv, x)
    for layer, after in zip(layers, [*layers[1:], None], strict=True):
        attended = attend(_multiply(x, rows, layer.qkv))
        d = _project(attended, _rows_for(layer.attn_out, attended), layer.attn_out, residual=x)
        x, rows = _norm(*d, layer.attn_norm, eps=eps, reader=layer.ffn_in)
        d = _feed_forward(x, rows, layer, activation)
        reader = None if after is None else after.qkv
        x, rows = _norm(*d, layer.ffn_norm, eps=eps, reader=reader)
        if on_layer:
            on_layer(x)
    return x


def _feed_forward(x: Tensor, rows: Rows | None, layer: Fp8Layer, activation: str) -> ToNorm:
    if layer.inner_scale is None:
        inner = _multiply(x, rows, layer.ffn_in, activation=activation)
        return _project(inner, None, layer.ffn_out, residual=x)
    assert rows is not None and isinstance(layer.ffn_in, Fp8LinearWeight)
    assert isinstance(layer.ffn_out, Fp8LinearWeight)
    options = {"activation": activation, "out_scale": layer.inner_scale}
    inner = fp8_linear(*rows, layer.ffn_in, **options)
    return fp8_linear(inner, None, layer.ffn_out, residual=x), None


def _multiply(x: Tensor, rows: Rows | None, w: Gemm, *, activation: str = "none") -> Tensor:
    if isinstance(w, LinearWeight):
        return linear(x, w, activation=activation)
    assert rows is not None
    return fp8_linear(*rows, w, activation=activation)


def _project(x: Tensor, rows: Rows | None, w: Gemm, *, residual: Tensor) -> ToNorm:
    """x @ w.T + bias, and the residual where the norm had better add it."""
    if isinstance(w, Fp8LinearWeight):
        assert rows is not None
        return fp8_linear(*rows, w, residual=residual), None
    if fuses_residual(x.shape[0], w):
        return linear(x, w, residual=residual), None
    return linear(x, w), residual


def _norm(
    d: Tensor, residual: Tensor | None, norm: NormWeight, *, eps: float, reader: Gemm | None
) -> tuple[Tensor, Rows | None]:
    """norm(d + residual), in d's place, and its E4M3 rows where the GEMM that reads it wants."""
    rows = empty_fp8_rows(d) if isinstance(reader, Fp8LinearWeight) else None
    options = {"residual": residual, "out": d, "fp8_out": rows}
    return layer_norm(d, norm.weight, norm.bias, eps=eps, **options), rows


def _rows_for(w: Gemm, x: Tensor) -> Rows | None:
    return quantize_rows(x) if isinstance(w, Fp8LinearWeight) else None


def _quantized(w: LinearWeight) -> Fp8LinearWeight:
    assert not w.is_prepacked
    return prepare_fp8_linear(w.weight, w.bias)
