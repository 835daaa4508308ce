"""Keys and values in FP8 (ops/kv_codes.py) by integer operations, as GPUs before Ada need it."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bytetx.ops.kv_codes import LARGEST_SCALE, LEAST_SCALE, NAN_SCALE
from bytetx.ops.triton_kernels.launch import launch, next_power_of_2

_LEAST = tl.constexpr(LEAST_SCALE)
_LARGEST = tl.constexpr(LARGEST_SCALE)
_NAN = tl.constexpr(NAN_SCALE)


@triton.jit
def restored_rows(codes, scales, DTYPE: tl.constexpr):
    """uint8 [rows, features], uint8 [rows] -> DTYPE [rows, features]."""
    wide = codes.to(tl.int32)
    # A code's seven bits are those of an f16 that is 2^8 times too small.
    half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    exponents = tl.minimum(scales.to(tl.int32) + 8, 255)
    factors = (exponents << 23).to(tl.float32, bitcast=True)
    values = half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return (values * factors[:, None]).to(DTYPE)


@triton.jit(do_not_specialize=["table_stride", "num_columns"])
def _restore_kernel(
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    page_table,
    kv_seqlens,
    k_pages,
    v_pages,
    table_stride,
    num_columns,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    sequence, column = tl.program_id(0) // num_columns, tl.program_id(0) % num_columns
    head = tl.program_id(1)
    num_keys = tl.load(kv_seqlens + sequence) - column * PAGE_SIZE
    if num_keys <= 0:
        return
    page = tl.load(page_table + sequence * table_stride + column).to(tl.int64)
    if page < 0:
        return
    tokens, features = tl.arange(0, PAGE_SIZE), tl.arange(0, BLOCK)
    in_row = features[None, :] < HEAD_DIM
    is_key = (tokens[:, None] < num_keys) & in_row
    rows = (tokens * NUM_HEADS + head)[:, None] * HEAD_DIM + features[None, :]
    size = PAGE_SIZE * NUM_HEADS * HEAD_DIM
    scales = (page * NUM_HEADS + head) * PAGE_SIZE + tokens
    target = tl.program_id(0).to(tl.int64) * size + rows
    k = tl.load(k_cache + page * size + rows, mask=is_key, other=0)
    v = tl.load(v_cache + page * size + rows, mask=is_key, other=0)
    # What is no key is 0, whatever the scale says.
    k_scale = tl.load(k_scales + scales, mask=tokens < num_keys, other=127)
    v_scale = tl.load(v_scales + scales, mask=tokens < num_keys, other=127)
    dtype: tl.constexpr = k_pages.dtype.element_ty
    tl.store(k_pages + target, restored_rows(k, k_scale, dtype), mask=in_row)
    tl.store(v_pages + target, restored_rows(v, v_scale, dtype), mask=in_row)


def restore_pages(
    k_cache: Tensor,
    v_cache: Tensor,
    k_scales: Tensor,
    v_scales: Tensor,
    page_table: Tensor,
    kv_seqlens: Tensor,
    *,
    num_columns: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Keys and values of the first num_columns pages of each sequence, one sequence's pages behind
    the other's: two of [batch_size * num_columns, page_size, num_kv_heads, head_dim], in dtype.

    Pages without keys, or with a negative number, are left as they were allocated.
    """
    _, page_size, num_heads, head_dim = k_cache.shape
    shape = (len(kv_seqlens) * num_columns, page_size, num_heads, head_dim)
    k_pages, v_pages = (torch.empty(shape, dtype=dtype, device=k_cache.device) for _ in range(2))
    launch(
        _restore_kernel,
        (shape[0], num_heads),
        k_cache,
        v_cache,
        k_scales,
        v_scales,
        page_table,
        kv_seqlens,
        k_pages,
        v_pages,
        page_table.stride(0),
        num_columns,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        PAGE_SIZE=page_size,
        BLOCK=next_power_of_2(head_dim),
        num_warps=4,
    )
    return k_pages, v_pages


@triton.jit
def _store_codes(x, codes, scale, features, HEAD_DIM: tl.constexpr):
    """One vector x, zeros past HEAD_DIM, to the codes and the scale at these addresses."""
    sizes = x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest = tl.max(sizes, 0)  # as of numbers; NaN is above all
    # A significand above 1.75 (448 is 1.75 * 2^8) carries into the exponent.
    exponent = ((largest + 0x1FFFFF) >> 23) - 8
    exponent = tl.minimum(tl.maximum(exponent, _LEAST), _LARGEST)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    size = tl.minimum(sizes.to(tl.float32, bitcast=True) * inverse, 448.0)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 codes are multiples of 2^-9, the distance of f32 numbers from 2^14 on.
    small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0.015625, small, normal)
    is_negative = x.to(tl.float32).to(tl.int32, bitcast=True) < 0
    code = tl.where(is_negative, code | 0x80, code)
    tl.store(codes + features, code.to(tl.uint8), mask=features < HEAD_DIM)
    kept = tl.where(largest >= 0x7F800000, _NAN, exponent)
    tl.store(scale, kept.to(tl.uint8))


@triton.jit(do_not_specialize=["num_slots"])
def _write_codes_kernel(
    k,
    v,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    slot_mapping,
    k_stride,
    v_stride,
    num_slots,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if (slot < 0) | (slot >= num_slots):
        return
    features = tl.arange(0, BLOCK)
    mask = features < HEAD_DIM
    own_k = tl.load(k + token * k_stride + head * HEAD_DIM + features, mask, other=0.0)
    own_v = tl.load(v + token * v_stride + head * HEAD_DIM + features, mask, other=0.0)
    row = (slot * NUM_HEADS + head) * HEAD_DIM
    scale = (slot // PAGE_SIZE * NUM_HEADS + head) * PAGE_SIZE + slot % PAGE_SIZE
    _store_codes(own_k, k_cache + row, k_scales + scale, features, HEAD_DIM)
    _store_codes(own_v, v_cache + row, v_scales + scale, features, HEAD_DIM)


def write_codes(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scales: Tensor,
    v_scales: Tensor,
) -> None:
    """ops.paged.write_kv with scales, on checked arguments; what is no slot writes nothing."""
    total_tokens, num_heads, head_dim = k.shape
    if k.numel() == 0:
        return
    num_pages, page_size = k_cache.shape[:2]
    launch(
        _write_codes_kernel,
        (total_tokens, num_heads),
        k,
        v,
        k_cache,
        v_cache,
        k_scales,
        v_scales,
        slot_mapping,
        k.stride(0),
        v.stride(0),
        num_pages * page_size,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        PAGE_SIZE=page_size,
        BLOCK=next_power_of_2(head_dim),
        num_warps=1,
    )
