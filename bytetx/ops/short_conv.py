"""Causal convolution of each feature over the tokens of packed sequences, with or without gates."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bytetx.ops import triton_backend
from bytetx.ops.check import require_tensor
from bytetx.ops.registry import Operation

# Shape class: dtype.  run(x, weight, bias, batch, is_gated, silu) on checked arguments.
SHORT_CONV = Operation("short_conv")
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_INT32 = (torch.int32,)


@dataclass(frozen=True, slots=True)
class ConvPast:
    """The rows that earlier steps left of each sequence's last tokens.

    state: [num_slots, taps - 1, channels], the convolution's inputs of the last tokens, in order.
    slots: int32 [batch_size], the row of `state` that belongs to each sequence.
    kv_seqlens: int32 [batch_size], tokens of each sequence, this step's included; a sequence of
    which they are all starts from zeros, whatever its row holds.
    """

    state: Tensor
    slots: Tensor
    kv_seqlens: Tensor


def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    *,
    is_gated: bool = False,
    has_silu: bool = False,
    past: ConvPast | None = None,
) -> Tensor:
    """act(sum over j of weight[:, j] * u[t - taps + 1 + j] + bias); u is 0 before a sequence.

    x: [total_tokens, channels or more], rows with any stride.  is_gated: x holds gates b and c and
    values, in this order, channels of each; then u = b * values, and the result is times c.
    weight: [channels, taps] in x's dtype.  bias: [channels].  cu_seqlens: int32 [batch_size + 1].
    has_silu: act is SiLU, else nothing.  past: where sequences continue; its state becomes that
    behind this step's tokens.  Sums are in f32, u has x's dtype.
    Returns a new [total_tokens, channels] in x's dtype; rows behind the last sequence are finite
    where x's are, and otherwise arbitrary.  Raises ValueError on shape, dtype or device mismatch.
    Source: LFM2 (arXiv 2511.23404), section 2; Mamba (2312.00752) for the one without gates.
    """
    channels, taps = weight.shape
    device, dtype = x.device, x.dtype
    require_tensor("x", x, shape=(None, None), dtypes=_FLOATS)
    if x.shape[1] < (3 if is_gated else 1) * channels or x.stride(1) != 1:
        raise ValueError(
            f"x must have rows of {3 if is_gated else 1} * {channels} adjacent features or more, "
            f"got {tuple(x.shape)} of strides {x.stride()}"
        )
    require_tensor("weight", weight, shape=(channels, taps), dtypes=(dtype,), device=device)
    if bias is not None:
        require_tensor("bias", bias, shape=(channels,), dtypes=(dtype,), device=device)
    require_tensor("cu_seqlens", cu_seqlens, shape=(None,), dtypes=_INT32, device=device)
    if past is not None:
        batch_size = cu_seqlens.shape[0] - 1
        shape = (None, taps - 1, channels)
        require_tensor("past.state", past.state, shape=shape, dtypes=(dtype,), device=device)
        for name, t in (("slots", past.slots), ("kv_seqlens", past.kv_seqlens)):
            require_tensor(f"past.{name}", t, shape=(batch_size,), dtypes=_INT32, device=device)
    mixed: Tensor = SHORT_CONV.choose(device, dtype).run(
        x, weight, bias, cu_seqlens, is_gated, has_silu, past
    )
    return mixed


@SHORT_CONV.triton_kernel(beside="")
def _run_triton(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    is_gated: bool,
    has_silu: bool,
    past: ConvPast | None,
) -> Tensor:
    states = () if past is None else (past.state, past.slots, past.kv_seqlens)
    mixed: Tensor = triton_backend.kernels(x.device).short_conv(
        x, weight, bias, cu_seqlens, is_gated=is_gated, has_silu=has_silu, past=states
    )
    return mixed


@SHORT_CONV.in_torch()
def _run_torch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    is_gated: bool,
    has_silu: bool,
    past: ConvPast | None,
) -> Tensor:
    """Each sequence with what came before it in front: a shift then is one for all sequences."""
    channels, taps = weight.shape
    total_tokens, batch_size, before = x.shape[0], cu_seqlens.shape[0] - 1, taps - 1
    if total_tokens == 0 or batch_size == 0:
        return x.new_zeros((total_tokens, channels))
    u = x[:, :channels]
    if is_gated:
        u = u * x[:, 2 * channels : 3 * channels]
    at = torch.arange(total_tokens, device=x.device)
    sequence = torch.searchsorted(cu_seqlens, at, right=True, out_int32=True)
    rows = at + sequence.clamp(1, batch_size) * before  # each token's place behind what is in front
    ends = cu_seqlens[1:].long() + torch.arange(1, batch_size + 1, device=x.device) * before
    steps = torch.arange(before, device=x.device)
    extended = u.new_zeros((total_tokens + batch_size * before, channels))
    extended[rows] = u
    if past is not None:
        continues = past.kv_seqlens > cu_seqlens.diff()
        # A row of a sequence that starts may hold anything, NaN among it.
        state = past.state[past.slots].masked_fill_(~continues[:, None, None], 0)
        starts = cu_seqlens[:-1].long() + torch.arange(batch_size, device=x.device) * before
        extended[starts[:, None] + steps] = state
    sums = torch.zeros((total_tokens, channels), device=x.device)
    for tap in range(taps):
        # In two steps: with one, a row's bits depend on where it lies in the processor's vectors.
        sums += extended[rows - (before - tap)].float() * weight[:, tap].float()
    if bias is not None:
        sums += bias.float()
    if past is not None:
        past.state[past.slots] = extended[ends[:, None] - before + steps]
    mixed = F.silu(sums).to(x.dtype) if has_silu else sums.to(x.dtype)
    return mixed.mul_(x[:, channels : 2 * channels]) if is_gated else mixed
