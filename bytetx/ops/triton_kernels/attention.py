"""Attention over packed sequences: tiles of rows that may hold many short sequences.

A tile of query rows ignores where sequences begin and end: it reads the keys from the first row's
sequence to the last row's, and each row masks those of other sequences. Lengths stay on the device.
"""

import triton
import triton.language as tl
from torch import Tensor

from bytetx.ops.triton_kernels.launch import dot_precision, launch, next_power_of_2
from bytetx.ops.triton_kernels.softmax import (
    LOG2_E,
    add_key,
    add_keys,
    begin_rows,
    count_not_finite,
    soft_capped,
)

_LONG_TOKENS = 512  # mean length from which on tiles hold 128 rows: their keys are read less often
_SLOW_ROWS = tl.constexpr(16)  # rows that go key by key at a time: few registers


@triton.jit
def seen_ranges(rows, bounds, total_tokens, window, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """(first, end) of the keys that each row sees; end <= first for rows of padding."""
    is_row = rows < total_tokens
    starts = tl.load(bounds + rows, mask=is_row, other=total_tokens)
    ends = tl.load(bounds + total_tokens + rows, mask=is_row, other=0)
    if CAUSAL:
        ends = tl.minimum(ends, rows + 1)
    if HAS_WINDOW:
        starts = tl.maximum(starts, rows - window + 1)
        ends = tl.minimum(ends, rows + window)
    return starts, ends


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
    SCALES_SCORES: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
):
    """Scores of products s [rows, keys]: scaled, softcap, bias.

    Where there is neither softcap nor bias, the softmax scales them (add_keys).
    """
    if SCALES_SCORES:
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
    return s


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
    starts,
    ends,
    bias_row,
    row_position,
    bias_positions,
    scale,
    to_log2,
    softcap,
    span,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SCALES_SCORES: tl.constexpr,
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
        mask = (features < HEAD_DIM)[None, :]
        if MASKED:
            mask = mask & (keys < key_end)[:, None]
        offsets = keys.to(tl.int64)[:, None]
        k = tl.load(k_head + offsets * k_stride + features[None, :], mask=mask, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        is_seen = (keys[None, :] >= starts[:, None]) & (keys[None, :] < ends[:, None])
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
            SCALES_SCORES,
            HAS_SOFTCAP,
            HAS_BIAS,
            HAS_POSITIONS,
        )
        if MASKED:
            s = tl.where(is_seen, s, float("-inf"))
        v = tl.load(v_head + offsets * v_stride + features[None, :], mask=mask, other=0.0)
        acc, top, total = add_keys(acc, top, total, s, v, to_log2, MASKED, PRECISION)
    return acc, top, total


@triton.jit
def _attend_key_by_key(
    q_head,
    k_head,
    v_head,
    out_head,
    bounds,
    first_row,
    total_tokens,
    q_stride,
    k_stride,
    v_stride,
    out_stride,
    bias_row,
    bias_positions,
    scale,
    to_log2,
    softcap,
    span,
    window,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SCALES_SCORES: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
):
    """A tile of which a row is not finite, each row with its own keys: slow, and rarely done.

    It begins anew, a few rows at a time, so that it takes no registers from the tiles that are.
    """
    features = tl.arange(0, BLOCK_D)
    is_feature = features < HEAD_DIM
    for part in range(0, BLOCK_M, _SLOW_ROWS):
        rows = first_row + part + tl.arange(0, _SLOW_ROWS)
        starts, ends = seen_ranges(rows, bounds, total_tokens, window, CAUSAL, HAS_WINDOW)
        is_row = ends > starts
        mask = is_row[:, None] & is_feature[None, :]
        place = rows.to(tl.int64)[:, None]
        q = tl.load(q_head + place * q_stride + features[None, :], mask=mask, other=0.0)
        q = q.to(tl.float32)
        row_position = rows
        if HAS_POSITIONS:
            row_position = tl.load(bias_positions + rows, mask=is_row, other=0)
        acc, top, total = begin_rows(_SLOW_ROWS, BLOCK_D)
        for key in range(tl.min(starts, 0), tl.max(ends, 0)):
            is_seen = (key >= starts) & (key < ends)
            keys = tl.zeros((1,), tl.int32) + key
            key_place = keys.to(tl.int64)
            k = tl.load(k_head + key_place * k_stride + features, mask=is_feature, other=0.0)
            v = tl.load(v_head + key_place * v_stride + features, mask=is_feature, other=0.0)
            s = tl.sum(q * k.to(tl.float32)[None, :], 1)
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
                SCALES_SCORES,
                HAS_SOFTCAP,
                HAS_BIAS,
                HAS_POSITIONS,
            )
            s = tl.sum(s, 1) * to_log2
            acc, top, total = add_key(acc, top, total, s, v.to(tl.float32), is_seen)
        out_row = out_head + place * out_stride + features[None, :]
        tl.store(out_row, (acc / total[:, None]).to(out_head.dtype.element_ty), mask=mask)


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
    SCALES_SCORES: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    head = tl.program_id(0)
    first_row = tl.program_id(1) * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)
    starts, ends = seen_ranges(rows, bounds, total_tokens, window, CAUSAL, HAS_WINDOW)
    is_row = ends > starts
    first, key_end = tl.min(starts, 0), tl.max(ends, 0)
    if key_end <= 0:
        return
    # The blocks of keys that every row sees need no mask.
    all_first = tl.max(tl.where(is_row, starts, 0), 0)
    all_end = tl.min(tl.where(is_row, ends, total_tokens), 0)
    free_first = first + tl.cdiv(all_first - first, BLOCK_N) * BLOCK_N
    free_last = first + tl.maximum(all_end - first, 0) // BLOCK_N * BLOCK_N
    if free_last <= free_first:
        free_first = key_end
        free_last = key_end
    to_log2 = LOG2_E
    if not SCALES_SCORES:
        to_log2 = scale * LOG2_E
    features = tl.arange(0, BLOCK_D)
    offsets = rows.to(tl.int64)[:, None]
    mask = is_row[:, None] & (features < HEAD_DIM)[None, :]
    q_head = q_base + head * HEAD_DIM
    k_head = k_base + head // GROUP * HEAD_DIM
    v_head = v_base + head // GROUP * HEAD_DIM
    out_head = out + head * HEAD_DIM
    q = tl.load(q_head + offsets * q_stride + features[None, :], mask=mask, other=0.0)
    bias_row = bias
    row_position = rows
    if HAS_BIAS:
        bias_row = bias + head * (2 * span - 1)
        if HAS_POSITIONS:
            row_position = tl.load(bias_positions + rows, mask=is_row, other=0)
    acc, top, total = begin_rows(BLOCK_M, BLOCK_D)
    acc, top, total = _attend(
        acc, top, total, q, k_head, v_head, k_stride, v_stride, first, free_first, key_end, starts,
        ends, bias_row, row_position, bias_positions, scale, to_log2, softcap, span, HEAD_DIM,
        BLOCK_D, BLOCK_N, SCALES_SCORES, HAS_SOFTCAP, HAS_BIAS, HAS_POSITIONS, True, PRECISION,
    )  # fmt: skip
    acc, top, total = _attend(
        acc, top, total, q, k_head, v_head, k_stride, v_stride, free_first, free_last, key_end,
        starts, ends, bias_row, row_position, bias_positions, scale, to_log2, softcap, span,
        HEAD_DIM, BLOCK_D, BLOCK_N, SCALES_SCORES, HAS_SOFTCAP, HAS_BIAS, HAS_POSITIONS, False,
        PRECISION,
    )  # fmt: skip
    acc, top, total = _attend(
        acc, top, total, q, k_head, v_head, k_stride, v_stride, free_last, key_end, key_end, starts,
        ends, bias_row, row_position, bias_positions, scale, to_log2, softcap, span, HEAD_DIM,
        BLOCK_D, BLOCK_N, SCALES_SCORES, HAS_SOFTCAP, HAS_BIAS, HAS_POSITIONS, True, PRECISION,
    )  # fmt: skip
    result = acc / total[:, None]
    if count_not_finite(result, mask) > 0:
        _attend_key_by_key(
            q_head, k_head, v_head, out_head, bounds, first_row, total_tokens, q_stride, k_stride,
            v_stride, out_stride, bias_row, bias_positions, scale, to_log2, softcap, span, window,
            HEAD_DIM, BLOCK_D, BLOCK_M, CAUSAL, HAS_WINDOW, SCALES_SCORES, HAS_SOFTCAP, HAS_BIAS,
            HAS_POSITIONS,
        )  # fmt: skip
    else:
        out_row = out_head + offsets * out_stride + features[None, :]
        tl.store(out_row, result.to(out.dtype.element_ty), mask=mask)


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
        SCALES_SCORES=softcap > 0 or relative_bias is not None or softmax_scale <= 0,
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

    Each fits in the 99 KiB of an sm_86, sm_89 or sm_120, and leaves registers for two more programs
    a multiprocessor: one's softmax runs while another's products do.
    """
    if element_bytes == 4:
        return (32, 32, 8, 1) if block_d > 64 else (64, 32, 8, 1)
    if block_d > 128:
        return 64, 32, 8, 2
    if block_d > 64 or mean_tokens < _LONG_TOKENS:
        return 64, 32, 4, 3
    return 128, 64, 8, 3
