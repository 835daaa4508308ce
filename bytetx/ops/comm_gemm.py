"""Linear layers that carry their own communication: checks, choice of kernel, reference.

The rows of a pass are dealt to the ranks of a group in whole tiles (row_offsets) or held by all of
them.  Weights are split over the ranks: by outputs before a block's middle, by inputs after it.
This room knows nothing of torch.distributed: a Peers says where the other ranks' memory is, and its
collectives are what runs where there is no kernel.
Source: Flux (arXiv 2406.06858), sections 3 and 4.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from torch import Tensor
from torch.nn import functional as F

from bytetx.ops import comm_copies, comm_kernels, reference
from bytetx.ops.check import require_contiguous, require_tensor
from bytetx.ops.comm_copies import CopyMemory
from bytetx.ops.comm_plan import CUBLAS_PUSH, LINEAR, CommPlan, Layer, Op, plan_comm
from bytetx.ops.comm_workspace import Workspace
from bytetx.ops.gated import GatedWeight, gate, gated_linear
from bytetx.ops.linear import LinearWeight, linear
from bytetx.ops.norm import layer_norm, rms_norm


class Collectives(Protocol):
    """Collectives of a group on the current stream; every rank calls them in the same order."""

    def all_gather(self, shard: Tensor, row_offsets: Sequence[int]) -> Tensor:
        """[own rows, n] of every rank -> [total_tokens, n], in the order of ranks."""
        ...

    def reduce_scatter(self, partial: Tensor, row_offsets: Sequence[int]) -> Tensor:
        """[total_tokens, n] of every rank -> the sum's own rows, in partial's dtype or f32."""
        ...

    def all_reduce(self, partial: Tensor) -> Tensor:
        """[m, n] of every rank -> their sum, in its dtype or f32; may overwrite it."""
        ...


@dataclass(frozen=True, slots=True)
class Peers:
    """The ranks that share the layers of a model.

    workspace: None where there is no such memory, or not every rank has kernels that use it.
    is_even: whether every rank's share of a layer is as large.
    """

    rank: int
    size: int
    collectives: Collectives
    workspace: Workspace | None = None
    is_even: bool = True


@dataclass(frozen=True, slots=True)
class RowNorm:
    """The norm behind a sum: weight, bias [n] (an RMS norm has no bias)."""

    weight: Tensor
    bias: Tensor | None
    eps: float
    kind: Literal["layer_norm", "rms_norm"] = "layer_norm"


def all_gather_gemm(
    x: Tensor,
    w: LinearWeight | GatedWeight,
    *,
    peers: Peers,
    row_offsets: Sequence[int],
    activation: str = "none",
    plan: CommPlan | None = None,
) -> Tensor:
    """act(all ranks' x @ w.T + bias): the rows of everyone, this rank's outputs.

    x: [own rows, k], contiguous, this rank's rows row_offsets[rank] to row_offsets[rank + 1].
    w: this rank's outputs [n, k] with their bias, gated or plain.  activation: as of `linear`.
    row_offsets: size + 1 host ints from 0 to total_tokens, the same on every rank; shares may be
        empty, and all but the last non-empty one are whole tiles (multiples of 16 rows at least).
    plan: None is the table's; every rank's is the same.
    Returns a new [total_tokens, n].  Raises ValueError on shape, dtype or device mismatch.
    """
    _check_offsets(row_offsets, peers)
    own = row_offsets[peers.rank + 1] - row_offsets[peers.rank]
    is_gated = isinstance(w, GatedWeight)
    plain = w.fused if is_gated else w
    _check_rows("x", x, (own, plain.k), plain)
    total_tokens, workspace = row_offsets[-1], _kernel_workspace(peers)
    fits = workspace is not None and comm_kernels.takes_gather(
        plain, total_tokens=total_tokens, buffer_bytes=workspace.buffer_bytes
    )
    plan = plan or _plan(peers, "all_gather_gemm", plain, total_tokens, is_gated=is_gated)
    if fits and w.has_kernel and plan.is_fused:
        return comm_kernels.all_gather_gemm(
            x,
            plain,
            memory=workspace.memory,
            row_offsets=row_offsets,
            activation=activation,
            is_gated=is_gated,
            plan=plan,
        )
    copies = _copies(peers, plan, total_tokens * plain.k * plain.dtype.itemsize)
    if copies is not None and w.has_kernel:
        options = {"copies": copies, "row_offsets": row_offsets, "activation": activation}
        return comm_copies.all_gather_gemm(x, w, **options)
    rows = peers.collectives.all_gather(x, row_offsets)
    return _unfused(rows, w, activation=activation, plan=plan)


def column_gemm(
    x: Tensor,
    w: LinearWeight | GatedWeight,
    *,
    peers: Peers,
    activation: str = "none",
    plan: CommPlan | None = None,
) -> Tensor:
    """act(x @ w.T + bias): all_gather_gemm where every rank holds all rows x [m, k].

    Returns a new [m, n].  Nothing is communicated; the shares of large models are no sizes that
    `linear` was measured at, and where cuBLAS wins is in the same table as the other ops' ways.
    """
    is_gated = isinstance(w, GatedWeight)
    plain = w.fused if is_gated else w
    _check_rows("x", x, (len(x), plain.k), plain)
    plan = plan or _plan(peers, "column_gemm", plain, len(x), is_gated=is_gated)
    return _unfused(x, w, activation=activation, plan=plan)


def _unfused(
    x: Tensor, w: LinearWeight | GatedWeight, *, activation: str, plan: CommPlan
) -> Tensor:
    if isinstance(w, GatedWeight):
        if not plan.is_cublas:
            return gated_linear(x, w, activation=activation)
        return gate(F.linear(x, w.fused.weight, w.fused.bias), w, activation=activation)
    if not plan.is_cublas:
        return linear(x, w, activation=activation)
    return reference.linear(x, w.weight, w.bias, activation=activation, residual=None)


def gemm_reduce_scatter(
    x: Tensor,
    w: LinearWeight,
    *,
    peers: Peers,
    row_offsets: Sequence[int],
    residual: Tensor,
    bias: Tensor | None = None,
    partial: Tensor | None = None,
    norm: RowNorm,
    plan: CommPlan | None = None,
) -> tuple[Tensor, Tensor]:
    """(norm(h), h) of this rank's rows of h = sum over ranks (x @ w.T + partial) + bias + residual.

    x: [total_tokens, k], this rank's inputs of every row.  w: [n, k], these inputs' columns of the
    weight, without bias.  bias: [n], added once, to the sum.  partial: [total_tokens, n], added to
    this rank's product (a parallel block's other half); it may be overwritten.
    residual: [own rows, n]; it may be overwritten.  row_offsets: as of all_gather_gemm.
    plan: as of all_gather_gemm.
    The kernel sums in f32, in the order of ranks.  Returns two new [own rows, n] in x's dtype.
    """
    _check_offsets(row_offsets, peers)
    own = row_offsets[peers.rank + 1] - row_offsets[peers.rank]
    _check_sum(x, w, (own, w.n), residual=residual, bias=bias, partial=partial)
    most = max(row_offsets[i + 1] - row_offsets[i] for i in range(peers.size))
    plan = plan or _plan(peers, "gemm_reduce_scatter", w, len(x))
    workspace = _kernel_workspace(peers)
    fits = workspace is not None and comm_kernels.fits_slots(
        w, slot_rows=most * peers.size, buffer_bytes=workspace.buffer_bytes
    )
    options = {"residual": residual, "bias": bias, "norm": norm, "plan": plan}
    if fits and plan.is_fused:
        return _sum_by_kernel(x, w, peers, row_offsets, **options, partial=partial)
    copies = _copies(peers, plan, most * peers.size * w.n * w.dtype.itemsize)
    if copies is not None and comm_kernels.takes_copies(w):
        given = {"copies": copies, "row_offsets": row_offsets}
        if plan.adds_parts and partial is None:
            given |= {"residual": residual, "bias": bias, "tiling": plan.tiling}
            return _norm_sums(comm_copies.added_sums(x, w, **given), norm)
        parts = comm_copies.partial_sums(x, w, **given, partial=partial)
        return _sum_by_kernel(residual, w, peers, None, **options, partial=parts)
    product = _product(x, w, peers, bias=bias, partial=partial, plan=plan)
    return _finish(peers.collectives.reduce_scatter(product, row_offsets), residual, norm)


def gemm_all_reduce(
    x: Tensor,
    w: LinearWeight,
    *,
    peers: Peers,
    residual: Tensor,
    bias: Tensor | None = None,
    partial: Tensor | None = None,
    norm: RowNorm,
    plan: CommPlan | None = None,
) -> tuple[Tensor, Tensor]:
    """(norm(h), h) of every row, on every rank: gemm_reduce_scatter for few rows, which all hold.

    residual: [m, n], the same on every rank; else as of gemm_reduce_scatter.
    Returns two new tensors [m, n], bit for bit the same on every rank.
    """
    _check_sum(x, w, (x.shape[0], w.n), residual=residual, bias=bias, partial=partial)
    plan = plan or _plan(peers, "gemm_all_reduce", w, len(x))
    plan = _with_slots(plan, w, peers, len(x))
    options = {"residual": residual, "bias": bias, "norm": norm, "plan": plan}
    if _sums_by_kernel(plan, w, peers, len(x)):
        if plan.is_fused:
            return _sum_by_kernel(x, w, peers, None, **options, partial=partial)
        if plan.is_pushed:
            product = _product(x, w, peers, bias=None, partial=partial, plan=plan)
            return _sum_by_kernel(x, w, peers, None, **options, partial=product)
    product = _product(x, w, peers, bias=bias, partial=partial, plan=plan)
    return _finish(peers.collectives.all_reduce(product), residual, norm)


def _with_slots(plan: CommPlan, w: LinearWeight, peers: Peers, rows: int) -> CommPlan:
    """The plan of a gemm_all_reduce, or one with the staging buffer where the slots are small."""
    workspace = _kernel_workspace(peers)
    if workspace is None or not plan.uses_slots:
        return plan
    sizes = {"slot_rows": rows * peers.size, "buffer_bytes": workspace.buffer_bytes}
    return plan if comm_kernels.fits_slots(w, **sizes) else CommPlan(CUBLAS_PUSH)


def _sums_by_kernel(plan: CommPlan, w: LinearWeight, peers: Peers, rows: int) -> bool:
    """Whether this gemm_all_reduce can be a kernel's; the same on every rank."""
    if _kernel_workspace(peers) is None:
        return False
    sizes = {"rows": rows, "size": peers.size}
    return comm_kernels.fits_staging(w, **sizes, is_two_shot=plan.is_two_shot)


def _plan(peers: Peers, op: Op, w: LinearWeight, m: int, *, is_gated: bool = False) -> CommPlan:
    if _kernel_workspace(peers) is None:
        return CommPlan(LINEAR)
    return plan_comm(Layer(op, peers.size, w.n, w.k, is_gated, peers.is_even), m)


def _kernel_workspace(peers: Peers) -> Workspace | None:
    workspace = peers.workspace
    return None if workspace is None or workspace.memory is None else workspace


def _copies(peers: Peers, plan: CommPlan, num_bytes: int) -> CopyMemory | None:
    """The region for copies where the plan has any and they fit; the same on every rank."""
    workspace = _kernel_workspace(peers)
    if workspace is None or workspace.copies is None or not plan.is_copied:
        return None
    return workspace.copies if 0 < num_bytes <= workspace.copies.own.numel() else None


def _product(
    x: Tensor,
    w: LinearWeight,
    peers: Peers,
    *,
    bias: Tensor | None,
    partial: Tensor | None,
    plan: CommPlan,
) -> Tensor:
    """This rank's part of a sum; rank 0's has the bias, for its product adds it for nothing."""
    own = replace(w, bias=bias if peers.rank == 0 else None)
    if plan.is_cublas:
        return reference.linear(x, own.weight, own.bias, activation="none", residual=partial)
    return linear(x, own, residual=partial)


def _sum_by_kernel(
    x: Tensor,
    w: LinearWeight,
    peers: Peers,
    row_offsets: Sequence[int] | None,
    *,
    residual: Tensor,
    bias: Tensor | None,
    partial: Tensor | None,
    norm: RowNorm,
    plan: CommPlan,
) -> tuple[Tensor, Tensor]:
    return comm_kernels.gemm_sum(
        x,
        w,
        memory=peers.workspace.memory,
        row_offsets=row_offsets,
        own_rows=len(residual),
        size=peers.size,
        residual=residual,
        bias=bias,
        partial=partial,
        norm_weight=norm.weight,
        norm_bias=norm.bias,
        eps=norm.eps,
        is_rms=norm.kind == "rms_norm",
        plan=plan,
    )


def _finish(sums: Tensor, residual: Tensor, norm: RowNorm) -> tuple[Tensor, Tensor]:
    """(norm(h), h) of h = sums + residual; sums may be f32 where residual is a half type."""
    if sums.dtype == residual.dtype:
        options = {"eps": norm.eps, "residual": residual, "sum_out": sums}
        if norm.kind == "rms_norm":
            return rms_norm(sums, norm.weight, **options), sums
        return layer_norm(sums, norm.weight, norm.bias, **options), sums
    h = sums.float() + residual.float()
    if norm.kind == "rms_norm":
        normalized = reference.rms_norm(h, norm.weight, eps=norm.eps)
    else:
        normalized = reference.layer_norm(h, norm.weight, norm.bias, eps=norm.eps)
    return normalized.to(residual.dtype), h.to(residual.dtype)


def _norm_sums(h: Tensor, norm: RowNorm) -> tuple[Tensor, Tensor]:
    if norm.kind == "rms_norm":
        return rms_norm(h, norm.weight, eps=norm.eps), h
    return layer_norm(h, norm.weight, norm.bias, eps=norm.eps), h


def _check_offsets(row_offsets: Sequence[int], peers: Peers) -> None:
    if len(row_offsets) != peers.size + 1 or row_offsets[0] != 0:
        raise ValueError(
            f"row_offsets must be {peers.size + 1} row numbers from 0, got {list(row_offsets)}"
        )


def _check_sum(
    x: Tensor,
    w: LinearWeight,
    shape: tuple[int, int],
    *,
    residual: Tensor,
    bias: Tensor | None,
    partial: Tensor | None,
) -> None:
    if w.bias is not None:
        raise ValueError("w must have no bias: every rank would add it; give it as bias")
    _check_rows("x", x, (x.shape[0], w.k), w)
    _check_rows("residual", residual, shape, w)
    if partial is not None:
        _check_rows("partial", partial, (x.shape[0], w.n), w)
    if bias is not None:
        require_tensor("bias", bias, shape=(w.n,), dtypes=(w.dtype,), device=x.device)


def _check_rows(name: str, x: Tensor, shape: tuple[int, int], w: LinearWeight) -> None:
    require_tensor(name, x, shape=shape, dtypes=(w.dtype,), device=w.weight.device)
    require_contiguous(name, x)
