"""Low-rank changes of the rows of a product, another one for each segment of rows."""

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from bytetx.ops.triton_kernels.launch import dot_precision, launch
from bytetx.packed import RowSegments, upload

_ROWS, _COLUMNS, _INNER, _RANKS = 32, 128, 64, 16


@triton.jit(do_not_specialize=["max_rank"])
def _shrink_kernel(
    x,
    middle,
    tiles,
    factors,
    k,
    max_rank,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """middle = x @ a.T in f32, a program for each tile of rows, as many columns as its rank."""
    tile = tiles + 3 * tl.program_id(0)
    first, num_rows, owner = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    a = tl.load(factors + 3 * owner).to(tl.pointer_type(x.dtype.element_ty))
    rank = tl.load(factors + 3 * owner + 2).to(tl.int32)
    offsets, inner, ranks = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_R)
    # Rows and ranks beyond the end are read as the last, and not stored.
    rows = (first + tl.minimum(offsets, num_rows - 1)).to(tl.int64)
    x_rows = x + rows[:, None] * k + inner[None, :]
    for start in range(0, rank, BLOCK_R):
        own = start + ranks
        a_rows = a + tl.minimum(own, rank - 1).to(tl.int64)[:, None] * k + inner[None, :]
        acc = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
        for at in range(0, k, BLOCK_K):
            is_inner = (at + inner < k)[None, :]
            left = tl.load(x_rows + at, mask=is_inner, other=0.0)
            right = tl.load(a_rows + at, mask=is_inner, other=0.0)
            acc = tl.dot(left, tl.trans(right), acc, input_precision=PRECISION)
        mask = (offsets < num_rows)[:, None] & (own < rank)[None, :]
        tl.store(middle + rows[:, None] * max_rank + own[None, :], acc, mask=mask)


@triton.jit(do_not_specialize=["max_rank", "stride"])
def _expand_kernel(
    d,
    middle,
    tiles,
    factors,
    n,
    stride,
    max_rank,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """d += middle @ b.T, a program for each tile of rows and columns."""
    tile = tiles + 3 * tl.program_id(0)
    first, num_rows, owner = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    b = tl.load(factors + 3 * owner + 1).to(tl.pointer_type(d.dtype.element_ty))
    rank = tl.load(factors + 3 * owner + 2).to(tl.int32)
    offsets, ranks = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_R)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = (first + tl.minimum(offsets, num_rows - 1)).to(tl.int64)
    b_rows = b + tl.minimum(columns, n - 1).to(tl.int64)[:, None] * rank
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, rank, BLOCK_R):
        own = start + ranks
        is_own = (own < rank)[None, :]
        left = tl.load(middle + rows[:, None] * max_rank + own[None, :], mask=is_own, other=0.0)
        right = tl.load(b_rows + own[None, :], mask=is_own, other=0.0)
        acc = tl.dot(left.to(right.dtype), tl.trans(right), acc, input_precision=PRECISION)
    mask = (offsets < num_rows)[:, None] & (columns < n)[None, :]
    places = d + rows[:, None] * stride + columns[None, :]
    acc += tl.load(places, mask=mask, other=0.0).to(tl.float32)
    tl.store(places, acc.to(d.dtype.element_ty), mask=mask)


def add_low_rank(
    d: Tensor,
    x: Tensor,
    segments: RowSegments,
    *,
    addresses: Tensor,
    has_change: np.ndarray,
    max_rank: int,
) -> None:
    """ops.low_rank.add_low_rank on checked arguments; the others as of its LowRankChanges."""
    plan = ("tiles", x.device, has_change.tobytes())
    tiles = segments.plans.get(plan)
    if tiles is None:
        tiles = upload(torch.from_numpy(_tiles(segments, has_change)), x.device)
        segments.plans[plan] = tiles
    (m, k), n = x.shape, d.shape[1]
    if not len(tiles) or not n or not k:
        return
    middle = torch.empty((m, max_rank), dtype=torch.float32, device=x.device)
    meta = {"PRECISION": dot_precision(x.dtype), "BLOCK_M": _ROWS, "BLOCK_R": _RANKS}
    meta |= {"num_warps": 4, "num_stages": 3}
    tables, key = (tiles, addresses), (x.dtype, k, n, meta["PRECISION"])
    shrink = {"key": key, "BLOCK_K": _INNER, **meta}
    launch(_shrink_kernel, (len(tiles),), x, middle, *tables, k, max_rank, **shrink)
    grid, stride = (len(tiles), triton.cdiv(n, _COLUMNS)), d.stride(0)
    expand = {"key": key, "BLOCK_N": _COLUMNS, **meta}
    launch(_expand_kernel, grid, d, middle, *tables, n, stride, max_rank, **expand)


def _tiles(segments: RowSegments, has_change: np.ndarray) -> np.ndarray:
    """int32 [num_tiles, 3]: first row, number of rows and owner of tiles of at most _ROWS rows."""
    own = has_change[segments.owners] & (segments.stops > segments.starts)
    starts, stops, owners = (t[own] for t in (segments.starts, segments.stops, segments.owners))
    counts = -(-(stops - starts) // _ROWS)
    numbers = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    first = np.repeat(starts, counts) + numbers * _ROWS
    num_rows = np.minimum(np.repeat(stops, counts) - first, _ROWS)
    return np.stack([first, num_rows, np.repeat(owners, counts)], axis=1).astype(np.int32)
