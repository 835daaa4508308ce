"""Causal convolutions of every feature over packed sequences, and what they leave behind."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bytetx.ops.triton_kernels.launch import address_or, launch, next_power_of_2
from bytetx.ops.triton_kernels.sequences import sequence_of

_TOKENS, _CHANNELS = 16, 128
_STATE_CHANNELS = 256


@triton.jit
def _inputs(x, row, channel, mask, x_stride, channels, GATED: tl.constexpr):
    """u of ops.short_conv, in x's dtype, 0 outside the mask."""
    at = x + row.to(tl.int64) * x_stride + channel
    u = tl.load(at, mask=mask, other=0.0)
    if GATED:
        values = tl.load(at + 2 * channels, mask=mask, other=0.0)
        u = (u.to(tl.float32) * values.to(tl.float32)).to(x.dtype.element_ty)
    return u


@triton.jit(do_not_specialize=["batch_size", "total_tokens", "num_steps"])
def _conv_kernel(
    x,
    weight,
    bias,
    out,
    cu_seqlens,
    state,
    slots,
    kv_seqlens,
    batch_size,
    total_tokens,
    num_steps,
    x_stride,
    channels,
    TAPS: tl.constexpr,
    GATED: tl.constexpr,
    SILU: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_PAST: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    is_row, is_channel = token < total_tokens, channel < channels
    sequence = sequence_of(token, cu_seqlens, batch_size, num_steps, 0)
    has_sequence = sequence < batch_size  # not so at padding
    sequence = tl.minimum(sequence, batch_size - 1)
    start = tl.where(has_sequence, tl.load(cu_seqlens + sequence), token)
    if HAS_PAST:
        # The row that the sequence's first token of all would have; that of a step before, or ours.
        first = tl.load(cu_seqlens + sequence + 1) - tl.load(kv_seqlens + sequence)
        first = tl.where(has_sequence & is_row, first, token)
        slot = tl.load(slots + sequence).to(tl.int64)
    sums = tl.zeros((TOKENS, CHANNELS), tl.float32)
    for tap in tl.static_range(TAPS):
        row = token - (TAPS - 1 - tap)
        mask = ((row >= start) & is_row)[:, None] & is_channel
        u = _inputs(x, row[:, None], channel, mask, x_stride, channels, GATED).to(tl.float32)
        if HAS_PAST and tap < TAPS - 1:
            at = slot * (TAPS - 1) + row - start + (TAPS - 1)
            before = state + at[:, None] * channels + channel
            mask = ((row < start) & (row >= first))[:, None] & is_channel
            u += tl.load(before, mask=mask, other=0.0).to(tl.float32)
        w = tl.load(weight + channel * TAPS + tap, mask=is_channel, other=0.0)
        sums += u * w.to(tl.float32)
    if HAS_BIAS:
        sums += tl.load(bias + channel, mask=is_channel, other=0.0).to(tl.float32)
    if SILU:
        sums = sums * tl.sigmoid(sums)
    mask = is_row[:, None] & is_channel
    mixed = sums.to(out.dtype.element_ty)
    if GATED:
        gate = tl.load(
            x + token.to(tl.int64)[:, None] * x_stride + channels + channel, mask=mask, other=0.0
        )
        mixed = (mixed.to(tl.float32) * gate.to(tl.float32)).to(out.dtype.element_ty)
    tl.store(out + token.to(tl.int64)[:, None] * channels + channel, mixed, mask=mask)


@triton.jit
def _state_kernel(
    x,
    cu_seqlens,
    state,
    slots,
    kv_seqlens,
    x_stride,
    channels,
    TAPS: tl.constexpr,
    GATED: tl.constexpr,
    STEPS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """One sequence's state behind its tokens; a program reads all of its part before it writes."""
    sequence = tl.program_id(0)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    step = tl.arange(0, STEPS)[:, None]
    is_state = (step < TAPS - 1) & (channel < channels)
    start, end = tl.load(cu_seqlens + sequence), tl.load(cu_seqlens + sequence + 1)
    row = end - (TAPS - 1) + step
    own = _inputs(x, row, channel, is_state & (row >= start), x_stride, channels, GATED)
    states = state + tl.load(slots + sequence).to(tl.int64) * (TAPS - 1) * channels + channel
    first = end - tl.load(kv_seqlens + sequence)
    before = tl.load(
        states + (row - start + TAPS - 1) * channels,
        mask=is_state & (row < start) & (row >= first),
        other=0.0,
    )
    tl.debug_barrier()
    tl.store(states + step * channels, tl.where(row < start, before, own), mask=is_state)


def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    *,
    is_gated: bool,
    has_silu: bool,
    past: tuple[Tensor, ...],
) -> Tensor:
    """ops.short_conv.short_conv on checked arguments; past: state, slots, kv_seqlens, or none."""
    (channels, taps), (total_tokens, batch_size) = weight.shape, (x.shape[0], len(cu_seqlens) - 1)
    out = torch.empty((total_tokens, channels), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    if batch_size == 0:
        return out.zero_()
    launch(
        _conv_kernel,
        (triton.cdiv(total_tokens, _TOKENS), triton.cdiv(channels, _CHANNELS)),
        x,
        weight,
        address_or(bias, weight),
        out,
        cu_seqlens,
        *(past or (x, cu_seqlens, cu_seqlens)),
        batch_size,
        total_tokens,
        batch_size.bit_length(),
        x.stride(0),
        channels,
        TAPS=taps,
        GATED=is_gated,
        SILU=has_silu,
        HAS_BIAS=bias is not None,
        HAS_PAST=bool(past),
        TOKENS=_TOKENS,
        CHANNELS=_CHANNELS,
        num_warps=4,
    )
    if past and taps > 1:
        launch(
            _state_kernel,
            (batch_size, triton.cdiv(channels, _STATE_CHANNELS)),
            x,
            cu_seqlens,
            *past,
            x.stride(0),
            channels,
            TAPS=taps,
            GATED=is_gated,
            STEPS=next_power_of_2(taps - 1),
            CHANNELS=_STATE_CHANNELS,
            num_warps=4,
        )
    return out
