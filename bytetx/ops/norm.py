"""Layer norm with a fused residual: checks, choice of kernel."""

from collections.abc import Callable

import torch
from torch import Tensor

from bytetx.ops import native, reference
from bytetx.ops.check import has_row_kernel, require_contiguous, require_out, require_tensor


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    eps: float,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """norm(x + residual) * weight + bias over each row; sum and statistics in f32.

    x, residual, out: [total_tokens, hidden_size], f32, bf16 or f16, contiguous; `out` may be x or
    residual.  weight, bias: [hidden_size], x's dtype.  Returns out, a new tensor where it is None.
    Raises ValueError on shape, dtype or device mismatch.
    """
    _check(x, weight, bias, residual, out)
    if torch.compiler.is_compiling():
        normed = torch.ops.bytetx.layer_norm(x, weight, bias, eps=eps, residual=residual)
        return normed if out is None else out.copy_(normed)
    kernel = native.kernel("layer_norm", x.device)
    if kernel is None or not has_row_kernel(x):
        normed = reference.layer_norm(x, weight, bias, eps=eps, residual=residual)
        return normed if out is None else out.copy_(normed)
    out = torch.empty_like(x) if out is None else out
    return run_kernel(kernel, x, weight, bias, eps=eps, residual=residual, out=out)


def run_kernel(
    kernel: Callable[..., None],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    eps: float,
    residual: Tensor | None,
    out: Tensor,
    isa: str = "auto",
) -> Tensor:
    """The native kernel on checked arguments; isa: a key of native.ISA_CODES."""
    kernel(
        x.data_ptr(),
        0 if residual is None else residual.data_ptr(),
        out.data_ptr(),
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        x.shape[0],
        x.shape[1],
        eps,
        native.DTYPE_CODES[x.dtype],
        *native.launch_args(x.device, isa),
    )
    return out


def _check(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor | None
) -> None:
    require_tensor("x", x, shape=(None, None))
    require_contiguous("x", x)
    shape, dtypes, device = x.shape, (x.dtype,), x.device
    for name, t in (("weight", weight), ("bias", bias)):
        if t is not None:
            require_tensor(name, t, shape=shape[1:], dtypes=dtypes, device=device)
            require_contiguous(name, t)
    if residual is not None:
        require_tensor("residual", residual, shape=shape, dtypes=dtypes, device=device)
        require_contiguous("residual", residual)
    if out is not None:
        require_out("out", out, like=x, shape=shape)


native.register(
    "layer_norm",
    "(Tensor x, Tensor weight, Tensor? bias, *, float eps, Tensor? residual=None) -> Tensor",
    fn=layer_norm,
    fake=lambda x, weight, bias, *, eps, residual=None: torch.empty_like(x),
)
