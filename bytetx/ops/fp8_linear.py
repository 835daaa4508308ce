"""Linear layers of E4M3 rows: checks, choice of kernel and tiling, weights as they take them."""

from dataclasses import dataclass, replace
from functools import cache, lru_cache

import torch
from torch import Tensor

from bytetx.ops import native, reference
from bytetx.ops.check import is_aligned, require_contiguous, require_tensor
from bytetx.ops.linear import ACTIVATIONS, taken
from bytetx.ops.linear_plan import Tiling, fastest_whole
from bytetx.ops.quantize import quantize_rows
from bytetx.ops.registry import Operation
from bytetx.ops.weight import QuantizedWeight

KERNEL_COLUMNS = 32  # n in these steps
KERNEL_FEATURES = 16  # k
HALVES = (torch.float16, torch.bfloat16)

# Shape class: whether the weight's sizes and the rows are as the Hopper kernel wants them.
# run(rows, scale, w, *, activation, out_scale) as of fp8_linear.
FP8_LINEAR = Operation("fp8_linear", "cuda")

_COPY = "_bytetx_e4m3"  # attribute of a tensor
_SCALE_BYTES = 4
_SCALE_STEPS = 16  # scales of a weight's row that are tried

_MAX_PLANS = 4096


@dataclass(frozen=True, slots=True)
class Fp8LinearWeight(QuantizedWeight):
    """A layer's weight in E4M3: about rows * scale[:, None].

    out_scale: where it is given the results are E4M3 of act(...) / out_scale.
    Other members: as of bytetx.ops.weight.Weight.
    """

    rows: Tensor  # float8_e4m3fn [n, k]
    scale: Tensor  # f32 [n]
    bias: Tensor | None  # f32 [n]
    dtype: torch.dtype  # the results' dtype: f16 or bf16
    out_scale: float | None = None
    sum_bias: Tensor | None = None

    @property
    def n(self) -> int:
        return self.rows.shape[0]

    @property
    def k(self) -> int:
        return self.rows.shape[1]

    def shard(
        self, *, outputs: range | None = None, inputs: range | None = None
    ) -> "Fp8LinearWeight":
        bias, sum_bias = taken(self.bias, outputs), taken(self.sum_bias, outputs)
        if inputs is not None and bias is not None:
            sum_bias = bias.to(self.dtype)
            bias = None
        rows = taken(taken(self.rows, outputs), inputs, dim=1)
        return replace(
            self, rows=rows, scale=taken(self.scale, outputs), bias=bias, sum_bias=sum_bias
        )

    def matmul(
        self,
        x: Tensor,
        *,
        activation: str = "none",
        residual: Tensor | None = None,
        is_gated: bool = False,
    ) -> Tensor:
        """x: in f16 or bf16, or the E4M3 rows of a weight with out_scale.

        is_gated: the gated product of rows of gates and values in turn, 32 of each; only where
        has_fp8_linear.
        """
        rows, scale = (x, None) if x.dtype == torch.float8_e4m3fn else e4m3_copy(x)
        if is_gated:
            tiling = plan_fp8_linear(rows.shape[0], self.n, self.k).index
            return run_kernel(rows, scale, self, tiling, activation=activation, is_gated=True)
        d = _product(rows, scale, self, activation=activation, out_scale=self.out_scale)
        return d if residual is None else d.add_(residual)


def e4m3_copy(x: Tensor) -> tuple[Tensor, Tensor]:
    """(rows, scale) of x, quantized once: several layers read the same rows.

    The copy is kept on the tensor itself, where a norm that makes both leaves it (keep_e4m3_copy).
    """
    copy: tuple[Tensor, Tensor] | None = getattr(x, _COPY, None)
    if copy is None:
        copy = quantize_rows(x)
        setattr(x, _COPY, copy)
    return copy


def keep_e4m3_copy(x: Tensor, copy: tuple[Tensor, Tensor]) -> None:
    """x: whose quantized rows and scales `copy` holds."""
    setattr(x, _COPY, copy)


def prepare_fp8_linear(weight: Tensor, bias: Tensor | None = None) -> Fp8LinearWeight:
    """weight [n, k] and bias [n], f16 or bf16, rounded to E4M3 with a scale for every output.

    Raises ValueError on shape, dtype or device mismatch.
    """
    require_tensor("weight", weight, shape=(None, None), dtypes=HALVES)
    if bias is not None:
        require_tensor("bias", bias, shape=weight.shape[:1], device=weight.device)
        bias = bias.float()
    return Fp8LinearWeight(*_round_weight(weight.contiguous()), bias, weight.dtype)


def fp8_rows(w: Fp8LinearWeight) -> Tensor:
    """uint8 [n, k + 4]: a row's E4M3 codes and the bytes of its scale; in any order, a weight."""
    scales = w.scale.contiguous().view(torch.uint8).view(w.n, _SCALE_BYTES)
    return torch.cat([w.rows.view(torch.uint8), scales], 1)


def fp8_from_rows(packed: Tensor, bias: Tensor | None, *, dtype: torch.dtype) -> Fp8LinearWeight:
    """A weight of rows as fp8_rows has them.  bias [n], f16 or bf16.  dtype: of the results."""
    codes, scales = (
        part.clone(memory_format=torch.contiguous_format)
        for part in packed.split([packed.shape[1] - _SCALE_BYTES, _SCALE_BYTES], 1)
    )
    rows, scale = codes.view(torch.float8_e4m3fn), scales.view(torch.float32).squeeze(1)
    return Fp8LinearWeight(rows, scale, None if bias is None else bias.float(), dtype)


def are_finite_rows(packed: Tensor) -> bool:
    """Whether all numbers of rows as fp8_rows has them are finite."""
    w = fp8_from_rows(packed, None, dtype=torch.bfloat16)
    nans = (w.rows.view(torch.uint8) & 0x7F) == 0x7F
    return not nans.any() and bool(w.scale.isfinite().all())


def _round_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(rows, scale): of scales from amax / 448 to twice that, a row's with the least square error.

    An octave holds all there are: E4M3 rounds w / scale and w / (2 scale) alike.
    """
    w = weight.float()
    rows, least = quantize_rows(w)
    scale, error = least, _square_error(w, rows, least)
    for step in range(1, _SCALE_STEPS):
        other_scale = least * (1 + step / _SCALE_STEPS)
        other = (w / other_scale[:, None]).to(torch.float8_e4m3fn)
        other_error = _square_error(w, other, other_scale)
        better = (other_error < error).nonzero().squeeze(1)
        rows.view(torch.uint8)[better] = other.view(torch.uint8)[better]
        scale = scale.index_copy(0, better, other_scale[better])
        error = torch.minimum(error, other_error)
    return rows, scale


def _square_error(w: Tensor, rows: Tensor, scale: Tensor) -> Tensor:
    return (rows.float() * scale[:, None] - w).square().sum(1)


def fp8_linear(
    rows: Tensor,
    scale: Tensor | None,
    w: Fp8LinearWeight,
    *,
    activation: str = "none",
    out_scale: float | None = None,
) -> Tensor:
    """act((rows * scale[:, None]) @ w.T + bias).

    rows: float8_e4m3fn [m, k], contiguous.  scale: f32 [m], None for ones.
    activation: one of ops.linear.ACTIVATIONS.
    out_scale: where it is given the result is E4M3 of act(...) / out_scale, cut off beyond 448.
    Returns a new [m, n] in w.dtype or in float8_e4m3fn. A row's result depends on no other row.
    Raises ValueError on shape, dtype or device mismatch, or an unknown activation.
    """
    device = w.rows.device
    require_tensor("rows", rows, shape=(None, w.k), dtypes=(torch.float8_e4m3fn,), device=device)
    require_contiguous("rows", rows)
    if scale is not None:
        require_tensor("scale", scale, shape=rows.shape[:1], dtypes=(torch.float32,), device=device)
        require_contiguous("scale", scale)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    if out_scale is not None and not out_scale > 0:
        raise ValueError(f"out_scale must be above 0, got {out_scale}")
    return _product(rows, scale, w, activation=activation, out_scale=out_scale)


def _product(
    rows: Tensor,
    scale: Tensor | None,
    w: Fp8LinearWeight,
    *,
    activation: str,
    out_scale: float | None,
) -> Tensor:
    """fp8_linear on checked arguments."""
    backend = FP8_LINEAR.choose(rows.device, _fits(w) and is_aligned(rows))
    d: Tensor = backend.run(rows, scale, w, activation=activation, out_scale=out_scale)
    return d


@FP8_LINEAR.native_kernel("cuda", takes=lambda device, fits: fits)
def _run_native(
    rows: Tensor,
    scale: Tensor | None,
    w: Fp8LinearWeight,
    *,
    activation: str,
    out_scale: float | None,
) -> Tensor:
    tiling = plan_fp8_linear(rows.shape[0], w.n, w.k).index
    return run_kernel(rows, scale, w, tiling, activation=activation, out_scale=out_scale)


@FP8_LINEAR.in_torch()
def _run_torch(
    rows: Tensor,
    scale: Tensor | None,
    w: Fp8LinearWeight,
    *,
    activation: str,
    out_scale: float | None,
) -> Tensor:
    return reference.fp8_linear(
        rows,
        scale,
        w.rows,
        w.scale,
        w.bias,
        dtype=w.dtype,
        activation=activation,
        out_scale=out_scale,
    )


def run_kernel(
    rows: Tensor,
    scale: Tensor | None,
    w: Fp8LinearWeight,
    tiling: int,
    *,
    activation: str = "none",
    out_scale: float | None = None,
    is_gated: bool = False,
) -> Tensor:
    """The Hopper kernel on checked arguments, cut as `tiling` says.

    is_gated: as of Fp8LinearWeight.matmul, without out_scale.
    """
    is_fp8 = out_scale is not None
    dtype = torch.float8_e4m3fn if is_fp8 else w.dtype
    columns = w.n // 2 if is_gated else w.n
    d = torch.empty((rows.shape[0], columns), dtype=dtype, device=rows.device)
    native.require_kernel("fp8_linear", rows.device)(
        a=rows,
        b=w.rows,
        a_scale=scale,
        b_scale=w.scale,
        bias=w.bias,
        d=d,
        m=rows.shape[0],
        n=w.n,
        k=w.k,
        activation=ACTIVATIONS.index(activation),
        gated=is_gated,
        is_d_fp8=is_fp8,
        d_scale=out_scale if is_fp8 else 1.0,
        tiling=tiling,
        dtype=native.DTYPE_CODES[w.dtype],
        launch=native.launch_args(rows.device),
    )
    return d


def has_fp8_linear(w: Fp8LinearWeight) -> bool:
    """Whether the Hopper kernel takes this weight."""
    return _fits(w) and native.kernel("fp8_linear", w.rows.device) is not None


def _fits(w: Fp8LinearWeight) -> bool:
    return w.n % KERNEL_COLUMNS == 0 and w.k % KERNEL_FEATURES == 0 and w.dtype in HALVES


@lru_cache(_MAX_PLANS)
def plan_fp8_linear(m: int, n: int, k: int) -> Tiling:
    """The tiling that is predicted to be the fastest for the product [m, k] x [k, n]."""
    return fastest_whole(tilings(), m, n, k // 2)


@cache
def tilings() -> tuple[Tiling, ...]:
    """The tilings that the kernel was built with; empty where there is no kernel."""
    return tuple(Tiling(i, *row) for i, row in enumerate(native.fp8_linear_tilings()))
