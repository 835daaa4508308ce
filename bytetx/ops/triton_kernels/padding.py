"""A padded batch to packed rows and back; lengths stay on the device."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bytetx.ops.padded_ids import IdTables, PackedIds, PaddedIds
from bytetx.ops.triton_kernels.launch import address_or, launch

_BLOCK = 256
_PADDED, _COLUMNS = 8, 256


@triton.jit(do_not_specialize=["num_columns", "mask_stride", "num_rows"])
def _count_kernel(mask, counts, num_columns, mask_stride, num_rows, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    own = mask + row.to(tl.int64) * mask_stride
    num_tokens, num_runs = row * 0, row * 0
    for at in range(0, num_columns, BLOCK):
        columns = at + tl.arange(0, BLOCK)
        inside = columns < num_columns
        is_token = inside & (tl.load(own + columns, mask=inside, other=0) != 0)
        has_left = inside & (columns > 0)
        is_run = has_left & (tl.load(own + columns - 1, mask=has_left, other=0) != 0)
        num_tokens += tl.sum(is_token.to(tl.int32), 0)
        num_runs += tl.sum((is_token & ~is_run).to(tl.int32), 0)
    tl.store(counts + row, num_tokens)
    tl.store(counts + num_rows + row, num_runs)
    tl.store(counts + 2 * num_rows + row, (tl.load(own) != 0).to(tl.int32))


def count_tokens(mask: Tensor) -> Tensor:
    """ops.padding.count_tokens on a checked mask."""
    num_rows, num_columns = mask.shape
    counts = torch.empty((3, num_rows), dtype=torch.int32, device=mask.device)
    if mask.numel() == 0:
        return counts.zero_()
    launch(
        _count_kernel,
        (num_rows,),
        _loadable(mask),
        counts,
        num_columns,
        mask.stride(0),
        num_rows,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return counts


@triton.jit
def _first_row(
    row,
    mask,
    seqlens,
    num_columns,
    mask_stride,
    HAS_MASK: tl.constexpr,
    HAS_SEQLENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The tokens in front of a row of the padded batch."""
    start = row * 0
    if HAS_SEQLENS:
        for at in range(0, row, BLOCK):
            rows = at + tl.arange(0, BLOCK)
            start += tl.sum(tl.load(seqlens + rows, mask=rows < row, other=0), 0)
    elif HAS_MASK:
        end = row * num_columns
        for at in range(0, end, BLOCK):
            indices = at + tl.arange(0, BLOCK)
            addresses = mask + (indices // num_columns).to(tl.int64) * mask_stride
            values = tl.load(addresses + indices % num_columns, mask=indices < end, other=0)
            start += tl.sum((values != 0).to(tl.int32), 0)
    else:
        start = row * num_columns
    return start


@triton.jit
def _as_int32(ids):
    """ids as int32; one that is too large stays too large for every table, and never wraps."""
    if ids.dtype == tl.int64:
        ids = tl.minimum(tl.maximum(ids, -2147483648), 2147483647)
    return ids.to(tl.int32)


@triton.jit
def _note_bad(ids, is_token, num_rows, bad_id):
    if num_rows > 0:
        is_bad = is_token & ((ids < 0) | (ids >= num_rows))
        tl.store(bad_id + ids * 0, ids, mask=is_bad)  # any of them


@triton.jit(
    do_not_specialize=[
        "num_rows",
        "num_columns",
        "ids_stride",
        "mask_stride",
        "types_stride",
        "positions_stride",
        "num_texts",
        "num_sequences",
        "num_tokens",
        "filler_tokens",
        "position_offset",
        "num_words",
        "num_positions",
        "num_types",
    ]
)
def _pack_kernel(
    input_ids,
    mask,
    token_type_ids,
    position_ids,
    seqlens,
    cu_seqlens,
    packed_ids,
    packed_positions,
    packed_types,
    rows,
    bad_ids,
    num_rows,
    num_columns,
    ids_stride,
    mask_stride,
    types_stride,
    positions_stride,
    num_texts,
    num_sequences,
    num_tokens,
    filler_tokens,
    position_offset,
    num_words,
    num_positions,
    num_types,
    HAS_MASK: tl.constexpr,
    HAS_SEQLENS: tl.constexpr,
    HAS_TYPES: tl.constexpr,
    KEEPS_TYPES: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    COUNTS_POSITIONS: tl.constexpr,
    CHECKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    start = _first_row(row, mask, seqlens, num_columns, mask_stride, HAS_MASK, HAS_SEQLENS, BLOCK)
    lanes = tl.arange(0, BLOCK)
    if row == num_rows:  # behind the batch: start is its number of tokens
        for at in range(0, num_sequences + 1 - num_rows, BLOCK):
            index = num_rows + at + lanes
            end = start + filler_tokens * tl.maximum(index - num_texts, 0)
            tl.store(cu_seqlens + index, tl.minimum(end, num_tokens), mask=index <= num_sequences)
        zeros = lanes * 0
        for at in range(start, num_tokens, BLOCK):
            inside = at + lanes < num_tokens
            tl.store(packed_ids + at + lanes, zeros, mask=inside)
            tl.store(packed_positions + at + lanes, zeros, mask=inside)
            if KEEPS_TYPES:
                tl.store(packed_types + at + lanes, zeros, mask=inside)
        return
    tl.store(cu_seqlens + row, start)
    place, num_counted, long_row = start, row * 0, row.to(tl.int64)
    for at in range(0, num_columns, BLOCK):
        columns = at + lanes
        inside = columns < num_columns
        is_token = inside
        if HAS_MASK:
            values = tl.load(mask + long_row * mask_stride + columns, mask=inside, other=0)
            is_token = inside & (values != 0)
        ones = is_token.to(tl.int32)
        target = place + tl.cumsum(ones, 0) - ones
        place += tl.sum(ones, 0)
        if HAS_MASK:
            own = rows + long_row * num_columns + columns
            tl.store(own, tl.where(is_token, target, -1), mask=inside)
        is_token = is_token & (target < num_tokens)
        ids = _as_int32(tl.load(input_ids + long_row * ids_stride + columns, mask=inside, other=0))
        tl.store(packed_ids + target, ids, mask=is_token)
        if HAS_POSITIONS:
            given = position_ids + long_row * positions_stride + columns
            positions = _as_int32(tl.load(given, mask=inside, other=0))
        elif COUNTS_POSITIONS:
            pad = position_offset - 1
            is_counted = inside & (ids != pad)
            counts = is_counted.to(tl.int32)
            positions = tl.where(is_counted, num_counted + tl.cumsum(counts, 0) + pad, pad)
            num_counted += tl.sum(counts, 0)
        else:
            positions = columns
        tl.store(packed_positions + target, positions, mask=is_token)
        types = lanes * 0
        if HAS_TYPES:
            given = token_type_ids + long_row * types_stride + columns
            types = _as_int32(tl.load(given, mask=inside, other=0))
        if KEEPS_TYPES:
            tl.store(packed_types + target, types, mask=is_token)
        if CHECKS:
            _note_bad(ids, is_token, num_words, bad_ids)
            _note_bad(positions, is_token, num_positions, bad_ids + 1)
            _note_bad(types, is_token, num_types, bad_ids + 2)


def pack_padded(
    padded: PaddedIds,
    packed: PackedIds,
    *,
    num_texts: int,
    filler_tokens: int,
    position_offset: int,
    seqlens: Tensor | None,
    tables: IdTables | None,
    bad_ids: Tensor | None,
) -> Tensor | None:
    """ops.padding.pack_padded on checked arguments: a program a row, and one for what is behind."""
    ids, mask, types, positions = (
        padded.input_ids,
        padded.mask,
        padded.token_type_ids,
        padded.position_ids,
    )
    num_rows, num_columns = ids.shape
    rows = None
    if mask is not None:
        rows = torch.empty(num_rows * num_columns, dtype=torch.int32, device=ids.device)
    launch(
        _pack_kernel,
        (num_rows + 1,),
        ids,
        ids if mask is None else _loadable(mask),
        address_or(types, ids),
        address_or(positions, ids),
        address_or(seqlens, packed.cu_seqlens),
        packed.cu_seqlens,
        packed.input_ids,
        packed.position_ids,
        address_or(packed.token_type_ids, packed.input_ids),
        address_or(rows, packed.input_ids),
        address_or(bad_ids, packed.input_ids),
        num_rows,
        num_columns,
        ids.stride(0),
        0 if mask is None else mask.stride(0),
        _row_stride(types),
        _row_stride(positions),
        num_texts,
        packed.cu_seqlens.shape[0] - 1,
        packed.input_ids.shape[0],
        filler_tokens,
        position_offset,
        0 if tables is None else tables.word,
        0 if tables is None else tables.position,
        0 if tables is None else tables.token_type,
        HAS_MASK=mask is not None,
        HAS_SEQLENS=seqlens is not None,
        HAS_TYPES=types is not None,
        KEEPS_TYPES=packed.token_type_ids is not None,
        HAS_POSITIONS=positions is not None,
        COUNTS_POSITIONS=position_offset != 0,
        CHECKS=bad_ids is not None,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return rows


@triton.jit(do_not_specialize=["num_padded"])
def _unpack_kernel(x, rows, out, num_padded, width, PADDED: tl.constexpr, COLUMNS: tl.constexpr):
    padded = tl.program_id(0) * PADDED + tl.arange(0, PADDED)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_padded, is_column = padded < num_padded, columns < width
    row = tl.load(rows + padded, mask=is_padded, other=-1)
    from_row = x + row.to(tl.int64)[:, None] * width + columns[None, :]
    values = tl.load(from_row, mask=(row >= 0)[:, None] & is_column[None, :], other=0.0)
    to_padded = out + padded.to(tl.int64)[:, None] * width + columns[None, :]
    tl.store(to_padded, values, mask=is_padded[:, None] & is_column[None, :])


def unpack_padded(x: Tensor, rows: Tensor) -> Tensor:
    """ops.padding.unpack_padded on checked arguments."""
    num_padded, width = rows.shape[0], x.shape[1]
    out = torch.empty((num_padded, width), dtype=x.dtype, device=x.device)
    if out.numel() > 0:
        launch(
            _unpack_kernel,
            (triton.cdiv(num_padded, _PADDED), triton.cdiv(width, _COLUMNS)),
            x,
            rows,
            out,
            num_padded,
            width,
            PADDED=_PADDED,
            COLUMNS=_COLUMNS,
            num_warps=4,
        )
    return out


def _loadable(mask: Tensor) -> Tensor:
    """Triton addresses no single bits."""
    return mask.view(torch.uint8) if mask.dtype == torch.bool else mask


def _row_stride(t: Tensor | None) -> int:
    """0 where one row stands for all."""
    return 0 if t is None or t.shape[0] == 1 else t.stride(0)
