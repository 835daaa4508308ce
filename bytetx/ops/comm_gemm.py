"""Linear layers that communicate: argument checks, choice of the plan, one function a transport.

The rows of a pass are sharded over the ranks of a group in whole tiles (row_offsets), or every rank
has all of them.  Weights are split over the ranks: by outputs in the first half of a block, by
inputs in the second.  This module does not know torch.distributed: Peers says where the other
ranks' memory is, and its collectives run where there is no kernel.
Source: Flux (arXiv 2406.06858), sections 3 and 4.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from torch.nn import functional as F

from bytetx.ops import comm_copies, comm_kernels, reference
from bytetx.ops.check import require_contiguous, require_tensor
from bytetx.ops.comm_epilogue import SumEpilogue
from bytetx.ops.comm_plan import CommPlan, Layer, Op, plan_comm
from bytetx.ops.comm_workspace import Workspace
from bytetx.ops.norm import RowNorm
from bytetx.ops.weight import Weight

__all__ = [
    "Collectives",
    "Peers",
    "all_gather_gemm",
    "column_gemm",
    "gemm_all_reduce",
    "gemm_reduce_scatter",
]


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
    is_even: whether every rank's shard of a layer has the same size.
    """

    rank: int
    size: int
    collectives: Collectives
    workspace: Workspace | None = None
    is_even: bool = True


def all_gather_gemm(
    x: Tensor,
    w: Weight,
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
    _require_rows("x", x, w.k, w, m=own)
    plan = plan or _plan(peers, "all_gather_gemm", w, row_offsets[-1])
    workspace = _kernel_workspace(peers)
    if workspace is None or not _can_gather(plan, w, workspace, row_offsets[-1]):
        plan = plan.without_kernels
    elif plan.transport == "peer_store":
        return comm_kernels.all_gather_gemm(
            x,
            w.dense,
            memory=workspace.memory,
            row_offsets=row_offsets,
            activation=activation,
            is_gated=w.block > 0,
            plan=plan,
        )
    elif plan.transport == "copy_engine" and workspace.copies is not None:
        return comm_copies.all_gather_gemm(
            x, w, copies=workspace.copies, row_offsets=row_offsets, activation=activation
        )
    rows = peers.collectives.all_gather(x, row_offsets)
    return _plain_gemm(rows, w, activation=activation, plan=plan)


def column_gemm(
    x: Tensor,
    w: Weight,
    *,
    peers: Peers,
    activation: str = "none",
    plan: CommPlan | None = None,
) -> Tensor:
    """act(x @ w.T + bias): all_gather_gemm where every rank has all rows x [m, k].

    Returns a new [m, n].  Nothing is communicated.  The op has plans because `linear` was not
    measured at the sizes of large models' shards, where cuBLAS is faster for some.
    """
    _require_rows("x", x, w.k, w)
    plan = plan or _plan(peers, "column_gemm", w, len(x))
    return _plain_gemm(x, w, activation=activation, plan=plan)


def gemm_reduce_scatter(
    x: Tensor,
    w: Weight,
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
    most_rows = max(row_offsets[i + 1] - row_offsets[i] for i in range(peers.size))
    plan = plan or _plan(peers, "gemm_reduce_scatter", w, len(x))
    workspace, epilogue = _sum_workspace(peers, norm), SumEpilogue(residual, bias, norm)
    if workspace is None or not _can_scatter(plan, w, workspace, most_rows * peers.size):
        plan = plan.without_kernels
    elif plan.transport == "peer_store":
        return comm_kernels.gemm_reduce_scatter(
            x,
            w.dense,
            epilogue,
            workspace.memory,
            row_offsets=row_offsets,
            partial=partial,
            plan=plan,
        )
    elif plan.transport == "copy_engine" and workspace.copies is not None:
        return comm_copies.gemm_reduce_scatter(
            x, w.dense, epilogue, copies=workspace.copies, row_offsets=row_offsets, partial=partial
        )
    product = _product(x, w, peers, bias=bias, partial=partial, plan=plan)
    return epilogue.after_collective(peers.collectives.reduce_scatter(product, row_offsets))


def gemm_all_reduce(
    x: Tensor,
    w: Weight,
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
    workspace, epilogue = _sum_workspace(peers, norm), SumEpilogue(residual, bias, norm)
    if workspace is None:
        plan = plan.without_kernels
    else:
        plan = _fit_all_reduce(plan, w, workspace, rows=len(x), size=peers.size)
        if plan.is_fused:
            return comm_kernels.gemm_all_reduce(
                x, w.dense, epilogue, workspace.memory, size=peers.size, partial=partial, plan=plan
            )
        if plan.transport != "collective":
            product = _product(x, w, peers, bias=None, partial=partial, plan=plan)
            return comm_kernels.all_reduce(
                product, epilogue, workspace.memory, size=peers.size, plan=plan
            )
    product = _product(x, w, peers, bias=bias, partial=partial, plan=plan)
    return epilogue.after_collective(peers.collectives.all_reduce(product))


def _plan(peers: Peers, op: Op, w: Weight, m: int) -> CommPlan:
    if _kernel_workspace(peers) is None:
        return CommPlan("linear")
    plain = w.dense
    return plan_comm(Layer(op, peers.size, plain.n, plain.k, w.block > 0, peers.is_even), m)


def _sum_workspace(peers: Peers, norm: RowNorm) -> Workspace | None:
    """Return the workspace of the kernels of sums, which compute their norms as well."""
    return None if norm.fused_kind is None else _kernel_workspace(peers)


def _kernel_workspace(peers: Peers) -> Workspace | None:
    workspace = peers.workspace
    return None if workspace is None or workspace.memory is None else workspace


# Whether the kernels of a plan take a layer: the same on every rank.


def _can_gather(plan: CommPlan, w: Weight, workspace: Workspace, total_tokens: int) -> bool:
    plain = w.dense
    if plan.transport == "peer_store":
        return w.has_kernel and comm_kernels.fits_gather(
            plain, total_tokens=total_tokens, buffer_bytes=workspace.buffer_bytes
        )
    num_bytes = total_tokens * plain.k * plain.dtype.itemsize
    return plan.transport == "copy_engine" and w.has_kernel and workspace.has_copies_of(num_bytes)


def _can_scatter(plan: CommPlan, w: Weight, workspace: Workspace, slot_rows: int) -> bool:
    if plan.transport == "peer_store":
        return comm_kernels.fits_slots(w, slot_rows=slot_rows, buffer_bytes=workspace.buffer_bytes)
    num_bytes = slot_rows * w.n * w.dtype.itemsize
    return (
        plan.transport == "copy_engine"
        and comm_kernels.has_sum_kernel(w)
        and workspace.has_copies_of(num_bytes)
    )


def _fit_all_reduce(
    plan: CommPlan, w: Weight, workspace: Workspace, *, rows: int, size: int
) -> CommPlan:
    """The plan, or the one that takes its place where the memory it needs is too small."""
    if plan.gemm == "fused" and not comm_kernels.fits_slots(
        w, slot_rows=rows * size, buffer_bytes=workspace.buffer_bytes
    ):
        plan = CommPlan("cublas", "one_shot")
    is_two_shot = plan.transport == "two_shot"
    fits = comm_kernels.fits_staging(w, rows=rows, size=size, is_two_shot=is_two_shot)
    return plan if fits else plan.without_kernels


def _plain_gemm(x: Tensor, w: Weight, *, activation: str, plan: CommPlan) -> Tensor:
    if plan.gemm != "cublas":
        return w.matmul(x, activation=activation)
    dense = w.dense
    if w.block:
        return w.activated(F.linear(x, dense.weight, dense.bias), activation)
    return reference.linear(x, dense.weight, dense.bias, activation=activation, residual=None)


def _product(
    x: Tensor,
    w: Weight,
    peers: Peers,
    *,
    bias: Tensor | None,
    partial: Tensor | None,
    plan: CommPlan,
) -> Tensor:
    """This rank's partial sums. Rank 0 adds the bias, which costs nothing in its GEMM."""
    own = bias if peers.rank == 0 else None
    if plan.gemm == "cublas":
        return reference.linear(x, w.dense.weight, own, activation="none", residual=partial)
    return w.product(x, bias=own, residual=partial)


def _require_rows(name: str, rows: Tensor, width: int, w: Weight, *, m: int | None = None) -> None:
    """ops.linear.require_rows for a weight of any kind."""
    require_tensor(name, rows, shape=(m, width), dtypes=(w.dtype,))
    require_contiguous(name, rows)


def _check_offsets(row_offsets: Sequence[int], peers: Peers) -> None:
    if len(row_offsets) != peers.size + 1 or row_offsets[0] != 0:
        raise ValueError(
            f"row_offsets must be {peers.size + 1} row numbers from 0, got {list(row_offsets)}"
        )


def _check_sum(
    x: Tensor,
    w: Weight,
    shape: tuple[int, int],
    *,
    residual: Tensor,
    bias: Tensor | None,
    partial: Tensor | None,
) -> None:
    _require_rows("x", x, w.k, w)
    _require_rows("residual", residual, shape[1], w, m=shape[0])
    if partial is not None:
        _require_rows("partial", partial, w.n, w, m=x.shape[0])
    if bias is not None:
        require_tensor("bias", bias, shape=(w.n,), dtypes=(w.dtype,), device=x.device)
