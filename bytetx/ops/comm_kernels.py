"""The GPU kernels of linear layers that communicate: what they take, and their calls.

Every rank must come to the same answer on whether a kernel runs, or one waits for a message that
never comes. The answer depends on sizes that all ranks share, and on whether the weights have
kernels, on which the ranks agree when they load them (ShardedBlocks.sync_kernel_support).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from bytetx.ops import native
from bytetx.ops.check import is_aligned
from bytetx.ops.comm_epilogue import SumEpilogue
from bytetx.ops.comm_plan import CommPlan, Op, tile_index
from bytetx.ops.linear import ACTIVATIONS, LinearWeight
from bytetx.ops.native_params import LinearParams, NormParams
from bytetx.ops.registry import Operation
from bytetx.ops.weight import Weight

TIMEOUT_CYCLES = 20_000_000_000  # a kernel waits for another rank: about ten seconds of an H200
_MAX_FEATURES = 16384  # the longest row that is summed and normalized in registers
_GIVEN_UP_WORD = 8  # index into epochs: kGivenUpWord in csrc/comm_ops.h
# A staging buffer of gemm_all_reduce behind the flags, one for odd and one for even calls.
STAGING_BYTES = 36 << 20  # 703 rows of 12288 features in two exchanges
STAGING_FLAG = 32768  # kStaging of csrc/comm/peers.cuh: behind flags and counters
_QUARTERS = 4  # a buffer's parts: gathered rows and slots, for odd and for even calls each


def peer_memory(
    buffers: Sequence[int],
    flags: Sequence[int],
    *,
    epochs: Tensor,
    buffer_bytes: int,
    num_flags: int,
    fault: Tensor,
    rank: int,
) -> object | None:
    """The description of the group that every kernel call takes; None where there are no kernels.

    fault: int32 [6] in pinned memory, where a kernel whose wait timed out writes a PeerFault.
    """
    make = native.kernel("PeerMemory", epochs.device)
    if make is None:
        return None
    memory: object = make(
        buffers=list(buffers),
        flags=list(flags),
        epochs=epochs.data_ptr(),
        buffer_bytes=buffer_bytes,
        num_flags=num_flags,
        fault=fault.data_ptr(),
        timeout_cycles=TIMEOUT_CYCLES,
        rank=rank,
    )
    return memory


def fits_gather(w: LinearWeight, *, total_tokens: int, buffer_bytes: int) -> bool:
    """Whether the gathered rows fit the buffer of all_gather_gemm's kernel."""
    fits = (total_tokens + 128) * w.k * w.dtype.itemsize <= buffer_bytes // _QUARTERS
    return fits and total_tokens > 0


def fits_slots(w: Weight, *, slot_rows: int, buffer_bytes: int) -> bool:
    """Whether a kernel can sum this weight's products in slots; slot_rows: of all slots."""
    return has_sum_kernel(w) and _fits(w, slot_rows, buffer_bytes // _QUARTERS)


def fits_staging(w: Weight, *, rows: int, size: int, is_two_shot: bool) -> bool:
    """Whether a kernel can sum this weight's products in staging buffers; rows: of every rank.

    A staging buffer holds all ranks' rows; with two exchanges, all ranks' parts of the rows that
    its rank owns, and all sums.
    """
    slot_rows = size * -(-rows // size) + rows if is_two_shot else size * rows
    return has_sum_kernel(w) and _fits(w, slot_rows, STAGING_BYTES)


def has_sum_kernel(w: Weight) -> bool:
    """Whether kernels sum and normalize rows of this weight's outputs."""
    return w.has_kernel and w.n <= _MAX_FEATURES


def _fits(w: Weight, rows: int, num_bytes: int) -> bool:
    return rows > 0 and rows * w.n * w.dtype.itemsize <= num_bytes


def all_gather_gemm(
    x: Tensor,
    w: LinearWeight,
    *,
    memory: object,
    row_offsets: Sequence[int],
    activation: str,
    is_gated: bool,
    plan: CommPlan,
) -> Tensor:
    """The fused kernel, as comm_gemm.all_gather_gemm, on checked arguments."""
    total_tokens, x = row_offsets[-1], _aligned(x)
    d = x.new_empty((total_tokens, w.n // 2 if is_gated else w.n))
    linear = LinearParams(
        a=x,
        b=w.weight,
        bias=w.bias,
        d=d,
        m=total_tokens,
        n=w.n,
        k=w.k,
        activation=ACTIVATIONS.index(activation),
        gated=is_gated,
        tiling=_tile_index(plan),
        dtype=native.DTYPE_CODES[x.dtype],
    )
    launch = native.launch_args(x.device)
    native.require_kernel("all_gather_gemm", x.device)(
        linear=linear, peers=memory, row_offsets=row_offsets, launch=launch
    )
    return d


def gemm_reduce_scatter(
    x: Tensor,
    w: LinearWeight,
    epilogue: SumEpilogue,
    memory: object,
    *,
    row_offsets: Sequence[int],
    partial: Tensor | None,
    plan: CommPlan,
) -> tuple[Tensor, Tensor]:
    """The fused kernel, as comm_gemm.gemm_reduce_scatter, on checked arguments."""
    x, partial = _aligned(x), None if partial is None else _aligned(partial)
    linear = LinearParams(
        a=x,
        b=w.weight,
        residual=partial,
        m=len(x),
        n=w.n,
        k=w.k,
        tiling=_tile_index(plan),
        dtype=native.DTYPE_CODES[x.dtype],
    )
    fuse_reduce = plan.fuse_reduce and partial is None
    return _sum(
        "gemm_reduce_scatter", linear, epilogue, memory, row_offsets, fuse_reduce=fuse_reduce
    )


def gemm_all_reduce(
    x: Tensor,
    w: LinearWeight,
    epilogue: SumEpilogue,
    memory: object,
    *,
    size: int,
    partial: Tensor | None,
    plan: CommPlan,
) -> tuple[Tensor, Tensor]:
    """The fused kernel, as comm_gemm.gemm_all_reduce, on checked arguments."""
    x, partial = _aligned(x), None if partial is None else _aligned(partial)
    linear = LinearParams(
        a=x,
        b=w.weight,
        residual=partial,
        m=len(x),
        n=w.n,
        k=w.k,
        tiling=_tile_index(plan),
        split_k=plan.split_k,
        dtype=native.DTYPE_CODES[x.dtype],
    )
    offsets, is_two_shot = _all_rows(len(x), size), plan.transport == "two_shot"
    return _sum("gemm_all_reduce", linear, epilogue, memory, offsets, is_two_shot=is_two_shot)


def all_reduce(
    product: Tensor, epilogue: SumEpilogue, memory: object, *, size: int, plan: CommPlan
) -> tuple[Tensor, Tensor]:
    """(norm(h), h) of h = the sum of all ranks' products [m, n] + bias + residual."""
    kernel = "all_reduce_two_shot" if plan.transport == "two_shot" else "all_reduce_one_shot"
    product = _aligned(product)
    return _sum(
        kernel, _of_product(product, len(product)), epilogue, memory, _all_rows(len(product), size)
    )


def sum_copies(
    parts: Tensor, epilogue: SumEpilogue, memory: object, *, size: int
) -> tuple[Tensor, Tensor]:
    """(norm(h), h) of h = the sum of all ranks' parts [size * rows, n] + bias + residual."""
    rows = len(epilogue.residual)
    linear = _of_product(_aligned(parts), rows)
    return _sum("sum_copies", linear, epilogue, memory, _all_rows(rows, size))


def _of_product(product: Tensor, rows: int) -> LinearParams:
    """Parameters for a kernel that follows another GEMM: its product, and no operands."""
    dtype = native.DTYPE_CODES[product.dtype]
    return LinearParams(residual=product, m=rows, n=product.shape[1], k=8, dtype=dtype)


def _sum(
    kernel: str,
    linear: LinearParams,
    epilogue: SumEpilogue,
    memory: object,
    row_offsets: Sequence[int],
    *,
    fuse_reduce: bool = False,
    is_two_shot: bool = False,
) -> tuple[Tensor, Tensor]:
    residual, bias, norm = _aligned(epilogue.residual), epilogue.bias, epilogue.norm
    out, h = torch.empty_like(residual), torch.empty_like(residual)
    params = NormParams(
        residual=residual,
        out=out,
        sum_out=h,
        weight=norm.weight,
        bias=norm.bias,
        total_tokens=len(residual),
        hidden_size=linear.n,
        eps=norm.eps,
        dtype=linear.dtype,
    )
    native.require_kernel(kernel, residual.device)(
        linear=linear,
        norm=params,
        bias=bias,
        peers=memory,
        row_offsets=row_offsets,
        is_rms=bool(norm.fused_kind),
        fuse_reduce=fuse_reduce,
        is_two_shot=is_two_shot,
        launch=native.launch_args(residual.device),
    )
    return out, h


def _all_rows(rows: int, size: int) -> tuple[int, ...]:
    """Row offsets where every rank has all rows."""
    return (*[0] * size, rows)


def _tile_index(plan: CommPlan) -> int:
    assert plan.tile is not None
    is_all_reduce = plan.transport in ("one_shot", "two_shot")
    op: Op = "gemm_all_reduce" if is_all_reduce else "gemm_reduce_scatter"
    return tile_index(op, plan.gemm, plan.tile)


def _aligned(x: Tensor) -> Tensor:
    """x, or a copy whose address is a multiple of 16: one rank alone cannot take another path."""
    return x if is_aligned(x) else x.clone()


def fault_text(fault: Tensor) -> str | None:
    """The error text for a kernel whose wait timed out; None where none has."""
    is_set, rank, source, flag, seen, expected = fault[:6].tolist()
    if not is_set:
        return None
    return (
        f"rank {rank} timed out waiting for rank {source}: "
        f"flag {flag} is {seen}, expected {expected}"
    )


def give_up(epochs: Tensor) -> None:
    """Ends kernels that wait for a rank which is gone; their results are wrong.

    The word is written by a copy on a stream of its own, which needs no free multiprocessor.
    """
    word = epochs[_GIVEN_UP_WORD : _GIVEN_UP_WORD + 1]
    with torch.cuda.stream(torch.cuda.Stream(epochs.device)):
        word.copy_(torch.ones(1, dtype=torch.int32, pin_memory=True), non_blocking=True)


def new_fault() -> Tensor:
    """Pinned host memory for one PeerFault."""
    return torch.zeros(8, dtype=torch.int32, pin_memory=True)


# Chosen by comm_plan, which leaves them to NCCL and a GEMM where they are slower.
for _name, _kernel, _run in (
    ("all_gather_gemm", "all_gather_gemm", all_gather_gemm),
    ("gemm_reduce_scatter", "gemm_reduce_scatter", gemm_reduce_scatter),
    ("gemm_all_reduce", "gemm_all_reduce", gemm_all_reduce),
    ("all_reduce", "all_reduce_one_shot", all_reduce),
    ("sum_copies", "sum_copies", sum_copies),
):
    Operation(_name).native_kernel("cuda", kernel=_kernel)(_run)
