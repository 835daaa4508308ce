"""Disentangled attention (DeBERTa) over packed sequences, in tiles as attention.py's.

The buckets of a tile's distances are neighbours, so many at most as rows and keys together: their
position vectors are multiplied with the tile's queries and keys, and each pair takes its product.
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

_BLOCK = 32  # rows and keys of a tile; 64 need 104 to 152 KiB and spill


@triton.jit
def _position_rows(table, first, num_buckets, num_heads, head, WINDOW: tl.constexpr,
                   HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """Vectors of WINDOW buckets from `first` on; the last one again behind the end."""
    bucket = tl.minimum(first + tl.arange(0, WINDOW), num_buckets - 1)
    features = tl.arange(0, BLOCK_D)
    rows = (bucket.to(tl.int64) * num_heads + head) * HEAD_DIM
    mask = (features < HEAD_DIM)[None, :] & (bucket >= 0)[:, None]
    return tl.load(table + rows[:, None] + features[None, :], mask=mask, other=0.0)


@triton.jit
def _attend_key_by_key(
    q,
    k_head,
    v_head,
    pos_k,
    pos_q,
    buckets,
    k_stride,
    v_stride,
    first,
    last,
    rows,
    starts,
    ends,
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
    """A tile of which a row is not finite: see attention.py."""
    features = tl.arange(0, BLOCK_D)
    is_feature = features < HEAD_DIM
    acc, top, total = begin_rows(BLOCK_M, BLOCK_D)
    for key in range(first, last):
        is_seen = (key >= starts) & (key < ends)
        place = (tl.zeros((1,), tl.int32) + key).to(tl.int64)
        k = tl.load(k_head + place * k_stride + features, mask=is_feature, other=0.0)
        v = tl.load(v_head + place * v_stride + features, mask=is_feature, other=0.0)
        k, v = k.to(tl.float32), v.to(tl.float32)
        bucket = tl.load(buckets + rows - key + span - 1, mask=is_seen, other=0)
        vectors = ((bucket.to(tl.int64) * num_heads + head) * HEAD_DIM)[:, None] + features[None, :]
        mask = is_seen[:, None] & is_feature[None, :]
        s = tl.sum(q.to(tl.float32) * k[None, :], 1)
        if HAS_POS_K:
            at = tl.load(pos_k + vectors, mask=mask, other=0.0).to(tl.float32)
            s += tl.sum(q.to(tl.float32) * at, 1)
        if HAS_POS_Q:
            at = tl.load(pos_q + vectors, mask=mask, other=0.0).to(tl.float32)
            s += tl.sum(at * k[None, :], 1)
        acc, top, total = add_key(acc, top, total, s * scale, v, is_seen)
    return acc / total[:, None]


@triton.jit
def _attend(
    q,
    k_head,
    v_head,
    pos_k,
    pos_q,
    buckets,
    k_stride,
    v_stride,
    first,
    key_end,
    rows,
    starts,
    ends,
    first_row,
    span,
    num_buckets,
    num_heads,
    head,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HAS_POS_K: tl.constexpr,
    HAS_POS_Q: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Online softmax over the keys from `first` to `key_end`."""
    BLOCK_N: tl.constexpr = BLOCK_M
    WINDOW: tl.constexpr = BLOCK_M + BLOCK_N
    features = tl.arange(0, BLOCK_D)
    acc, top, total = begin_rows(BLOCK_M, BLOCK_D)
    for at in range(first, key_end, BLOCK_N):
        keys = at + tl.arange(0, BLOCK_N)
        key_mask = (keys < key_end)[:, None] & (features < HEAD_DIM)[None, :]
        offsets = keys.to(tl.int64)[:, None]
        k = tl.load(k_head + offsets * k_stride + features[None, :], mask=key_mask, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        is_seen = (keys[None, :] >= starts[:, None]) & (keys[None, :] < ends[:, None])
        distance = rows[:, None] - keys[None, :] + span - 1
        least_distance = tl.maximum(first_row - at - BLOCK_N + span, 0)
        first_bucket = tl.load(buckets + tl.minimum(least_distance, 2 * span - 2))
        bucket = tl.load(buckets + distance, mask=is_seen, other=0) - first_bucket
        bucket = tl.where(is_seen, bucket, 0)
        if HAS_POS_K:
            at_k = _position_rows(
                pos_k, first_bucket, num_buckets, num_heads, head, WINDOW, HEAD_DIM, BLOCK_D
            )
            products = tl.dot(q, tl.trans(at_k), input_precision=PRECISION)
            s += tl.gather(products, bucket, 1)
        if HAS_POS_Q:
            at_q = _position_rows(
                pos_q, first_bucket, num_buckets, num_heads, head, WINDOW, HEAD_DIM, BLOCK_D
            )
            products = tl.dot(k, tl.trans(at_q), input_precision=PRECISION)
            s += tl.trans(tl.gather(products, tl.trans(bucket), 1))
        s = tl.where(is_seen, s * scale, float("-inf"))
        v = tl.load(v_head + offsets * v_stride + features[None, :], mask=key_mask, other=0.0)
        acc, top, total = add_keys(acc, top, total, s, v, 1.0, True, PRECISION)
    return acc / total[:, None]


@triton.jit(do_not_specialize=["total_tokens", "span", "num_buckets"])
def _disentangled_kernel(
    q_base,
    k_base,
    v_base,
    out,
    pos_k,
    pos_q,
    buckets,
    bounds,
    total_tokens,
    q_stride,
    k_stride,
    v_stride,
    span,
    num_buckets,
    num_heads,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HAS_POS_K: tl.constexpr,
    HAS_POS_Q: tl.constexpr,
    PRECISION: tl.constexpr,
):
    head = tl.program_id(0)
    first_row = tl.program_id(1) * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)
    starts, ends = seen_ranges(rows, bounds, total_tokens, 0, False, False)
    is_row = ends > starts
    first, key_end = tl.min(starts, 0), tl.max(ends, 0)
    if key_end <= 0:
        return
    features = tl.arange(0, BLOCK_D)
    mask = is_row[:, None] & (features < HEAD_DIM)[None, :]
    k_head, v_head = k_base + head * HEAD_DIM, v_base + head * HEAD_DIM
    q_rows = q_base + head * HEAD_DIM + rows.to(tl.int64)[:, None] * q_stride + features[None, :]
    q = tl.load(q_rows, mask=mask, other=0.0)
    result = _attend(
        q, k_head, v_head, pos_k, pos_q, buckets, k_stride, v_stride, first, key_end, rows, starts,
        ends, first_row, span, num_buckets, num_heads, head, scale, HEAD_DIM, BLOCK_D, BLOCK_M,
        HAS_POS_K, HAS_POS_Q, PRECISION,
    )  # fmt: skip
    if count_not_finite(result, mask) > 0:
        result = _attend_key_by_key(
            q, k_head, v_head, pos_k, pos_q, buckets, k_stride, v_stride, first, key_end, rows,
            starts, ends, span, num_heads, head, scale, HEAD_DIM, BLOCK_D, BLOCK_M, HAS_POS_K,
            HAS_POS_Q,
        )  # fmt: skip
    place = out + (rows.to(tl.int64)[:, None] * num_heads + head) * HEAD_DIM + features[None, :]
    tl.store(place, result.to(out.dtype.element_ty), mask=mask)


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
    table = pos_k if pos_k is not None else pos_q
    launch(
        _disentangled_kernel,
        (num_heads, triton.cdiv(total_tokens, _BLOCK)),
        q,
        k,
        v,
        out,
        address_or(pos_k, q),
        address_or(pos_q, q),
        buckets,
        bounds,
        total_tokens,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        (len(buckets) + 1) // 2,
        0 if table is None else table.shape[0],
        num_heads,
        softmax_scale * LOG2_E.value,
        HEAD_DIM=head_dim,
        BLOCK_D=max(16, next_power_of_2(head_dim)),
        BLOCK_M=_BLOCK,
        HAS_POS_K=pos_k is not None,
        HAS_POS_Q=pos_q is not None,
        PRECISION=dot_precision(q.dtype),
        num_warps=4 if head_dim <= 64 else 8,
        num_stages=2,
    )
    return out
