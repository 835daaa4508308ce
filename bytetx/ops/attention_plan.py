"""Planned attention: the Hopper kernel, and the plan of a batch that all its layers share."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from bytetx.ops import native

_HALF_DTYPES = (torch.float16, torch.bfloat16)
_MAX_HEAD_DIM = 256
_ALIGNMENT_BYTES = 16


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Which rows each tile of the attention kernel owns; made by plan_attention, on the device.

    buffer: uint8, in the layout of csrc/cuda/attention_plan.cuh.  tile_rows: token rows a tile
    holds.  The rest is what the plan was made for and holds for.  A kernel counts in the buffer, so
    the calls that share a plan run one after the other, as in one stream.
    """

    buffer: Tensor
    tile_rows: int
    batch_size: int
    total_tokens: int
    causal: bool
    window: int


def plan_attention(
    cu_seqlens: Tensor,
    *,
    total_tokens: int,
    head_dim: int,
    causal: bool = False,
    window: int = 0,
    has_bias: bool = False,
    softcap: float = 0.0,
) -> AttentionPlan | None:
    """Plans one batch for varlen_attention; None where no kernel takes a plan, or nothing to do.

    cu_seqlens: int32 [batch_size + 1].  total_tokens: rows of q; where it is more than
    cu_seqlens[-1], the rows past that are padding, which no sequence reads and nobody writes.
    causal, window, head_dim, has_bias, softcap: as the calls that will use the plan.
    Costs one small kernel and no synchronisation, so that a captured graph can hold it.
    """
    batch_size = cu_seqlens.shape[0] - 1
    if not has_planned_kernel(cu_seqlens.device) or batch_size == 0 or total_tokens == 0:
        return None
    kernels = _kernels(cu_seqlens.device)
    # Wide tiles have no kernel that changes scores: a head_dim of 0 asks for narrow ones.
    is_plain = not has_bias and softcap == 0
    tile_rows = kernels.tile_rows(batch_size, total_tokens, head_dim if is_plain else 0)
    num_bytes = kernels.plan_bytes(batch_size, total_tokens, tile_rows)
    buffer = torch.empty(num_bytes, dtype=torch.uint8, device=cu_seqlens.device)
    kernels.plan(
        cu_seqlens.data_ptr(),
        buffer.data_ptr(),
        num_bytes,
        batch_size,
        total_tokens,
        tile_rows,
        window,
        causal,
        *native.launch_args(cu_seqlens.device),
    )
    return AttentionPlan(buffer, tile_rows, batch_size, total_tokens, causal, window)


def takes_plan(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float) -> bool:
    """Whether the planned kernel computes this call."""
    head_dim = q.shape[2]
    if not (q.is_cuda and q.dtype in _HALF_DTYPES and 0 < head_dim <= _MAX_HEAD_DIM):
        return False
    # Each of these is 0 where it is a multiple of 16 bytes: one test instead of seven, for this is
    # on the way of every call.
    offsets = q.data_ptr() | k.data_ptr() | v.data_ptr()
    elements = head_dim | q.stride(0) | k.stride(0) | v.stride(0)
    is_aligned = (offsets | 2 * elements) % _ALIGNMENT_BYTES == 0
    return is_aligned and softmax_scale > 0 and has_planned_kernel(q.device)


def run_planned(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: AttentionPlan,
    *,
    softmax_scale: float,
    softcap: float,
    relative_bias: Tensor | None,
    bias_positions: Tensor | None,
    out: Tensor | None,
) -> Tensor:
    """The Hopper kernel on checked arguments that takes_plan accepts."""
    total_tokens, num_heads, head_dim = q.shape
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    _kernels(q.device).attention(
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        out.data_ptr(),
        plan.buffer.data_ptr(),
        0 if relative_bias is None else relative_bias.data_ptr(),
        0 if bias_positions is None else bias_positions.data_ptr(),
        plan.batch_size,
        total_tokens,
        plan.tile_rows,
        num_heads,
        k.shape[1],
        head_dim,
        0 if relative_bias is None else (relative_bias.shape[1] + 1) // 2,
        plan.window,
        plan.causal,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        num_heads * head_dim,
        softmax_scale,
        softcap,
        native.DTYPE_CODES[q.dtype],
        *native.launch_args(q.device),
    )
    return out


def is_planned(dtype: torch.dtype, head_dim: int, device: torch.device) -> bool:
    """Whether a model's attention runs by a plan, so that no launch depends on the lengths."""
    fits = 0 < head_dim <= _MAX_HEAD_DIM and head_dim * dtype.itemsize % _ALIGNMENT_BYTES == 0
    return dtype in _HALF_DTYPES and fits and has_planned_kernel(device)


@cache
def has_planned_kernel(device: torch.device) -> bool:
    return native.kernel("planned_attention", device) is not None


@dataclass(frozen=True, slots=True)
class _Kernels:
    tile_rows: Callable[..., Any]
    plan_bytes: Callable[..., Any]
    plan: Callable[..., Any]
    attention: Callable[..., Any]


@cache
def _kernels(device: torch.device) -> _Kernels:
    names = (
        "attention_tile_rows",
        "attention_plan_bytes",
        "attention_plan",
        "planned_attention",
    )
    return _Kernels(*(native.require_kernel(name, device) for name in names))
