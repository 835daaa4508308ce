"""A linear layer, the residual behind it and their layer norm: one kernel where that is faster."""

import torch
from torch import Tensor

from bytetx.ops import native
from bytetx.ops.check import is_aligned, require_contiguous, require_tensor
from bytetx.ops.linear import DTYPE_NAMES, LinearWeight, fuses_residual, linear, require_rows
from bytetx.ops.linear_plan import norms_rows
from bytetx.ops.norm import layer_norm

WIDTHS = (384, 768, 1024)  # n that the kernel takes

# By rows, n, device and stream, whose kernels run one after another. Each is kept for good:
# captured graphs have its address.
_workspaces: dict[tuple[int, int, int, int], Tensor] = {}


def linear_norm(
    x: Tensor,
    w: LinearWeight,
    *,
    residual: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    eps: float,
) -> Tensor:
    """layer_norm(x @ w.T + bias + residual) * norm_weight + norm_bias.

    x: [m, k] in w's dtype, contiguous.  residual: [m, n].  norm_weight, norm_bias: [n].
    Returns a new [m, n]. One kernel where the table says that it wins (H200), else two. It must
    not run on two streams in graphs that were captured on one: they would share its workspace.
    Raises ValueError on shape, dtype or device mismatch.
    """
    norm = (norm_weight, norm_bias)
    require_rows("x", x, w.k, w)
    require_rows("residual", residual, w.n, w, m=x.shape[0])
    for name, t in zip(("norm_weight", "norm_bias"), norm, strict=True):
        if t is not None:
            require_tensor(name, t, shape=(w.n,), dtypes=(w.dtype,), device=x.device)
            require_contiguous(name, t)
    fused = fused_linear_norm(x, w, residual=residual, norm=norm, eps=eps)
    if fused is not None:
        return fused
    adds = fuses_residual(x.shape[0], w)
    d = linear(x, w, residual=residual if adds else None)
    return layer_norm(d, *norm, eps=eps, residual=None if adds else residual, out=d)


def fused_linear_norm(
    x: Tensor,
    w: LinearWeight,
    *,
    residual: Tensor,
    norm: tuple[Tensor, Tensor | None],
    eps: float,
) -> Tensor | None:
    """linear_norm of checked operands by one kernel; None where it is not there or not faster."""
    workspace = _workspace_for(x, w, residual, *norm)
    if workspace is None:
        return None
    return run_kernel(x, w, residual=residual, norm=norm, eps=eps, workspace=workspace)


def run_kernel(
    x: Tensor,
    w: LinearWeight,
    *,
    residual: Tensor,
    norm: tuple[Tensor, Tensor | None],
    eps: float,
    workspace: Tensor,
) -> Tensor:
    """The Hopper kernel on operands that takes_kernel accepts; workspace: make_workspace's."""
    m = x.shape[0]
    d = x.new_empty((m, w.n))
    native.require_kernel("linear_norm", x.device)(
        a=x,
        b=w.weight,
        bias=w.bias,
        residual=residual,
        weight=norm[0],
        shift=norm[1],
        d=d,
        workspace=workspace,
        m=m,
        n=w.n,
        k=w.k,
        eps=eps,
        dtype=native.DTYPE_CODES[x.dtype],
        launch=native.launch_args(x.device),
    )
    return d


def takes_kernel(
    x: Tensor, w: LinearWeight, residual: Tensor, norm_weight: Tensor, norm_bias: Tensor | None
) -> bool:
    """Whether the Hopper kernel takes these operands, fast or not."""
    if torch.compiler.is_compiling() or not w.has_kernel or w.n not in WIDTHS or w.bias is None:
        return False
    if norm_bias is None or native.kernel("linear_norm", x.device) is None:
        return False
    return all(is_aligned(t) for t in (x, residual, norm_weight, norm_bias))


def make_workspace(m: int, n: int, device: torch.device) -> Tensor:
    """Allocate the scratch memory of run_kernel's calls on at most m rows, one call at a time."""
    num_bytes = native.linear_norm_workspace_bytes(m, n)
    return torch.full((num_bytes,), 255, dtype=torch.uint8, device=device)


def _workspace_for(
    x: Tensor, w: LinearWeight, residual: Tensor, norm_weight: Tensor, norm_bias: Tensor | None
) -> Tensor | None:
    """This stream's; None where two kernels run instead."""
    m = x.shape[0]
    if m == 0 or w.batch_invariant or not takes_kernel(x, w, residual, norm_weight, norm_bias):
        return None
    if not norms_rows(m, w.n, w.k, dtype=DTYPE_NAMES[w.dtype]):
        return None
    index, stream, *_ = native.launch_args(x.device)
    key = (1 << (m - 1).bit_length(), w.n, index, stream)  # few sizes
    if key not in _workspaces:
        needs_memory = native.linear_norm_workspace_bytes(m, w.n) > 0
        if needs_memory and torch.cuda.is_current_stream_capturing():
            return None  # memory that a graph allocates is filled only when the graph runs
        _workspaces[key] = make_workspace(key[0], w.n, x.device)
    return _workspaces[key]
