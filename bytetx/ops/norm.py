"""Norms: layer norm and RMS norm with a fused residual, a linear layer with its norm, and norms as
objects: a kind's weights, and everything that a layer or a collective asks of them."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from bytetx.ops import native, reference, triton_backend
from bytetx.ops.check import is_aligned, is_operand, require_contiguous, require_out, require_tensor
from bytetx.ops.linear import DTYPE_NAMES, LinearWeight, fuses_residual, linear, require_rows
from bytetx.ops.linear_plan import LinearPlan, norms_rows, plan_parts
from bytetx.ops.native import empty_rows, has_row_kernel
from bytetx.ops.quantize import has_fp8_kernel
from bytetx.ops.registry import Backend, Operation
from bytetx.ops.weight import Weight

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


@dataclass(frozen=True, slots=True)
class RowNorm(ABC):
    """A norm of each row: weight and bias [hidden_size], or [hidden_size] and None.

    operation: computes the norm; backend: its choice for these weights.
    fused_kind: the kind's number in the kernels of collectives that norm their sums; None where
    these do not compute it, and the collective comes first.
    """

    weight: Tensor
    bias: Tensor | None
    eps: float
    backend: Backend = field(init=False, compare=False, repr=False)

    operation: ClassVar[Operation]
    fused_kind: ClassVar[int | None] = None

    def __post_init__(self) -> None:
        w = self.weight
        object.__setattr__(self, "backend", self.operation.choose(w.device, w.dtype, w.shape[-1]))

    def __call__(
        self,
        x: Tensor,
        *,
        residual: Tensor | None = None,
        out: Tensor | None = None,
        sum_out: Tensor | None = None,
        fp8_out: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """The norm of x + residual; arguments as of bytetx.ops.norm.layer_norm, unchecked."""
        outs = {"out": out, "sum_out": sum_out, "fp8_out": fp8_out}
        normed: Tensor = self.backend.run(
            x, self.weight, self.bias, eps=self.eps, residual=residual, **outs
        )
        return normed

    @abstractmethod
    def in_torch(self, h: Tensor) -> Tensor:
        """The norm of f32 rows in plain torch, f32."""

    @abstractmethod
    def over_ranks(self, x: Tensor, sum_ranks: Callable[[Tensor], Tensor], count: int) -> Tensor:
        """The norm of rows whose features are divided over ranks; x: this rank's of `count`.

        sum_ranks: sums f64 [rows, sums] over ranks. In f64, for a mean far from 0 then costs no
        digits.
        """

    def parts_plan(self, x: Tensor, w: LinearWeight, residual: Tensor) -> LinearPlan | None:
        """The plan of after_parts; None where that is not there or not faster."""
        if torch.compiler.is_compiling() or w.batch_invariant:
            return None
        plan = plan_parts(x.shape[0], w.n, w.k, dtype=DTYPE_NAMES[w.dtype])
        if plan is None:
            return None
        given = (t for t in (x, residual, self.weight, self.bias) if t is not None)
        return plan if all(is_aligned(t) for t in given) else None

    def after_parts(
        self,
        x: Tensor,
        w: LinearWeight,
        plan: LinearPlan,
        *,
        residual: Tensor,
        sum_out: Tensor | None = None,
    ) -> Tensor:
        """The norm of x @ w.T + bias + residual, a new tensor, which adds up shares of k.

        sum_out: gets what is normed.
        """
        return run_split_kernel(
            x,
            w,
            plan=plan,
            residual=residual,
            norm=(self.weight, self.bias),
            is_rms=self.operation is RMS_NORM,
            eps=self.eps,
            sum_out=sum_out,
        )

    def after_linear(self, x: Tensor, w: Weight, *, residual: Tensor) -> Tensor:
        """The norm of x @ w.T + bias + residual, a new tensor."""
        plan = self.parts_plan(x, w.dense, residual) if w.has_kernel else None
        if plan is not None:
            return self.after_parts(x, w.dense, plan, residual=residual)
        adds = w.has_kernel and fuses_residual(x.shape[0], w.dense)
        d = w.matmul(x, residual=residual if adds else None)
        return self(d, residual=None if adds else residual, out=d)


class LayerNorm(RowNorm):
    """Layer norm, with or without a shift."""

    __slots__ = ()
    operation = LAYER_NORM
    fused_kind = 0

    def in_torch(self, h: Tensor) -> Tensor:
        return reference.layer_norm(h, self.weight, self.bias, eps=self.eps)

    def over_ranks(self, x: Tensor, sum_ranks: Callable[[Tensor], Tensor], count: int) -> Tensor:
        wide = x.float()
        squares = wide.square().sum(1, dtype=torch.float64)
        sums = torch.stack([wide.sum(1, dtype=torch.float64), squares], dim=1)
        mean, mean_square = (sum_ranks(sums) / count).unbind(1)
        variance = (mean_square - mean.square()).clamp_(min=0)
        scale = torch.rsqrt(variance + self.eps)
        normed = (wide - mean.float()[:, None]) * scale.float()[:, None] * self.weight
        return (normed if self.bias is None else normed + self.bias).to(x.dtype)

    def after_linear(self, x: Tensor, w: Weight, *, residual: Tensor) -> Tensor:
        fused = None
        if w.has_kernel:
            norm = (self.weight, self.bias)
            fused = fused_linear_norm(x, w.dense, residual=residual, norm=norm, eps=self.eps)
        return super().after_linear(x, w, residual=residual) if fused is None else fused


class RmsNorm(RowNorm):
    """Root mean square norm; bias is None."""

    __slots__ = ()
    operation = RMS_NORM
    fused_kind = 1

    def in_torch(self, h: Tensor) -> Tensor:
        return reference.rms_norm(h, self.weight, eps=self.eps)

    def over_ranks(self, x: Tensor, sum_ranks: Callable[[Tensor], Tensor], count: int) -> Tensor:
        wide = x.float()
        squares = wide.square().sum(1, dtype=torch.float64)
        mean_square = sum_ranks(squares[:, None]) / count
        scale = torch.rsqrt(mean_square + self.eps)
        return (wide * scale.float() * self.weight).to(x.dtype)


# By the names of bytetx.checkpoint.norm_kinds.
NORMS: dict[str, type[RowNorm]] = {"layer_norm": LayerNorm, "rms_norm": RmsNorm}


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
    return run_fused_kernel(x, w, residual=residual, norm=norm, eps=eps, workspace=workspace)


def run_fused_kernel(
    x: Tensor,
    w: LinearWeight,
    *,
    residual: Tensor,
    norm: tuple[Tensor, Tensor | None],
    eps: float,
    workspace: Tensor,
) -> Tensor:
    """The Hopper kernel on operands that takes_fused_kernel accepts.

    workspace: fused_workspace's.
    """
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


def run_split_kernel(
    x: Tensor,
    w: LinearWeight,
    *,
    plan: LinearPlan,
    residual: Tensor | None,
    norm: tuple[Tensor, Tensor | None],
    is_rms: bool,
    eps: float,
    sum_out: Tensor | None = None,
) -> Tensor:
    """The two Hopper kernels on aligned operands, cut as `plan` says (plan.tiling is not None).

    sum_out: gets x @ w.T + bias + residual.
    """
    m = x.shape[0]
    d = x.new_empty((m, w.n))
    native.require_kernel("split_norm", x.device)(
        a=x,
        b=w.weight,
        bias=w.bias,
        residual=residual,
        weight=norm[0],
        shift=norm[1],
        d=d,
        sum_out=sum_out,
        parts=x.new_empty((plan.split_k, m, w.n), dtype=torch.float32),
        m=m,
        n=w.n,
        k=w.k,
        tiling=plan.tiling,
        split_k=plan.split_k,
        is_rms=is_rms,
        eps=eps,
        dtype=native.DTYPE_CODES[x.dtype],
        launch=native.launch_args(x.device),
    )
    return d


def takes_fused_kernel(
    x: Tensor, w: LinearWeight, residual: Tensor, norm_weight: Tensor, norm_bias: Tensor | None
) -> bool:
    """Whether the Hopper kernel takes these operands, fast or not."""
    if torch.compiler.is_compiling() or not w.has_kernel or w.n not in WIDTHS or w.bias is None:
        return False
    if norm_bias is None or native.kernel("linear_norm", x.device) is None:
        return False
    return all(is_aligned(t) for t in (x, residual, norm_weight, norm_bias))


def fused_workspace(m: int, n: int, device: torch.device) -> Tensor:
    """Allocate the scratch memory of run_fused_kernel on at most m rows, one call at a time."""
    num_bytes = native.linear_norm_workspace_bytes(m, n)
    return torch.full((num_bytes,), 255, dtype=torch.uint8, device=device)


def _workspace_for(
    x: Tensor, w: LinearWeight, residual: Tensor, norm_weight: Tensor, norm_bias: Tensor | None
) -> Tensor | None:
    """This stream's; None where two kernels run instead."""
    m = x.shape[0]
    if (
        m == 0
        or w.batch_invariant
        or not takes_fused_kernel(x, w, residual, norm_weight, norm_bias)
    ):
        return None
    if not norms_rows(m, w.n, w.k, dtype=DTYPE_NAMES[w.dtype]):
        return None
    index, stream, *_ = native.launch_args(x.device)
    key = (1 << (m - 1).bit_length(), w.n, index, stream)  # few sizes
    if key not in _workspaces:
        needs_memory = native.linear_norm_workspace_bytes(m, w.n) > 0
        if needs_memory and torch.cuda.is_current_stream_capturing():
            return None  # memory that a graph allocates is filled only when the graph runs
        _workspaces[key] = fused_workspace(key[0], w.n, x.device)
    return _workspaces[key]
