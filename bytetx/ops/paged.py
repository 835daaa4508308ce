"""Attention over keys and values that lie in pages, and the way into them: checks, dispatch."""

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

from bytetx.ops import native, reference
from bytetx.ops.check import (
    require_contiguous,
    require_heads,
    require_out,
    require_softcap,
    require_tensor,
)
from bytetx.ops.paged_plan import (
    EarlyRead,
    PagedPlan,
    plan_paged_attention,
    run_planned,
    takes_paged_plan,
)
from bytetx.ops.rows import empty_rows
from bytetx.ops.triton_backend import triton_beside_native, triton_kernels

_INT32 = (torch.int32,)
_MAX_GROUP = 256  # query heads on one key head: kGroupQueries in csrc/cpu/attention.h


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cu_seqlens: Tensor,
    page_table: Tensor,
    kv_seqlens: Tensor,
    max_seqlen: int,
    max_kv_seqlen: int,
    softmax_scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    plan: PagedPlan | None = None,
    batch_invariant: bool = False,
    early_read: EarlyRead = EarlyRead.NOTHING,
    out: Tensor | None = None,
) -> Tensor:
    """Causal attention of each sequence's last tokens over all its keys: prefill chunks and decode.

    q: [total_tokens, num_heads, head_dim], f32, bf16 or f16, heads and features contiguous in each
    row.  k_cache, v_cache: [num_pages, page_size, num_kv_heads, head_dim] in q's dtype, contiguous;
    num_kv_heads divides num_heads, neighbouring query heads share one.  cu_seqlens: int32
    [batch_size + 1], starts at 0, ends at total_tokens.  page_table: int32 [batch_size, max_pages].
    kv_seqlens: int32 [batch_size]: sequence i's rows are the last of its kv_seqlens[i] keys, and a
    row sees the keys up to its own.  max_seqlen, max_kv_seqlen: the longest, tokens, host ints.
    softmax_scale: 1 / sqrt(head_dim) where None.  window: a row sees itself and the window - 1
    keys before it; 0: all before it.  Keys that no row sees are not read.
    softcap: scaled scores s become softcap * tanh(s / softcap), before slopes and mask; 0: they
    stay.  alibi_slopes: f32 [num_heads]; a head's score of a row and a key gets -slope times the
    tokens that the key lies before the row.
    plan: plan_paged_attention's for this step, made once for all layers; where None and a kernel
    wants one, the call makes its own.  On a GPU's kernels cu_seqlens may end before total_tokens:
    rows past its end are padding, and are not written.  max_seqlen and max_kv_seqlen may be larger
    than the longest there.
    batch_invariant: a row's bits depend on its own keys alone, not on how many rows of its sequence
    are in this call, nor on other sequences; of the native kernels, on a GPU without slopes.
    early_read: what may be read, on a GPU, before the kernel right before this call has ended.
    out: contiguous [total_tokens, num_heads, head_dim], or None for a new tensor.
    Returns out, q's dtype; accumulates in f32.
    Raises ValueError on shape, dtype or device mismatch.
    Source: paged keys as in PagedAttention (arXiv 2309.06180), section 4.
    """
    _check_cache(k_cache, v_cache, q.shape[2], like=q)
    _check(q, k_cache, cu_seqlens, page_table, kv_seqlens)
    _check_sizes(page_table, max_kv_seqlen, page_size=k_cache.shape[1], window=window)
    require_softcap(softcap)
    if alibi_slopes is not None:
        _check_slopes(alibi_slopes, q)
    if out is not None:
        require_out("out", out, like=q, shape=q.shape)
    if softmax_scale is None:
        softmax_scale = 1.0 / math.sqrt(q.shape[2])
    if torch.compiler.is_compiling():
        attended = torch.ops.bytetx.paged_attention(
            q,
            k_cache,
            v_cache,
            cu_seqlens=cu_seqlens,
            page_table=page_table,
            kv_seqlens=kv_seqlens,
            max_seqlen=max_seqlen,
            max_kv_seqlen=max_kv_seqlen,
            softmax_scale=softmax_scale,
            window=window,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
        )
        return attended if out is None else out.copy_(attended)
    options: dict[str, Any] = {
        "softmax_scale": softmax_scale,
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
    }
    has_work = q.shape[0] > 0 and kv_seqlens.shape[0] > 0
    if has_work and takes_paged_plan(q, k_cache, v_cache, softmax_scale, max_seqlen=max_seqlen):
        longest = (max_seqlen, max_kv_seqlen)
        plan = _plan_for(plan, q, k_cache, cu_seqlens, kv_seqlens, longest, window, batch_invariant)
        operands = (q, k_cache, v_cache, page_table)
        return run_planned(*operands, plan, **options, early_read=early_read, out=out)
    options |= {"cu_seqlens": cu_seqlens, "page_table": page_table, "kv_seqlens": kv_seqlens}
    options["window"] = window
    triton = triton_beside_native(q.device)  # heads of more than 128 features, f32
    if triton is not None and has_work and q.shape[2] > 0:
        out = q.new_empty(q.shape) if out is None else out
        longest = (max_seqlen, max_kv_seqlen)
        options["window"] = min(window, native.MAX_WINDOW)
        triton.paged_attention(q, k_cache, v_cache, **options, longest=longest, out=out)
        return out
    if _has_kernel(q, k_cache):
        return run_kernel(q, k_cache, v_cache, **options, batch_invariant=batch_invariant, out=out)
    attended = reference.paged_attention(q, k_cache, v_cache, **options)
    return attended if out is None else out.copy_(attended)


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Copies each token's key and value into its slot of the cache.

    k, v: [total_tokens, num_kv_heads, head_dim], heads and features contiguous in each row.
    k_cache, v_cache: [num_pages, page_size, num_kv_heads, head_dim] in their dtype, contiguous.
    slot_mapping: int32 [total_tokens], page * page_size + offset, no slot twice; -1 writes nothing.
    Raises ValueError on shape, dtype or device mismatch, and on a CPU where a slot is no slot.
    """
    require_heads("k", k)
    require_heads("v", v)
    require_tensor("v", v, shape=tuple(k.shape), dtypes=(k.dtype,), device=k.device)
    _check_cache(k_cache, v_cache, k.shape[2], like=k)
    if k.shape[1] != k_cache.shape[2]:
        raise ValueError(f"k must have the cache's {k_cache.shape[2]} heads, got {k.shape[1]}")
    require_tensor("slot_mapping", slot_mapping, shape=k.shape[:1], dtypes=_INT32, device=k.device)
    require_contiguous("slot_mapping", slot_mapping)
    if torch.compiler.is_compiling():
        torch.ops.bytetx.write_kv(k, v, k_cache, v_cache, slot_mapping)
        return
    kernel = native.kernel("write_kv", k.device)
    if kernel is not None:
        kernel(
            k=k,
            v=v,
            k_cache=k_cache,
            v_cache=v_cache,
            slot_mapping=slot_mapping,
            total_tokens=k.shape[0],
            num_slots=k_cache.shape[0] * k_cache.shape[1],
            row_elements=k.shape[1] * k.shape[2],
            k_stride=k.stride(0),
            v_stride=v.stride(0),
            dtype=native.DTYPE_CODES[k.dtype],
            launch=native.launch_args(k.device),
        )
        return
    triton = triton_kernels(k.device)
    if triton is not None:
        triton.write_kv(k, v, k_cache, v_cache, slot_mapping)
        return
    if not k.is_cuda and slot_mapping.numel() > 0:
        num_slots = k_cache.shape[0] * k_cache.shape[1]
        low, high = (int(t) for t in slot_mapping.aminmax())
        if low < -1 or high >= num_slots:
            raise ValueError(
                f"slot_mapping must be in [-1, {num_slots}), the slots of the cache, "
                f"got {low} to {high}"
            )
    reference.write_kv(k, v, k_cache, v_cache, slot_mapping)


def _plan_for(
    plan: PagedPlan | None,
    q: Tensor,
    k_cache: Tensor,
    cu_seqlens: Tensor,
    kv_seqlens: Tensor,
    longest: tuple[int, int],
    window: int,
    batch_invariant: bool,
) -> PagedPlan:
    """longest: (max_seqlen, max_kv_seqlen)."""
    if plan is not None:
        _check_plan(plan, q, k_cache, kv_seqlens, window, batch_invariant)
        return plan
    plan = plan_paged_attention(
        cu_seqlens,
        kv_seqlens,
        total_tokens=q.shape[0],
        max_seqlen=longest[0],
        max_kv_seqlen=longest[1],
        num_heads=q.shape[1],
        num_kv_heads=k_cache.shape[2],
        head_dim=q.shape[2],
        window=window,
        batch_invariant=batch_invariant,
    )
    assert plan is not None  # takes_paged_plan said that there is a kernel
    return plan


def _check_plan(
    plan: PagedPlan,
    q: Tensor,
    k_cache: Tensor,
    kv_seqlens: Tensor,
    window: int,
    batch_invariant: bool,
) -> None:
    params = plan.params
    heads = (params.num_heads, params.num_kv_heads, params.head_dim)
    made_for = (params.batch_size, params.total_tokens, *heads, plan.window, params.batch_invariant)
    total_tokens, num_heads, head_dim = q.shape
    wanted = (
        len(kv_seqlens),
        total_tokens,
        num_heads,
        k_cache.shape[2],
        head_dim,
        window,
        batch_invariant,
    )
    if made_for != wanted:
        raise ValueError(
            "plan must be of this step: (batch_size, total_tokens, num_heads, num_kv_heads, "
            f"head_dim, window, batch_invariant) is {wanted}, the plan's {made_for}; make it with "
            "plan_paged_attention"
        )


def _has_kernel(q: Tensor, k_cache: Tensor) -> bool:
    if q.device.type != "cpu" or native.kernel("paged_attention", q.device) is None:
        return False
    is_native = q.dtype in (torch.float32, torch.bfloat16) and q.shape[2] > 0
    return is_native and k_cache.shape[1] >= 2 and q.shape[1] <= _MAX_GROUP * k_cache.shape[2]


def run_kernel(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cu_seqlens: Tensor,
    page_table: Tensor,
    kv_seqlens: Tensor,
    softmax_scale: float,
    window: int,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    batch_invariant: bool = False,
    out: Tensor | None = None,
    isa: str = "auto",
) -> Tensor:
    """The CPU's native kernel on checked arguments; isa: a key of native.ISA_CODES."""
    total_tokens, num_heads, head_dim = q.shape
    num_pages, page_size, num_kv_heads, _ = k_cache.shape
    batch_size, max_pages = page_table.shape
    kernel, workspace_bytes = _kernel(q.device)
    launch = native.launch_args(q.device, isa)
    window = min(window, native.MAX_WINDOW)
    num_bytes = workspace_bytes(
        cu_seqlens=cu_seqlens.data_ptr(),
        kv_seqlens=kv_seqlens.data_ptr(),
        batch_size=batch_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        window=window,
        batch_invariant=batch_invariant,
        num_threads=launch.num_threads,
    )
    if out is None:
        out = empty_rows(total_tokens, q.shape[1:], q.dtype)
    kernel(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        out=out,
        cu_seqlens=cu_seqlens,
        page_table=page_table,
        kv_seqlens=kv_seqlens,
        alibi_slopes=alibi_slopes,
        workspace=torch.empty(num_bytes, dtype=torch.uint8),
        workspace_bytes=num_bytes,
        batch_size=batch_size,
        total_tokens=total_tokens,
        num_pages=num_pages,
        max_pages=max_pages,
        page_size=page_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        window=window,
        q_stride=q.stride(0),
        softmax_scale=softmax_scale,
        softcap=softcap,
        dtype=native.DTYPE_CODES[q.dtype],
        batch_invariant=batch_invariant,
        launch=launch,
    )
    return out


@cache
def _kernel(device: torch.device) -> tuple[native.Kernel, native.Kernel]:
    workspace_bytes = native.require_kernel("paged_attention_workspace_bytes", device)
    return native.require_kernel("paged_attention", device), workspace_bytes


def _check(
    q: Tensor, k_cache: Tensor, cu_seqlens: Tensor, page_table: Tensor, kv_seqlens: Tensor
) -> None:
    require_heads("q", q)
    num_kv_heads = k_cache.shape[2]
    if num_kv_heads == 0 or q.shape[1] % num_kv_heads:
        raise ValueError(
            f"k_cache must have a number of heads that divides q's {q.shape[1]}, got {num_kv_heads}"
        )
    device = q.device
    require_tensor("kv_seqlens", kv_seqlens, shape=(None,), dtypes=_INT32, device=device)
    batch_size = kv_seqlens.shape[0]
    tables = (
        ("cu_seqlens", cu_seqlens, (batch_size + 1,)),
        ("page_table", page_table, (batch_size, None)),
    )
    for name, t, shape in tables:
        require_tensor(name, t, shape=shape, dtypes=_INT32, device=device)
        require_contiguous(name, t)
    require_contiguous("kv_seqlens", kv_seqlens)


def _check_sizes(page_table: Tensor, max_kv_seqlen: int, *, page_size: int, window: int) -> None:
    if max_kv_seqlen > page_table.shape[1] * page_size:
        raise ValueError(
            f"page_table must have pages for max_kv_seqlen {max_kv_seqlen} keys, got "
            f"{page_table.shape[1]} of {page_size}"
        )
    if window < 0:
        raise ValueError(f"window must be 0 (none) or more tokens, got {window}")


def _check_slopes(alibi_slopes: Tensor, q: Tensor) -> None:
    f32 = (torch.float32,)
    shape = (q.shape[1],)
    require_tensor("alibi_slopes", alibi_slopes, shape=shape, dtypes=f32, device=q.device)
    require_contiguous("alibi_slopes", alibi_slopes)


def _check_cache(k_cache: Tensor, v_cache: Tensor, head_dim: int, *, like: Tensor) -> None:
    dtypes, device = (like.dtype,), like.device
    shape = (None, None, None, head_dim)
    require_tensor("k_cache", k_cache, shape=shape, dtypes=dtypes, device=device)
    require_tensor("v_cache", v_cache, shape=k_cache.shape, dtypes=dtypes, device=device)
    require_contiguous("k_cache", k_cache)
    require_contiguous("v_cache", v_cache)
    page_size = k_cache.shape[1]
    if page_size < 1 or page_size & (page_size - 1):
        raise ValueError(f"k_cache must have pages of a power of two tokens, got {page_size}")


native.register(
    paged_attention,
    without=["plan", "batch_invariant", "early_read", "out"],
    fake=lambda q, *_, **__: q.new_empty(q.shape),
)
native.register(write_kv, mutates=["k_cache", "v_cache"], fake=lambda *_, **__: None)
