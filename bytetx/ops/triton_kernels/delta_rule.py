"""The gated delta rule of packed sequences in chunks, one token's step of it, and its gated norm.

Chunks do not wait for each other but for the state, so that two kernels follow one another. The
first solves the triangular system of every chunk of all sequences. The second carries each
sequence's state from chunk to chunk; what scales a row is left to it, so that it multiplies q and k
as they are in memory.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bytetx.ops.delta_chunk import CHUNK
from bytetx.ops.triton_kernels.launch import has_tensor_descriptors, launch, next_power_of_2
from bytetx.ops.triton_kernels.sequences import sequence_of

_EPS = 1e-6  # beside the square of a key's or query's length
# Features of a head's values in a program: of a step, and of the scan in half types and in f32.
_STEP_COLUMNS, _COLUMNS, _F32_COLUMNS = 32, 64, 32
_NORM_ELEMENTS = 2048
# Of the small blocks of the inverse, and of an operand of a product.
# ptxas 12.8 gives narrower products on Hopper the descriptors of other operands.
_SIDE, _LEAST_WIDTH = 16, 64


@triton.jit
def _doubled(x, a, size, i, j, INNER: tl.constexpr, PRECISION: tl.constexpr):
    """Inverses of blocks of 2 * size on the diagonal of I + a, from those of `size`."""
    is_beside = (i // (2 * size) == j // (2 * size)) & (i // size != j // size)
    own = x.to(INNER)
    right = tl.dot(tl.where(is_beside, a, 0.0).to(INNER), own, input_precision=PRECISION)
    return x - tl.dot(own, right.to(INNER), input_precision=PRECISION)


@triton.jit
def _inverse(
    a,
    INNER: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCK_LEVELS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """(I + a)^-1 of a strictly lower triangular a, f32 [CHUNK, CHUNK], whose elements are within 1.

    By blocks on the diagonal, each inverse made of two of half its size: as stable as solving row
    by row, which powers of a are not. The elements of all of them are within 1, so that INNER, f16,
    holds them as well as TF32. Up to BLOCK, the blocks are multiplied side by side.
    """
    COUNT: tl.constexpr = CHUNK // BLOCK
    block = tl.arange(0, COUNT)
    is_own = block[:, None, None, None] == block[None, None, :, None]
    own = tl.sum(tl.where(is_own, tl.reshape(a, (COUNT, BLOCK, COUNT, BLOCK)), 0.0), 2)
    i, j = tl.arange(0, BLOCK)[None, :, None], tl.arange(0, BLOCK)[None, None, :]
    x = tl.where(i == j, 1.0, 0.0) - tl.where(i // 2 == j // 2, own, 0.0)
    for level in tl.static_range(1, BLOCK_LEVELS):
        x = _doubled(x, own, 1 << level, i, j, INNER, PRECISION)
    x = tl.reshape(tl.where(is_own, x[:, :, None, :], 0.0), (CHUNK, CHUNK))
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    for level in tl.static_range(BLOCK_LEVELS, LEVELS):
        x = _doubled(x, a, 1 << level, i, j, INNER, PRECISION)
    return x


@triton.jit
def _gates(decay, beta, rates, decay_bias, row, head, decay_stride, beta_stride):
    """(logarithms of the decays, betas), f32 of each row."""
    x = tl.load(decay + row * decay_stride + head).to(tl.float32) + tl.load(decay_bias + head)
    softplus = tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))
    b = tl.load(beta + row * beta_stride + head).to(tl.float32)
    return softplus * tl.load(rates + head), tl.sigmoid(b)


@triton.jit(do_not_specialize=["batch_size", "total_tokens", "num_steps", "num_blocks"])
def _delta_chunk_kernel(
    q,
    k,
    v,
    decay,
    beta,
    rates,
    decay_bias,
    new,
    read,
    within,
    scales,
    kept,
    out,
    cu_seqlens,
    batch_size,
    total_tokens,
    num_steps,
    num_blocks,
    q_stride,
    k_stride,
    v_stride,
    decay_stride,
    beta_stride,
    eps,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCK_LEVELS: tl.constexpr,
    INNER: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One chunk of one head: `new` - `read` @ (state before) are the rows that it writes."""
    head, block = tl.program_id(0) % HEADS, tl.program_id(0) // HEADS
    sequence = sequence_of(block, cu_seqlens, batch_size, num_steps, CHUNK)
    start = tl.load(cu_seqlens + sequence)
    first = start + (block - (start // CHUNK + sequence)) * CHUNK
    at, feature, column = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    row = (first + at).to(tl.int64)
    values = (row[:, None] * HEADS + head) * V_DIM + column[None, :]
    if sequence >= batch_size:  # padding
        mask = (row < total_tokens)[:, None] & (column < V_DIM)[None, :]
        tl.store(out + values, tl.zeros((CHUNK, BLOCK_V), out.dtype.element_ty), mask=mask)
        return
    end = tl.load(cu_seqlens + sequence + 1)
    if first >= end:
        return
    is_row = row < end
    present = tl.minimum(row, end - 1)
    logs, b = _gates(decay, beta, rates, decay_bias, present, head, decay_stride, beta_stride)
    logs, b = tl.where(is_row, logs, 0.0), tl.where(is_row, b, 0.0)
    sums, all_logs = tl.cumsum(logs, 0), tl.sum(logs, 0)
    is_key = is_row[:, None] & (feature < K_DIM)[None, :]
    of_key = head // GROUP * K_DIM + feature[None, :]
    keys = tl.load(k + row[:, None] * k_stride + of_key, mask=is_key, other=0.0)
    queries = tl.load(q + row[:, None] * q_stride + of_key, mask=is_key, other=0.0)
    wide = keys.to(tl.float32)
    k_unit = tl.rsqrt(tl.sum(wide * wide, 1) + eps)
    wide = queries.to(tl.float32)
    q_unit = tl.rsqrt(tl.sum(wide * wide, 1) + eps) * tl.rsqrt(K_DIM + 0.0)
    i, j = at[:, None], at[None, :]
    # Rows behind the sequence's last have exponents of 0 and keys of 0.
    between = tl.where(i >= j, tl.exp(tl.where(i >= j, sums[:, None] - sums[None, :], 0.0)), 0.0)
    between *= k_unit[None, :]
    keys_t = tl.trans(keys)
    attended = tl.dot(queries, keys_t, input_precision=PRECISION) * between * q_unit[:, None]
    triangle = (row[:, None] * HEADS + head) * CHUNK + j
    tl.store(within + triangle, attended.to(within.dtype.element_ty), mask=is_row[:, None])
    system = tl.dot(keys, keys_t, input_precision=PRECISION) * between * (k_unit * b)[:, None]
    system = tl.where(i > j, system, 0.0)
    solved = _inverse(system, INNER, CHUNK, BLOCK, LEVELS, BLOCK_LEVELS, PRECISION)
    dtype = new.dtype.element_ty
    is_value = is_row[:, None] & (column < V_DIM)[None, :]
    of_value = head * V_DIM + column[None, :]
    rows = tl.load(v + row[:, None] * v_stride + of_value, mask=is_value, other=0.0)
    u = tl.dot((solved * b[None, :]).to(dtype), rows, input_precision=PRECISION)
    tl.store(new + values, u.to(dtype), mask=is_value)
    faded = (solved * (b * k_unit * tl.exp(sums))[None, :]).to(dtype)
    w = tl.dot(faded, keys, input_precision=PRECISION)
    at_read = (row[:, None] * HEADS + head) * K_DIM + feature[None, :]
    tl.store(read + at_read, w.to(dtype), mask=is_key)
    scale = scales + head.to(tl.int64) * total_tokens + row
    tl.store(scale, q_unit * tl.exp(sums), mask=is_row)
    k_scales = scale + HEADS * total_tokens.to(tl.int64)
    tl.store(k_scales, k_unit * tl.exp(all_logs - sums), mask=is_row)
    tl.store(kept + head * num_blocks + block, tl.exp(all_logs))


@triton.jit(do_not_specialize=["batch_size", "total_tokens", "num_blocks"])
def _delta_scan_kernel(
    q,
    k,
    new,
    read,
    within,
    scales,
    kept,
    out,
    cu_seqlens,
    memory,
    slots,
    kv_seqlens,
    total_tokens,
    num_blocks,
    q_stride,
    k_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_PAST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A sequence's chunks in order, for some features of a head's values."""
    program = tl.program_id(0)
    column = program % PARTS * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    head, sequence = program // PARTS % HEADS, program // (PARTS * HEADS)
    start, end = tl.load(cu_seqlens + sequence), tl.load(cu_seqlens + sequence + 1)
    if start == end:
        return
    at, feature = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    is_column, is_feature = column < V_DIM, feature < K_DIM
    state = tl.zeros((BLOCK_K, COLUMNS), tl.float32)
    if HAS_PAST:
        slot = tl.load(slots + sequence).to(tl.int64)
        places = memory + (slot * HEADS + head) * K_DIM * V_DIM + feature[:, None] * V_DIM + column
        is_place = is_feature[:, None] & is_column
        if tl.load(kv_seqlens + sequence) > end - start:
            state = tl.load(places, mask=is_place, other=0.0)
    dtype = q.dtype.element_ty
    of_key = head // GROUP * K_DIM + feature
    block = head * num_blocks + start // CHUNK + sequence
    for first in range(start, end, CHUNK):
        row = (first + at).to(tl.int64)
        is_row = row < end
        is_key, is_value = is_row[:, None] & is_feature[None, :], is_row[:, None] & is_column
        place = row[:, None] * HEADS + head
        before = state.to(dtype)
        w = tl.load(read + place * K_DIM + feature[None, :], mask=is_key, other=0.0)
        written = tl.load(new + place * V_DIM + column, mask=is_value, other=0.0).to(tl.float32)
        written -= tl.dot(w, before, input_precision=PRECISION)
        queries = tl.load(q + row[:, None] * q_stride + of_key[None, :], mask=is_key, other=0.0)
        mixed = tl.dot(queries, before, input_precision=PRECISION)
        scale = scales + head.to(tl.int64) * total_tokens + row
        mixed *= tl.load(scale, mask=is_row, other=0.0)[:, None]
        attended = tl.load(within + place * CHUNK + at[None, :], mask=is_row[:, None], other=0.0)
        mixed = tl.dot(attended, written.to(dtype), acc=mixed, input_precision=PRECISION)
        tl.store(out + place * V_DIM + column, mixed.to(dtype), mask=is_value)
        keys_t = tl.load(
            k + row[None, :] * k_stride + of_key[:, None],
            mask=is_row[None, :] & is_feature[:, None],
            other=0.0,
        )
        k_scales = tl.load(scale + HEADS * total_tokens.to(tl.int64), mask=is_row, other=0.0)
        faded = (written * k_scales[:, None]).to(dtype)
        state *= tl.load(kept + block)
        state = tl.dot(keys_t, faded, acc=state, input_precision=PRECISION)
        block += 1
    if HAS_PAST:
        tl.store(places, state, mask=is_place)


@triton.jit(do_not_specialize=["batch_size"])
def _delta_step_kernel(
    q,
    k,
    v,
    decay,
    beta,
    rates,
    decay_bias,
    out,
    cu_seqlens,
    memory,
    slots,
    kv_seqlens,
    batch_size,
    q_stride,
    k_stride,
    v_stride,
    decay_stride,
    beta_stride,
    eps,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """One token of a sequence that has no other, for some features of a head's values."""
    program = tl.program_id(0)
    column = program % PARTS * COLUMNS + tl.arange(0, COLUMNS)
    head, sequence = program // PARTS % HEADS, program // (PARTS * HEADS)
    start, end = tl.load(cu_seqlens + sequence), tl.load(cu_seqlens + sequence + 1)
    feature = tl.arange(0, BLOCK_K)
    is_column, is_key = column < V_DIM, feature < K_DIM
    if sequence >= tl.load(cu_seqlens + batch_size):  # padding has rows that no sequence has
        nothing = tl.zeros((COLUMNS,), out.dtype.element_ty)
        place = (sequence.to(tl.int64) * HEADS + head) * V_DIM + column
        tl.store(out + place, nothing, mask=is_column)
    if start == end:
        return
    slot = tl.load(slots + sequence).to(tl.int64)
    base = memory + (slot * HEADS + head) * K_DIM * V_DIM
    places = base + feature[:, None] * V_DIM + column[None, :]
    is_place = is_key[:, None] & is_column[None, :]
    state = tl.zeros((BLOCK_K, COLUMNS), tl.float32)
    if tl.load(kv_seqlens + sequence) > 1:
        state = tl.load(places, mask=is_place, other=0.0)
    row = start.to(tl.int64)
    of_key = head // GROUP * K_DIM + feature
    key = tl.load(k + row * k_stride + of_key, mask=is_key, other=0.0).to(tl.float32)
    query = tl.load(q + row * q_stride + of_key, mask=is_key, other=0.0).to(tl.float32)
    key *= tl.rsqrt(tl.sum(key * key) + eps)
    query *= tl.rsqrt(tl.sum(query * query) + eps) * tl.rsqrt(K_DIM + 0.0)
    value = tl.load(v + row * v_stride + head * V_DIM + column, mask=is_column, other=0.0)
    logs, b = _gates(decay, beta, rates, decay_bias, row, head, decay_stride, beta_stride)
    state *= tl.exp(logs)
    change = (value.to(tl.float32) - tl.sum(state * key[:, None], 0)) * b
    state += key[:, None] * change[None, :]
    tl.store(places, state, mask=is_place)
    mixed = tl.sum(state * query[:, None], 0).to(out.dtype.element_ty)
    tl.store(out + (row * HEADS + head) * V_DIM + column, mixed, mask=is_column)


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    rates: Tensor,
    decay_bias: Tensor,
    cu_seqlens: Tensor,
    *,
    has_one_token: bool,
    past: tuple[Tensor, ...],
) -> Tensor:
    """ops.delta_rule.gated_delta_rule on checked arguments.

    has_one_token: no sequence has more.  past: memory, slots, kv_seqlens, or none.
    """
    (total_tokens, heads, v_dim), (_, k_heads, k_dim) = v.shape, k.shape
    batch_size = len(cu_seqlens) - 1
    out = torch.empty((total_tokens, heads, v_dim), dtype=v.dtype, device=v.device)
    if out.numel() == 0:
        return out
    if batch_size == 0:
        return out.zero_()
    gates = (decay, beta, rates, decay_bias)
    strides = tuple(x.stride(0) for x in (q, k, v, decay, beta))
    is_half = v.dtype != torch.float32
    block_k, block_v = (
        max(next_power_of_2(dim), _LEAST_WIDTH if is_half else _SIDE) for dim in (k_dim, v_dim)
    )
    sizes = {"HEADS": heads, "GROUP": heads // k_heads, "K_DIM": k_dim, "V_DIM": v_dim}
    sizes["BLOCK_K"] = block_k
    if has_one_token and past and total_tokens == batch_size:
        _run_step(q, k, v, gates, out, cu_seqlens, past, strides, sizes)
        return out
    num_blocks = total_tokens // CHUNK + batch_size + 1
    new, read, within = (
        torch.empty((total_tokens, heads, width), dtype=v.dtype, device=v.device)
        for width in (v_dim, k_dim, CHUNK)
    )
    scales = torch.empty((2, heads, total_tokens), device=v.device)
    kept = torch.empty((heads, num_blocks), device=v.device)
    precision = "ieee" if is_half else "tf32x3"
    launch(
        _delta_chunk_kernel,
        (heads * num_blocks,),
        q,
        k,
        v,
        *gates,
        new,
        read,
        within,
        scales,
        kept,
        out,
        cu_seqlens,
        batch_size,
        total_tokens,
        batch_size.bit_length(),
        num_blocks,
        *strides,
        _EPS,
        **sizes,
        BLOCK_V=block_v,
        CHUNK=CHUNK,
        BLOCK=_SIDE,
        LEVELS=CHUNK.bit_length() - 1,
        BLOCK_LEVELS=_SIDE.bit_length() - 1,
        INNER=tl.float16 if is_half else tl.float32,
        PRECISION=precision,
        num_warps=4,
    )
    solved = (new, read, within, scales, kept)
    _run_scan(q, k, solved, out, cu_seqlens, past, sizes, precision=precision)
    return out


def _run_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: tuple[Tensor, ...],
    out: Tensor,
    cu_seqlens: Tensor,
    past: tuple[Tensor, ...],
    strides: tuple[int, ...],
    sizes: dict[str, int],
) -> None:
    """One token of each sequence.  strides: between rows of q, k, v and the gates of tokens."""
    batch_size, parts = len(cu_seqlens) - 1, triton.cdiv(v.shape[2], _STEP_COLUMNS)
    launch(
        _delta_step_kernel,
        (parts * v.shape[1] * batch_size,),
        q,
        k,
        v,
        *gates,
        out,
        cu_seqlens,
        *past,
        batch_size,
        *strides,
        _EPS,
        **sizes,
        COLUMNS=_STEP_COLUMNS,
        PARTS=parts,
        num_warps=4,
    )


def _run_scan(
    q: Tensor,
    k: Tensor,
    solved: tuple[Tensor, ...],
    out: Tensor,
    cu_seqlens: Tensor,
    past: tuple[Tensor, ...],
    sizes: dict[str, int],
    *,
    precision: str,
) -> None:
    """The chunks of each sequence in order.  solved: what _delta_chunk_kernel wrote of them."""
    total_tokens, heads, v_dim = out.shape
    *_, scales, kept = solved
    count = heads * (len(cu_seqlens) - 1)
    columns, num_stages = _COLUMNS, 3 if has_tensor_descriptors(out.device) else 1
    if out.dtype == torch.float32:
        columns, num_stages = _F32_COLUMNS, 1
    parts = triton.cdiv(v_dim, columns)
    launch(
        _delta_scan_kernel,
        (parts * count,),
        q,
        k,
        *solved,
        out,
        cu_seqlens,
        *(past or (scales, cu_seqlens, cu_seqlens)),
        total_tokens,
        kept.shape[1],
        q.stride(0),
        k.stride(0),
        **sizes,
        COLUMNS=columns,
        PARTS=parts,
        CHUNK=CHUNK,
        HAS_PAST=bool(past),
        PRECISION=precision,
        num_warps=4,
        num_stages=num_stages,
    )


@triton.jit(do_not_specialize=["num_rows"])
def _gated_norm_kernel(
    x,
    gate,
    weight,
    out,
    num_rows,
    gate_stride,
    eps,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, COLUMNS)[None, :]
    mask = (row < num_rows)[:, None] & (column < WIDTH)
    place = row[:, None] * WIDTH + column
    values = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 1) / WIDTH + eps)
    w = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    gates = gate + (row // HEADS)[:, None] * gate_stride + (row % HEADS)[:, None] * WIDTH + column
    g = tl.load(gates, mask=mask, other=0.0).to(tl.float32)
    normed = values * scale[:, None] * w * (g * tl.sigmoid(g))
    tl.store(out + place, normed.to(out.dtype.element_ty), mask=mask)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """ops.delta_rule.gated_norm on checked arguments."""
    total_tokens, heads, width = x.shape
    out = torch.empty((total_tokens, heads * width), dtype=gate.dtype, device=gate.device)
    if out.numel() == 0:
        return out
    columns = next_power_of_2(width)
    rows = max(_NORM_ELEMENTS // columns, 1)
    launch(
        _gated_norm_kernel,
        (triton.cdiv(total_tokens * heads, rows),),
        x,
        gate,
        weight,
        out,
        total_tokens * heads,
        gate.stride(0),
        eps,
        HEADS=heads,
        WIDTH=width,
        ROWS=rows,
        COLUMNS=columns,
        num_warps=4,
    )
    return out
