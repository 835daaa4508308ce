"""Attention over keys and values that lie in pages, and the way into them: checks, dispatch."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bytetx.ops import native, reference, triton_backend
from bytetx.ops.check import (
    HALF_DTYPES,
    is_aligned,
    require_contiguous,
    require_heads,
    require_out,
    require_softcap,
    require_tensor,
)
from bytetx.ops.native import empty_rows
from bytetx.ops.paged_plan import (
    EarlyRead,
    PagedPlan,
    fits_kernel,
    plan_paged_attention,
    run_planned,
)
from bytetx.ops.registry import Operation

_INT32 = (torch.int32,)
# Of a layer's keys and values that are restored from codes for a step with pieces of prompts.
MAX_RESTORED_BYTES = 512 << 20
_MAX_GROUP = 256  # query heads on one key head: kGroupQueries in csrc/cpu/attention.h


class PagedCalls(NamedTuple):
    """Shape class of paged_attention.

    decodes: whether no sequence has more than one row.  is_aligned: whether rows and pages start at
    multiples of 16 bytes.  has_scale: whether softmax_scale is above 0.  has_work: whether there is
    a row and a sequence.  has_codes: whether pages hold E4M3 codes and scales.  restores: whether
    all keys and values of the step fit the memory where they are restored from their codes.
    """

    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    decodes: bool = True
    is_aligned: bool = True
    has_scale: bool = True
    has_work: bool = True
    has_codes: bool = False
    restores: bool = False


# run takes what paged_attention does, checked, with every option given.
PAGED_ATTENTION = Operation("paged_attention")
# Shape class: whether the cache has codes.  run(k, v, k_cache, v_cache, slot_mapping, k_scales,
# v_scales) as of write_kv.
WRITE_KV = Operation("write_kv")


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
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
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
    k_scales, v_scales: uint8 [num_pages, num_kv_heads, page_size] where k_cache and v_cache are
    E4M3 codes, uint8 (ops/kv_codes.py); a number that is not finite in a vector is in all of it.
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
    check_cache(k_cache, v_cache, q.shape[2], like=q, scales=(k_scales, v_scales))
    if k_scales is not None and batch_invariant:
        raise ValueError("batch_invariant does not go with a cache of E4M3 codes")
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
            k_scales=k_scales,
            v_scales=v_scales,
        )
        return attended if out is None else out.copy_(attended)
    calls = PagedCalls(
        q.dtype,
        q.shape[1],
        k_cache.shape[2],
        q.shape[2],
        page_size=k_cache.shape[1],
        decodes=max_seqlen <= 1,
        is_aligned=all(map(is_aligned, (q, k_cache, v_cache))) and q.stride(0) * 2 % 16 == 0,
        has_scale=softmax_scale > 0,
        has_work=q.shape[0] > 0 and kv_seqlens.shape[0] > 0,
        has_codes=k_scales is not None,
        restores=k_scales is not None and fits_restored(k_cache, len(kv_seqlens), max_kv_seqlen),
    )
    rows: Tensor = PAGED_ATTENTION.choose(q.device, calls).run(
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
        k_scales=k_scales,
        v_scales=v_scales,
        plan=plan,
        batch_invariant=batch_invariant,
        early_read=early_read,
        out=out,
    )
    return rows


def write_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> None:
    """Copies each token's key and value into its slot of the cache.

    k, v: [total_tokens, num_kv_heads, head_dim], heads and features contiguous in each row.
    k_cache, v_cache: [num_pages, page_size, num_kv_heads, head_dim] in their dtype, contiguous.
    slot_mapping: int32 [total_tokens], page * page_size + offset, no slot twice; -1 writes nothing.
    k_scales, v_scales: as paged_attention's; each vector is rounded to codes on its own.
    Raises ValueError on shape, dtype or device mismatch, and on a CPU where a slot is no slot.
    """
    require_heads("k", k)
    require_heads("v", v)
    require_tensor("v", v, shape=tuple(k.shape), dtypes=(k.dtype,), device=k.device)
    check_cache(k_cache, v_cache, k.shape[2], like=k, scales=(k_scales, v_scales))
    check_slots(k, k_cache, slot_mapping)
    if torch.compiler.is_compiling():
        torch.ops.bytetx.write_kv(k, v, k_cache, v_cache, slot_mapping, k_scales, v_scales)
        return
    run = WRITE_KV.choose(k.device, k_scales is not None).run
    run(k, v, k_cache, v_cache, slot_mapping, k_scales, v_scales)


@WRITE_KV.native_kernel(takes=lambda device, has_codes: not has_codes)
def _write_by_kernel(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scales: Tensor | None,
    v_scales: Tensor | None,
) -> None:
    native.require_kernel("write_kv", k.device)(
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


@WRITE_KV.triton_kernel(beside="")
def _write_by_triton(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scales: Tensor | None,
    v_scales: Tensor | None,
) -> None:
    kernels = triton_backend.kernels(k.device)
    if k_scales is None or v_scales is None:
        kernels.write_kv(k, v, k_cache, v_cache, slot_mapping)
    else:
        kernels.write_codes(k, v, k_cache, v_cache, slot_mapping, k_scales, v_scales)


@WRITE_KV.in_torch()
def _write_in_torch(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scales: Tensor | None,
    v_scales: Tensor | None,
) -> None:
    if not k.is_cuda and slot_mapping.numel() > 0:
        num_slots = k_cache.shape[0] * k_cache.shape[1]
        low, high = (int(t) for t in slot_mapping.aminmax())
        if low < -1 or high >= num_slots:
            raise ValueError(
                f"slot_mapping must be in [-1, {num_slots}), the slots of the cache, "
                f"got {low} to {high}"
            )
    reference.write_kv(k, v, k_cache, v_cache, slot_mapping, k_scales, v_scales)


def _takes_plan(device: torch.device, calls: PagedCalls) -> bool:
    heads = (calls.num_heads, calls.num_kv_heads, calls.head_dim)
    fits = calls.dtype in HALF_DTYPES and fits_kernel(*heads, 1 if calls.decodes else 2)
    if calls.has_codes:  # decode rows alone
        fits &= calls.decodes and calls.head_dim % 16 == 0 and calls.page_size >= 16
    return fits and calls.is_aligned and calls.has_scale and calls.has_work


@PAGED_ATTENTION.native_kernel("cuda", kernel="planned_paged_attention", takes=_takes_plan)
def _run_planned(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cu_seqlens: Tensor,
    page_table: Tensor,
    kv_seqlens: Tensor,
    max_seqlen: int,
    max_kv_seqlen: int,
    window: int,
    plan: PagedPlan | None,
    batch_invariant: bool,
    **options: Any,
) -> Tensor:
    longest = (max_seqlen, max_kv_seqlen)
    plan = _plan_for(plan, q, k_cache, cu_seqlens, kv_seqlens, longest, window, batch_invariant)
    return run_planned(q, k_cache, v_cache, page_table, plan, **options)


def fits_restored(k_cache: Tensor, batch_size: int, max_kv_seqlen: int) -> bool:
    """Whether the codes of so many sequences may be restored, to 16 bits, for a step."""
    _, page_size, num_kv_heads, head_dim = k_cache.shape
    num_keys = batch_size * -(-max_kv_seqlen // page_size) * page_size
    return 4 * num_keys * num_kv_heads * head_dim <= MAX_RESTORED_BYTES


def _takes_restored(device: torch.device, calls: PagedCalls) -> bool:
    heads = (calls.num_heads, calls.num_kv_heads, calls.head_dim)
    fits = calls.restores and not calls.decodes and fits_kernel(*heads, 2)
    fits &= triton_backend.why_no_triton(device) is None
    return fits and calls.dtype in HALF_DTYPES and calls.is_aligned and calls.has_scale


@PAGED_ATTENTION.register(
    "restored",
    "cuda",
    why_missing=lambda device: native.why_no_kernel("planned_paged_attention", device),
    takes=lambda device, calls: _takes_restored(device, calls) and calls.has_work,
)
def run_restored(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    page_table: Tensor,
    kv_seqlens: Tensor,
    max_kv_seqlen: int,
    k_scales: Tensor,
    v_scales: Tensor,
    early_read: EarlyRead,
    **options: Any,
) -> Tensor:
    """Writes keys and values out in q's dtype, for the prefill tiles that read no codes."""
    num_columns = -(-max_kv_seqlen // k_cache.shape[1])
    k_pages, v_pages = triton_backend.kernels(q.device).restore_pages(
        k_cache,
        v_cache,
        k_scales,
        v_scales,
        page_table,
        kv_seqlens,
        num_columns=num_columns,
        dtype=q.dtype,
    )
    pages = torch.arange(len(k_pages), dtype=torch.int32, device=q.device)
    return _run_planned(
        q,
        k_pages,
        v_pages,
        page_table=pages.view(-1, num_columns),
        kv_seqlens=kv_seqlens,
        max_kv_seqlen=max_kv_seqlen,
        **options,
    )


# Heads of more than 128 features and f32 have no native kernel on a GPU.
@PAGED_ATTENTION.triton_kernel(
    beside="",
    takes=lambda device, calls: calls.has_work and calls.head_dim > 0,
)
def _run_triton(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    max_seqlen: int,
    max_kv_seqlen: int,
    window: int,
    plan: PagedPlan | None,
    batch_invariant: bool,
    early_read: EarlyRead,
    out: Tensor | None,
    **options: Any,
) -> Tensor:
    out = q.new_empty(q.shape) if out is None else out
    options |= {"window": min(window, native.MAX_WINDOW), "longest": (max_seqlen, max_kv_seqlen)}
    triton_backend.kernels(q.device).paged_attention(q, k_cache, v_cache, **options, out=out)
    return out


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
    assert plan is not None  # _takes_plan said that there is a kernel
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


def _takes_kernel(device: torch.device, calls: PagedCalls) -> bool:
    is_native = calls.dtype in (torch.float32, torch.bfloat16) and calls.head_dim > 0
    fits = calls.page_size >= 2 and calls.num_heads <= _MAX_GROUP * calls.num_kv_heads
    return is_native and fits


@PAGED_ATTENTION.native_kernel("cpu", takes=_takes_kernel)
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
    max_seqlen: int = 0,
    max_kv_seqlen: int = 0,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    plan: PagedPlan | None = None,
    early_read: EarlyRead = EarlyRead.NOTHING,
) -> Tensor:
    """The CPU's native kernel on checked arguments; it needs no plan nor the longest lengths.

    isa: a key of native.ISA_CODES.
    """
    total_tokens, num_heads, head_dim = q.shape
    num_pages, page_size, num_kv_heads, _ = k_cache.shape
    batch_size, max_pages = page_table.shape
    launch = native.launch_args(q.device, isa)
    window = min(window, native.MAX_WINDOW)
    num_bytes = native.require_kernel("paged_attention_workspace_bytes", q.device)(
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
    native.require_kernel("paged_attention", q.device)(
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
        k_scales=k_scales,
        v_scales=v_scales,
        launch=launch,
    )
    return out


@PAGED_ATTENTION.in_torch()
def _run_torch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    max_seqlen: int,
    max_kv_seqlen: int,
    plan: PagedPlan | None,
    batch_invariant: bool,
    early_read: EarlyRead,
    out: Tensor | None,
    **options: Any,
) -> Tensor:
    attended = reference.paged_attention(q, k_cache, v_cache, **options)
    return attended if out is None else out.copy_(attended)


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


def check_slots(k: Tensor, k_cache: Tensor, slot_mapping: Tensor) -> None:
    """Raises ValueError unless each row of k has a slot, and as many heads as the checked cache."""
    if k.shape[1] != k_cache.shape[2]:
        raise ValueError(f"k must have the cache's {k_cache.shape[2]} heads, got {k.shape[1]}")
    require_tensor("slot_mapping", slot_mapping, shape=k.shape[:1], dtypes=_INT32, device=k.device)
    require_contiguous("slot_mapping", slot_mapping)


def check_cache(
    k_cache: Tensor,
    v_cache: Tensor,
    head_dim: int,
    *,
    like: Tensor,
    scales: tuple[Tensor | None, Tensor | None],
) -> None:
    """Raises ValueError unless these are pages of heads of like's dtype, or codes with scales."""
    has_codes = scales[0] is not None or scales[1] is not None
    dtypes, device = ((torch.uint8,) if has_codes else (like.dtype,)), like.device
    shape = (None, None, None, head_dim)
    require_tensor("k_cache", k_cache, shape=shape, dtypes=dtypes, device=device)
    require_tensor("v_cache", v_cache, shape=k_cache.shape, dtypes=dtypes, device=device)
    require_contiguous("k_cache", k_cache)
    require_contiguous("v_cache", v_cache)
    page_size = k_cache.shape[1]
    if page_size < 1 or page_size & (page_size - 1):
        raise ValueError(f"k_cache must have pages of a power of two tokens, got {page_size}")
    if has_codes:
        sizes = (k_cache.shape[0], k_cache.shape[2], page_size)
        for name, t in zip(("k_scales", "v_scales"), scales, strict=True):
            require_tensor(name, t, shape=sizes, dtypes=dtypes, device=device)
            assert t is not None  # require_tensor has seen to it
            require_contiguous(name, t)


native.register(
    paged_attention,
    without=["plan", "batch_invariant", "early_read", "out"],
    fake=lambda q, *_, **__: q.new_empty(q.shape),
)
native.register(
    write_kv,
    mutates=["k_cache", "v_cache", "k_scales", "v_scales"],
    fake=lambda *_, **__: None,
)
