"""Rotary position embedding on packed rows, in place: checks, choice of kernel."""

import torch
from torch import Tensor

from bytetx.ops import native, reference, triton_backend
from bytetx.ops.check import require_contiguous, require_heads, require_tensor
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
    _check(x, cos, sin, position_ids)
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
def _run_kernel(
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
def _run_triton(
    x: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor, *, is_interleaved: bool
) -> None:
    run = triton_backend.kernels(x.device).rotary
    run(x, cos, sin, position_ids, is_interleaved=is_interleaved)


@ROTARY.in_torch()
def _run_torch(
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


def _check(x: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor) -> None:
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
