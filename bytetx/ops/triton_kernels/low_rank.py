"""Low-rank changes of the rows of a product, another one for each owner of rows."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from bytetx.ops.low_rank import RANGE_COLUMNS, RowTiles, StartedChange
from bytetx.ops.triton_kernels.launch import dot_precision, launch, launches_early

_MAX_FUSED_RANK = 64  # ranks that a program holds
_MANY_ROWS = 64  # from tiles of this size on, the change is added to the product
_MAX_SPLITS = 8
_EXPAND_PROGRAMS = 16  # for tiles of few rows


@triton.jit
def _tile(number, rows, tiles, factors, BLOCK_M: tl.constexpr):
    """(row numbers, which of them count, owner, its rank, the address of its bias or 0) of a tile.

    One without rows or owner has no rank and no bias, and owner 0. Rows beyond its end are read as
    row 0, and not stored.
    """
    tile = tiles + 3 * number
    first, num_rows, owner = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    offsets = tl.arange(0, BLOCK_M)
    own = offsets < num_rows
    numbers = tl.load(rows + first + offsets, mask=own, other=0)
    has_owner = (num_rows > 0) & (owner >= 0)
    owner = tl.maximum(owner, 0)
    rank = tl.where(has_owner, tl.load(factors + 4 * owner + 2).to(tl.int32), 0)
    bias = tl.where(has_owner, tl.load(factors + 4 * owner + 3), 0)
    return numbers.to(tl.int64), own, owner, rank, bias


@triton.jit
def _bias_of(bias, columns, n, d):
    """f32 [BLOCK_N]: of these outputs, 0 where there is none."""
    places = bias.to(tl.pointer_type(d.dtype.element_ty)) + columns
    return tl.load(places, mask=columns < tl.where(bias != 0, n, 0), other=0.0).to(tl.float32)


@triton.jit
def _shrink(
    x,
    numbers,
    a,
    rank,
    start,
    k,
    first_k,
    end_k,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """x[numbers, first_k:end_k] @ a[start : start + BLOCK_R, first_k:end_k].T, f32."""
    inner = first_k + tl.arange(0, BLOCK_K)
    # Ranks beyond the end are read as the last; without any, nothing is read.
    own = tl.minimum(start + tl.arange(0, BLOCK_R), rank - 1).to(tl.int64)
    end_a = tl.where(rank > 0, end_k, 0)
    x_rows = x + numbers[:, None] * k + inner[None, :]
    a_rows = a + own[:, None] * k + inner[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    for at in range(0, end_k - first_k, BLOCK_K):
        is_inner = (at + inner < end_k)[None, :]
        left = tl.load(x_rows + at, mask=is_inner, other=0.0)
        right = tl.load(a_rows + at, mask=(at + inner < end_a)[None, :], other=0.0)
        acc = tl.dot(left, tl.trans(right), acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=["m"])
def _shrink_kernel(
    x,
    middle,
    rows,
    tiles,
    factors,
    m,
    k,
    split_k,
    max_rank,
    EARLY: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """middle[split] = x @ a.T of split_k columns, a program for each tile of rows and split.

    EARLY: it starts before the kernel before it ends, and lets the next one start, too.
    """
    if EARLY:
        gdc_launch_dependents()
    numbers, own, owner, rank, bias = _tile(tl.program_id(0), rows, tiles, factors, BLOCK_M)
    a = tl.load(factors + 4 * owner).to(tl.pointer_type(x.dtype.element_ty))
    split = tl.program_id(1)
    first_k = split * split_k
    end_k = tl.minimum(first_k + split_k, k)
    places = middle + (split.to(tl.int64) * m + numbers[:, None]) * max_rank
    if EARLY:
        gdc_wait()
    for start in range(0, rank, BLOCK_R):
        ranks = start + tl.arange(0, BLOCK_R)
        acc = _shrink(
            x, numbers, a, rank, start, k, first_k, end_k, PRECISION, BLOCK_M, BLOCK_K, BLOCK_R
        )
        tl.store(places + ranks[None, :], acc, mask=own[:, None] & (ranks < rank)[None, :])


@triton.jit(do_not_specialize=["m", "num_tiles"])
def _expand_kernel(
    out,
    before,
    middle,
    rows,
    tiles,
    factors,
    ranges,
    num_tiles,
    m,
    n,
    out_stride,
    before_stride,
    max_rank,
    ADDS: tl.constexpr,
    EARLY: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RANGE: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """out = before + middle.sum(0) @ b.T of a block of columns, and of every num_programs-th tile.

    ADDS: "in place", before is out; "residual"; "nothing", and before is not read.
    Tiles without rows are many, and a program for each would take longer than the products.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    block = tl.program_id(1)
    columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
    for number in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        numbers, own, owner, rank, bias = _tile(number, rows, tiles, factors, BLOCK_M)
        part = block * BLOCK_N // RANGE
        used = ranges + 2 * (owner.to(tl.int64) * tl.cdiv(n, RANGE) + part)
        first, end = tl.load(used), tl.minimum(tl.load(used + 1), rank)
        if ADDS == "in place":
            limit = tl.where(first < end, n, tl.where(bias != 0, n, 0))
        else:
            limit = tl.load(tiles + 3 * number + 1)
        if limit > 0:
            b = tl.load(factors + 4 * owner + 1).to(tl.pointer_type(out.dtype.element_ty))
            mask = own[:, None] & (columns < n)[None, :]
            if ADDS == "nothing":
                acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            else:
                places = before + numbers[:, None] * before_stride + columns[None, :]
                acc = tl.load(places, mask=mask, other=0.0).to(tl.float32)
            if HAS_BIAS:
                acc += _bias_of(bias, columns, n, out)[None, :]
            b_rows = b + tl.minimum(columns, n - 1).to(tl.int64)[:, None] * rank
            for start in range(first // 16 * 16, end, BLOCK_R):
                ranks = start + tl.arange(0, BLOCK_R)
                is_own = (ranks < end)[None, :]
                right = tl.load(b_rows + ranks[None, :], mask=is_own, other=0.0)
                sums = middle + numbers[:, None] * max_rank + ranks[None, :]
                left = tl.load(sums, mask=is_own, other=0.0)
                for split in tl.static_range(1, SPLITS):
                    one = sums + split * m.to(tl.int64) * max_rank
                    left += tl.load(one, mask=is_own, other=0.0)
                acc = tl.dot(left.to(right.dtype), tl.trans(right), acc, input_precision=PRECISION)
            places = out + numbers[:, None] * out_stride + columns[None, :]
            tl.store(places, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _change_kernel(
    d,
    x,
    rows,
    tiles,
    factors,
    ranges,
    n,
    k,
    stride,
    HAS_BIAS: tl.constexpr,
    RANGE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """d += x @ a.T @ b.T, a program for each tile of rows; no rank exceeds BLOCK_R."""
    numbers, own, owner, rank, bias = _tile(tl.program_id(0), rows, tiles, factors, BLOCK_M)
    limit = tl.where(bias != 0, n, rank)
    if limit > 0:
        a = tl.load(factors + 4 * owner).to(tl.pointer_type(x.dtype.element_ty))
        b = tl.load(factors + 4 * owner + 1).to(tl.pointer_type(x.dtype.element_ty))
        acc = _shrink(x, numbers, a, rank, 0, k, 0, k, PRECISION, BLOCK_M, BLOCK_K, BLOCK_R)
        ranks = tl.arange(0, BLOCK_R)
        acc = tl.where((ranks < rank)[None, :], acc, 0.0).to(x.dtype.element_ty)
        used = ranges + 2 * owner.to(tl.int64) * tl.cdiv(n, RANGE)
        for block in range(0, tl.cdiv(n, BLOCK_N)):
            part = used + 2 * (block * BLOCK_N // RANGE)
            columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
            # A mask and no branch: the loads of the next block begin before this one's end.
            is_used = tl.load(part) < tl.load(part + 1)
            is_column = columns < tl.where(is_used, n, tl.where(bias != 0, n, 0))
            mask = own[:, None] & is_column[None, :]
            places = d + numbers[:, None] * stride + columns[None, :]
            before = tl.load(places, mask=mask, other=0.0).to(tl.float32)
            if HAS_BIAS:
                before += _bias_of(bias, columns, n, d)[None, :]
            b_rows = b + columns.to(tl.int64)[:, None] * rank
            is_factor = is_column[:, None] & (ranks < rank)[None, :]
            right = tl.load(b_rows + ranks[None, :], mask=is_factor, other=0.0)
            sums = tl.dot(acc, tl.trans(right), before, input_precision=PRECISION)
            tl.store(places, sums.to(d.dtype.element_ty), mask=mask)


def start_low_rank(
    x: Tensor,
    tiles: RowTiles,
    residual: Tensor | None,
    *,
    n: int,
    addresses: Tensor,
    ranges: Tensor,
    max_rank: int,
    has_bias: bool,
) -> StartedChange:
    """ops.low_rank.start_low_rank on checked arguments; the others as of its LowRankChanges."""
    (m, k), num_tiles = x.shape, len(tiles.table)
    if not num_tiles or not n or not k:
        return residual, None
    tables = (tiles.rows, tiles.table, addresses)
    block_r = min(max(triton.next_power_of_2(max_rank), 16), _MAX_FUSED_RANK)
    meta = {"PRECISION": dot_precision(x.dtype), "BLOCK_M": tiles.size, "BLOCK_R": block_r}
    meta |= {"num_warps": 4, "num_stages": 3}
    itemsize, is_few = x.element_size(), tiles.size < _MANY_ROWS
    sizes = (x.dtype, k, n, max_rank, has_bias, *meta.values())
    # Products of f32 are not the tensor cores': their tiles are small.
    block_n = RANGE_COLUMNS if itemsize < 4 else 32
    added = {"HAS_BIAS": has_bias, "RANGE": RANGE_COLUMNS, "BLOCK_N": block_n}
    if not is_few and max_rank <= _MAX_FUSED_RANK:

        def change(d: Tensor) -> None:
            options = {"key": (*sizes, d.stride(0)), "BLOCK_K": 128 // itemsize, **added, **meta}
            grid = (num_tiles,)
            launch(_change_kernel, grid, d, x, *tables, ranges, n, k, d.stride(0), **options)

        return residual, change
    # 49 KiB for three stages of a, beside x: other GPUs have 99 KiB a block.
    block_k = (min(512, 16384 // block_r) if is_few else 128) // itemsize
    splits, split_k = 1, k
    if is_few:  # few programs: each reads a part of k
        split_k = triton.cdiv(triton.cdiv(k, _MAX_SPLITS), block_k) * block_k
        splits = triton.cdiv(k, split_k)
    meta["EARLY"] = is_few and launches_early(x.device)
    if meta["EARLY"]:
        meta["launch_pdl"] = True
    middle = torch.empty((splits, m, max_rank), dtype=torch.float32, device=x.device)
    shrink = {"key": sizes, "BLOCK_K": block_k, **meta}
    grid = (num_tiles, splits)
    launch(_shrink_kernel, grid, x, middle, *tables, m, k, split_k, max_rank, **shrink)

    def expand(out: Tensor, before: Tensor | None) -> None:
        adds = "nothing" if before is None else "in place" if before is out else "residual"
        before = out if before is None else before
        strides = (out.stride(0), before.stride(0))
        options = {"key": (*sizes, *strides, adds), "SPLITS": splits, **added, **meta}
        options |= {"ADDS": adds, "BLOCK_R": block_r if itemsize < 4 else 16}
        places = (out, before, middle, *tables, ranges, num_tiles, m, n, *strides, max_rank)
        most = _EXPAND_PROGRAMS if is_few else num_tiles
        grid = (min(num_tiles, most), triton.cdiv(n, block_n))
        launch(_expand_kernel, grid, *places, **options)

    if not is_few:
        return residual, lambda d: expand(d, d)
    out = x.new_empty((m, n))
    expand(out, residual)
    return out, None
