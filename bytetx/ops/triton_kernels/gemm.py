"""A GEMM whose epilogue adds the bias, activates and adds the residual."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from bytetx.ops.check import is_aligned
from bytetx.ops.triton_kernels.activation import activated
from bytetx.ops.triton_kernels.launch import (
    address_or,
    dot_precision,
    has_tensor_descriptors,
    launch,
    num_multiprocessors,
)

# Row tiles that follow one another, so that they share columns of w in the L2.
_GROUP_ROWS, _DESCRIPTOR_GROUP_ROWS = 8, 16
_DESCRIPTOR_ELEMENTS = 8  # 16 bytes of f16 or bf16: what a descriptor's row is a multiple of
_PROGRAMS = 2  # a multiprocessor: one's epilogue runs while the other's products do


class _Tile(NamedTuple):
    rows: int
    columns: int
    inner: int
    num_warps: int
    num_stages: int


# By descriptors: 96 KiB of operands and 8 to 16 of results a program. The lower tile takes 0.55 of
# the time of the higher one.
_LOW_TILE = _Tile(64, 128, 64, num_warps=4, num_stages=4)
_HIGH_TILE = _Tile(128, 128, 64, num_warps=4, num_stages=3)
_LOW_COST = 0.55


@triton.jit
def _place(tile, num_rows, num_columns, GROUP_ROWS: tl.constexpr):
    """(row tile, column tile) of a tile in the order in which they are computed."""
    group = tile // (GROUP_ROWS * num_columns)
    first_row = group * GROUP_ROWS
    rows_in_group = tl.minimum(num_rows - first_row, GROUP_ROWS)
    at = tile % (GROUP_ROWS * num_columns)
    return first_row + at % rows_in_group, at // rows_in_group


@triton.jit
def _finished(
    acc,
    rows,
    columns,
    bias,
    residual,
    out,
    m,
    n,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """act(acc + bias) + residual in the dtype of out."""
    if HAS_BIAS:
        acc += tl.load(bias + columns, mask=columns < n, other=0.0).to(tl.float32)[None, :]
    acc = activated(acc, ACTIVATION, out.dtype.element_ty.primitive_bitwidth == 16)
    if HAS_RESIDUAL:
        mask = (rows < m)[:, None] & (columns < n)[None, :]
        offsets = rows.to(tl.int64)[:, None] * n + columns[None, :]
        acc += tl.load(residual + offsets, mask=mask, other=0.0).to(tl.float32)
    return acc.to(out.dtype.element_ty)


@triton.jit(do_not_specialize=["m"])
def _linear_kernel(
    bias,
    residual,
    out,
    x,
    w,
    m,
    n,
    k,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
):
    """A program a tile, operands by their addresses: any GPU, any width."""
    row_tile, column_tile = _place(
        tl.program_id(0), tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N), GROUP_ROWS
    )
    rows = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    # Rows and columns beyond the end are read as the last, and not stored.
    x_rows = x + tl.minimum(rows, m - 1).to(tl.int64)[:, None] * k + inner[None, :]
    w_rows = w + tl.minimum(columns, n - 1).to(tl.int64)[:, None] * k + inner[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for at in range(0, k, BLOCK_K):
        is_inner = (at + inner < k)[None, :]
        a = tl.load(x_rows + at, mask=is_inner, other=0.0)
        b = tl.load(w_rows + at, mask=is_inner, other=0.0)
        acc = tl.dot(a, tl.trans(b), acc, input_precision=PRECISION)
    result = _finished(
        acc, rows, columns, bias, residual, out, m, n, HAS_BIAS, HAS_RESIDUAL, ACTIVATION
    )
    mask = (rows < m)[:, None] & (columns < n)[None, :]
    tl.store(out + rows.to(tl.int64)[:, None] * n + columns[None, :], result, mask=mask)


@triton.jit(do_not_specialize=["m"])
def _descriptor_kernel(
    bias,
    residual,
    out,
    x_tiles,
    w_tiles,
    out_tiles,
    m,
    n,
    k,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
):
    """A program goes through tiles, loaded and stored by descriptors (TMA), without a pause between
    one's epilogue and the next one's loads; results leave in halves, for shared memory's sake."""
    HALF: tl.constexpr = BLOCK_N // 2
    num_rows, num_columns = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    num_inner = tl.cdiv(k, BLOCK_K)
    num_tiles = num_rows * num_columns
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), flatten=True):
        row_tile, column_tile = _place(tile, num_rows, num_columns, GROUP_ROWS)
        row, column = row_tile * BLOCK_M, column_tile * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for at in range(num_inner):
            a = x_tiles.load([row, at * BLOCK_K])
            b = w_tiles.load([column, at * BLOCK_K])
            acc = tl.dot(a, tl.trans(b), acc)
        rows = row + tl.arange(0, BLOCK_M)
        columns = column + tl.arange(0, HALF)
        left, right = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, HALF)), (0, 2, 1)))
        left = _finished(
            left, rows, columns, bias, residual, out, m, n, HAS_BIAS, HAS_RESIDUAL, ACTIVATION
        )
        out_tiles.store([row, column], left)
        columns += HALF
        right = _finished(
            right, rows, columns, bias, residual, out, m, n, HAS_BIAS, HAS_RESIDUAL, ACTIVATION
        )
        out_tiles.store([row, column + HALF], right)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, activation: str, residual: Tensor | None
) -> Tensor:
    """ops.linear.linear on checked arguments; weight: contiguous [n, k]."""
    (m, k), n = x.shape, weight.shape[0]
    out = x.new_empty((m, n))
    if out.numel() == 0:
        return out
    multiprocessors = num_multiprocessors(x.device)
    descriptor_tile = _descriptor_tile(x, weight, multiprocessors)
    tile = descriptor_tile or _tile(m, n, x.element_size(), multiprocessors)
    num_tiles = _num_tiles(tile, m, n)
    operands = (address_or(bias, weight), address_or(residual, x), out)
    meta = {
        "HAS_BIAS": bias is not None,
        "HAS_RESIDUAL": residual is not None,
        "ACTIVATION": activation,
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.columns,
        "BLOCK_K": tile.inner,
        "GROUP_ROWS": _GROUP_ROWS if descriptor_tile is None else _DESCRIPTOR_GROUP_ROWS,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
    if descriptor_tile is None:
        precision = dot_precision(x.dtype)
        grid = (num_tiles,)
        launch(_linear_kernel, grid, *operands, x, weight, m, n, k, PRECISION=precision, **meta)
        return out
    launch(
        _descriptor_kernel,
        (min(num_tiles, _PROGRAMS * multiprocessors),),
        *operands,
        TensorDescriptor.from_tensor(x, [tile.rows, tile.inner]),
        TensorDescriptor.from_tensor(weight, [tile.columns, tile.inner]),
        TensorDescriptor.from_tensor(out, [tile.rows, tile.columns // 2]),
        m,
        n,
        k,
        **meta,
    )
    return out


def _descriptor_tile(x: Tensor, weight: Tensor, multiprocessors: int) -> _Tile | None:
    """The tile with the shorter way through all of them; None where addresses serve better.

    That is where a multiprocessor would have no tile, or where a descriptor fits no row.
    """
    (n, k), m = weight.shape, x.shape[0]
    if x.element_size() != 2 or n % _DESCRIPTOR_ELEMENTS or k % _DESCRIPTOR_ELEMENTS:
        return None
    if not (is_aligned(x) and is_aligned(weight) and has_tensor_descriptors(x.device)):
        return None
    low, high = (_num_tiles(tile, m, n) for tile in (_LOW_TILE, _HIGH_TILE))
    if low < multiprocessors:
        return None
    at_once = _PROGRAMS * multiprocessors
    is_low = _LOW_COST * triton.cdiv(low, at_once) < triton.cdiv(high, at_once)
    return _LOW_TILE if is_low else _HIGH_TILE


def _num_tiles(tile: _Tile, m: int, n: int) -> int:
    return int(triton.cdiv(m, tile.rows) * triton.cdiv(n, tile.columns))


def _tile(m: int, n: int, element_bytes: int, multiprocessors: int) -> _Tile:
    """The tile for operands loaded by their addresses; it fits in 99 KiB of shared memory."""
    if element_bytes == 4:
        return _Tile(64, 64, 32, num_warps=4, num_stages=2)
    if m <= 16:
        return _Tile(16, 64, 128, num_warps=4, num_stages=4)
    if m <= 32:
        return _Tile(32, 64, 128, num_warps=4, num_stages=3)
    wide = _Tile(64, 128, 64, num_warps=4, num_stages=3)
    if m <= 256 or _num_tiles(wide, m, n) < multiprocessors:
        return _Tile(64, 64, 64, num_warps=4, num_stages=4)
    return wide if m <= 2048 else _Tile(128, 128, 64, num_warps=8, num_stages=3)
