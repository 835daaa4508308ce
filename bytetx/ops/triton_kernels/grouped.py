"""Products with weights of 8 and 4 bits in groups of 32 features, in the blocks of grouped_blocks.

FORM says how a group's numbers make weights of its codes, as bytetx/ops/group_rows.py has it.

A strip of 16 outputs lies in the order in which the lanes of a warp need it as an operand of the
matrix unit, as csrc/cuda/grouped_codes.cuh says. Layouts of tensors keep to it: codes are decoded
in the registers where products read them.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bytetx.ops.triton_kernels.activation import activated
from bytetx.ops.triton_kernels.launch import address_or, launch, num_multiprocessors

_ROWS = 64  # rows of the matrix that a program writes out
# Added to codes as the last bits of a number that counts ones there: 1024, 128 and 2^23. Launches
# pass it, because a constant makes two instructions of mask and sum.
_MAGIC = {torch.float16: 0x64006400, torch.bfloat16: 0x43004300}
_MAGIC_OF_F32 = 0x4B000000

# Triton's release decides how lanes hold operands that were joined from 4-bit codes.
_HAS_PAIRS = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 8)


class _Tile(NamedTuple):
    """rows: of x.  strips: of 16 outputs.  shares_k: see _grouped_linear_kernel."""

    rows: int
    strips: int
    num_warps: int
    num_stages: int
    shares_k: bool


@triton.jit
def _low(words, DTYPE: tl.constexpr):
    return words.to(tl.int16).to(DTYPE, bitcast=True)


@triton.jit
def _high(words, DTYPE: tl.constexpr):
    return (words >> 16).to(tl.int16).to(DTYPE, bitcast=True)


@triton.jit
def _pairs(words, magic, NIBBLE: tl.constexpr, DTYPE: tl.constexpr):
    """Codes of 4 bits in nibbles NIBBLE and NIBBLE + 4, with _ones added."""
    pairs = ((words >> (4 * NIBBLE)) & 0x000F000F) | magic
    return tl.join(_low(pairs, DTYPE), _high(pairs, DTYPE))


@triton.jit
def _weights4(codes, numbers, FORM: tl.constexpr, DTYPE: tl.constexpr):
    """Weights of codes [R, W, e, i % 2] with ones added, and the numbers [R, W] of their groups."""
    scale = _low(numbers, DTYPE)[:, :, None, None].broadcast_to(codes.shape)
    second = _high(numbers, DTYPE)[:, :, None, None].broadcast_to(codes.shape)
    if FORM == "zero":  # it has the ones, too
        return (codes - second) * scale
    ONES: tl.constexpr = 1024.0 if tl.float16 == DTYPE else 128.0
    return tl.fma(codes - ONES, scale, second)


@triton.jit
def _decoded4(words, numbers, magic, FORM: tl.constexpr, DTYPE: tl.constexpr):
    """Weights [R, W, e, i % 2, i // 2] of words [R, W] and their numbers [R, W]."""
    first = tl.join(_pairs(words, magic, 0, DTYPE), _pairs(words, magic, 1, DTYPE))
    second = tl.join(_pairs(words, magic, 2, DTYPE), _pairs(words, magic, 3, DTYPE))
    # Joined at the end: products take operands of joins in the order that this module is for.
    return tl.join(_weights4(first, numbers, FORM, DTYPE), _weights4(second, numbers, FORM, DTYPE))


@triton.jit
def _byte(words, magic, BYTE: tl.constexpr):
    """A code of 8 bits and 2^23."""
    return (((words >> (8 * BYTE)) & 255) | magic).to(tl.float32, bitcast=True)


@triton.jit
def _decoded8(words, numbers, magic, FORM: tl.constexpr, DTYPE: tl.constexpr):
    """Weights [R, W, e, i % 2] of words [R, W].

    numbers: [R, W], where FORM is "least" or "zero" words of two, else scales.
    """
    even = tl.join(_byte(words, magic, 0), _byte(words, magic, 1))
    odd = tl.join(_byte(words, magic, 2), _byte(words, magic, 3))
    codes = tl.join(even, odd)
    if FORM == "zero":
        ONES: tl.constexpr = 8387584.0 if tl.float16 == DTYPE else 8388608.0  # f16 has 1024 of them
        zeros = _high(numbers, DTYPE).to(tl.float32) + ONES
        scales = _low(numbers, DTYPE)
        return (codes - zeros[:, :, None, None]).to(DTYPE) * scales[:, :, None, None]
    elif FORM == "least":
        scale = _low(numbers, DTYPE)[:, :, None, None].broadcast_to(codes.shape)
        least = _high(numbers, DTYPE)[:, :, None, None].broadcast_to(codes.shape)
        return tl.fma((codes - 8388608.0).to(DTYPE), scale, least)
    else:
        return (codes - 8388736.0).to(DTYPE) * numbers[:, :, None, None]


@triton.jit
def _of_words(numbers, R: tl.constexpr, FORM: tl.constexpr, DTYPE: tl.constexpr):
    """The numbers that _decoded8 takes for the words [R, 128] of a group.

    numbers: [R, 8], words of two outputs' scales; of other forms [R, 8, 2], a word for each output.
    """
    if FORM == "symmetric":
        scales = tl.join(_low(numbers, DTYPE), _high(numbers, DTYPE))
        found = tl.reshape(scales, (R, 8, 1, 2, 1))
    elif FORM == "halves":
        scales = tl.join(_low(numbers, DTYPE), _high(numbers, DTYPE))
        found = tl.reshape(scales, (R, 8, 1, 2, 2))
    else:
        found = tl.reshape(numbers, (R, 8, 1, 2, 1))
    return tl.reshape(found.broadcast_to((R, 8, 4, 2, 2)), (R, 128))


@triton.jit
def _strips(
    code_words,
    number_words,
    mask,
    magic,
    OWN: tl.constexpr,
    BITS: tl.constexpr,
    FORM: tl.constexpr,
    BY_PAIRS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Weights [warps, OWN * 16, 64] of OWN strips a warp; addresses [OWN * warps, words]."""
    R: tl.constexpr = code_words.shape[0]
    WARPS: tl.constexpr = R // OWN
    codes = tl.load(code_words, mask=mask, other=0)
    numbers = tl.load(number_words, mask=mask, other=0)
    if BITS == 4:
        numbers = tl.reshape(numbers, (R, 8, 1, 4)).broadcast_to((R, 8, 4, 4))
        b = _decoded4(codes, tl.reshape(numbers, (R, 128)), magic, FORM, DTYPE)
        # strip, warp, r, t, group, half, e, i % 2, i // 2
        b = tl.reshape(b, (OWN, WARPS, 8, 4, 2, 2, 2, 2, 2))
        if BY_PAIRS:
            b = tl.permute(b, (1, 0, 5, 2, 4, 8, 7, 3, 6))
        else:
            b = tl.permute(b, (1, 0, 5, 2, 4, 8, 3, 7, 6))
    else:
        of_second = tl.load(code_words + 128, mask=mask, other=0)
        if FORM == "symmetric":
            first, second = tl.split(tl.reshape(numbers, (R, 8, 2)))
        else:
            numbers = tl.permute(tl.reshape(numbers, (R, 8, 2, 2)), (0, 1, 3, 2))
            first, second = tl.split(numbers)
        b = tl.join(
            _decoded8(codes, _of_words(first, R, FORM, DTYPE), magic, FORM, DTYPE),
            _decoded8(of_second, _of_words(second, R, FORM, DTYPE), magic, FORM, DTYPE),
        )
        # strip, warp, r, t, half, i // 2, e, i % 2, group
        b = tl.reshape(b, (OWN, WARPS, 8, 4, 2, 2, 2, 2, 2))
        b = tl.permute(b, (1, 0, 4, 2, 8, 5, 3, 7, 6))
    return tl.reshape(b, (WARPS, OWN * 16, 64))


@triton.jit(do_not_specialize=["m", "magic"])
def _grouped_linear_kernel(
    words,
    factor,
    bias,
    residual,
    out,
    x,
    m,
    n,
    k,
    magic,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IS_GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BITS: tl.constexpr,
    FORM: tl.constexpr,
    ROWS: tl.constexpr,
    STRIPS: tl.constexpr,
    WARPS: tl.constexpr,
    SHARES_K: tl.constexpr,
    IS_EVEN: tl.constexpr,
    BY_PAIRS: tl.constexpr,
):
    """A program a tile of ROWS rows and STRIPS strips.

    words: the blocks, as int32.  Gated: half of the strips have gates, half their values.
    SHARES_K: a warp has every WARPS-th block of features, for all strips of the tile; else it has
    all features, for its share of the strips. Triton gives each warp one product of a batch.
    IS_EVEN: warps have as many blocks, and all blocks 64 features.
    BY_PAIRS: whether a lane has two neighbours of the features that a product takes, or four. Sums
    may take features in any order: theirs is the one in which no lane asks another for codes.
    """
    DTYPE: tl.constexpr = x.dtype.element_ty
    STRIP_WORDS: tl.constexpr = 128 if BITS == 4 else 256
    STRIP_NUMBERS: tl.constexpr = 16 if FORM == "symmetric" else 32  # words, too
    BLOCK_WORDS: tl.constexpr = 4 * (STRIP_WORDS + STRIP_NUMBERS)
    SHARES: tl.constexpr = WARPS if SHARES_K else 1  # blocks of features at a time
    OWN: tl.constexpr = STRIPS if SHARES_K else STRIPS // WARPS  # a warp's strips
    R: tl.constexpr = OWN * WARPS
    COLUMNS: tl.constexpr = ROWS if ROWS > 8 else 8  # what the matrix unit multiplies at least
    num_blocks = tl.cdiv(k, 64)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    features = tl.arange(0, SHARES)[:, None, None] * 64 + tl.arange(0, 64)[None, None, :]
    x_rows = x + rows.to(tl.int64)[None, :, None] * k + features
    r = tl.arange(0, R)
    if SHARES_K:
        strip = _strip(r // WARPS, STRIPS, IS_GATED)
    else:
        strip = _strip(r % WARPS * OWN + r // WARPS, STRIPS, IS_GATED)
    if STRIPS > 4:  # the last tile may have more blocks than there are
        strip = tl.minimum(strip, tl.cdiv(n, 64) * 4 - 1)
    block = r % SHARES
    first = words + ((strip // 4).to(tl.int64) * num_blocks + block)[:, None] * BLOCK_WORDS
    code_words = first + (strip % 4 * STRIP_WORDS)[:, None] + tl.arange(0, 128)[None, :]
    number_words = first + 4 * STRIP_WORDS + (strip % 4 * STRIP_NUMBERS)[:, None]
    number_words += tl.arange(0, STRIP_NUMBERS)[None, :]
    acc = tl.zeros((WARPS, OWN * 16, COLUMNS), tl.float32)
    for at in range(0, num_blocks, SHARES):
        is_block = ((at + block < num_blocks) | IS_EVEN)[:, None]
        is_x = ((rows < m) | (ROWS == 1))[None, :, None] & ((at * 64 + features < k) | IS_EVEN)
        a = tl.load(x_rows + at * 64, mask=is_x, other=0.0)
        by = at * BLOCK_WORDS
        b = _strips(
            code_words + by, number_words + by, is_block, magic, OWN, BITS, FORM, BY_PAIRS, DTYPE
        )
        if not BY_PAIRS:  # in the order of b: group, i // 2, t, i % 2, e
            a = tl.permute(tl.reshape(a, (SHARES, ROWS, 2, 2, 2, 4, 2)), (0, 1, 2, 3, 5, 4, 6))
            a = tl.reshape(a, (SHARES, ROWS, 64))
        a = tl.permute(a, (0, 2, 1)).broadcast_to((WARPS, 64, COLUMNS))
        acc = tl.dot(b, a, acc)
    if SHARES_K:
        sums = tl.trans(tl.sum(acc, 0))
    else:
        sums = tl.trans(tl.reshape(acc, (STRIPS * 16, COLUMNS)))
    row = tl.arange(0, COLUMNS)
    rows = tl.program_id(1) * ROWS + row
    is_row = (row < ROWS) & (rows < m)
    column = tl.arange(0, STRIPS * 16)
    columns = _strip(column // 16, STRIPS, IS_GATED) * 16 + column % 16
    is_column = columns < n
    sums *= tl.load(factor + columns, mask=is_column, other=0.0)[None, :]
    if HAS_BIAS:
        sums += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    places = columns
    width = n
    if IS_GATED:
        HALF: tl.constexpr = STRIPS * 8
        gates, sums = tl.split(tl.permute(tl.reshape(sums, (COLUMNS, 2, HALF)), (0, 2, 1)))
        sums = activated(gates, ACTIVATION, True) * sums
        places = tl.program_id(0) * HALF + tl.arange(0, HALF)
        width = n // 2
    else:
        sums = activated(sums, ACTIVATION, True)
    mask = is_row[:, None] & (places < width)[None, :]
    offsets = rows.to(tl.int64)[:, None] * width + places[None, :]
    if HAS_RESIDUAL:
        sums += tl.load(residual + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + offsets, sums.to(DTYPE), mask=mask)


@triton.jit
def _strip(at, STRIPS: tl.constexpr, IS_GATED: tl.constexpr):
    """The strip of all that is a program's strip `at`; a block has two of gates, two of values."""
    if not IS_GATED:
        return tl.program_id(0) * STRIPS + at
    HALF: tl.constexpr = STRIPS // 2
    pair = tl.program_id(0) * HALF + at % HALF
    return pair // 2 * 4 + at // HALF * 2 + pair % 2


@triton.jit(do_not_specialize=["num_rows", "magic"])
def _grouped_rows_kernel(
    words,
    factor,
    indices,
    out,
    num_rows,
    n,
    k,
    magic,
    HAS_INDICES: tl.constexpr,
    BITS: tl.constexpr,
    FORM: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A program writes ROWS rows of one block of features."""
    DTYPE: tl.constexpr = out.dtype.element_ty
    at = tl.program_id(1)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = rows < num_rows
    index = rows.to(tl.int64)
    if HAS_INDICES:
        index = tl.load(indices + rows, mask=is_row, other=0)
    is_there = (index >= 0) & (index < n)
    index = tl.where(is_there, index, 0)
    block = index // 64 * tl.cdiv(k, 64) + at
    strip, half, r = index % 64 // 16, index % 16 // 8, index % 8
    mask = is_row[:, None]
    if BITS == 4:
        word = tl.arange(0, 8)[None, :]  # t, group
        first = words + (block * 640 + half)[:, None] + word % 2 * 2
        code_words = first + (strip * 128 + r * 16)[:, None] + word // 2 * 4
        codes = tl.load(code_words, mask=mask, other=0)
        numbers = tl.load(first + (512 + strip * 32 + r * 4)[:, None], mask=mask, other=0)
        values = _decoded4(codes, numbers, magic, FORM, DTYPE)
        values = tl.permute(tl.reshape(values, (ROWS, 4, 2, 2, 2, 2)), (0, 2, 5, 4, 1, 3))
    else:
        word = tl.arange(0, 16)[None, :]  # group, t, i // 2
        first = words + (block * (1088 if FORM == "symmetric" else 1152))[:, None]
        code_words = first + (strip * 256 + half * 2 + r * 16)[:, None] + word // 8 * 128
        codes = tl.load(code_words + word % 8 // 2 * 4 + word % 2, mask=mask, other=0)
        if FORM == "symmetric":
            number_words = first + (1024 + strip * 16 + r * 2)[:, None] + word // 8
            numbers = tl.load(number_words, mask=mask, other=0)
            numbers = tl.where(half[:, None] == 0, _low(numbers, DTYPE), _high(numbers, DTYPE))
        else:
            number_words = first + (1024 + strip * 32 + r * 4 + half)[:, None] + word // 8 * 2
            numbers = tl.load(number_words, mask=mask, other=0)
        if FORM == "halves":
            numbers = tl.where(word % 2 == 0, _low(numbers, DTYPE), _high(numbers, DTYPE))
        values = _decoded8(codes, numbers, magic, FORM, DTYPE)
        values = tl.permute(tl.reshape(values, (ROWS, 2, 4, 2, 2, 2)), (0, 1, 3, 5, 2, 4))
    values = tl.reshape(values, (ROWS, 64)).to(tl.float32) * tl.load(factor + index)[:, None]
    values = tl.where(is_there[:, None], values, float("nan"))
    features = at * 64 + tl.arange(0, 64)
    mask = is_row[:, None] & (features < k)[None, :]
    offsets = rows.to(tl.int64)[:, None] * k + features[None, :]
    tl.store(out + offsets, values.to(DTYPE), mask=mask)


def grouped_linear(
    x: Tensor,
    blocks: Tensor,
    factor: Tensor,
    bias: Tensor | None,
    *,
    bits: int,
    form: str,
    activation: str,
    residual: Tensor | None,
    is_gated: bool,
) -> Tensor:
    """GroupedBlocks.matmul on checked arguments."""
    (m, k), n = x.shape, len(factor)
    out = x.new_empty((m, n // 2 if is_gated else n))
    if out.numel() == 0:
        return out
    tile = _tile(m, n, is_gated, num_multiprocessors(x.device))
    has = bias is not None, residual is not None
    launch(
        _grouped_linear_kernel,
        (triton.cdiv(n, tile.strips * 16), triton.cdiv(m, tile.rows)),
        blocks.view(torch.int32),
        factor,
        address_or(bias, x),
        address_or(residual, x),
        out,
        x,
        m,
        n,
        k,
        _MAGIC[x.dtype] if bits == 4 else _MAGIC_OF_F32,
        key=(n, k, bits, form, x.dtype, activation, is_gated, has, tile),
        HAS_BIAS=has[0],
        HAS_RESIDUAL=has[1],
        IS_GATED=is_gated,
        ACTIVATION=activation,
        BITS=bits,
        FORM=form,
        ROWS=tile.rows,
        STRIPS=tile.strips,
        WARPS=tile.num_warps,
        SHARES_K=tile.shares_k,
        IS_EVEN=k % (64 * (tile.num_warps if tile.shares_k else 1)) == 0,
        BY_PAIRS=bits == 4 and _HAS_PAIRS,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out


def grouped_rows(
    blocks: Tensor,
    factor: Tensor,
    indices: Tensor | None,
    *,
    k: int,
    bits: int,
    form: str,
    dtype: torch.dtype,
) -> Tensor:
    """GroupedBlocks.rows on checked arguments; indices: int64, or None for all rows."""
    num_rows = len(factor) if indices is None else len(indices)
    out = torch.empty((num_rows, k), dtype=dtype, device=blocks.device)
    if out.numel() == 0:
        return out
    launch(
        _grouped_rows_kernel,
        (triton.cdiv(num_rows, _ROWS), triton.cdiv(k, 64)),
        blocks.view(torch.int32),
        factor,
        address_or(indices, factor),
        out,
        num_rows,
        len(factor),
        k,
        _MAGIC[dtype] if bits == 4 else _MAGIC_OF_F32,
        HAS_INDICES=indices is not None,
        BITS=bits,
        FORM=form,
        ROWS=_ROWS,
        num_warps=4,
    )
    return out


def _tile(m: int, n: int, is_gated: bool, multiprocessors: int) -> _Tile:
    """The fastest tile on an H200 of those that fit where a block has 99 KiB of shared memory."""
    if m > 32:
        if n < 128 * multiprocessors:
            return _Tile(64, 2, 4, 3, shares_k=True)
        return _Tile(64, 8 if m <= 64 else 4, 4, 4, shares_k=False)
    if m > 16:
        if n < 128 * multiprocessors:
            return _Tile(32, 2, 4, 4, shares_k=True)
        return _Tile(32, 8, 4, 4, shares_k=False)
    rows = 1 if m == 1 else 8 if m <= 8 else 16
    strips = 2 if is_gated or n > 96 * multiprocessors else 1
    # Many programs load ahead for one another.
    are_many = n > 16 * strips * 4 * multiprocessors
    return _Tile(rows, strips, 4, 3 if are_many else 5, shares_k=True)
