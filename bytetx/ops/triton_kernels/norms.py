"""Layer norm and RMS norm with a fused residual, and the embedding that ends in a layer norm."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bytetx.ops.triton_kernels.launch import address_or, launch, next_power_of_2

_TILE_ELEMENTS = 4096  # numbers that one program holds at a time


@triton.jit
def _normalized(
    h,
    is_column,
    weight,
    bias,
    columns,
    width,
    eps,
    HAS_BIAS: tl.constexpr,
    IS_RMS: tl.constexpr,
):
    """Rows h [rows, columns] in f32, which are 0 where there is no column."""
    if IS_RMS:
        centered = h
    else:
        mean = tl.sum(h, 1) / width
        centered = tl.where(is_column[None, :], h - mean[:, None], 0.0)
    variance = tl.sum(centered * centered, 1) / width
    # Rounded as 1 / sqrt: the approximate rsqrt is off by more than torch is.
    scale = 1.0 / tl.sqrt_rn(variance + eps)
    w = tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32)
    normalized = centered * scale[:, None] * w[None, :]
    if HAS_BIAS:
        normalized += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    return normalized


@triton.jit(do_not_specialize=["num_rows"])
def _norm_kernel(
    x,
    residual,
    weight,
    bias,
    out,
    sum_out,
    num_rows,
    width,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SUM: tl.constexpr,
    IS_RMS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    is_column = columns < width
    mask = (rows < num_rows)[:, None] & is_column[None, :]
    offsets = rows.to(tl.int64)[:, None] * width + columns[None, :]
    h = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        h += tl.load(residual + offsets, mask=mask, other=0.0).to(tl.float32)
    if HAS_SUM:
        tl.store(sum_out + offsets, h.to(sum_out.dtype.element_ty), mask=mask)
    normalized = _normalized(h, is_column, weight, bias, columns, width, eps, HAS_BIAS, IS_RMS)
    tl.store(out + offsets, normalized.to(out.dtype.element_ty), mask=mask)


def norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    is_rms: bool,
    eps: float,
    residual: Tensor | None,
    out: Tensor,
    sum_out: Tensor | None = None,
) -> Tensor:
    """ops.norm.layer_norm or rms_norm on checked arguments; every row is read before it is written.

    x: [rows, width], at most 65536 wide.
    """
    num_rows, width = x.shape
    if num_rows == 0:
        return out
    rows, block, num_warps = _tile(width)
    launch(
        _norm_kernel,
        (triton.cdiv(num_rows, rows),),
        x,
        address_or(residual, x),
        weight,
        address_or(bias, weight),
        out,
        address_or(sum_out, out),
        num_rows,
        width,
        eps,
        HAS_RESIDUAL=residual is not None,
        HAS_BIAS=bias is not None,
        HAS_SUM=sum_out is not None,
        IS_RMS=is_rms,
        ROWS=rows,
        BLOCK=block,
        num_warps=num_warps,
    )
    return out


@triton.jit
def _table_rows(
    table, ids, tokens, is_token, table_rows, columns, is_column, width, bad_id, NOTES: tl.constexpr
):
    """table[ids] in f32; an id outside it is noted and gives NaN, or is taken as the nearest."""
    row = tl.load(ids + tokens, mask=is_token, other=0)
    nearest = tl.minimum(tl.maximum(row, 0), table_rows - 1)
    mask = is_token[:, None] & is_column[None, :]
    offsets = nearest.to(tl.int64)[:, None] * width + columns[None, :]
    values = tl.load(table + offsets, mask=mask, other=0.0).to(tl.float32)
    if NOTES:
        is_bad = is_token & (row != nearest)
        # Any of them may stay, and none is 0.
        tl.store(bad_id + tl.zeros_like(row), row, mask=is_bad)
        values = tl.where(is_bad[:, None], float("nan"), values)
    return values


@triton.jit(do_not_specialize=["total_tokens", "word_rows", "position_rows", "token_type_rows"])
def _embed_kernel(
    input_ids,
    position_ids,
    token_type_ids,
    word,
    position,
    token_type,
    inputs_embeds,
    weight,
    bias,
    bad_ids,
    out,
    total_tokens,
    width,
    word_rows,
    position_rows,
    token_type_rows,
    eps,
    HAS_EMBEDS: tl.constexpr,
    HAS_POSITION: tl.constexpr,
    HAS_TOKEN_TYPE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NOTES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tokens = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_token = tokens < total_tokens
    columns = tl.arange(0, BLOCK)
    is_column = columns < width
    mask = is_token[:, None] & is_column[None, :]
    offsets = tokens.to(tl.int64)[:, None] * width + columns[None, :]
    if HAS_EMBEDS:
        h = tl.load(inputs_embeds + offsets, mask=mask, other=0.0).to(tl.float32)
    else:
        h = _table_rows(
            word, input_ids, tokens, is_token, word_rows, columns, is_column, width, bad_ids, NOTES
        )
    if HAS_TOKEN_TYPE:
        h += _table_rows(
            token_type, token_type_ids, tokens, is_token, token_type_rows, columns, is_column,
            width, bad_ids + 2, NOTES,
        )  # fmt: skip
    if HAS_POSITION:
        h += _table_rows(
            position, position_ids, tokens, is_token, position_rows, columns, is_column, width,
            bad_ids + 1, NOTES,
        )  # fmt: skip
    if HAS_NORM:
        h = _normalized(h, is_column, weight, bias, columns, width, eps, HAS_BIAS, False)
    tl.store(out + offsets, h.to(out.dtype.element_ty), mask=mask)


def embed(
    ids: tuple[Tensor, Tensor | None, Tensor | None],
    tables: tuple[Tensor, Tensor | None, Tensor | None],
    *,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    eps: float,
    inputs_embeds: Tensor | None,
    bad_ids: Tensor | None,
) -> Tensor:
    """ops.embedding.embed on checked (input, position, token type) ids and tables."""
    input_ids, position_ids, token_type_ids = ids
    word, position, token_type = tables
    total_tokens, width = input_ids.shape[0], word.shape[1]
    out = torch.empty((total_tokens, width), dtype=word.dtype, device=word.device)
    if total_tokens == 0:
        return out
    rows, block, num_warps = _tile(width)
    launch(
        _embed_kernel,
        (triton.cdiv(total_tokens, rows),),
        input_ids,
        address_or(position_ids, input_ids),
        address_or(token_type_ids, input_ids),
        word,
        address_or(position, word),
        address_or(token_type, word),
        address_or(inputs_embeds, word),
        address_or(norm_weight, word),
        address_or(norm_bias, word),
        address_or(bad_ids, input_ids),
        out,
        total_tokens,
        width,
        word.shape[0],
        0 if position is None else position.shape[0],
        0 if token_type is None else token_type.shape[0],
        eps,
        HAS_EMBEDS=inputs_embeds is not None,
        HAS_POSITION=position is not None,
        HAS_TOKEN_TYPE=token_type is not None,
        HAS_NORM=norm_weight is not None,
        HAS_BIAS=norm_bias is not None,
        NOTES=bad_ids is not None,
        ROWS=rows,
        BLOCK=block,
        num_warps=num_warps,
    )
    return out


def _tile(width: int) -> tuple[int, int, int]:
    """(rows, columns, warps) of a program: whole rows, several where they are short."""
    block = max(16, next_power_of_2(width))
    rows = max(1, min(8, _TILE_ELEMENTS // block))
    return rows, block, min(16, max(4, rows * block // 1024))
