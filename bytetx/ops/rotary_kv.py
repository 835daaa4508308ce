"""Rotary position embedding in place, alone, after head norms, and with the write into the KV
cache."""

import torch
from torch import Tensor

from bytetx.ops import native, reference, triton_backend
from bytetx.ops.check import require_contiguous, require_heads, require_tensor
from bytetx.ops.norm import RMS_NORM, rms_norm
from bytetx.ops.paged import WRITE_KV, check_cache, check_slots, write_kv
from bytetx.ops.registry import Operation

# Shape class: dtype.  run(x, cos, sin, position_ids, *, is_interleaved) as of rotary.
ROTARY = Operation("rotary")


def rotary(
    x: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor, *, is_interleaved: bool = False
) -> Tensor:
    """Turns pairs of features by the angles of their token's position, in place, and returns x.

    x: [total_tokens, heads, head_dim], f32, bf16 or f16, heads and features contiguous in each row
    (a view into fused qkv rows is normal).  cos, sin: f32 [num_positions, rotary_dim / 2] of the
    angles; rotary_dim at most head_dim, the features after it stay.  position_ids: int32
    [total_tokens].  A pair is (i, i + rotary_dim / 2), or with is_interleaved (2 i, 2 i + 1).
    Computes in f32.  Raises ValueError on shape, dtype or device mismatch, and on a CPU where a
    position is outside the tables.
    Source: RoFormer (arXiv 2104.09864), section 3.2.
    """
    _check_rotary(x, cos, sin, position_ids)
    if torch.compiler.is_compiling():
        torch.ops.bytetx.rotary(x, cos, sin, position_ids, is_interleaved=is_interleaved)
    else:
        rotate(x, cos, sin, position_ids, is_interleaved=is_interleaved)
    return x


def rotate(
    x: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor, *, is_interleaved: bool
) -> None:
    """rotary on checked arguments."""
    run = ROTARY.choose(x.device, x.dtype).run
    run(x, cos, sin, position_ids, is_interleaved=is_interleaved)


def _takes_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cuda" or dtype in (torch.float32, torch.bfloat16)


@ROTARY.native_kernel(takes=_takes_kernel)
def _rotate_by_kernel(
    x: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor, *, is_interleaved: bool
) -> None:
    native.require_kernel("rotary", x.device)(
        x=x,
        cos=cos,
        sin=sin,
        position_ids=position_ids,
        total_tokens=x.shape[0],
        num_positions=cos.shape[0],
        num_heads=x.shape[1],
        head_dim=x.shape[2],
        num_pairs=cos.shape[1],
        is_interleaved=is_interleaved,
        x_stride=x.stride(0),
        dtype=native.DTYPE_CODES[x.dtype],
        launch=native.launch_args(x.device),
    )


@ROTARY.triton_kernel()
def _rotate_by_triton(
    x: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor, *, is_interleaved: bool
) -> None:
    run = triton_backend.kernels(x.device).rotary
    run(x, cos, sin, position_ids, is_interleaved=is_interleaved)


@ROTARY.in_torch()
def _rotate_in_torch(
    x: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor, *, is_interleaved: bool
) -> None:
    if not x.is_cuda and position_ids.numel() > 0:
        low, high = (int(t) for t in position_ids.aminmax())
        if low < 0 or high >= cos.shape[0]:
            raise ValueError(
                f"position_ids must be in [0, {cos.shape[0]}), the rows of cos and sin, "
                f"got {low} to {high}"
            )
    reference.rotary(x, cos, sin, position_ids, is_interleaved=is_interleaved)


def _check_rotary(x: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor) -> None:
    require_heads("x", x)
    device, f32 = x.device, (torch.float32,)
    require_tensor("cos", cos, shape=(None, None), dtypes=f32, device=device)
    require_tensor("sin", sin, shape=tuple(cos.shape), dtypes=f32, device=device)
    int32 = (torch.int32,)
    require_tensor("position_ids", position_ids, shape=x.shape[:1], dtypes=int32, device=device)
    for name, t in (("cos", cos), ("sin", sin), ("position_ids", position_ids)):
        require_contiguous(name, t)
    if 2 * cos.shape[1] > x.shape[2]:
        raise ValueError(
            f"cos must have at most head_dim / 2 = {x.shape[2] // 2} columns, got {cos.shape[1]}"
        )


native.register(rotate, name="rotary", mutates=["x"], fake=lambda *_, **__: None)


_FLOAT32, _INT32 = (torch.float32,), (torch.int32,)

# Shape class: whether the cache has codes.  run takes what rotary_write_kv does, checked, with
# every option given.
ROTARY_WRITE_KV = Operation("rotary_write_kv")


def rotary_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    is_interleaved: bool = False,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> Tensor:
    """Norms and turns the heads of q and k, writes k and v into the cache; returns the new q.

    q: [total_tokens, num_heads, head_dim], k, v: [total_tokens, num_kv_heads, head_dim], f32, bf16
    or f16, heads and features contiguous in each row (views of fused rows are normal).  cos, sin,
    position_ids, is_interleaved: as rotary's.  k_cache, v_cache, slot_mapping, k_scales, v_scales:
    as write_kv's.
    q_norm, k_norm: [head_dim] in q's dtype, weights of an RMS norm of each head that comes first,
    or None for none.  eps: the norm's.
    Returns [total_tokens, num_heads, head_dim]: q itself where one kernel does it all, with f32
    between the steps.  q and k hold anything after the call.
    Raises ValueError on shape, dtype or device mismatch, and on a CPU where a position or a slot
    is outside its table.
    """
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm and k_norm must be given both, or neither")
    if torch.compiler.is_compiling():
        if q_norm is not None and k_norm is not None:
            q, k = (_rms_norm(x, w, eps) for x, w in ((q, q_norm), (k, k_norm)))
        rotary(q, cos, sin, position_ids, is_interleaved=is_interleaved)
        rotary(k, cos, sin, position_ids, is_interleaved=is_interleaved)
        write_kv(k, v, k_cache, v_cache, slot_mapping, k_scales, v_scales)
        return q
    _check(q, k, v, cos, sin, position_ids)
    check_cache(k_cache, v_cache, k.shape[2], like=k, scales=(k_scales, v_scales))
    check_slots(k, k_cache, slot_mapping)
    _check_norms(q, q_norm, k_norm)
    rotated: Tensor = ROTARY_WRITE_KV.choose(q.device, k_scales is not None).run(
        q,
        k,
        v,
        cos,
        sin,
        position_ids,
        k_cache,
        v_cache,
        slot_mapping,
        is_interleaved=is_interleaved,
        q_norm=q_norm,
        k_norm=k_norm,
        eps=eps,
        k_scales=k_scales,
        v_scales=v_scales,
    )
    return rotated


@ROTARY_WRITE_KV.native_kernel("cuda")
def _run_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor,
    k_cache: Tensor | None,
    v_cache: Tensor | None,
    slot_mapping: Tensor | None,
    *,
    is_interleaved: bool,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> Tensor:
    native.require_kernel("rotary_write_kv", q.device)(
        q=q,
        k=k,
        v=v,
        k_cache=k_cache,
        v_cache=v_cache,
        k_scales=k_scales,
        v_scales=v_scales,
        cos=cos,
        sin=sin,
        q_norm=q_norm,
        k_norm=k_norm,
        position_ids=position_ids,
        slot_mapping=slot_mapping,
        total_tokens=q.shape[0],
        num_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        head_dim=q.shape[2],
        num_pairs=cos.shape[1],
        page_size=0 if k_scales is None else k_scales.shape[2],
        is_interleaved=is_interleaved,
        q_stride=q.stride(0),
        k_stride=k.stride(0),
        v_stride=0 if v is None else v.stride(0),
        eps=eps,
        dtype=native.DTYPE_CODES[q.dtype],
        launch=native.launch_args(q.device),
    )
    return q


@ROTARY_WRITE_KV.register("one op after another")
def _run_in_turn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    is_interleaved: bool,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    k_scales: Tensor | None,
    v_scales: Tensor | None,
) -> Tensor:
    angles, norms = (cos, sin, position_ids), (q_norm, k_norm)
    q, k = _norm_and_rotate_in_turn(
        q, k, *angles, is_interleaved=is_interleaved, norms=norms, eps=eps
    )
    run = WRITE_KV.choose(k.device, k_scales is not None).run
    run(k, v, k_cache, v_cache, slot_mapping, k_scales, v_scales)
    return q


# Shape class: none.  run(q, k, cos, sin, position_ids, *, is_interleaved, norms, eps) gives q and k
# after an RMS norm of each head, where norms are the weights of q's and of k's, and the rotation;
# arguments are checked ones of rotary_write_kv, and q and k hold anything after the call.
NORM_ROTARY = Operation("norm_rotary")

_Norms = tuple[Tensor | None, Tensor | None]


@NORM_ROTARY.native_kernel("cuda", kernel="rotary_write_kv")
def _norm_and_rotate_by_kernel(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor,
    *,
    is_interleaved: bool,
    norms: _Norms,
    eps: float,
) -> tuple[Tensor, Tensor]:
    _run_kernel(
        q,
        k,
        None,
        cos,
        sin,
        position_ids,
        None,
        None,
        None,
        is_interleaved=is_interleaved,
        q_norm=norms[0],
        k_norm=norms[1],
        eps=eps,
    )
    return q, k


@NORM_ROTARY.register("one op after another")
def _norm_and_rotate_in_turn(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor,
    *,
    is_interleaved: bool,
    norms: _Norms,
    eps: float,
) -> tuple[Tensor, Tensor]:
    if norms[0] is not None and norms[1] is not None:
        q, k = norm_heads(q, norms[0], eps), norm_heads(k, norms[1], eps)
    run = ROTARY.choose(q.device, q.dtype).run
    for heads in (q, k):
        run(heads, cos, sin, position_ids, is_interleaved=is_interleaved)
    return q, k


def norm_heads(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of each head of checked x [total_tokens, heads, head_dim]; a new tensor."""
    rows = x.reshape(-1, x.shape[2]).contiguous()  # a view where there is one head
    run = RMS_NORM.choose(x.device, x.dtype, x.shape[2]).run
    normed: Tensor = run(rows, weight, None, eps=eps, residual=None, out=None)
    return normed.view(x.shape)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms_norm(x.reshape(-1, x.shape[2]).contiguous(), weight, eps=eps).view(x.shape)


def _check(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor) -> None:
    for name, t in (("q", q), ("k", k), ("v", v)):
        require_heads(name, t)
    head_dim, device = q.shape[2], q.device
    shape = (q.shape[0], None, head_dim)
    require_tensor("k", k, shape=shape, dtypes=(q.dtype,), device=device)
    require_tensor("v", v, shape=k.shape, dtypes=(q.dtype,), device=device)
    require_tensor("cos", cos, shape=(None, None), dtypes=_FLOAT32, device=device)
    require_tensor("sin", sin, shape=cos.shape, dtypes=_FLOAT32, device=device)
    require_tensor("position_ids", position_ids, shape=q.shape[:1], dtypes=_INT32, device=device)
    for name, t in (("cos", cos), ("sin", sin), ("position_ids", position_ids)):
        require_contiguous(name, t)
    if 2 * cos.shape[1] > head_dim:
        raise ValueError(
            f"cos must have at most head_dim / 2 = {head_dim // 2} columns, got {cos.shape[1]}"
        )


def _check_norms(q: Tensor, q_norm: Tensor | None, k_norm: Tensor | None) -> None:
    for name, t in (("q_norm", q_norm), ("k_norm", k_norm)):
        if t is not None:
            shape = q.shape[2:]
            require_tensor(name, t, shape=shape, dtypes=(q.dtype,), device=q.device)
            require_contiguous(name, t)
