"""Planned paged attention: the Hopper kernels, and the plan of a step that all its layers share."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import Any

import torch
from torch import Tensor

from bytetx.ops import native
from bytetx.ops.check import HALF_DTYPES
from bytetx.ops.native_params import PagedPlanParams
from bytetx.ops.triton_backend import why_no_triton

_MAX_HEAD_DIM = 256
_MAX_WIDE_GROUP = 8  # query heads a key head of more than 128 features


class EarlyRead(IntEnum):
    """Tensors that a call may read before the preceding kernel of its stream has ended.

    That kernel does not write it; the call begins early by programmatic dependent launch (PDL).
    """

    NOTHING = 0
    TABLES = 1  # the plan, lengths and page table
    KEYS = 2  # those, and the keys and values before each sequence's rows of this step


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """Which keys each part of the paged kernels reads; made by plan_paged_attention, on the device.

    params: what it was made for, with addresses in the tensors below.  window: as given.
    buffer: uint8, the plan in the layout of csrc/cuda/paged_plan.cuh, behind it the workspace that
    all calls with this plan use in turn: they must run one behind the other on one stream.
    """

    params: PagedPlanParams
    window: int
    buffer: Tensor
    cu_seqlens: Tensor
    kv_seqlens: Tensor


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
    batch_invariant: bool = False,
) -> PagedPlan | None:
    """Plans one step for paged_attention; None where no kernel takes a plan, or nothing to do.

    cu_seqlens: int32 [batch_size + 1], kv_seqlens: int32 [batch_size], read by the device alone.
    total_tokens: rows of q; where it is more than cu_seqlens[-1], the rows past that are padding,
    which nobody reads or writes.  max_seqlen, max_kv_seqlen: tokens, of the longest or more.
    num_heads, num_kv_heads, head_dim, window: as the calls that will use the plan.
    batch_invariant: one kernel runs decode rows and prefill chunks, so that a row's bits depend on
    its own keys alone; see has_invariant_kernel.
    Costs one small kernel and no synchronisation, so that a captured graph can hold it.
    """
    device, batch_size = cu_seqlens.device, kv_seqlens.shape[0]
    fits = has_paged_kernel(device) and fits_kernel(num_heads, num_kv_heads, head_dim, max_seqlen)
    if not fits or batch_size == 0 or total_tokens == 0:
        return None
    kernels = _kernels(device)
    params = PagedPlanParams(
        cu_seqlens=cu_seqlens.data_ptr(),
        kv_seqlens=kv_seqlens.data_ptr(),
        plan=0,
        plan_bytes=0,
        batch_size=batch_size,
        total_tokens=total_tokens,
        max_seqlen=max_seqlen,
        max_kv_seqlen=max_kv_seqlen,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        window=min(window, native.MAX_WINDOW),
        tile_tokens=kernels.tile_tokens(
            num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim
        ),
        batch_invariant=batch_invariant,
    )
    plan_bytes, workspace_bytes = kernels.bytes(params)
    buffer = torch.empty(plan_bytes + workspace_bytes, dtype=torch.uint8, device=device)
    params = params._replace(plan=buffer.data_ptr(), plan_bytes=plan_bytes)
    kernels.plan(
        cu_seqlens=params.cu_seqlens,
        kv_seqlens=params.kv_seqlens,
        plan=params.plan,
        plan_bytes=params.plan_bytes,
        batch_size=params.batch_size,
        total_tokens=params.total_tokens,
        max_seqlen=params.max_seqlen,
        max_kv_seqlen=params.max_kv_seqlen,
        num_heads=params.num_heads,
        num_kv_heads=params.num_kv_heads,
        head_dim=params.head_dim,
        window=params.window,
        tile_tokens=params.tile_tokens,
        batch_invariant=params.batch_invariant,
        launch=native.launch_args(device),
    )
    return PagedPlan(params, window, buffer, cu_seqlens, kv_seqlens)


def launches_by_sizes(
    dtype: torch.dtype,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    max_seqlen: int,
    device: torch.device,
    has_codes: bool = False,
) -> bool:
    """Whether no launch of paged_attention depends on the lengths, as a captured graph needs."""
    fits = dtype in HALF_DTYPES and fits_kernel(num_heads, num_kv_heads, head_dim, max_seqlen)
    fits &= not has_codes  # native kernels read codes in decode rows alone
    return (fits and has_paged_kernel(device)) or why_no_triton(device) is None


def fits_kernel(num_heads: int, num_kv_heads: int, head_dim: int, max_seqlen: int) -> bool:
    """Whether the planned kernels have these heads; above 128 features, for decode rows alone."""
    if not 0 < head_dim <= _MAX_HEAD_DIM or head_dim % 8 != 0:
        return False
    is_wide = head_dim > 128
    return not is_wide or (max_seqlen <= 1 and num_heads // num_kv_heads <= _MAX_WIDE_GROUP)


def has_invariant_kernel(
    num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device
) -> bool:
    """Whether decode rows and prefill chunks of these heads can go through one native kernel."""
    if not has_paged_kernel(device) or not fits_kernel(num_heads, num_kv_heads, head_dim, 2):
        return False
    tile_tokens = _kernels(device).tile_tokens(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim
    )
    return int(tile_tokens) > 0


def run_planned(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    plan: PagedPlan,
    *,
    softmax_scale: float,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    out: Tensor | None,
    early_read: EarlyRead = EarlyRead.NOTHING,
) -> Tensor:
    """The Hopper kernels on checked arguments that the planned kernel takes."""
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _kernels(q.device).attention(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        k_scales=k_scales,
        v_scales=v_scales,
        out=out,
        page_table=page_table,
        alibi_slopes=alibi_slopes,
        plan=plan.params,
        workspace=plan.params.plan + plan.params.plan_bytes,
        workspace_bytes=plan.buffer.shape[0] - plan.params.plan_bytes,
        max_pages=page_table.shape[1],
        page_size=k_cache.shape[1],
        q_stride=q.stride(0),
        softmax_scale=softmax_scale,
        softcap=softcap,
        dtype=native.DTYPE_CODES[q.dtype],
        early_read=early_read,
        launch=native.launch_args(q.device),
    )
    return out


def has_paged_kernel(device: torch.device) -> bool:
    return native.kernel("planned_paged_attention", device) is not None


@dataclass(frozen=True, slots=True)
class _Kernels:
    tile_tokens: Callable[..., int]
    bytes: Callable[[PagedPlanParams], tuple[int, int]]
    plan: Callable[..., Any]
    attention: Callable[..., Any]


@cache
def _kernels(device: torch.device) -> _Kernels:
    names = ("paged_tile_tokens", "paged_plan_bytes", "paged_plan", "planned_paged_attention")
    return _Kernels(*(native.require_kernel(name, device) for name in names))
