"""Disentangled attention (DeBERTa) over packed sequences: checks, choice of kernel."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from bytetx.ops import native, reference, triton_backend
from bytetx.ops.check import (
    HALF_DTYPES,
    is_aligned,
    require_contiguous,
    require_heads,
    require_tensor,
)
from bytetx.ops.native import empty_rows
from bytetx.ops.registry import Operation

_MAX_HEAD_DIM = 128

# Shape class: dtype, head_dim, whether rows and tables start at multiples of 16 bytes, and whether
# there are rows.  run(q, k, v, pos_k, pos_q, buckets, cu_seqlens, *, softmax_scale) as of
# disentangled_attention.
DISENTANGLED_ATTENTION = Operation("disentangled_attention")


def disentangled_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pos_k: Tensor | None,
    pos_q: Tensor | None,
    buckets: Tensor,
    cu_seqlens: Tensor,
    *,
    max_seqlen: int,
    softmax_scale: float,
) -> Tensor:
    """Attention whose scores also compare contents with relative positions.

    score(i, j) = softmax_scale * (q[i] . k[j] + q[i] . pos_k[b] + k[j] . pos_q[b]), where
    b = buckets[i - j + span - 1] and i, j are positions in one sequence.
    q, k, v: [total_tokens, num_heads, head_dim], f32, bf16 or f16, heads and features contiguous in
    each row.  pos_k, pos_q: contiguous [num_buckets, num_heads, head_dim] of q's dtype, or None,
    and their term is 0.  buckets: int32 [2 * span - 1] in [0, num_buckets), each as the one before
    or one more; span >= max_seqlen.  cu_seqlens: int32 [batch_size + 1] on q's device, starts at 0,
    ends at total_tokens; on a GPU it may end before, and the rows past its end, which are padding,
    are neither read nor written.  max_seqlen: tokens, host int.  softmax_scale: above 0.
    Returns [total_tokens, num_heads, head_dim], q's dtype; accumulates in f32.
    Raises ValueError on shape, dtype or device mismatch.
    Source: DeBERTa (arXiv 2006.03654), section 3.1.
    """
    _check(q, k, v, pos_k, pos_q, buckets, cu_seqlens, max_seqlen, softmax_scale)
    if torch.compiler.is_compiling():
        attended: Tensor = torch.ops.bytetx.disentangled_attention(
            q,
            k,
            v,
            pos_k,
            pos_q,
            buckets,
            cu_seqlens,
            max_seqlen=max_seqlen,
            softmax_scale=softmax_scale,
        )
        return attended
    calls = (q.dtype, q.shape[2], _are_aligned((q, k, v), (pos_k, pos_q)), q.shape[0] > 0)
    rows: Tensor = DISENTANGLED_ATTENTION.choose(q.device, *calls).run(
        q, k, v, pos_k, pos_q, buckets, cu_seqlens, softmax_scale=softmax_scale
    )
    return rows


def has_disentangled_kernel(device: torch.device) -> bool:
    """Whether a kernel is there, which reads the lengths on the device."""
    is_native = native.kernel("disentangled_attention", device) is not None
    return is_native or triton_backend.why_no_triton(device) is None


def _are_aligned(rows: Sequence[Tensor], tables: Sequence[Tensor | None]) -> bool:
    starts = all(is_aligned(t) for t in (*rows, *tables) if t is not None)
    return starts and all(t.stride(0) * t.element_size() % 16 == 0 for t in rows)


def _takes_kernel(
    device: torch.device, dtype: torch.dtype, head_dim: int, are_aligned: bool, has_rows: bool
) -> bool:
    if device.type != "cuda":
        return dtype in (torch.float32, torch.bfloat16) and head_dim > 0
    fits = head_dim % 8 == 0 and 0 < head_dim <= _MAX_HEAD_DIM
    return dtype in HALF_DTYPES and fits and are_aligned


def _takes_triton(
    device: torch.device, dtype: torch.dtype, head_dim: int, are_aligned: bool, has_rows: bool
) -> bool:
    return 0 < head_dim <= _MAX_HEAD_DIM and has_rows


@DISENTANGLED_ATTENTION.native_kernel(takes=_takes_kernel)
def run_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pos_k: Tensor | None,
    pos_q: Tensor | None,
    buckets: Tensor,
    cu_seqlens: Tensor,
    *,
    softmax_scale: float,
    isa: str = "auto",
) -> Tensor:
    """The native kernel on checked arguments; isa: a key of native.ISA_CODES."""
    total_tokens, num_heads, head_dim = q.shape
    batch_size = cu_seqlens.shape[0] - 1
    launch = native.launch_args(q.device, isa)
    num_bytes = 0
    if q.device.type == "cpu":
        workspace_bytes = native.require_kernel("disentangled_attention_workspace_bytes", q.device)
        num_bytes = workspace_bytes(
            batch_size=batch_size, head_dim=head_dim, num_threads=launch.num_threads
        )
    is_cpu = q.device.type == "cpu"
    out = empty_rows(total_tokens, q.shape[1:], q.dtype) if is_cpu else q.new_empty(q.shape)
    table = pos_k if pos_k is not None else pos_q
    native.require_kernel("disentangled_attention", q.device)(
        q=q,
        k=k,
        v=v,
        out=out,
        pos_k=pos_k,
        pos_q=pos_q,
        buckets=buckets,
        cu_seqlens=cu_seqlens,
        workspace=torch.empty(num_bytes, dtype=torch.uint8),
        workspace_bytes=num_bytes,
        batch_size=batch_size,
        total_tokens=total_tokens,
        span=(len(buckets) + 1) // 2,
        num_buckets=0 if table is None else table.shape[0],
        num_heads=num_heads,
        head_dim=head_dim,
        q_stride=q.stride(0),
        k_stride=k.stride(0),
        v_stride=v.stride(0),
        out_stride=num_heads * head_dim,
        softmax_scale=softmax_scale,
        dtype=native.DTYPE_CODES[q.dtype],
        launch=launch,
    )
    return out


@DISENTANGLED_ATTENTION.triton_kernel(takes=_takes_triton)
def _run_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pos_k: Tensor | None,
    pos_q: Tensor | None,
    buckets: Tensor,
    cu_seqlens: Tensor,
    *,
    softmax_scale: float,
) -> Tensor:
    triton = triton_backend.kernels(q.device)
    bounds = triton.sequence_bounds(cu_seqlens, q.shape[0])
    rows: Tensor = triton.disentangled_attention(
        q, k, v, pos_k, pos_q, buckets, bounds, softmax_scale=softmax_scale
    )
    return rows


DISENTANGLED_ATTENTION.in_torch()(reference.disentangled_attention)


def log_buckets(num_buckets: int, max_distance: int, span: int) -> Tensor:
    """DeBERTa's buckets of the distances 1 - span to span - 1, int32 [2 * span - 1].

    num_buckets: of one direction; 0: every distance is its own bucket.  max_distance: positions,
    the distance of the last bucket.  Distance 0 is bucket num_buckets, or max_distance without
    buckets; the values are in [0, 2 * that).  Computed in f32 as the published models were trained.
    Source: DeBERTaV3 (arXiv 2111.09543), and transformers' make_log_bucket_position.
    """
    distance = torch.arange(1 - span, span, dtype=torch.int64)
    half = num_buckets or max_distance
    if num_buckets > 0 and max_distance > 0:
        middle = num_buckets // 2
        magnitude = distance.abs().clamp(min=middle - 1).float()
        scale = torch.log(torch.tensor((max_distance - 1) / middle))
        logs = torch.ceil(torch.log(magnitude / middle) / scale * (middle - 1)) + middle
        is_near = distance.abs() <= middle
        distance = torch.where(is_near, distance, (logs * distance.sign()).long())
    return (distance + half).clamp(0, 2 * half - 1).int()


def require_span(buckets: Tensor, max_seqlen: int) -> None:
    """Check that buckets [2 * span - 1] have a bucket for each distance in a sequence."""
    span, rest = divmod(buckets.shape[0] + 1, 2)
    if rest or span < max_seqlen:
        raise ValueError(
            f"buckets must have 2 * span - 1 entries with span >= max_seqlen {max_seqlen}, "
            f"got {buckets.shape[0]}"
        )


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pos_k: Tensor | None,
    pos_q: Tensor | None,
    buckets: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    softmax_scale: float,
) -> None:
    require_heads("q", q)
    dtypes, device = (q.dtype,), q.device
    for name, rows in (("k", k), ("v", v)):
        require_tensor(name, rows, shape=tuple(q.shape), dtypes=dtypes, device=device)
        require_heads(name, rows)
    num_buckets = None
    for name, table in (("pos_k", pos_k), ("pos_q", pos_q)):
        if table is None:
            continue
        shape = (num_buckets, *q.shape[1:])
        require_tensor(name, table, shape=shape, dtypes=dtypes, device=device)
        require_contiguous(name, table)
        num_buckets = table.shape[0]
    for name, ints in (("buckets", buckets), ("cu_seqlens", cu_seqlens)):
        require_tensor(name, ints, shape=(None,), dtypes=(torch.int32,), device=device)
        require_contiguous(name, ints)
    require_span(buckets, max_seqlen)
    if cu_seqlens.shape[0] == 0:
        raise ValueError("cu_seqlens must have batch_size + 1 entries, got 0")
    if not (math.isfinite(softmax_scale) and softmax_scale > 0):
        raise ValueError(f"softmax_scale must be above 0, got {softmax_scale}")


native.register(disentangled_attention, fake=lambda q, *_, **__: q.new_empty(q.shape))
