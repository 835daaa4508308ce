"""Layer norm and RMS norm with a fused residual: checks, choice of kernel."""

from functools import partial

import torch
from torch import Tensor

from bytetx.ops import native, reference, triton_backend
from bytetx.ops.check import is_operand, require_contiguous, require_out, require_tensor
from bytetx.ops.quantize import has_fp8_kernel
from bytetx.ops.registry import Operation
from bytetx.ops.rows import empty_rows, has_row_kernel

# Shape classes: dtype and width of the rows.  run(x, weight, bias or None, *, eps, residual, out,
# sum_out, fp8_out) as of layer_norm.
LAYER_NORM = Operation("layer_norm")
RMS_NORM = Operation("rms_norm")


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
    _check(x, weight, bias, residual, out, sum_out, fp8_out)
    if torch.compiler.is_compiling():
        normalized = torch.ops.bytetx.layer_norm(x, weight, bias, eps=eps, residual=residual)
        return _store(normalized, x, residual, out, sum_out, fp8_out)
    run = LAYER_NORM.choose(x.device, x.dtype, x.shape[1]).run
    outs = {"out": out, "sum_out": sum_out, "fp8_out": fp8_out}
    normed: Tensor = run(x, weight, bias, eps=eps, residual=residual, **outs)
    return normed


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
    _check(x, weight, None, residual, out, sum_out, fp8_out)
    if torch.compiler.is_compiling():
        normalized = torch.ops.bytetx.rms_norm(x, weight, eps=eps, residual=residual)
        return _store(normalized, x, residual, out, sum_out, fp8_out)
    run = RMS_NORM.choose(x.device, x.dtype, x.shape[1]).run
    outs = {"out": out, "sum_out": sum_out, "fp8_out": fp8_out}
    normed: Tensor = run(x, weight, None, eps=eps, residual=residual, **outs)
    return normed


def run_kernel(
    name: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    eps: float,
    residual: Tensor | None,
    out: Tensor | None,
    sum_out: Tensor | None = None,
    fp8_out: tuple[Tensor, Tensor] | None = None,
    isa: str = "auto",
) -> Tensor:
    """The native kernel `name` on checked arguments; isa: a key of native.ISA_CODES."""
    if out is None:
        out = torch.empty_like(x) if x.is_cuda else empty_rows(x.shape[0], x.shape[1:], x.dtype)
    fused = fp8_out if fp8_out is not None and has_fp8_kernel(x) else None
    native.require_kernel(name, x.device)(
        x=x,
        residual=residual,
        out=out,
        sum_out=sum_out,
        weight=weight,
        bias=bias,
        out_fp8=None if fused is None else fused[0],
        out_scale=None if fused is None else fused[1],
        total_tokens=x.shape[0],
        hidden_size=x.shape[1],
        eps=eps,
        dtype=native.DTYPE_CODES[x.dtype],
        launch=native.launch_args(x.device, isa),
    )
    return out if fp8_out is fused else _store_fp8(out, fp8_out)


def _run_triton(
    name: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    eps: float,
    residual: Tensor | None,
    out: Tensor | None,
    sum_out: Tensor | None = None,
    fp8_out: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    out = torch.empty_like(x) if out is None else out
    options = {"is_rms": name == "rms_norm", "eps": eps, "residual": residual}
    triton_backend.kernels(x.device).norm(x, weight, bias, **options, out=out, sum_out=sum_out)
    return _store_fp8(out, fp8_out)


def _run_torch(
    name: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    eps: float,
    residual: Tensor | None,
    out: Tensor | None,
    sum_out: Tensor | None = None,
    fp8_out: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    biases = () if name == "rms_norm" else (bias,)
    normed = getattr(reference, name)(x, weight, *biases, eps=eps, residual=residual)
    return _store(normed, x, residual, out, sum_out, fp8_out)


for _op in (LAYER_NORM, RMS_NORM):
    _op.native_kernel(takes=has_row_kernel)(partial(run_kernel, _op.name))
    _op.triton_kernel(takes=triton_backend.holds_rows)(partial(_run_triton, _op.name))
    _op.in_torch()(partial(_run_torch, _op.name))


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
    _store_fp8(normalized, fp8_out)
    return normalized if out is None else out.copy_(normalized)


def _store_fp8(normalized: Tensor, fp8_out: tuple[Tensor, Tensor] | None) -> Tensor:
    if fp8_out is not None:
        for to, value in zip(fp8_out, reference.quantize_rows(normalized), strict=True):
            to.copy_(value)
    return normalized


def _check(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor | None,
    sum_out: Tensor | None,
    fp8_out: tuple[Tensor, Tensor] | None,
) -> None:
    require_tensor("x", x, shape=(None, None))
    require_contiguous("x", x)
    if sum_out is not None or fp8_out is not None:
        _check_more_outputs(x, residual, out, sum_out, fp8_out)
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
