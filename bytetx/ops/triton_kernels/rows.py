"""Kernels on single rows: rotation, gates, the write into the KV cache, pooling."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bytetx.ops.reference import normalize_rows
from bytetx.ops.triton_kernels.activation import activated
from bytetx.ops.triton_kernels.launch import address_or, launch, next_power_of_2

_ROTARY_TOKENS = 16
_GATE_COLUMNS = 512
_POOL_TOKENS, _POOL_COLUMNS = 16, 128


@triton.jit(do_not_specialize=["total_tokens", "num_positions"])
def _rotary_kernel(
    x,
    cos,
    sin,
    position_ids,
    total_tokens,
    x_stride,
    num_positions,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tokens = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    is_token = tokens < total_tokens
    pairs = tl.arange(0, BLOCK)
    mask = is_token[:, None] & (pairs < HALF)[None, :]
    position = tl.load(position_ids + tokens, mask=is_token, other=0)
    position = tl.minimum(tl.maximum(position, 0), num_positions - 1)
    angle = position.to(tl.int64)[:, None] * HALF + pairs[None, :]
    turn_cos = tl.load(cos + angle, mask=mask, other=1.0)
    turn_sin = tl.load(sin + angle, mask=mask, other=0.0)
    row = x + tokens.to(tl.int64)[:, None] * x_stride + tl.program_id(0) * HEAD_DIM
    if INTERLEAVED:
        first, second = row + 2 * pairs[None, :], row + 2 * pairs[None, :] + 1
    else:
        first, second = row + pairs[None, :], row + pairs[None, :] + HALF
    a = tl.load(first, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(second, mask=mask, other=0.0).to(tl.float32)
    tl.store(first, (a * turn_cos - b * turn_sin).to(x.dtype.element_ty), mask=mask)
    tl.store(second, (b * turn_cos + a * turn_sin).to(x.dtype.element_ty), mask=mask)


def rotary(
    x: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor, *, is_interleaved: bool
) -> None:
    """ops.rotary_kv.rotary on checked arguments; a position outside the tables is the nearest."""
    total_tokens, num_heads, head_dim = x.shape
    half = cos.shape[1]
    if x.numel() == 0 or half == 0:
        return
    launch(
        _rotary_kernel,
        (num_heads, triton.cdiv(total_tokens, _ROTARY_TOKENS)),
        x,
        cos,
        sin,
        position_ids,
        total_tokens,
        x.stride(0),
        cos.shape[0],
        HEAD_DIM=head_dim,
        HALF=half,
        INTERLEAVED=is_interleaved,
        TOKENS=_ROTARY_TOKENS,
        BLOCK=next_power_of_2(half),
        num_warps=4,
    )


@triton.jit
def _gate_kernel(
    both, out, n, ACTIVATION: tl.constexpr, GATE_BLOCK: tl.constexpr, COLUMNS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < n
    gate_column = columns // GATE_BLOCK * (2 * GATE_BLOCK) + columns % GATE_BLOCK
    gate = both + row * 2 * n + gate_column
    gates = tl.load(gate, mask=is_column, other=0.0).to(tl.float32)
    values = tl.load(gate + GATE_BLOCK, mask=is_column, other=0.0).to(tl.float32)
    gated = activated(gates, ACTIVATION) * values
    tl.store(out + row * n + columns, gated.to(out.dtype.element_ty), mask=is_column)


def gate_rows(both: Tensor, n: int, *, block: int, activation: str) -> Tensor:
    """act(gates) * values, [m, 2 * n] -> [m, n]; gates and values take turns, `block` of each."""
    out = both.new_empty((both.shape[0], n))
    if out.numel() > 0:
        launch(
            _gate_kernel,
            (both.shape[0], triton.cdiv(n, _GATE_COLUMNS)),
            both,
            out,
            n,
            ACTIVATION=activation,
            GATE_BLOCK=block,
            COLUMNS=_GATE_COLUMNS,
            num_warps=4,
        )
    return out


@triton.jit(do_not_specialize=["num_slots"])
def _write_kv_kernel(
    k,
    v,
    k_cache,
    v_cache,
    slot_mapping,
    k_stride,
    v_stride,
    num_slots,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if (slot < 0) | (slot >= num_slots):
        return
    columns = tl.arange(0, BLOCK)
    mask = columns < ROW
    tl.store(k_cache + slot * ROW + columns, tl.load(k + token * k_stride + columns, mask), mask)
    tl.store(v_cache + slot * ROW + columns, tl.load(v + token * v_stride + columns, mask), mask)


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """ops.paged.write_kv on checked arguments; what is no slot writes nothing."""
    row = k.shape[1] * k.shape[2]
    if k.numel() == 0:
        return
    launch(
        _write_kv_kernel,
        (k.shape[0],),
        k,
        v,
        k_cache,
        v_cache,
        slot_mapping,
        k.stride(0),
        v.stride(0),
        k_cache.shape[0] * k_cache.shape[1],
        ROW=row,
        BLOCK=next_power_of_2(row),
        num_warps=4,
    )


@triton.jit(do_not_specialize=["total_tokens"])
def _pool_kernel(
    x,
    cu_seqlens,
    first_tokens,
    out,
    total_tokens,
    width,
    MODE: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    sequence = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < width
    begin = tl.load(cu_seqlens + sequence)
    end = tl.minimum(tl.load(cu_seqlens + sequence + 1), total_tokens)
    first = begin
    if HAS_FIRST:
        first += tl.load(first_tokens + sequence)
    target = out + sequence.to(tl.int64) * width + columns
    if first >= end:
        tl.store(target, tl.zeros((COLUMNS,), tl.float32), mask=is_column)
        return
    if MODE == "cls" or MODE == "lasttoken":
        row = (first if MODE == "cls" else end - 1).to(tl.int64)
        chosen = tl.load(x + row * width + columns, mask=is_column, other=0.0)
        tl.store(target, chosen.to(tl.float32), mask=is_column)
        return
    if MODE == "max":
        pooled = tl.full((COLUMNS,), float("-inf"), tl.float32)
        nans = tl.zeros((COLUMNS,), tl.int32)
    else:
        pooled = tl.zeros((COLUMNS,), tl.float32)
    for at in range(first, end, TOKENS):
        tokens = at + tl.arange(0, TOKENS)
        mask = (tokens < end)[:, None] & is_column[None, :]
        offsets = tokens.to(tl.int64)[:, None] * width + columns[None, :]
        if MODE == "max":
            rows = tl.load(x + offsets, mask=mask, other=float("-inf")).to(tl.float32)
            pooled = tl.maximum(pooled, tl.max(rows, 0))
            nans += tl.sum(tl.where(rows != rows, 1, 0), 0)
        else:
            rows = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
            if MODE == "weightedmean":
                rows *= (tokens - begin + 1).to(tl.float32)[:, None]
            pooled += tl.sum(rows, 0)
    if MODE == "max":
        pooled = tl.where(nans > 0, float("nan"), pooled)
    elif MODE == "weightedmean":
        # The sum of the weights first - begin + 1 to end - begin.
        count = (end - first).to(tl.float32)
        pooled /= count * ((first - begin + 1).to(tl.float32) + (end - begin).to(tl.float32)) * 0.5
    elif MODE == "mean":
        pooled /= (end - first).to(tl.float32)
    else:
        pooled /= tl.sqrt_rn((end - first).to(tl.float32))
    tl.store(target, pooled, mask=is_column)


def pool(
    x: Tensor, cu_seqlens: Tensor, *, mode: str, first_tokens: Tensor | None, normalize: bool
) -> Tensor:
    """ops.pooling.pool on checked arguments."""
    total_tokens, width = x.shape
    batch_size = cu_seqlens.shape[0] - 1
    out = torch.empty((batch_size, width), dtype=torch.float32, device=x.device)
    if out.numel() == 0:
        return out
    launch(
        _pool_kernel,
        (batch_size, triton.cdiv(width, _POOL_COLUMNS)),
        x,
        cu_seqlens,
        address_or(first_tokens, cu_seqlens),
        out,
        total_tokens,
        width,
        MODE=mode,
        HAS_FIRST=first_tokens is not None,
        TOKENS=_POOL_TOKENS,
        COLUMNS=_POOL_COLUMNS,
        num_warps=4,
    )
    return normalize_rows(out) if normalize else out
