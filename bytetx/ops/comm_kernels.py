"""The GPU kernels of linear layers that carry their own communication: what they take, their calls.

Whether a kernel runs must come out the same on every rank, or one waits for another in vain: it
depends on sizes that all ranks share, and on weights that either all have kernels or none has, as
whoever loads them agrees with the other ranks (ShardedBlocks.sync_kernel_support).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from bytetx.ops import native
from bytetx.ops.check import is_aligned
from bytetx.ops.comm_plan import COPIED, PUSHES, TWO_SHOTS, CommPlan, Op, tiling_index
from bytetx.ops.linear import ACTIVATIONS, LinearWeight
from bytetx.ops.native_params import LinearParams, NormParams

# That a kernel waits for another rank before it traps: about ten seconds of an H200.
TIMEOUT_CYCLES = 20_000_000_000
_MOST_FEATURES = 16384  # of a row that is summed and normalized in registers
_GIVEN_UP_WORD = 8  # of epochs; kGivenUpWord of csrc/comm_ops.h
# Of partial sums that gemm_all_reduce puts behind the flags, for odd and for even calls each.
STAGING_BYTES = 36 << 20  # 703 rows of 12288 features in two exchanges
STAGING_FLAG = 32768  # kStaging of csrc/comm/peers.cuh: behind flags and counters
# Of ways whose product another GEMM makes.
_UNFUSED_KERNELS = {
    COPIED: "sum_copies",
    **dict.fromkeys(PUSHES, "all_reduce_one_shot"),
    **dict.fromkeys(TWO_SHOTS, "all_reduce_two_shot"),
}
_QUARTERS = 4  # of a buffer: gathered rows and slots, for odd and for even calls


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
    """What every kernel call is told about the group; None where there are no kernels.

    fault: int32 [6] in pinned memory, where a kernel that waited in vain leaves PeerFault.
    """
    make = native.kernel("PeerMemory", epochs.device)
    if make is None:
        return None
    addresses = (epochs.data_ptr(), buffer_bytes, num_flags, fault.data_ptr())
    return make(list(buffers), list(flags), *addresses, TIMEOUT_CYCLES, rank)


def takes_gather(w: LinearWeight, *, total_tokens: int, buffer_bytes: int) -> bool:
    """Whether all_gather_gemm's kernel takes everyone's rows; w: a weight that has kernels."""
    fits = (total_tokens + 128) * w.k * w.dtype.itemsize <= buffer_bytes // _QUARTERS
    return fits and total_tokens > 0


def fits_slots(w: LinearWeight, *, slot_rows: int, buffer_bytes: int) -> bool:
    """Whether a kernel sums this weight's products from slots; slot_rows: of all slots."""
    return _takes_sum(w, slot_rows=slot_rows, most_bytes=buffer_bytes // _QUARTERS)


def fits_staging(w: LinearWeight, *, rows: int, size: int, is_two_shot: bool) -> bool:
    """Whether a kernel sums this weight's products from staging buffers; rows: of all ranks alike.

    A staging buffer takes all ranks' rows, or parts of those that its rank owns, and all sums.
    """
    slot_rows = size * -(-rows // size) + rows if is_two_shot else size * rows
    return _takes_sum(w, slot_rows=slot_rows, most_bytes=STAGING_BYTES)


def takes_copies(w: LinearWeight) -> bool:
    """Whether kernels sum this weight's products where copies have brought them."""
    return w.has_kernel and w.n <= _MOST_FEATURES


def _takes_sum(w: LinearWeight, *, slot_rows: int, most_bytes: int) -> bool:
    fits = slot_rows * w.n * w.dtype.itemsize <= most_bytes
    return takes_copies(w) and fits and slot_rows > 0


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
    """The fused kernel on checked arguments."""
    total_tokens, x = row_offsets[-1], _aligned(x)
    d = x.new_empty((total_tokens, w.n // 2 if is_gated else w.n))
    linear = LinearParams(
        x.data_ptr(),
        w.weight.data_ptr(),
        bias=0 if w.bias is None else w.bias.data_ptr(),
        d=d.data_ptr(),
        m=total_tokens,
        n=w.n,
        k=w.k,
        activation=ACTIVATIONS.index(activation),
        gated=is_gated,
        tiling=tiling_index("all_gather_gemm", plan.way),
        dtype=native.DTYPE_CODES[x.dtype],
    )
    launch = native.launch_args(x.device)
    native.kernel("all_gather_gemm", x.device)(linear, memory, row_offsets, *launch)
    return d


def gemm_sum(
    x: Tensor,
    w: LinearWeight,
    *,
    memory: object,
    row_offsets: Sequence[int] | None,
    own_rows: int,
    size: int,
    residual: Tensor,
    bias: Tensor | None,
    partial: Tensor | None,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    eps: float,
    is_rms: bool,
    plan: CommPlan,
) -> tuple[Tensor, Tensor]:
    """The fused kernels on checked arguments: dealt rows, or all of them where row_offsets is None.

    own_rows: rows of the results, [own_rows, n] each.  If plan.is_pushed, partial is the product;
    if plan.is_copied, it is all ranks' parts of own_rows, and x but has as many rows.
    """
    m, x = len(x), _aligned(x)
    partial = None if partial is None else _aligned(partial)
    residual = _aligned(residual)
    is_dealt = row_offsets is not None
    if row_offsets is None:
        row_offsets = (*[0] * size, m)
    out, h = residual.new_empty((own_rows, w.n)), residual.new_empty((own_rows, w.n))
    op: Op = "gemm_reduce_scatter" if is_dealt else "gemm_all_reduce"
    name = _UNFUSED_KERNELS.get(COPIED if plan.is_copied else plan.way, op)
    dtype = native.DTYPE_CODES[x.dtype]
    linear = LinearParams(
        x.data_ptr(),
        w.weight.data_ptr(),
        residual=0 if partial is None else partial.data_ptr(),
        m=m,
        n=w.n,
        k=w.k,
        tiling=tiling_index(op, plan.tiling) if plan.is_fused else 0,
        split_k=plan.split_k,
        dtype=dtype,
    )
    norm = NormParams(
        residual=residual.data_ptr(),
        out=out.data_ptr(),
        sum_out=h.data_ptr(),
        weight=norm_weight.data_ptr(),
        bias=0 if norm_bias is None else norm_bias.data_ptr(),
        total_tokens=own_rows,
        hidden_size=w.n,
        eps=eps,
        dtype=dtype,
    )
    native.kernel(name, x.device)(
        linear,
        norm,
        0 if bias is None else bias.data_ptr(),
        memory,
        row_offsets,
        is_rms,
        plan.is_fused and plan.adds_parts and partial is None,
        *native.launch_args(x.device),
    )
    return out, h


def gemm_add_parts(
    x: Tensor,
    w: LinearWeight,
    *,
    rows: tuple[int, int],
    residual: Tensor,
    bias: Tensor | None,
    parts: Tensor,
    rank: int,
    size: int,
    out: Tensor,
    tiling: str,
) -> None:
    """out = x @ w.T + bias + residual + the other ranks' parts, of some of this rank's rows.

    rows: [first, end) of them.  x: [own rows, k].  residual, out: [own rows, n].
    parts: [size * own rows, n], of which this rank's are not read.
    """
    first, end = rows
    x, residual = _aligned(x), _aligned(residual)
    linear = LinearParams(
        x[first:].data_ptr(),
        w.weight.data_ptr(),
        bias=0 if bias is None else bias.data_ptr(),
        residual=residual[first:].data_ptr(),
        d=out[first:].data_ptr(),
        m=end - first,
        n=w.n,
        k=w.k,
        tiling=tiling_index("gemm_reduce_scatter", tiling),
        dtype=native.DTYPE_CODES[x.dtype],
    )
    parts_address, launch = parts[first:].data_ptr(), native.launch_args(x.device)
    native.kernel("gemm_add_parts", x.device)(linear, parts_address, len(out), rank, size, *launch)


def _aligned(x: Tensor) -> Tensor:
    """x, or a copy that begins at 16 bytes: one rank alone cannot go another way."""
    return x if is_aligned(x) else x.clone()


def fault_text(fault: Tensor) -> str | None:
    """What a kernel that waited in vain has left, in words; None where none has."""
    is_set, rank, source, flag, seen, expected = fault[:6].tolist()
    if not is_set:
        return None
    return (
        f"rank {rank} waited in vain for rank {source}: "
        f"flag {flag} holds {seen}, expected {expected}"
    )


def give_up(epochs: Tensor) -> None:
    """Lets kernels that wait for a rank which is gone end, with wrong results.

    By a copy on a stream of its own, for which no multiprocessor must be free.
    """
    word = epochs[_GIVEN_UP_WORD : _GIVEN_UP_WORD + 1]
    with torch.cuda.stream(torch.cuda.Stream(epochs.device)):
        word.copy_(torch.ones(1, dtype=torch.int32, pin_memory=True), non_blocking=True)


def new_fault() -> Tensor:
    """Pinned host memory for one PeerFault."""
    return torch.zeros(8, dtype=torch.int32, pin_memory=True)
