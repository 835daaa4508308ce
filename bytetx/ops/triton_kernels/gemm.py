"""A GEMM whose epilogue adds the bias, activates and adds the residual."""

import triton
import triton.language as tl
from torch import Tensor

from bytetx.ops.triton_kernels.activation import activated
from bytetx.ops.triton_kernels.launch import address_or, dot_precision, launch

_GROUP_ROWS = 8  # row tiles that follow one another, so that they share columns of w in the L2


@triton.jit(do_not_specialize=["m"])
def _linear_kernel(
    x,
    w,
    bias,
    residual,
    out,
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
    tile = tl.program_id(0)
    num_rows, num_columns = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    group = tile // (GROUP_ROWS * num_columns)
    first_row = group * GROUP_ROWS
    rows_in_group = tl.minimum(num_rows - first_row, GROUP_ROWS)
    row_tile = first_row + tile % (GROUP_ROWS * num_columns) % rows_in_group
    column_tile = tile % (GROUP_ROWS * num_columns) // rows_in_group

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
    if HAS_BIAS:
        acc += tl.load(bias + columns, mask=columns < n, other=0.0).to(tl.float32)[None, :]
    acc = activated(acc, ACTIVATION)
    mask = (rows < m)[:, None] & (columns < n)[None, :]
    offsets = rows.to(tl.int64)[:, None] * n + columns[None, :]
    if HAS_RESIDUAL:
        acc += tl.load(residual + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + offsets, acc.to(out.dtype.element_ty), mask=mask)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, activation: str, residual: Tensor | None
) -> Tensor:
    """ops.linear.linear on checked arguments; weight: contiguous [n, k]."""
    m, k = x.shape
    n = weight.shape[0]
    out = x.new_empty((m, n))
    if out.numel() == 0:
        return out
    block_m, block_n, block_k, num_warps, num_stages = _tile(m, x.element_size())
    launch(
        _linear_kernel,
        (triton.cdiv(m, block_m) * triton.cdiv(n, block_n),),
        x,
        weight,
        address_or(bias, weight),
        address_or(residual, x),
        out,
        m,
        n,
        k,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        ACTIVATION=activation,
        PRECISION=dot_precision(x.dtype),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        GROUP_ROWS=_GROUP_ROWS,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    return out


def _tile(m: int, element_bytes: int) -> tuple[int, int, int, int, int]:
    """(rows, columns, inner, warps, stages); each fits in 99 KiB of shared memory."""
    if element_bytes == 4:
        return 64, 64, 32, 4, 2
    if m <= 16:
        return 16, 64, 128, 4, 4
    if m <= 32:
        return 32, 64, 128, 4, 3
    if m <= 256:
        return 64, 64, 64, 4, 4
    if m <= 2048:
        return 64, 128, 64, 4, 3
    return 128, 128, 64, 8, 3
