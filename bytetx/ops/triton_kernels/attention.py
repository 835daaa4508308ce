"""Attention over packed sequences: tiles of rows that may hold many short sequences.

A tile of query rows ignores where sequences begin and end: it reads the keys from the first row's
sequence to the last row's, and each row masks those of other sequences. Lengths stay on the device.
Where sequences continue others, tiles come from a table; all rows of one have the same ancestors,
whose keys it reads first.
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
    begin_rows_at_sinks,
    count_not_finite,
    soft_capped,
)
from bytetx.sequence_tree import MAX_ANCESTORS

_LONG_TOKENS = 512  # mean length from which on tiles hold 128 rows: their keys are read less often
_SLOW_ROWS = tl.constexpr(16)  # rows that go key by key at a time: few registers
_ANCESTORS = tl.constexpr(MAX_ANCESTORS)


@triton.jit
def seen_ranges(
    rows,
    bounds,
    end_row,
    window,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_TREE: tl.constexpr = False,
):
    """(first, end) of the keys that each row sees; end <= first for rows of padding.

    bounds: [2, end_row], with a tree [rows, 2].  end_row: one past the last row.
    """
    is_row = rows < end_row
    if HAS_TREE:
        starts = tl.load(bounds + 2 * rows, mask=is_row, other=end_row)
        ends = tl.load(bounds + 2 * rows + 1, mask=is_row, other=0)
    else:
        starts = tl.load(bounds + rows, mask=is_row, other=end_row)
        ends = tl.load(bounds + end_row + rows, mask=is_row, other=0)
    if CAUSAL:
        ends = tl.minimum(ends, rows + 1)
    if HAS_WINDOW:
        starts = tl.maximum(starts, rows - window + 1)
        ends = tl.minimum(ends, rows + window)
    return starts, ends


@triton.jit
def _ancestor_ranges(ancestor, between, rows, bounds, is_row, window, HAS_WINDOW: tl.constexpr):
    """(first, end) of the keys of an ancestor that each row sees, and the tokens from its first one
    to the rows' sequences; between: tokens from its end to there."""
    first, end = tl.load(ancestor), tl.load(ancestor + 1)
    between += end - first
    starts = tl.zeros_like(rows) + first
    if HAS_WINDOW:
        begins = tl.load(bounds + 2 * rows, mask=is_row, other=0)
        hidden = between + rows - begins - window + 1
        starts = tl.minimum(first + tl.maximum(hidden, 0), end)
    return tl.where(is_row, starts, end), tl.where(is_row, end, 0), between


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
def _attend_seen(
    acc,
    top,
    total,
    q,
    k_head,
    v_head,
    k_stride,
    v_stride,
    starts,
    ends,
    is_row,
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
    PRECISION: tl.constexpr,
):
    """Online softmax over each row's keys from `starts` to `ends`.

    The blocks of keys that every row sees need no mask.
    """
    first, key_end = tl.min(starts, 0), tl.max(ends, 0)
    all_first = tl.max(tl.where(is_row, starts, 0), 0)
    all_end = tl.min(tl.where(is_row, ends, key_end), 0)
    free_first = first + tl.cdiv(all_first - first, BLOCK_N) * BLOCK_N
    free_last = first + tl.maximum(all_end - first, 0) // BLOCK_N * BLOCK_N
    if free_last <= free_first:
        free_first = key_end
        free_last = key_end
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
    return acc, top, total


@triton.jit
def _add_each_key(
    acc,
    top,
    total,
    q,
    k_head,
    v_head,
    k_stride,
    v_stride,
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
    SCALES_SCORES: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
):
    """As _attend_seen, one key at a time, so that none reaches a row that does not see it."""
    features = tl.arange(0, BLOCK_D)
    is_feature = features < HEAD_DIM
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
    return acc, top, total


@triton.jit
def _attend_key_by_key(
    q_head,
    k_head,
    v_head,
    out_head,
    ancestors,
    bounds,
    first_row,
    end_row,
    q_stride,
    k_stride,
    v_stride,
    out_stride,
    sink,
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
    HAS_SINKS: tl.constexpr,
    HAS_TREE: tl.constexpr,
):
    """A tile of which a row is not finite, each row with its own keys: slow, and rarely done.

    It begins anew, a few rows at a time, so that it takes no registers from the tiles that are.
    """
    features = tl.arange(0, BLOCK_D)
    is_feature = features < HEAD_DIM
    for part in range(0, BLOCK_M, _SLOW_ROWS):
        rows = first_row + part + tl.arange(0, _SLOW_ROWS)
        starts, ends = seen_ranges(rows, bounds, end_row, window, CAUSAL, HAS_WINDOW, HAS_TREE)
        is_row = ends > starts
        mask = is_row[:, None] & is_feature[None, :]
        place = rows.to(tl.int64)[:, None]
        q = tl.load(q_head + place * q_stride + features[None, :], mask=mask, other=0.0)
        q = q.to(tl.float32)
        row_position = rows
        if HAS_POSITIONS:
            row_position = tl.load(bias_positions + rows, mask=is_row, other=0)
        acc, top, total = begin_rows(_SLOW_ROWS, BLOCK_D)
        if HAS_SINKS:
            top, total = begin_rows_at_sinks(sink, _SLOW_ROWS)
        if HAS_TREE:
            between = 0
            for i in range(_ANCESTORS):
                above, behind, between = _ancestor_ranges(
                    ancestors + 2 * (_ANCESTORS - 1 - i), between, rows, bounds, is_row, window,
                    HAS_WINDOW,
                )  # fmt: skip
                acc, top, total = _add_each_key(
                    acc, top, total, q, k_head, v_head, k_stride, v_stride, above, behind, bias_row,
                    row_position, bias_positions, scale, to_log2, softcap, span, HEAD_DIM, BLOCK_D,
                    SCALES_SCORES, HAS_SOFTCAP, HAS_BIAS, HAS_POSITIONS,
                )  # fmt: skip
        acc, top, total = _add_each_key(
            acc, top, total, q, k_head, v_head, k_stride, v_stride, starts, ends, bias_row,
            row_position, bias_positions, scale, to_log2, softcap, span, HEAD_DIM, BLOCK_D,
            SCALES_SCORES, HAS_SOFTCAP, HAS_BIAS, HAS_POSITIONS,
        )  # fmt: skip
        out_row = out_head + place * out_stride + features[None, :]
        tl.store(out_row, (acc / total[:, None]).to(out_head.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["total_tokens", "span", "window"])
def _attention_kernel(
    q_base,
    k_base,
    v_base,
    out,
    tiles,
    ancestors,
    bounds,
    sinks,
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
    HAS_SINKS: tl.constexpr,
    HAS_TREE: tl.constexpr,
    TILE_PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    head = tl.program_id(0)
    first_row = tl.program_id(1) * BLOCK_M
    end_row = total_tokens
    if HAS_TREE:
        tile = tl.program_id(1) // TILE_PARTS
        first_row = tl.load(tiles + 4 * tile)
        end_row = first_row + tl.load(tiles + 4 * tile + 1)
        first_row += tl.program_id(1) % TILE_PARTS * BLOCK_M
        ancestors += 2 * _ANCESTORS * tile
    rows = first_row + tl.arange(0, BLOCK_M)
    starts, ends = seen_ranges(rows, bounds, end_row, window, CAUSAL, HAS_WINDOW, HAS_TREE)
    is_row = ends > starts
    if tl.max(ends, 0) <= 0:
        return
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
    sink = 0.0
    if HAS_SINKS:
        sink = tl.load(sinks + head) * LOG2_E
        top, total = begin_rows_at_sinks(sink, BLOCK_M)
    if HAS_TREE:
        between = 0
        for i in range(_ANCESTORS):
            above, behind, between = _ancestor_ranges(
                ancestors + 2 * (_ANCESTORS - 1 - i), between, rows, bounds, is_row, window,
                HAS_WINDOW,
            )  # fmt: skip
            acc, top, total = _attend_seen(
                acc, top, total, q, k_head, v_head, k_stride, v_stride, above, behind, is_row,
                bias_row, row_position, bias_positions, scale, to_log2, softcap, span, HEAD_DIM,
                BLOCK_D, BLOCK_N, SCALES_SCORES, HAS_SOFTCAP, HAS_BIAS, HAS_POSITIONS, PRECISION,
            )  # fmt: skip
    acc, top, total = _attend_seen(
        acc, top, total, q, k_head, v_head, k_stride, v_stride, starts, ends, is_row, bias_row,
        row_position, bias_positions, scale, to_log2, softcap, span, HEAD_DIM, BLOCK_D, BLOCK_N,
        SCALES_SCORES, HAS_SOFTCAP, HAS_BIAS, HAS_POSITIONS, PRECISION,
    )  # fmt: skip
    result = acc / total[:, None]
    if count_not_finite(result, mask) > 0:
        _attend_key_by_key(
            q_head, k_head, v_head, out_head, ancestors, bounds, first_row, end_row, q_stride,
            k_stride, v_stride, out_stride, sink, bias_row, bias_positions, scale, to_log2, softcap,
            span, window, HEAD_DIM, BLOCK_D, BLOCK_M, CAUSAL, HAS_WINDOW, SCALES_SCORES,
            HAS_SOFTCAP, HAS_BIAS, HAS_POSITIONS, HAS_SINKS, HAS_TREE,
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
    sinks: Tensor | None = None,
    out: Tensor,
) -> Tensor:
    """ops.attention.varlen_attention on checked arguments; bounds: of sequence_bounds.

    Rows of padding are not written.
    """
    sizes = _tiles(q.shape[2], q.element_size(), mean_tokens=q.shape[0] / max(batch_size, 1))
    num_tiles = triton.cdiv(q.shape[0], sizes[0])
    options = (softmax_scale, causal, window, softcap, relative_bias, bias_positions, sinks)
    return _launch(q, k, v, out, bounds, bounds, bounds, num_tiles, 0, sizes, *options)


def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tables: tuple[Tensor, ...],
    *,
    tile_rows: int,
    softmax_scale: float,
    window: int = 0,
    softcap: float = 0.0,
    out: Tensor,
) -> Tensor:
    """varlen_attention of a batch with a tree; tables, tile_rows: SequenceTree.tiles and its."""
    sizes = _tree_tiles(q.shape[2], q.element_size())
    parts = triton.cdiv(tile_rows, sizes[0])
    options = (softmax_scale, True, window, softcap, None, None, None)
    tiles, ancestors, row_bounds = tables
    num_programs = parts * len(tiles)
    return _launch(q, k, v, out, tiles, ancestors, row_bounds, num_programs, parts, sizes, *options)


def tree_tile_rows(head_dim: int) -> int:
    """Rows of a tile of tree_attention; in f32 two programs may share one."""
    return _tree_tiles(head_dim, 2)[0]


def _tree_tiles(head_dim: int, element_bytes: int) -> tuple[int, int, int, int]:
    """As for long sequences: most of a tile's keys are its ancestors'."""
    return _tiles(head_dim, element_bytes, mean_tokens=_LONG_TOKENS)


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    tiles: Tensor,
    ancestors: Tensor,
    bounds: Tensor,
    num_programs: int,
    tile_parts: int,
    sizes: tuple[int, int, int, int],
    softmax_scale: float,
    causal: bool,
    window: int,
    softcap: float,
    relative_bias: Tensor | None,
    bias_positions: Tensor | None,
    sinks: Tensor | None,
) -> Tensor:
    """tile_parts: programs that share a tile of a tree, 0: there is none."""
    block_m, block_n, num_warps, num_stages = sizes
    launch(
        _attention_kernel,
        (q.shape[1], num_programs),
        q,
        k,
        v,
        out,
        tiles,
        ancestors,
        bounds,
        bounds if sinks is None else sinks,
        bounds if relative_bias is None else relative_bias,
        bounds if bias_positions is None else bias_positions,
        q.shape[0],
        q.stride(0),
        k.stride(0),
        v.stride(0),
        out.stride(0),
        softmax_scale,
        softcap,
        0 if relative_bias is None else (relative_bias.shape[1] + 1) // 2,
        window,
        GROUP=q.shape[1] // k.shape[1],
        HEAD_DIM=q.shape[2],
        BLOCK_D=_block_d(q.shape[2]),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        CAUSAL=causal,
        HAS_WINDOW=window > 0,
        SCALES_SCORES=softcap > 0 or relative_bias is not None or softmax_scale <= 0,
        HAS_SOFTCAP=softcap > 0,
        HAS_BIAS=relative_bias is not None,
        HAS_POSITIONS=relative_bias is not None and bias_positions is not None,
        HAS_SINKS=sinks is not None,
        HAS_TREE=tile_parts > 0,
        TILE_PARTS=tile_parts,
        PRECISION=dot_precision(q.dtype),
        num_warps=num_warps,
        num_stages=num_stages,
    )
    return out


def _block_d(head_dim: int) -> int:
    return max(16, next_power_of_2(head_dim))


def _tiles(head_dim: int, element_bytes: int, *, mean_tokens: float) -> tuple[int, int, int, int]:
    """(rows, keys, warps, stages) of a tile.

    Each fits in the 99 KiB of an sm_86, sm_89 or sm_120, and leaves registers for two more programs
    a multiprocessor: one's softmax runs while another's products do.
    """
    block_d = _block_d(head_dim)
    if element_bytes == 4:
        return (32, 32, 8, 1) if block_d > 64 else (64, 32, 8, 1)
    if block_d > 256:
        return 32, 32, 8, 1
    if block_d > 128:
        return 64, 32, 8, 2
    if block_d > 64 or mean_tokens < _LONG_TOKENS:
        return 64, 32, 4, 3
    return 128, 64, 8, 3
