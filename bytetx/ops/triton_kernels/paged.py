"""Causal attention over keys in pages, of prefill chunks and decode rows alike.

A program owns a block of a sequence's rows with all query heads of one key head, so that the keys
are read once for the group. Where blocks are few, several programs share the keys of a block and a
second kernel adds up their parts. Lengths stay on the device: launches depend on sizes alone.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bytetx.ops.triton_kernels.kv_codes import restored_rows
from bytetx.ops.triton_kernels.launch import (
    address_or,
    dot_precision,
    launch,
    next_power_of_2,
    num_multiprocessors,
)
from bytetx.ops.triton_kernels.sequences import sequence_of
from bytetx.ops.triton_kernels.softmax import LOG2_E, add_keys, begin_rows, soft_capped

_MAX_PARTS = 64
_KEYS_A_PART = 128  # at least
_WAVES = 4  # programs a multiprocessor that are enough


@triton.jit
def _scores(
    s,
    keys,
    is_key,
    position,
    slope,
    softcap,
    window,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Scores of scaled products s [rows, keys]; MASKED: -inf for keys that rows miss."""
    if HAS_SOFTCAP:
        s = soft_capped(s, softcap)
    if HAS_SLOPES:
        s += slope[:, None] * (keys[None, :] - position[:, None]).to(tl.float32)
    if MASKED:
        is_seen = is_key[None, :] & (keys[None, :] <= position[:, None])
        if HAS_WINDOW:
            is_seen &= position[:, None] - keys[None, :] < window
        s = tl.where(is_seen, s, float("-inf"))
    return s


@triton.jit
def _load_rows(
    cache, scales, offsets, cell, mask, is_key, DTYPE: tl.constexpr, HAS_CODES: tl.constexpr
):
    """Keys or values at these offsets, zeros where the mask has none; cell: of their scales."""
    if HAS_CODES:
        codes = tl.load(cache + offsets, mask=mask, other=0)
        rows = restored_rows(codes, tl.load(scales + cell, mask=is_key, other=0), DTYPE)
    else:
        rows = tl.load(cache + offsets, mask=mask, other=0.0)
    return rows


@triton.jit
def _attend_pages(
    acc,
    top,
    total,
    rows,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    pages,
    num_pages,
    kv_head,
    first,
    last,
    least,
    position,
    slope,
    scale,
    softcap,
    window,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    HAS_CODES: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Online softmax of query rows over the keys from `first` to `last` of one sequence's pages.

    least: the first key that any of the rows sees. Pages before it may be another sequence's now,
    and are not read: a weight of 0 times a value that is not finite would be NaN.
    MASKED: not every row sees them all; else they are whole blocks.
    """
    features = tl.arange(0, BLOCK_D)
    for at in range(first, last, BLOCK_N):
        keys = at + tl.arange(0, BLOCK_N)
        is_key = keys >= 0
        if MASKED:
            is_key = (keys >= least) & (keys < last)
        page = tl.load(pages + keys // PAGE_SIZE, mask=is_key, other=0)
        page = tl.minimum(tl.maximum(page, 0), num_pages - 1)
        slot = page.to(tl.int64) * PAGE_SIZE + keys % PAGE_SIZE
        offsets = (slot * NUM_KV_HEADS + kv_head)[:, None] * HEAD_DIM + features[None, :]
        key_mask = (features < HEAD_DIM)[None, :]
        if MASKED:
            key_mask = key_mask & is_key[:, None]
        cell = slot * 0  # not read
        if HAS_CODES:
            cell = (page.to(tl.int64) * NUM_KV_HEADS + kv_head) * PAGE_SIZE + keys % PAGE_SIZE
        k = _load_rows(k_cache, k_scales, offsets, cell, key_mask, is_key, rows.dtype, HAS_CODES)
        s = _scores(
            tl.dot(rows, tl.trans(k), input_precision=PRECISION) * scale,
            keys,
            is_key,
            position,
            slope,
            softcap,
            window,
            HAS_WINDOW,
            HAS_SOFTCAP,
            HAS_SLOPES,
            MASKED,
        )
        v = _load_rows(v_cache, v_scales, offsets, cell, key_mask, is_key, rows.dtype, HAS_CODES)
        acc, top, total = add_keys(acc, top, total, s, v, LOG2_E, MASKED, PRECISION)
    return acc, top, total


@triton.jit
def _keys_of_part(first, last, part, PARTS: tl.constexpr, BLOCK_N: tl.constexpr):
    """The share of a part of the keys from `first` to `last`, in whole blocks."""
    blocks_a_part = tl.cdiv(tl.cdiv(last - first, BLOCK_N), PARTS)
    first += part * blocks_a_part * BLOCK_N
    return first, tl.minimum(last, first + blocks_a_part * BLOCK_N)


@triton.jit(
    do_not_specialize=[
        "batch_size",
        "total_tokens",
        "num_steps",
        "max_pages",
        "num_pages",
        "window",
    ]
)
def _paged_kernel(
    q,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    out,
    part_sums,
    part_tops,
    part_totals,
    cu_seqlens,
    kv_seqlens,
    page_table,
    slopes,
    batch_size,
    total_tokens,
    num_steps,
    max_pages,
    num_pages,
    q_stride,
    scale,
    softcap,
    window,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    HAS_CODES: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(0)
    block = tl.program_id(1)
    part = tl.program_id(2)
    sequence = block
    if not ONE_BLOCK:
        sequence = sequence_of(block, cu_seqlens, batch_size, num_steps, TOKENS)
    if sequence >= batch_size:
        return
    begin = tl.load(cu_seqlens + sequence)
    num_rows = tl.load(cu_seqlens + sequence + 1) - begin
    first_row = begin * 0
    if not ONE_BLOCK:
        first_row = (block - begin // TOKENS - sequence) * TOKENS
    if first_row >= num_rows:
        return
    num_keys = tl.load(kv_seqlens + sequence)
    lanes = tl.arange(0, BLOCK_M)
    row = first_row + lanes // GROUP  # index among the sequence's rows in this step
    head = kv_head * GROUP + lanes % GROUP
    is_row = (lanes < TOKENS * GROUP) & (row < num_rows)
    position = num_keys - num_rows + row
    key_end = num_keys - num_rows + tl.minimum(first_row + TOKENS, num_rows)
    least = key_end * 0
    if HAS_WINDOW:
        least = tl.maximum(num_keys - num_rows + first_row - window + 1, 0)
    first = least // BLOCK_N * BLOCK_N
    if PARTS > 1:
        first, key_end = _keys_of_part(first, key_end, part, PARTS, BLOCK_N)

    features = tl.arange(0, BLOCK_D)
    token = (begin + row).to(tl.int64)
    mask = is_row[:, None] & (features < HEAD_DIM)[None, :]
    q_rows = q + token[:, None] * q_stride + head[:, None] * HEAD_DIM + features[None, :]
    rows = tl.load(q_rows, mask=mask, other=0.0)
    slope = position  # not read
    if HAS_SLOPES:
        slope = tl.load(slopes + head, mask=is_row, other=0.0)
    free_last = first  # the blocks of keys that every row sees need no mask
    if not HAS_WINDOW:
        all_end = tl.minimum(num_keys - num_rows + first_row + 1, key_end)
        free_last += tl.maximum(all_end - first, 0) // BLOCK_N * BLOCK_N
    pages = page_table + sequence.to(tl.int64) * max_pages
    acc, top, total = begin_rows(BLOCK_M, BLOCK_D)
    acc, top, total = _attend_pages(
        acc, top, total, rows, k_cache, v_cache, k_scales, v_scales, pages, num_pages, kv_head,
        first, free_last, least, position, slope, scale, softcap, window, NUM_KV_HEADS, HEAD_DIM,
        PAGE_SIZE, HAS_WINDOW, HAS_SOFTCAP, HAS_SLOPES, HAS_CODES, False, PRECISION, BLOCK_D,
        BLOCK_N,
    )  # fmt: skip
    acc, top, total = _attend_pages(
        acc, top, total, rows, k_cache, v_cache, k_scales, v_scales, pages, num_pages, kv_head,
        free_last, key_end, least, position, slope, scale, softcap, window, NUM_KV_HEADS, HEAD_DIM,
        PAGE_SIZE, HAS_WINDOW, HAS_SOFTCAP, HAS_SLOPES, HAS_CODES, True, PRECISION, BLOCK_D,
        BLOCK_N,
    )  # fmt: skip
    if PARTS > 1:
        cell = (token * NUM_HEADS + head) * PARTS + part
        tl.store(part_tops + cell, top, mask=is_row)
        tl.store(part_totals + cell, total, mask=is_row)
        tl.store(part_sums + cell[:, None] * HEAD_DIM + features[None, :], acc, mask=mask)
    else:
        cell = (token * NUM_HEADS + head)[:, None] * HEAD_DIM + features[None, :]
        result = acc / total[:, None]
        tl.store(out + cell, result.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["batch_size"])
def _add_parts_kernel(
    part_sums,
    part_tops,
    part_totals,
    cu_seqlens,
    out,
    batch_size,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    if token >= tl.load(cu_seqlens + batch_size):
        return
    cell = token * NUM_HEADS + tl.program_id(1)
    parts = tl.arange(0, PARTS)
    features = tl.arange(0, BLOCK_D)
    is_feature = features < HEAD_DIM
    tops = tl.load(part_tops + cell * PARTS + parts)
    top = tl.max(tops, 0)
    weights = tl.exp2(tops - tl.where(top == float("-inf"), 0.0, top))  # a part without keys: 0
    total = tl.sum(tl.load(part_totals + cell * PARTS + parts) * weights, 0)
    rows = part_sums + (cell * PARTS + parts)[:, None] * HEAD_DIM + features[None, :]
    sums = tl.load(rows, mask=is_feature[None, :], other=0.0)
    result = tl.sum(sums * weights[:, None], 0) / total
    tl.store(out + cell * HEAD_DIM + features, result.to(out.dtype.element_ty), mask=is_feature)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cu_seqlens: Tensor,
    page_table: Tensor,
    kv_seqlens: Tensor,
    longest: tuple[int, int],
    softmax_scale: float,
    window: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    out: Tensor,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> Tensor:
    """ops.paged.paged_attention on checked arguments; rows of padding are not written.

    longest: (max_seqlen, max_kv_seqlen).
    """
    max_seqlen, max_kv_seqlen = longest
    total_tokens, num_heads, head_dim = q.shape
    num_pages, page_size, num_kv_heads, _ = k_cache.shape
    batch_size = kv_seqlens.shape[0]
    group = num_heads // num_kv_heads
    block_d = max(16, next_power_of_2(head_dim))
    block_m = max(16 if max_seqlen <= 1 else 64, next_power_of_2(group))
    block_n, num_warps, num_stages = _tile(block_m, block_d, q.element_size())
    is_one_block = max_seqlen <= block_m // group
    num_blocks = batch_size + (0 if is_one_block else total_tokens // (block_m // group))
    parts = _num_parts(num_blocks * num_kv_heads, window or max_kv_seqlen, q.device)
    cells = total_tokens * num_heads * parts if parts > 1 else 0
    part_floats = torch.empty((cells, head_dim + 2), dtype=torch.float32, device=q.device)
    parts_of = part_floats.view(-1).split([cells * head_dim, cells, cells])
    launch(
        _paged_kernel,
        (num_kv_heads, num_blocks, parts),
        q,
        k_cache,
        v_cache,
        address_or(k_scales, cu_seqlens),
        address_or(v_scales, cu_seqlens),
        out,
        *parts_of,
        cu_seqlens,
        kv_seqlens,
        page_table,
        address_or(alibi_slopes, cu_seqlens),
        batch_size,
        total_tokens,
        batch_size.bit_length(),
        page_table.shape[1],
        num_pages,
        q.stride(0),
        softmax_scale,
        softcap,
        window,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        PAGE_SIZE=page_size,
        PARTS=parts,
        ONE_BLOCK=is_one_block,
        HAS_WINDOW=window > 0,
        HAS_SOFTCAP=softcap > 0,
        HAS_SLOPES=alibi_slopes is not None,
        HAS_CODES=k_scales is not None,
        PRECISION=dot_precision(q.dtype),
        BLOCK_D=block_d,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    if parts > 1:
        launch(
            _add_parts_kernel,
            (total_tokens, num_heads),
            *parts_of,
            cu_seqlens,
            out,
            batch_size,
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            PARTS=parts,
            BLOCK_D=block_d,
            num_warps=4,
        )
    return out


def _num_parts(num_programs: int, num_keys: int, device: torch.device) -> int:
    """A power of two: as many as fill the GPU, none with fewer keys than are worth a program."""
    wanted = _WAVES * num_multiprocessors(device) // max(num_programs, 1)
    most = min(wanted, num_keys // _KEYS_A_PART, _MAX_PARTS)
    return 1 << (max(most, 1).bit_length() - 1)


def _tile(block_m: int, block_d: int, element_bytes: int) -> tuple[int, int, int]:
    """(keys, warps, stages); all fit in 99 KiB of shared memory."""
    if element_bytes == 4:
        return (32 if block_d <= 64 else 16), 4 if block_m < 64 else 8, 1
    if block_m > 64 or (block_m == 64 and block_d > 128):
        return (64 if block_d <= 128 else 32), 8, 2
    if block_m == 64:
        return (64, 4, 2) if block_d <= 64 else (32, 4, 3)
    # The page table's loads take stages of their own: these hold two blocks of keys at a time.
    if block_d <= 128:
        return (64, 4, 5) if block_d <= 64 else (32, 4, 6)
    return 32, 4, 3
