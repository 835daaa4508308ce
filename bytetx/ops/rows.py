"""Row buffers with room up to a whole GEMM tile, so that a CPU meets few different row counts."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

# (most rows, from one row count to the next): as fine as decode steps of few sequences want it, for
# which GEMMs wait for weights, and for rows by the dozen. oneDNN takes a matrix-vector kernel for
# one row, which sums in another order, so that there are two at least.
_FEW_ROWS = ((8, 2), (32, 4), (128, 8))
# Above that spare rows are at most an eighth, and from _LARGE_ROWS on a sixteenth, of the power of
# two below m: half of that on average.
_LARGE_ROWS = 1024
_MAX_CPU_WIDTH = 16384  # kMaxRowWidth in csrc/cpu/rows.h


@lru_cache(maxsize=4096)
def tile_rows(m: int) -> int:
    """m rounded up to the row counts that CPU GEMMs run at: 46 of them up to 1024 rows, 94 to 8192.

    oneDNN builds one primitive a row count and layer shape, which takes about 0.6 ms and 0.55 MiB
    of heap, and keeps the last 1024 of them. With one for every total of ragged batches a model of
    a few MiB grew by 500.
    """
    step = _step(m)
    return -(-m // step) * step


def _step(m: int) -> int:
    for most, step in _FEW_ROWS:
        if m <= most:
            return step
    octave = 1 << ((m - 1).bit_length() - 1)  # octave < m <= 2 * octave
    return octave // (16 if m > _LARGE_ROWS else 8)


def num_tile_rows(most_rows: int) -> int:
    """How many different row counts tile_rows has for 1 to most_rows rows."""
    count, m = 0, 0
    while m < most_rows:
        m = tile_rows(m + 1)
        count += 1
    return count


def empty_rows(m: int, tail: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Uninitialised [m, *tail] on the CPU; behind it are zeros up to tile_rows(m) rows."""
    rows = torch.empty((tile_rows(m), *tail), dtype=dtype)
    if rows.shape[0] == m:
        return rows
    rows[m:].zero_()
    return rows[:m]


def padded(x: Tensor, rows: int) -> Tensor:
    """A copy of x [m, k] with zeros behind it: [rows, k]."""
    copy = x.new_empty((rows, x.shape[1]))
    copy[: x.shape[0]] = x
    copy[x.shape[0] :].zero_()
    return copy


def has_row_kernel(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Whether the native row kernels of a device take rows of this dtype and width."""
    if device.type == "cuda":
        return width > 0
    return dtype in (torch.float32, torch.bfloat16) and 0 < width <= _MAX_CPU_WIDTH
