"""Layer norm and RMS norm with a fused residual: checks, choice of kernel."""

import torch
from torch import Tensor

from bytetx.ops import native, reference
from bytetx.ops.check import (
    has_row_kernel,
    is_operand,
    require_contiguous,
    require_out,
    require_tensor,
)
from bytetx.ops.quantize import has_fp8_kernel
from bytetx.ops.rows import empty_rows
from bytetx.ops.triton_backend import MAX_ROW_WIDTH, triton_kernels


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    eps: float,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    sum_out: Tensor | None = None,
    fp8_out: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """norm(x + residual) * weight + bias over each row; sum and statistics in f32.

    x, residual, out, sum_out: [total_tokens, hidden_size], f32, bf16 or f16, contiguous; `out` may
    be x or residual.  weight, bias: [hidden_size], x's dtype.
    sum_out: gets x + residual, which the next residual of a pre-norm block is; may be x or
    residual, not out.
    fp8_out: gets what quantize_rows(out) returns, float8_e4m3fn [total_tokens, hidden_size] and
    f32 [total_tokens].
    Returns out, a new tensor where it is None.
    Raises ValueError on shape, dtype or device mismatch, or sum_out without residual.
    """
    outs = (out, sum_out, fp8_out)
    return _norm("layer_norm", x, weight, (bias,), eps=eps, residual=residual, outs=outs)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    *,
    eps: float,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    sum_out: Tensor | None = None,
    fp8_out: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """h / sqrt(mean(h^2) + eps) * weight over each row, h = x + residual; all of it in f32.

    Arguments, result and errors as of layer_norm.
    Source: root mean square layer normalization (arXiv 1910.07467).
    """
    outs = (out, sum_out, fp8_out)
    return _norm("rms_norm", x, weight, (), eps=eps, residual=residual, outs=outs)


def _norm(
    name: str,
    x: Tensor,
    weight: Tensor,
    biases: tuple[Tensor | None, ...],
    *,
    eps: float,
    residual: Tensor | None,
    outs: tuple[Tensor | None, Tensor | None, tuple[Tensor, Tensor] | None],
) -> Tensor:
    """The body of both norms; biases: the bias argument where the norm has one."""
    bias = biases[0] if biases else None
    out, sum_out, fp8_out = outs
    _check(x, weight, bias, residual, out)
    if sum_out is not None or fp8_out is not None:
        _check_more_outputs(x, residual, out, sum_out, fp8_out)
    if torch.compiler.is_compiling():
        normalized = getattr(torch.ops.bytetx, name)(x, weight, *biases, eps=eps, residual=residual)
        return _store(normalized, x, residual, out, sum_out, fp8_out)
    kernel = native.kernel(name, x.device)
    triton = triton_kernels(x.device) if kernel is None else None
    if triton is not None and 0 < x.shape[1] <= MAX_ROW_WIDTH:
        out = torch.empty_like(x) if out is None else out
        is_rms = name == "rms_norm"
        options = {"is_rms": is_rms, "eps": eps, "residual": residual}
        triton.norm(x, weight, bias, **options, out=out, sum_out=sum_out)
        return out if fp8_out is None else _store_fp8(out, fp8_out)
    if kernel is None or not has_row_kernel(x):
        normalized = getattr(reference, name)(x, weight, *biases, eps=eps, residual=residual)
        return _store(normalized, x, residual, out, sum_out, fp8_out)
    if out is None:
        out = torch.empty_like(x) if x.is_cuda else empty_rows(x.shape[0], x.shape[1:], x.dtype)
    fused = fp8_out if fp8_out is not None and has_fp8_kernel(x) else None
    run_kernel(
        kernel,
        x,
        weight,
        bias,
        eps=eps,
        residual=residual,
        out=out,
        sum_out=sum_out,
        fp8_out=fused,
    )
    return out if fp8_out is None or fp8_out is fused else _store_fp8(out, fp8_out)


def run_kernel(
    kernel: native.Kernel,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    eps: float,
    residual: Tensor | None,
    out: Tensor,
    sum_out: Tensor | None = None,
    fp8_out: tuple[Tensor, Tensor] | None = None,
    isa: str = "auto",
) -> Tensor:
    """The native kernel on checked arguments; isa: a key of native.ISA_CODES."""
    total_tokens, hidden_size = x.shape
    kernel(
        x=x,
        residual=residual,
        out=out,
        sum_out=sum_out,
        weight=weight,
        bias=bias,
        out_fp8=None if fp8_out is None else fp8_out[0],
        out_scale=None if fp8_out is None else fp8_out[1],
        total_tokens=total_tokens,
        hidden_size=hidden_size,
        eps=eps,
        dtype=native.DTYPE_CODES[x.dtype],
        launch=native.launch_args(x.device, isa),
    )
    return out


def _store(
    normalized: Tensor,
    x: Tensor,
    residual: Tensor | None,
    out: Tensor | None,
    sum_out: Tensor | None,
    fp8_out: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Store `normalized` in torch as a kernel would; sum_out comes first, for out may be x."""
    if sum_out is not None:
        assert residual is not None  # the caller has checked it
        sum_out.copy_(x.float() + residual.float())
    if fp8_out is not None:
        _store_fp8(normalized, fp8_out)
    return normalized if out is None else out.copy_(normalized)


def _store_fp8(normalized: Tensor, fp8_out: tuple[Tensor, Tensor]) -> Tensor:
    for to, value in zip(fp8_out, reference.quantize_rows(normalized), strict=True):
        to.copy_(value)
    return normalized


def _check(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor | None,
) -> None:
    require_tensor("x", x, shape=(None, None))
    require_contiguous("x", x)
    shape, dtype, index = x.shape, x.dtype, x.get_device()
    width = shape[1:]
    if (
        is_operand(weight, width, dtype, index)
        and (bias is None or is_operand(bias, width, dtype, index))
        and (residual is None or is_operand(residual, shape, dtype, index))
        and (out is None or is_operand(out, shape, dtype, index))
    ):
        return
    dtypes, device = (dtype,), x.device
    for name, t in (("weight", weight), ("bias", bias)):
        if t is not None:
            require_tensor(name, t, shape=shape[1:], dtypes=dtypes, device=device)
            require_contiguous(name, t)
    if residual is not None:
        require_tensor("residual", residual, shape=shape, dtypes=dtypes, device=device)
        require_contiguous("residual", residual)
    if out is not None:
        require_out("out", out, like=x, shape=shape)


def _check_more_outputs(
    x: Tensor,
    residual: Tensor | None,
    out: Tensor | None,
    sum_out: Tensor | None,
    fp8_out: tuple[Tensor, Tensor] | None,
) -> None:
    if sum_out is not None:
        require_out("sum_out", sum_out, like=x, shape=x.shape)
        if residual is None:
            raise ValueError("sum_out is x + residual, and residual is None: leave sum_out out")
        if sum_out is out:
            raise ValueError("sum_out and out must be two tensors, got the same")
    if fp8_out is not None:
        rows, scale = fp8_out
        fp8, f32 = (torch.float8_e4m3fn,), (torch.float32,)
        require_tensor("fp8_out[0]", rows, shape=x.shape, dtypes=fp8, device=x.device)
        require_tensor("fp8_out[1]", scale, shape=x.shape[:1], dtypes=f32, device=x.device)
        require_contiguous("fp8_out[0]", rows)
        require_contiguous("fp8_out[1]", scale)


_OUTPUTS = ("out", "sum_out", "fp8_out")
native.register(layer_norm, without=_OUTPUTS, fake=lambda x, *_, **__: torch.empty_like(x))
native.register(rms_norm, without=_OUTPUTS, fake=lambda x, *_, **__: torch.empty_like(x))
