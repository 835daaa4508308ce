"""The GPU kernels of linear layers that carry their own communication: what they take, their calls.

Whether a kernel runs must come out the same on every rank, or one waits for another in vain: it
depends on sizes that all ranks share, and on weights that either all have kernels or none has, as
whoever loads them agrees with the other ranks (ShardedBlocks.agree_on_kernels).
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from bytetx.ops import native
from bytetx.ops.check import is_aligned
from bytetx.ops.linear import ACTIVATIONS, LinearWeight

# That a kernel waits for another rank before it traps: about ten seconds of an H200.
TIMEOUT_CYCLES = 20_000_000_000
_MOST_FEATURES = 16384  # of a row that is summed and normed in registers
_NUM_SMS = 132
# Of gemm_all_reduce, whose ranks send every row to every other one: bytes that a rank sends, beyond
# which NCCL's two exchanges cost less; and columns, beyond which its tiles take a second wave of
# CTAs (16 rows of 6144 features to 12288 on two H200s: 71 us, cuBLAS alone 40).
_MOST_SENT_BYTES = 8 << 20
_MOST_COLUMNS = 64 * _NUM_SMS
# FaultState of csrc/comm_ops.h.
_WAITED_IN_VAIN, _GIVEN_UP = 1, 2
_QUARTERS = 4  # of a buffer: gathered rows and slots, for odd and for even calls

# Name in linear_tilings() -> columns, and what a tile of all_gather_gemm takes beside its columns'
# share (two H200s, bf16, 4096 rows of 12288 features to 6144: 938 us against 992).
_MANY_ROWS = {"128x192": (192, 1.0), "128x128": (128, 1.06)}


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


def takes_sum(w: LinearWeight, *, slot_rows: int, buffer_bytes: int) -> bool:
    """Whether the sums over ranks have a kernel for this weight; slot_rows: of all slots."""
    fits = slot_rows * w.n * w.dtype.itemsize <= buffer_bytes // _QUARTERS
    return w.has_kernel and fits and w.n <= _MOST_FEATURES and slot_rows > 0


def all_gather_gemm(
    x: Tensor,
    w: LinearWeight,
    *,
    memory: object,
    row_offsets: Sequence[int],
    activation: str,
    is_gated: bool,
) -> Tensor:
    """The fused kernel on checked arguments."""
    total_tokens, x = row_offsets[-1], _aligned(x)
    d = x.new_empty((total_tokens, w.n // 2 if is_gated else w.n))
    name = "128x128" if is_gated else _many_rows(total_tokens, w.n, is_gather=True)
    native.kernel("all_gather_gemm", x.device)(
        x.data_ptr(),
        w.weight.data_ptr(),
        0 if w.bias is None else w.bias.data_ptr(),
        d.data_ptr(),
        total_tokens,
        w.n,
        w.k,
        ACTIVATIONS.index(activation),
        is_gated,
        _index(name),
        memory,
        list(row_offsets),
        native.DTYPE_CODES[x.dtype],
        *native.launch_args(x.device),
    )
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
) -> tuple[Tensor, Tensor]:
    """The fused kernels on checked arguments: dealt rows, or all of them where row_offsets is None.

    own_rows: rows of the results, [own_rows, n] each.
    """
    m, x = len(x), _aligned(x)
    partial = None if partial is None else _aligned(partial)
    residual = _aligned(residual)
    is_dealt = row_offsets is not None
    if row_offsets is None:
        row_offsets = (*[0] * size, m)
    tiling, splits = (_index(_many_rows(m, w.n)), 1) if is_dealt else _plan_push(m, w.n, w.k)
    out, h = residual.new_empty((own_rows, w.n)), residual.new_empty((own_rows, w.n))
    name = "gemm_reduce_scatter" if is_dealt else "gemm_all_reduce"
    native.kernel(name, x.device)(
        x.data_ptr(),
        w.weight.data_ptr(),
        0 if partial is None else partial.data_ptr(),
        m,
        w.n,
        w.k,
        tiling,
        splits,
        0 if bias is None else bias.data_ptr(),
        residual.data_ptr(),
        out.data_ptr(),
        h.data_ptr(),
        norm_weight.data_ptr(),
        0 if norm_bias is None else norm_bias.data_ptr(),
        own_rows,
        eps,
        is_rms,
        memory,
        list(row_offsets),
        native.DTYPE_CODES[x.dtype],
        *native.launch_args(x.device),
    )
    return out, h


def takes_all_reduce(m: int, w: LinearWeight, *, size: int, buffer_bytes: int) -> bool:
    """Whether gemm_all_reduce has a kernel for m rows, and it is the faster way."""
    sent = (size - 1) * m * w.n * w.dtype.itemsize
    if sent > _MOST_SENT_BYTES or w.n > _MOST_COLUMNS:
        return False
    return takes_sum(w, slot_rows=m * size, buffer_bytes=buffer_bytes)


@lru_cache(4096)
def _many_rows(m: int, n: int, *, is_gather: bool = False) -> str:
    """The tiling whose busiest SM has the least to do."""

    def work(name: str) -> float:
        columns, factor = _MANY_ROWS[name]
        tiles = -(-m // 128) * -(-n // columns)
        return -(-tiles // _NUM_SMS) * columns * (factor if is_gather else 1.0)

    return min(_MANY_ROWS, key=work)


@lru_cache(4096)
def _plan_push(m: int, n: int, k: int) -> tuple[int, int]:
    """(tiling, splits) of gemm_all_reduce: CTAs share k where there are too few for all SMs."""
    rows, columns = (64, 64) if m <= 64 else (128, 128)
    names = [name for name, *_ in native.push_tilings()]
    tiles = -(-m // rows) * -(-n // columns)
    return names.index(f"{rows}x{columns}"), max(1, min(8, _NUM_SMS // tiles, k // 512))


@lru_cache(16)
def _index(name: str) -> int:
    return next(i for i, tiling in enumerate(native.linear_tilings()) if tiling[0] == name)


def _aligned(x: Tensor) -> Tensor:
    """x, or a copy that begins at 16 bytes: one rank alone cannot go another way."""
    return x if is_aligned(x) else x.clone()


def fault_text(fault: Tensor) -> str | None:
    """What a kernel that waited in vain has left, in words; None where none has."""
    state, rank, source, flag, seen, expected = fault[:6].tolist()
    if state != _WAITED_IN_VAIN:
        return None
    return (
        f"rank {rank} waited in vain for rank {source}: "
        f"flag {flag} holds {seen}, expected {expected}"
    )


def give_up(fault: Tensor) -> None:
    """Lets kernels that wait for a rank which is gone end, with wrong results."""
    if int(fault[0]) != _WAITED_IN_VAIN:
        fault[0] = _GIVEN_UP


def new_fault() -> Tensor:
    """Pinned host memory for one PeerFault."""
    return torch.zeros(8, dtype=torch.int32, pin_memory=True)
