"""Row buffers with room up to a whole GEMM tile, so that a CPU meets few different row counts."""

from collections.abc import Sequence

import torch
from torch import Tensor

# A tile above _MIN_TILE rows is at most this part of a row count's power of two, which bounds what
# spare rows cost: an eighth, a sixteenth on average. Larger products take a finer part, for they
# are what long runs consist of.
_PARTS, _LARGE_PARTS, _LARGE_ROWS = 8, 16, 1024
_MIN_TILE = 8
# Fewer rows than _MIN_TILE are what decode steps have. oneDNN takes a matrix-vector kernel for one,
# which sums in another order, so that a row alone would differ from the same row in a batch.
_FEW_ROWS = (2, 4)


def tile_rows(m: int) -> int:
    """m rounded up to the row counts that CPU GEMMs run at: 42 of them up to 1024 rows, 90 to 8192.

    oneDNN builds one primitive a row count and layer shape, which takes about 0.6 ms and 0.55 MiB
    of heap, and keeps the last 1024 of them. With one for every total of ragged batches a model of
    a few MiB grew by 500.
    """
    for few in _FEW_ROWS:
        if m <= few:
            return few if m else 0
    power = 1 << (m - 1).bit_length()  # m is in (power / 2, power]
    parts = 2 * (_LARGE_PARTS if m > _LARGE_ROWS else _PARTS)
    step = max(power // parts, _MIN_TILE)
    return -(-m // step) * step


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


def whole_tiles(x: Tensor) -> Tensor:
    """x [m, k] and what lies behind it, [tile_rows(m), k]; a copy where nothing does.

    For functions that treat each row alone.
    """
    rows = tile_rows(x.shape[0])
    if rows == x.shape[0]:
        return x
    end = (x.storage_offset() + rows * x.shape[1]) * x.element_size()
    if end > x.untyped_storage().nbytes():
        return padded(x, rows)
    return x.as_strided((rows, x.shape[1]), x.stride())


def padded(x: Tensor, rows: int) -> Tensor:
    """A copy of x [m, k] with zeros behind it: [rows, k]."""
    copy = x.new_empty((rows, x.shape[1]))
    copy[: x.shape[0]] = x
    copy[x.shape[0] :].zero_()
    return copy
