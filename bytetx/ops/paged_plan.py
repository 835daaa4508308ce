"""Planned paged attention: the Hopper kernels, and the plan of a step that all its layers share."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import Any

import torch
from torch import Tensor

from bytetx.ops import native

_HALF_DTYPES = (torch.float16, torch.bfloat16)
_MAX_HEAD_DIM = 128
_ALIGNMENT_BYTES = 16


class Settled(IntEnum):
    """What the kernel right before a call on its stream leaves alone: it may be read meanwhile."""

    NOTHING = 0
    TABLES = 1  # the plan, lengths and page table
    KEYS = 2  # those, and the keys and values before each sequence's rows of this step


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """Which keys each part of the paged kernels reads; made by plan_paged_attention, on the device.

    buffer: uint8, the plan in the layout of csrc/cuda/paged_plan.cuh, behind it the workspace that
    all calls with this plan use in turn: they must run one behind the other on one stream.
    The rest is what the plan was made for and holds for.
    """

    buffer: Tensor
    plan_bytes: int
    cu_seqlens: Tensor
    kv_seqlens: Tensor
    total_tokens: int
    max_seqlen: int
    max_kv_seqlen: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int

    @property
    def batch_size(self) -> int:
        return self.kv_seqlens.shape[0]


def plan_paged_attention(
    cu_seqlens: Tensor,
    kv_seqlens: Tensor,
    *,
    total_tokens: int,
    max_seqlen: int,
    max_kv_seqlen: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    window: int = 0,
) -> PagedPlan | None:
    """Plans one step for paged_attention; None where no kernel takes a plan, or nothing to do.

    cu_seqlens: int32 [batch_size + 1], kv_seqlens: int32 [batch_size], read by the device alone.
    total_tokens: rows of q; where it is more than cu_seqlens[-1], the rows past that are padding,
    which nobody reads or writes.  max_seqlen, max_kv_seqlen: tokens, of the longest or more.
    num_heads, num_kv_heads, head_dim, window: as the calls that will use the plan.
    Costs one small kernel and no synchronisation, so that a captured graph can hold it.
    """
    device, batch_size = cu_seqlens.device, kv_seqlens.shape[0]
    if not has_paged_kernel(device) or batch_size == 0 or total_tokens == 0:
        return None
    kernels = _kernels(device)
    lengths = (batch_size, total_tokens, max_seqlen, max_kv_seqlen)
    sizes = (*lengths, num_heads, num_kv_heads, min(window, native.MAX_WINDOW))
    plan_bytes, workspace_bytes = kernels.bytes(*sizes, head_dim)
    buffer = torch.empty(plan_bytes + workspace_bytes, dtype=torch.uint8, device=device)
    addresses = (cu_seqlens.data_ptr(), kv_seqlens.data_ptr(), buffer.data_ptr())
    kernels.plan(*addresses, plan_bytes, *sizes, *native.launch_args(device))
    return PagedPlan(
        buffer,
        plan_bytes,
        cu_seqlens,
        kv_seqlens,
        total_tokens,
        max_seqlen,
        max_kv_seqlen,
        num_heads,
        num_kv_heads,
        head_dim,
        window,
    )


def takes_paged_plan(q: Tensor, k_cache: Tensor, v_cache: Tensor, softmax_scale: float) -> bool:
    """Whether the planned kernels compute this call."""
    element_bytes = 2
    return (
        q.dtype in _HALF_DTYPES
        and has_paged_kernel(q.device)
        and 0 < q.shape[2] <= _MAX_HEAD_DIM
        and q.shape[2] * element_bytes % _ALIGNMENT_BYTES == 0
        and q.stride(0) * element_bytes % _ALIGNMENT_BYTES == 0
        and softmax_scale > 0
        and all(t.data_ptr() % _ALIGNMENT_BYTES == 0 for t in (q, k_cache, v_cache))
    )


def run_planned(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    plan: PagedPlan,
    *,
    softmax_scale: float,
    out: Tensor | None,
    settled: Settled = Settled.NOTHING,
) -> Tensor:
    """The Hopper kernels on checked arguments that takes_paged_plan accepts."""
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    operands = (q, k_cache, v_cache, out, page_table, plan.cu_seqlens, plan.kv_seqlens)
    plan_address = plan.buffer.data_ptr()
    _kernels(q.device).attention(
        *map(Tensor.data_ptr, operands),
        plan_address,
        plan.plan_bytes,
        plan_address + plan.plan_bytes,
        plan.buffer.shape[0] - plan.plan_bytes,
        plan.batch_size,
        plan.total_tokens,
        plan.max_seqlen,
        plan.max_kv_seqlen,
        plan.num_heads,
        plan.num_kv_heads,
        min(plan.window, native.MAX_WINDOW),
        plan.head_dim,
        page_table.shape[1],
        k_cache.shape[1],
        q.stride(0),
        softmax_scale,
        native.DTYPE_CODES[q.dtype],
        int(settled),
        *native.launch_args(q.device),
    )
    return out


def has_paged_kernel(device: torch.device) -> bool:
    return native.kernel("planned_paged_attention", device) is not None


@dataclass(frozen=True, slots=True)
class _Kernels:
    bytes: Callable[..., Any]
    plan: Callable[..., Any]
    attention: Callable[..., Any]


@cache
def _kernels(device: torch.device) -> _Kernels:
    names = ("paged_plan_bytes", "paged_plan", "planned_paged_attention")
    found = [native.kernel(name, device) for name in names]
    assert all(found)  # one module has all of them
    return _Kernels(*found)
