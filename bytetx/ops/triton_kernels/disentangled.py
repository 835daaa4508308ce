"""Disentangled attention (DeBERTa) over packed sequences, in tiles as attention.py's.

A first kernel multiplies queries and keys with the position vectors, and keeps the products of each
row with its sequence in a table, from which a tile of rows and keys takes its pairs'. Heads take
turns where the tables of all would be large.
"""

import triton
import triton.language as tl
from torch import Tensor

from bytetx.ops.triton_kernels.attention import seen_ranges
from bytetx.ops.triton_kernels.launch import (
    address_or,
    dot_precision,
    launch,
    next_power_of_2,
)
from bytetx.ops.triton_kernels.softmax import (
    LOG2_E,
    add_key,
    add_keys,
    begin_rows,
    count_not_finite,
)

_SLOW_ROWS = tl.constexpr(16)  # rows that go key by key at a time: few registers
_PRODUCTS_TILE = 32  # rows, and distances
_TABLE_BYTES = 512 << 20  # products of the heads whose turn it is


@triton.jit(do_not_specialize=["total_tokens", "span", "first_head", "margin"])
def _products_kernel(
    q_base,
    k_base,
    pos_k,
    pos_q,
    products,
    buckets,
    bounds,
    total_tokens,
    q_stride,
    k_stride,
    span,
    margin,
    num_heads,
    first_head,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_POS_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """products[kind, head, row, other - its sequence's first row]: queries', then keys'."""
    turn, kind = tl.program_id(0), tl.program_id(2)
    head = first_head + turn
    first_row = tl.program_id(1) * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)
    starts, ends = seen_ranges(rows, bounds, total_tokens, 0, False, False)
    first, end = tl.min(starts, 0), tl.max(ends, 0)
    if end <= 0:
        return
    base, stride, table, sign = q_base, q_stride, pos_k, -1
    if not HAS_POS_K or kind == 1:
        base, stride, table, sign = k_base, k_stride, pos_q, 1
    features = tl.arange(0, BLOCK_D)
    is_feature = (features < HEAD_DIM)[None, :]
    x_rows = base + head * HEAD_DIM + rows.to(tl.int64)[:, None] * stride + features[None, :]
    x = tl.load(x_rows, mask=(ends > starts)[:, None] & is_feature, other=0.0)
    row = (kind * tl.num_programs(0) + turn).to(tl.int64) * total_tokens + first_row
    out = products + margin + row * span
    place = (rows - first_row) * span + rows - starts
    for at in range(first - first_row - BLOCK_M + 1, end - first_row, BLOCK_N):
        ahead = at + tl.arange(0, BLOCK_N)  # from a row to the other of its pair
        distance = tl.minimum(tl.maximum(sign * ahead, 1 - span), span - 1)
        bucket = tl.load(buckets + distance + span - 1)
        vectors = table + ((bucket * num_heads + head) * HEAD_DIM)[:, None] + features[None, :]
        position = tl.load(vectors, mask=is_feature, other=0.0)
        found = tl.dot(x, tl.trans(position), input_precision=PRECISION)
        other = rows[:, None] + ahead[None, :]
        is_pair = (other >= starts[:, None]) & (other < ends[:, None])
        found = found.to(products.dtype.element_ty)
        tl.store(out + (place[:, None] + ahead[None, :]), found, mask=is_pair)


@triton.jit
def _attend(
    q,
    k_head,
    v_head,
    q_products,
    k_products,
    bounds,
    k_stride,
    v_stride,
    span,
    first,
    key_end,
    rows,
    starts,
    ends,
    first_row,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_POS_K: tl.constexpr,
    HAS_POS_Q: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Online softmax over the keys from `first` to `key_end`.

    Of pairs that are of two sequences it reads anything, inside the margins of the products.
    """
    features = tl.arange(0, BLOCK_D)
    acc, top, total = begin_rows(BLOCK_M, BLOCK_D)
    q_place = (rows - first_row) * span - tl.minimum(starts, first_row + BLOCK_M)
    for at in range(first, key_end, BLOCK_N):
        keys = at + tl.arange(0, BLOCK_N)
        is_key = keys < key_end
        key_mask = is_key[:, None] & (features < HEAD_DIM)[None, :]
        offsets = keys.to(tl.int64)[:, None]
        k = tl.load(k_head + offsets * k_stride + features[None, :], mask=key_mask, other=0.0)
        s = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        if HAS_POS_K:
            s += tl.load(q_products + (q_place[:, None] + keys[None, :])).to(tl.float32)
        if HAS_POS_Q:
            key_starts = tl.load(bounds + keys, mask=is_key, other=at)
            k_place = tl.where(is_key, keys - at, 0) * span - key_starts
            k_rows = k_products + tl.cast(at, tl.int64) * span
            s += tl.load(k_rows + (rows[:, None] + k_place[None, :])).to(tl.float32)
        s = tl.dot(q, tl.trans(k), s, input_precision=PRECISION)
        is_seen = (keys[None, :] >= starts[:, None]) & (keys[None, :] < ends[:, None])
        s = tl.where(is_seen, s, float("-inf"))
        v = tl.load(v_head + offsets * v_stride + features[None, :], mask=key_mask, other=0.0)
        acc, top, total = add_keys(acc, top, total, s, v, scale, True, PRECISION)
    return acc / total[:, None]


@triton.jit
def _attend_key_by_key(
    q_head,
    k_head,
    v_head,
    out_head,
    pos_k,
    pos_q,
    buckets,
    bounds,
    total_tokens,
    q_stride,
    k_stride,
    v_stride,
    first_row,
    span,
    num_heads,
    head,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HAS_POS_K: tl.constexpr,
    HAS_POS_Q: tl.constexpr,
):
    """A tile of which a row is not finite, a few rows at a time: see attention.py."""
    features = tl.arange(0, BLOCK_D)
    is_feature = features < HEAD_DIM
    for part in range(0, BLOCK_M, _SLOW_ROWS):
        rows = first_row + part + tl.arange(0, _SLOW_ROWS)
        starts, ends = seen_ranges(rows, bounds, total_tokens, 0, False, False)
        row_mask = (ends > starts)[:, None] & is_feature[None, :]
        place = rows.to(tl.int64)[:, None]
        q = tl.load(q_head + place * q_stride + features[None, :], mask=row_mask, other=0.0)
        q = q.to(tl.float32)
        acc, top, total = begin_rows(_SLOW_ROWS, BLOCK_D)
        for key in range(tl.min(starts, 0), tl.max(ends, 0)):
            is_seen = (key >= starts) & (key < ends)
            key_place = (tl.zeros((1,), tl.int32) + key).to(tl.int64)
            k = tl.load(k_head + key_place * k_stride + features, mask=is_feature, other=0.0)
            v = tl.load(v_head + key_place * v_stride + features, mask=is_feature, other=0.0)
            k, v = k.to(tl.float32), v.to(tl.float32)
            bucket = tl.load(buckets + rows - key + span - 1, mask=is_seen, other=0)
            first = (bucket.to(tl.int64) * num_heads + head) * HEAD_DIM
            vectors = first[:, None] + features[None, :]
            mask = is_seen[:, None] & is_feature[None, :]
            s = tl.sum(q * k[None, :], 1)
            if HAS_POS_K:
                at = tl.load(pos_k + vectors, mask=mask, other=0.0).to(tl.float32)
                s += tl.sum(q * at, 1)
            if HAS_POS_Q:
                at = tl.load(pos_q + vectors, mask=mask, other=0.0).to(tl.float32)
                s += tl.sum(at * k[None, :], 1)
            acc, top, total = add_key(acc, top, total, s * scale, v, is_seen)
        out_row = out_head + place * num_heads * HEAD_DIM + features[None, :]
        result = (acc / total[:, None]).to(out_head.dtype.element_ty)
        tl.store(out_row, result, mask=row_mask)


@triton.jit(do_not_specialize=["total_tokens", "span", "margin", "first_head"])
def _disentangled_kernel(
    q_base,
    k_base,
    v_base,
    out,
    pos_k,
    pos_q,
    products,
    buckets,
    bounds,
    total_tokens,
    q_stride,
    k_stride,
    v_stride,
    span,
    margin,
    num_heads,
    first_head,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_POS_K: tl.constexpr,
    HAS_POS_Q: tl.constexpr,
    PRECISION: tl.constexpr,
):
    turn, num_turns = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    head = first_head + tl.program_id(0)
    first_row = tl.program_id(1) * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)
    starts, ends = seen_ranges(rows, bounds, total_tokens, 0, False, False)
    is_row = ends > starts
    first, key_end = tl.min(starts, 0), tl.max(ends, 0)
    if key_end <= 0:
        return
    features = tl.arange(0, BLOCK_D)
    mask = is_row[:, None] & (features < HEAD_DIM)[None, :]
    q_head, out_head = q_base + head * HEAD_DIM, out + head * HEAD_DIM
    k_head, v_head = k_base + head * HEAD_DIM, v_base + head * HEAD_DIM
    place = rows.to(tl.int64)[:, None]
    q = tl.load(q_head + place * q_stride + features[None, :], mask=mask, other=0.0)
    products += margin
    q_products = products + (turn * total_tokens + first_row) * span
    if HAS_POS_K:
        turn += num_turns
    k_products = products + turn * total_tokens * span
    result = _attend(
        q, k_head, v_head, q_products, k_products, bounds, k_stride, v_stride, span, first, key_end,
        rows, starts, ends, first_row, scale, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, HAS_POS_K,
        HAS_POS_Q, PRECISION,
    )  # fmt: skip
    if count_not_finite(result, mask) > 0:
        _attend_key_by_key(
            q_head, k_head, v_head, out_head, pos_k, pos_q, buckets, bounds, total_tokens, q_stride,
            k_stride, v_stride, first_row, span, num_heads, head, scale, HEAD_DIM, BLOCK_D, BLOCK_M,
            HAS_POS_K, HAS_POS_Q,
        )  # fmt: skip
    else:
        out_row = out_head + place * num_heads * HEAD_DIM + features[None, :]
        tl.store(out_row, result.to(out.dtype.element_ty), mask=mask)


def disentangled_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pos_k: Tensor | None,
    pos_q: Tensor | None,
    buckets: Tensor,
    bounds: Tensor,
    *,
    softmax_scale: float,
) -> Tensor:
    """ops.disentangled.disentangled_attention on checked arguments; bounds: of sequence_bounds.

    Rows of padding hold anything.
    """
    total_tokens, num_heads, head_dim = q.shape
    out = q.new_empty(q.shape)
    num_kinds = (pos_k is not None) + (pos_q is not None)
    span = (len(buckets) + 1) // 2
    block_m, block_n, num_warps, num_stages = _tile(head_dim, q.element_size())
    num_turns = _heads_at_once(num_kinds * total_tokens * span * q.element_size(), num_heads)
    # Pairs of two sequences reach at most so far out of their row of products.
    margin = block_m * (span + 1) + block_n
    products = q.new_empty(num_kinds * num_turns * total_tokens * span + 2 * margin)
    shared = {
        "HEAD_DIM": head_dim,
        "BLOCK_D": max(16, next_power_of_2(head_dim)),
        "HAS_POS_K": pos_k is not None,
        "PRECISION": dot_precision(q.dtype),
    }
    positions = address_or(pos_k, q), address_or(pos_q, q)
    for first_head in range(0, num_heads, num_turns):
        if num_kinds:
            launch(
                _products_kernel,
                (num_turns, triton.cdiv(total_tokens, _PRODUCTS_TILE), num_kinds),
                q,
                k,
                *positions,
                products,
                buckets,
                bounds,
                total_tokens,
                q.stride(0),
                k.stride(0),
                span,
                margin,
                num_heads,
                first_head,
                BLOCK_M=_PRODUCTS_TILE,
                BLOCK_N=_PRODUCTS_TILE,
                num_warps=4,
                num_stages=2,
                **shared,
            )
        launch(
            _disentangled_kernel,
            (num_turns, triton.cdiv(total_tokens, block_m)),
            q,
            k,
            v,
            out,
            *positions,
            products,
            buckets,
            bounds,
            total_tokens,
            q.stride(0),
            k.stride(0),
            v.stride(0),
            span,
            margin,
            num_heads,
            first_head,
            softmax_scale * LOG2_E.value,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            HAS_POS_Q=pos_q is not None,
            num_warps=num_warps,
            num_stages=num_stages,
            **shared,
        )
    return out


def _heads_at_once(bytes_a_head: int, num_heads: int) -> int:
    """The greatest divisor of num_heads whose products fit; 1 at least."""
    most = max(_TABLE_BYTES // max(bytes_a_head, 1), 1)
    return max(n for n in range(1, num_heads + 1) if num_heads % n == 0 and n <= most)


def _tile(head_dim: int, element_bytes: int) -> tuple[int, int, int, int]:
    """(rows, keys, warps, stages); all fit in 99 KiB of shared memory."""
    if element_bytes == 4:
        return 32, 32, 4, 1
    return 64, 32, 4 if head_dim <= 64 else 8, 3
