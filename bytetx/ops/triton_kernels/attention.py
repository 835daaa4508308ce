"""Attention over packed sequences: tiles of rows that may hold many short sequences.

A tile of query rows ignores where sequences begin and end: it reads the keys from the first row's
sequence to the last row's, and each row masks those of other sequences. Lengths stay on the device.
"""

import triton
import triton.language as tl
from torch import Tensor

from bytetx.ops.triton_kernels.launch import dot_precision, launch, next_power_of_2
from bytetx.ops.triton_kernels.softmax import (
    add_key,
    add_keys,
    begin_rows,
    count_not_finite,
    in_log2,
    soft_capped,
)

_SHORT_TOKENS = 256  # mean length up to which tiles hold 64 rows: fewer keys of others are read


@triton.jit
def _scores(
    s,
    keys,
    bias_row,
    row_position,
    bias_positions,
    is_seen,
    scale,
    softcap,
    span,
    HAS_SOFTCAP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
):
    """Scores in units of log 2 of products s [rows, keys]: softcap, then bias."""
    s = s * scale
    if HAS_SOFTCAP:
        s = soft_capped(s, softcap)
    if HAS_BIAS:
        if HAS_POSITIONS:
            key_position = tl.load(bias_positions + keys, mask=keys >= 0, other=0)
        else:
            key_position = keys
        index = key_position[None, :] - row_position[:, None] + span - 1
        s += tl.load(bias_row + index, mask=is_seen, other=0.0)
    return in_log2(s)


@triton.jit
def _attend(
    acc,
    top,
    total,
    q,
    k_head,
    v_head,
    k_stride,
    v_stride,
    first,
    last,
    key_end,
    rows,
    starts,
    ends,
    bias_row,
    row_position,
    bias_positions,
    scale,
    softcap,
    span,
    window,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Online softmax over the keys from `first` to `last`; MASKED: not every row sees them all."""
    features = tl.arange(0, BLOCK_D)
    for at in range(first, last, BLOCK_N):
        keys = at + tl.arange(0, BLOCK_N)
        is_key = keys < key_end
        mask = is_key[:, None] & (features < HEAD_DIM)[None, :]
        offsets = keys.to(tl.int64)[:, None]
        k = tl.load(k_head + offsets * k_stride + features[None, :], mask=mask, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        is_seen = (keys[None, :] >= starts[:, None]) & (keys[None, :] < ends[:, None])
        if CAUSAL:
            is_seen &= keys[None, :] <= rows[:, None]
        if HAS_WINDOW:
            is_seen &= rows[:, None] - keys[None, :] < window
            is_seen &= keys[None, :] - rows[:, None] < window
        s = _scores(
            s,
            keys,
            bias_row,
            row_position,
            bias_positions,
            is_seen,
            scale,
            softcap,
            span,
            HAS_SOFTCAP,
            HAS_BIAS,
            HAS_POSITIONS,
        )
        if MASKED:
            s = tl.where(is_seen, s, float("-inf"))
        v = tl.load(v_head + offsets * v_stride + features[None, :], mask=mask, other=0.0)
        acc, top, total = add_keys(acc, top, total, s, v, MASKED, PRECISION)
    return acc, top, total


@triton.jit
def _attend_key_by_key(
    q,
    k_head,
    v_head,
    k_stride,
    v_stride,
    first,
    last,
    rows,
    starts,
    ends,
    bias_row,
    row_position,
    bias_positions,
    scale,
    softcap,
    span,
    window,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
):
    """A tile of which a row is not finite, each row with its own keys: slow, and rarely done."""
    features = tl.arange(0, BLOCK_D)
    is_feature = features < HEAD_DIM
    acc, top, total = begin_rows(BLOCK_M, BLOCK_D)
    for key in range(first, last):
        is_seen = (key >= starts) & (key < ends)
        if CAUSAL:
            is_seen &= key <= rows
        if HAS_WINDOW:
            is_seen &= (rows - key < window) & (key - rows < window)
        keys = tl.zeros((1,), tl.int32) + key
        place = keys.to(tl.int64)
        k = tl.load(k_head + place * k_stride + features, mask=is_feature, other=0.0)
        v = tl.load(v_head + place * v_stride + features, mask=is_feature, other=0.0)
        s = tl.sum(q.to(tl.float32) * k.to(tl.float32)[None, :], 1)
        s = _scores(
            s[:, None],
            keys,
            bias_row,
            row_position,
            bias_positions,
            is_seen[:, None],
            scale,
            softcap,
            span,
            HAS_SOFTCAP,
            HAS_BIAS,
            HAS_POSITIONS,
        )
        v = v.to(tl.float32)
        acc, top, total = add_key(acc, top, total, tl.sum(s, 1), v, is_seen)
    return acc / total[:, None]


@triton.jit
def key_ranges(
    rows,
    starts,
    ends,
    first_row,
    total_tokens,
    window,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Of a tile's keys: the first, the first and last block that all rows see, and the end.

    The end is 0 or less where the tile has rows of padding alone.
    """
    is_row = ends > starts
    last_row = tl.max(tl.where(is_row, rows, -1), 0)
    first, end = tl.min(starts, 0), tl.max(ends, 0)
    all_first = tl.max(tl.where(is_row, starts, 0), 0)
    all_end = tl.min(tl.where(is_row, ends, total_tokens), 0)
    if CAUSAL:
        end = tl.minimum(end, last_row + 1)
        all_end = tl.minimum(all_end, first_row + 1)
    if HAS_WINDOW:
        first = tl.maximum(first, first_row - window + 1)
        end = tl.minimum(end, last_row + window)
        all_first = tl.maximum(all_first, last_row - window + 1)
        all_end = tl.minimum(all_end, first_row + window)
    free_first = first + tl.cdiv(all_first - first, BLOCK_N) * BLOCK_N
    free_last = first + tl.maximum(all_end - first, 0) // BLOCK_N * BLOCK_N
    if free_last <= free_first:
        free_first = end
        free_last = end
    return first, free_first, free_last, end


@triton.jit(do_not_specialize=["total_tokens", "span", "window"])
def _attention_kernel(
    q_base,
    k_base,
    v_base,
    out,
    bounds,
    bias,
    bias_positions,
    total_tokens,
    q_stride,
    k_stride,
    v_stride,
    out_stride,
    scale,
    softcap,
    span,
    window,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    head = tl.program_id(0)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = rows < total_tokens
    starts = tl.load(bounds + rows, mask=is_row, other=total_tokens)
    ends = tl.load(bounds + total_tokens + rows, mask=is_row, other=0)
    is_row = ends > starts
    first, free_first, free_last, key_end = key_ranges(
        rows,
        starts,
        ends,
        tl.program_id(1) * BLOCK_M,
        total_tokens,
        window,
        BLOCK_N,
        CAUSAL,
        HAS_WINDOW,
    )
    if key_end <= 0:
        return
    features = tl.arange(0, BLOCK_D)
    offsets = rows.to(tl.int64)[:, None]
    mask = is_row[:, None] & (features < HEAD_DIM)[None, :]
    q_head = q_base + head * HEAD_DIM
    k_head = k_base + head // GROUP * HEAD_DIM
    v_head = v_base + head // GROUP * HEAD_DIM
    q = tl.load(q_head + offsets * q_stride + features[None, :], mask=mask, other=0.0)
    bias_row = bias
    row_position = rows
    if HAS_BIAS:
        bias_row = bias + head * (2 * span - 1)
        if HAS_POSITIONS:
            row_position = tl.load(bias_positions + rows, mask=is_row, other=0)
    acc, top, total = begin_rows(BLOCK_M, BLOCK_D)
    acc, top, total = _attend(
        acc, top, total, q, k_head, v_head, k_stride, v_stride, first, free_first, key_end, rows,
        starts, ends, bias_row, row_position, bias_positions, scale, softcap, span, window,
        HEAD_DIM, BLOCK_D, BLOCK_N, CAUSAL, HAS_WINDOW, HAS_SOFTCAP, HAS_BIAS, HAS_POSITIONS,
        True, PRECISION,
    )  # fmt: skip
    acc, top, total = _attend(
        acc, top, total, q, k_head, v_head, k_stride, v_stride, free_first, free_last, key_end,
        rows, starts, ends, bias_row, row_position, bias_positions, scale, softcap, span, window,
        HEAD_DIM, BLOCK_D, BLOCK_N, CAUSAL, HAS_WINDOW, HAS_SOFTCAP, HAS_BIAS, HAS_POSITIONS,
        False, PRECISION,
    )  # fmt: skip
    acc, top, total = _attend(
        acc, top, total, q, k_head, v_head, k_stride, v_stride, free_last, key_end, key_end, rows,
        starts, ends, bias_row, row_position, bias_positions, scale, softcap, span, window,
        HEAD_DIM, BLOCK_D, BLOCK_N, CAUSAL, HAS_WINDOW, HAS_SOFTCAP, HAS_BIAS, HAS_POSITIONS,
        True, PRECISION,
    )  # fmt: skip
    result = acc / total[:, None]
    if count_not_finite(result, mask) > 0:
        result = _attend_key_by_key(
            q, k_head, v_head, k_stride, v_stride, first, key_end, rows, starts, ends, bias_row,
            row_position, bias_positions, scale, softcap, span, window, HEAD_DIM, BLOCK_D, BLOCK_M,
            CAUSAL, HAS_WINDOW, HAS_SOFTCAP, HAS_BIAS, HAS_POSITIONS,
        )  # fmt: skip
    out_row = out + offsets * out_stride + head * HEAD_DIM
    tl.store(out_row + features[None, :], result.to(out.dtype.element_ty), mask=mask)


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor,
    *,
    batch_size: int,
    softmax_scale: float,
    causal: bool = False,
    window: int = 0,
    softcap: float = 0.0,
    relative_bias: Tensor | None = None,
    bias_positions: Tensor | None = None,
    out: Tensor,
) -> Tensor:
    """ops.attention.varlen_attention on checked arguments; bounds: of sequence_bounds.

    Rows of padding are not written.
    """
    total_tokens, num_heads, head_dim = q.shape
    block_d = max(16, next_power_of_2(head_dim))
    block_m, block_n, num_warps, num_stages = _tiles(
        block_d, q.element_size(), mean_tokens=total_tokens / max(batch_size, 1)
    )
    launch(
        _attention_kernel,
        (num_heads, triton.cdiv(total_tokens, block_m)),
        q,
        k,
        v,
        out,
        bounds,
        bounds if relative_bias is None else relative_bias,
        bounds if bias_positions is None else bias_positions,
        total_tokens,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        out.stride(0),
        softmax_scale,
        softcap,
        0 if relative_bias is None else (relative_bias.shape[1] + 1) // 2,
        window,
        GROUP=num_heads // k.shape[1],
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        CAUSAL=causal,
        HAS_WINDOW=window > 0,
        HAS_SOFTCAP=softcap > 0,
        HAS_BIAS=relative_bias is not None,
        HAS_POSITIONS=relative_bias is not None and bias_positions is not None,
        PRECISION=dot_precision(q.dtype),
        num_warps=num_warps,
        num_stages=num_stages,
    )
    return out


def _tiles(block_d: int, element_bytes: int, *, mean_tokens: float) -> tuple[int, int, int, int]:
    """(rows, keys, warps, stages) of a tile.

    Each fits in the 99 KiB of an sm_86, sm_89 or sm_120, and in their registers.
    """
    if element_bytes == 4:
        return (32, 32, 8, 1) if block_d > 64 else (64, 32, 8, 1)
    if block_d > 128:
        return 64, 32, 8, 2
    if block_d > 64:
        return 64, 64, 8, 2
    return (64, 64, 4, 2) if mean_tokens <= _SHORT_TOKENS else (128, 64, 8, 3)
