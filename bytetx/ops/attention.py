"""Attention over packed sequences: checks, choice of kernel."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bytetx.ops import native, reference
from bytetx.ops.attention_plan import (
    MAX_HEAD_DIM,
    MAX_WIDE_HEAD_DIM,
    AttentionPlan,
    plan_attention,
    run_planned,
    run_triton,
)
from bytetx.ops.check import (
    FLOAT_DTYPES,
    HALF_DTYPES,
    require_contiguous,
    require_heads,
    require_out,
    require_softcap,
    require_tensor,
)
from bytetx.ops.native import empty_rows
from bytetx.ops.registry import Operation


class AttentionCalls(NamedTuple):
    """Shape class of varlen_attention.

    changes_scores: whether there is a softcap or a bias.  has_mask: whether calls are causal, have
    a window, or fewer key heads.  is_aligned: whether rows start at multiples of 16 bytes.
    has_scale: whether softmax_scale is above 0.  has_work: whether there is a row and a sequence.
    has_tree: whether sequences continue others.  has_sinks: whether rows have a score of no key.
    """

    dtype: torch.dtype
    head_dim: int
    changes_scores: bool
    has_mask: bool
    is_aligned: bool = True
    has_scale: bool = True
    has_work: bool = True
    has_tree: bool = False
    has_sinks: bool = False


# run takes what varlen_attention does, checked, with every option given.
VARLEN_ATTENTION = Operation("varlen_attention")


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    *,
    max_seqlen: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window: int = 0,
    softcap: float = 0.0,
    relative_bias: Tensor | None = None,
    bias_positions: Tensor | None = None,
    sinks: Tensor | None = None,
    plan: AttentionPlan | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attention over packed sequences; no token sees another sequence.

    q: [total_tokens, num_heads, head_dim], f32, bf16 or f16, heads and features contiguous in each
    row (views into one packed qkv buffer are normal).  k, v: the same, or fewer heads that divide
    num_heads, each shared by neighbouring query heads.  cu_seqlens: int32 [batch_size + 1] on q's
    device, starts at 0, ends at total_tokens.  max_seqlen: tokens, host int.
    softmax_scale: 1 / sqrt(head_dim) where None.  causal: no token sees a later one.
    window: a token sees itself, the window - 1 tokens before it and, unless causal, the window - 1
        tokens after it; 0: no limit.
    softcap: scaled scores s become softcap * tanh(s / softcap), before the bias and the mask; 0:
        they stay.
    relative_bias: f32 [num_heads, 2 * span - 1], span >= max_seqlen; score(i, j) of a head gets
    relative_bias[head, position(j) - position(i) + span - 1], where position is the index in the
    sequence, or bias_positions: int32 [total_tokens], values in [0, span).
    sinks: f32 [num_heads], contiguous: a score of each row of a head beside those of its keys,
        neither scaled nor capped, whose weight goes to no value; not with a tree.
    plan: plan_attention's for this batch, made once for all layers; where None and a kernel wants
    one, the call makes its own.  With a plan, cu_seqlens may end before total_tokens: the rows past
    its end are padding, which is neither read by the sequences nor written.  With a plan of a tree,
    tokens see their sequence's ancestors before it, max_seqlen counts these, and k and v may have
    more rows than q: those of sequences that are keys alone.
    out: contiguous [total_tokens, num_heads, head_dim], or None for a new tensor.
    Returns out, q's dtype; accumulates in f32.
    Raises ValueError on shape, dtype or device mismatch.
    Source: FlashAttention-2 (arXiv 2307.08691), section 3; zero padding as in ByteTransformer
    (arXiv 2210.03052); sinks as of gpt-oss (arXiv 2508.10925), section 2.
    """
    tree = None if plan is None else plan.tree
    _check(q, k, v, cu_seqlens, out, num_keys=None if tree is None else tree.total_keys)
    if relative_bias is not None:
        require_bias(
            relative_bias,
            bias_positions,
            num_heads=q.shape[1],
            total_tokens=q.shape[0],
            max_seqlen=max_seqlen,
            device=q.device,
        )
    if sinks is not None:
        _require_sinks(sinks, q, has_tree=tree is not None)
    if window < 0:
        raise ValueError(f"window must be 0 (none) or more tokens, got {window}")
    require_softcap(softcap)
    if softmax_scale is None:
        softmax_scale = 1.0 / math.sqrt(q.shape[2])
    if plan is not None and tree is not None:
        _require_own_plan(plan, q, cu_seqlens, causal, window)
        if torch.compiler.is_compiling():
            raise ValueError("attention with a tree cannot be compiled; call it eagerly")
    if torch.compiler.is_compiling():
        attended: Tensor = torch.ops.bytetx.varlen_attention(
            q,
            k,
            v,
            cu_seqlens,
            max_seqlen=max_seqlen,
            softmax_scale=softmax_scale,
            causal=causal,
            window=window,
            softcap=softcap,
            relative_bias=relative_bias,
            bias_positions=bias_positions,
            sinks=sinks,
        )
        return attended if out is None else out.copy_(attended)
    attended = VARLEN_ATTENTION.choose(
        q.device,
        AttentionCalls(
            q.dtype,
            q.shape[2],
            changes_scores=softcap > 0 or relative_bias is not None,
            has_mask=causal or window > 0 or q.shape[1] != k.shape[1],
            is_aligned=_are_aligned(q, k, v),
            has_scale=softmax_scale > 0,
            has_work=q.shape[0] > 0 and cu_seqlens.shape[0] > 1,
            has_tree=tree is not None,
            has_sinks=sinks is not None,
        ),
    ).run(
        q,
        k,
        v,
        cu_seqlens,
        max_seqlen=max_seqlen,
        softmax_scale=softmax_scale,
        causal=causal,
        window=window,
        softcap=softcap,
        relative_bias=relative_bias,
        bias_positions=bias_positions,
        sinks=sinks,
        plan=plan,
        out=out,
    )
    return attended


def _are_aligned(q: Tensor, k: Tensor, v: Tensor) -> bool:
    # Each of these is 0 where it is a multiple of 16 bytes.
    offsets = q.data_ptr() | k.data_ptr() | v.data_ptr()
    elements = q.shape[2] | q.stride(0) | k.stride(0) | v.stride(0)
    return (offsets | elements * q.element_size()) % 16 == 0


def _takes_plan(device: torch.device, calls: AttentionCalls) -> bool:
    fits = calls.dtype in HALF_DTYPES and 0 < calls.head_dim <= MAX_HEAD_DIM
    if calls.has_sinks or (calls.has_tree and calls.changes_scores):
        return False  # the kernel has no sinks, and no tiles for both of the others
    return fits and calls.is_aligned and calls.has_scale and calls.has_work


def _takes_triton(device: torch.device, calls: AttentionCalls) -> bool:
    """In f32 it multiplies without tensor cores: torch's own is faster where nothing is masked, no
    score is changed and head_dim is a multiple of 4."""
    if not 0 < calls.head_dim <= MAX_HEAD_DIM or not calls.has_work:
        return False
    is_plain = not (calls.changes_scores or calls.has_mask or calls.has_sinks)
    return calls.dtype in HALF_DTYPES or not is_plain or calls.head_dim % 4 != 0


def _takes_more(device: torch.device, calls: AttentionCalls) -> bool:
    """Heads, and calls with sinks, that no other kernel takes."""
    if calls.has_sinks and _takes_triton(device, calls):
        return True
    is_wide = MAX_HEAD_DIM < calls.head_dim <= MAX_WIDE_HEAD_DIM
    return is_wide and calls.dtype in HALF_DTYPES and calls.has_work and not calls.has_tree


def _run_by_plan(
    run: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    *,
    max_seqlen: int,
    causal: bool,
    window: int,
    plan: AttentionPlan | None,
    **options: Any,
) -> Tensor:
    """A kernel that takes a plan: that of the call, or one of its own."""
    plan = _plan_for(plan, q, cu_seqlens, causal, window, **options)
    return run(q, k, v, plan, **options)


VARLEN_ATTENTION.native_kernel("cuda", kernel="planned_attention", takes=_takes_plan)(
    partial(_run_by_plan, run_planned)
)
VARLEN_ATTENTION.triton_kernel(beside="planned_attention", takes=_takes_triton)(
    partial(_run_by_plan, run_triton)
)
# Where the native kernel serves the GPU, Triton's runs what that one has not.
VARLEN_ATTENTION.triton_kernel(beside="", takes=_takes_more)(partial(_run_by_plan, run_triton))


def _plan_for(
    plan: AttentionPlan | None,
    q: Tensor,
    cu_seqlens: Tensor,
    causal: bool,
    window: int,
    *,
    softcap: float,
    relative_bias: Tensor | None,
    sinks: Tensor | None,
    **_: object,
) -> AttentionPlan:
    if plan is None:
        plan = plan_attention(
            cu_seqlens,
            total_tokens=q.shape[0],
            head_dim=q.shape[2],
            causal=causal,
            window=window,
            has_bias=relative_bias is not None,
            softcap=softcap,
            has_sinks=sinks is not None,
        )
        assert plan is not None  # _takes_plan said that there is a kernel
        return plan
    _require_own_plan(plan, q, cu_seqlens, causal, window)
    return plan


def _require_own_plan(
    plan: AttentionPlan, q: Tensor, cu_seqlens: Tensor, causal: bool, window: int
) -> None:
    made_for = (plan.batch_size, plan.total_tokens, plan.causal, plan.window)
    wanted = (cu_seqlens.shape[0] - 1, q.shape[0], causal, window)
    if made_for != wanted:
        raise ValueError(
            f"plan must be of this batch: (batch_size, total_tokens, causal, window) is {wanted}, "
            f"the plan's {made_for}; make it with plan_attention"
        )


@VARLEN_ATTENTION.native_kernel(
    "cpu",
    takes=lambda device, calls: (
        calls.dtype in (torch.float32, torch.bfloat16) and calls.head_dim > 0
    ),
)
def run_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    *,
    max_seqlen: int,
    softmax_scale: float,
    causal: bool = False,
    window: int = 0,
    softcap: float = 0.0,
    relative_bias: Tensor | None,
    bias_positions: Tensor | None,
    sinks: Tensor | None = None,
    plan: AttentionPlan | None = None,
    out: Tensor | None = None,
    isa: str = "auto",
) -> Tensor:
    """The CPU's native kernel on checked arguments; isa: a key of ISA_CODES."""
    total_tokens, num_heads, head_dim = q.shape
    key_rows, cu_keys = plan.tables if plan is not None and plan.tables else (None, None)
    batch_size = len(cu_seqlens if cu_keys is None else cu_keys) - 1
    launch = native.launch_args(q.device, isa)
    num_bytes = native.require_kernel("varlen_attention_workspace_bytes", q.device)(
        batch_size=batch_size, head_dim=head_dim, num_threads=launch.num_threads
    )
    if out is None:
        out = empty_rows(q.shape[0], q.shape[1:], q.dtype)
    native.require_kernel("varlen_attention", q.device)(
        q=q,
        k=k,
        v=v,
        out=out,
        cu_seqlens=cu_seqlens,
        key_rows=key_rows,
        cu_keys=cu_keys,
        relative_bias=relative_bias,
        bias_positions=bias_positions,
        sinks=sinks,
        workspace=torch.empty(num_bytes, dtype=torch.uint8),
        workspace_bytes=num_bytes,
        batch_size=batch_size,
        total_tokens=total_tokens,
        num_keys=k.shape[0],
        max_seqlen=max_seqlen,
        num_heads=num_heads,
        num_kv_heads=k.shape[1],
        head_dim=head_dim,
        relative_bias_span=0 if relative_bias is None else (relative_bias.shape[1] + 1) // 2,
        window=min(window, native.MAX_WINDOW),
        causal=causal,
        q_stride=q.stride(0),
        k_stride=k.stride(0),
        v_stride=v.stride(0),
        out_stride=num_heads * head_dim,
        softmax_scale=softmax_scale,
        softcap=softcap,
        dtype=native.DTYPE_CODES[q.dtype],
        launch=launch,
    )
    return out


def _why_no_flash(device: torch.device) -> str | None:
    """FlashAttention as torch ships it: f16, bf16, head_dim a multiple of 8 up to 256, no cap."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return "FlashAttention is for CUDA GPUs"
    if not torch.backends.cuda.is_flash_attention_available():
        return "torch was built without FlashAttention"
    is_new = torch.cuda.get_device_capability(device) >= (8, 0)
    return None if is_new else "FlashAttention is for sm_80 and later"


def _takes_flash(device: torch.device, calls: AttentionCalls) -> bool:
    fits = calls.head_dim % 8 == 0 and calls.head_dim <= MAX_HEAD_DIM and not calls.has_tree
    is_softmax = not (calls.changes_scores or calls.has_sinks)
    return fits and calls.dtype in HALF_DTYPES and calls.has_work and is_softmax


@VARLEN_ATTENTION.register(
    "torch's FlashAttention", "cuda", why_missing=_why_no_flash, takes=_takes_flash
)
def _flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    *,
    max_seqlen: int,
    softmax_scale: float,
    causal: bool,
    window: int,
    out: Tensor | None,
    **_: object,
) -> Tensor:
    """Called below torch.nn.attention.varlen, whose custom op costs microseconds per call and whose
    signature moved between torch 2.10 and 2.13."""
    attended: Tensor = torch.ops.aten._flash_attention_forward(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, 0.0, causal, False,
        scale=softmax_scale, window_size_left=window - 1 if window else None,
        window_size_right=window - 1 if window and not causal else None,
    )[0]  # fmt: skip
    return attended if out is None else out.copy_(attended)


def _takes_memory_efficient(device: torch.device, calls: AttentionCalls) -> bool:
    is_plain = not (calls.changes_scores or calls.has_mask or calls.has_sinks)
    return calls.dtype == torch.float32 and calls.head_dim % 4 == 0 and calls.has_work and is_plain


@VARLEN_ATTENTION.register(
    "torch's memory-efficient attention",
    "cuda",
    why_missing=lambda device: None if device.type == "cuda" else "it is for CUDA GPUs",
    takes=_takes_memory_efficient,
)
def _memory_efficient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    *,
    max_seqlen: int,
    softmax_scale: float,
    out: Tensor | None,
    **_: object,
) -> Tensor:
    attended: Tensor = torch.ops.aten._efficient_attention_forward(
        q[None], k[None], v[None], None, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, 0.0, 0,
        scale=softmax_scale,
    )[0][0]  # fmt: skip
    return attended if out is None else out.copy_(attended)


@VARLEN_ATTENTION.in_torch()
def _run_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    *,
    plan: AttentionPlan | None,
    out: Tensor | None,
    **options: Any,
) -> Tensor:
    if plan is not None and plan.tree is not None:
        attended = reference.tree_attention(q, k, v, plan.tree, **options)
    else:
        attended = reference.varlen_attention(q, k, v, cu_seqlens, **options)
    return attended if out is None else out.copy_(attended)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    out: Tensor | None,
    *,
    num_keys: int | None,
) -> None:
    if num_keys is not None or not _are_operands(q, k, v, cu_seqlens):
        _check_operands(q, k, v, cu_seqlens, num_keys=num_keys)
    if out is not None:
        require_out("out", out, like=q, shape=q.shape)


def _are_operands(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> bool:
    """Whether these pass _check_operands for sure, in a quarter of its time (2 us per call)."""
    is_tensors = isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)
    if not (is_tensors and isinstance(cu_seqlens, Tensor)):
        return False
    shape, shared, dtype, index = q.shape, k.shape, q.dtype, q.get_device()
    if not (len(shape) == 3 == len(shared) and shared == v.shape and shared[1] > 0):
        return False
    inner = (shape[2], 1)
    return (
        shape[0] == shared[0]
        and shape[2] == shared[2]
        and shape[1] % shared[1] == 0
        and q.stride()[1:] == k.stride()[1:] == v.stride()[1:] == inner
        and dtype in FLOAT_DTYPES
        and dtype is k.dtype is v.dtype
        and cu_seqlens.dtype is torch.int32
        and cu_seqlens.dim() == 1
        and cu_seqlens.is_contiguous()
        and cu_seqlens.shape[0] > 0
        and index == k.get_device() == v.get_device() == cu_seqlens.get_device()
    )


def _check_operands(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, *, num_keys: int | None
) -> None:
    """num_keys: rows of k and v; None means as many as q has."""
    require_heads("q", q)
    shape, dtypes, device = q.shape, (q.dtype,), q.device
    rows = shape[0] if num_keys is None else num_keys
    require_tensor("k", k, shape=(rows, None, shape[2]), dtypes=dtypes, device=device)
    require_tensor("v", v, shape=tuple(k.shape), dtypes=dtypes, device=device)
    require_heads("k", k)
    require_heads("v", v)
    if q.shape[1] != k.shape[1] and (k.shape[1] == 0 or q.shape[1] % k.shape[1]):
        raise ValueError(
            f"k must have a number of heads that divides q's {q.shape[1]}, got {k.shape[1]}"
        )
    require_tensor("cu_seqlens", cu_seqlens, shape=(None,), dtypes=(torch.int32,), device=device)
    require_contiguous("cu_seqlens", cu_seqlens)
    if cu_seqlens.shape[0] == 0:
        raise ValueError("cu_seqlens must have batch_size + 1 entries, got 0")


def _require_sinks(sinks: Tensor, q: Tensor, *, has_tree: bool) -> None:
    shape, f32 = (q.shape[1],), (torch.float32,)
    require_tensor("sinks", sinks, shape=shape, dtypes=f32, device=q.device)
    require_contiguous("sinks", sinks)
    if has_tree:
        raise ValueError("sinks must be None where sequences continue others (a plan of a tree)")


def require_bias(
    relative_bias: Tensor,
    bias_positions: Tensor | None,
    *,
    num_heads: int,
    total_tokens: int,
    max_seqlen: int,
    device: torch.device,
) -> None:
    """Check the bias that varlen_attention takes, and on a CPU the values of its positions."""
    shape, f32 = (num_heads, None), (torch.float32,)
    require_tensor("relative_bias", relative_bias, shape=shape, dtypes=f32, device=device)
    require_contiguous("relative_bias", relative_bias)
    span, rest = divmod(relative_bias.shape[1] + 1, 2)
    if rest or span < max_seqlen:
        raise ValueError(
            f"relative_bias must have 2 * span - 1 columns with span >= max_seqlen {max_seqlen}, "
            f"got {relative_bias.shape[1]}"
        )
    if bias_positions is None:
        return
    rows, int32 = (total_tokens,), (torch.int32,)
    require_tensor("bias_positions", bias_positions, shape=rows, dtypes=int32, device=device)
    require_contiguous("bias_positions", bias_positions)
    if total_tokens > 0 and device.type == "cpu" and not torch.compiler.is_compiling():
        low, high = (int(t) for t in bias_positions.aminmax())
        if low < 0 or high >= span:
            raise ValueError(f"bias_positions must be in [0, {span}), got {low} to {high}")


native.register(
    varlen_attention,
    without=["plan", "out"],
    fake=lambda q, *_, **__: q.new_empty(q.shape),
)
