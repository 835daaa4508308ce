"""Linear layers of 8-bit integers on CPUs: weights as the kernels take them."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from bytetx.ops import native
from bytetx.ops.check import require_tensor
from bytetx.ops.linear import ACTIVATIONS, LinearWeight, taken
from bytetx.ops.native import empty_rows
from bytetx.ops.registry import Operation
from bytetx.ops.weight import QuantizedWeight

# Of csrc/cpu/int8_linear.h: outputs of a panel, features that one instruction multiplies.
_COLUMNS, _GROUP = 32, 4
_MAX_FEATURES = 1 << 16
_LARGEST = 127.0
_DTYPES = (torch.float32, torch.bfloat16)
_SCALE_STEPS = 9  # scales of an output that are tried, from 0.8 of the largest weight's up
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Int8LinearWeight(QuantizedWeight):
    """A layer's weight [n, k] of about scale[:, None] * w, w in -127 to 127.

    panels: w + 128, uint8 [ceil(n / 32), ceil(k / 4), 32, 4], filled up with 128.
    scale, bias, weighted_sum (scale * w.sum(1)): f32, n filled up to a multiple of 32 with zeros.
    dtype: of rows and results, f32 or bf16.  Other members: as of bytetx.ops.weight.Weight.
    """

    panels: Tensor
    scale: Tensor
    weighted_sum: Tensor
    bias: Tensor
    n: int
    k: int
    dtype: torch.dtype
    sum_bias: Tensor | None = None

    def shard(
        self, *, outputs: range | None = None, inputs: range | None = None
    ) -> "Int8LinearWeight":
        rows = self.panels.transpose(1, 2).reshape(len(self.scale), -1)[: self.n, : self.k]
        scale, bias = taken(self.scale[: self.n], outputs), taken(self.bias[: self.n], outputs)
        sum_bias = taken(self.sum_bias, outputs)
        if inputs is not None and sum_bias is None:
            bias, sum_bias = torch.zeros_like(bias), bias.to(self.dtype)
        w = taken(taken(rows, outputs), inputs, dim=1).float() - 128.0
        return _in_panels(w, scale, bias, self.dtype, sum_bias)

    def matmul(
        self, x: Tensor, *, activation: str = "none", residual: Tensor | None = None
    ) -> Tensor:
        """Each row of x is rounded to 8 bits; a row's result depends on no other row."""
        d = run_int8_linear(x, self, activation=ACTIVATIONS.index(activation))
        return d if residual is None else d.add_(residual)


def why_no_int8_linear() -> str | None:
    """Why this machine cannot run int8_linear, or None where it can."""
    reason = native.why_no_kernel("int8_linear_isa", _CPU)
    if reason is None and int8_linear_isa() is None:
        return "it needs a CPU with AVX2 or NEON"
    return reason


def int8_linear_isa() -> str | None:
    """The instruction set that int8_linear runs with here, for people; None where it cannot."""
    isa = native.kernel("int8_linear_isa", _CPU)
    return None if isa is None else isa()


def prepare_int8_linear(plain: LinearWeight) -> Int8LinearWeight:
    """A plain weight, f32 or bf16 on the CPU, rounded with a scale for every output.

    Raises ValueError for another one.
    """
    if plain.is_prepacked:
        raise ValueError("plain must be a plain weight, got one in another layout")
    require_tensor("weight", plain.weight, shape=(None, None), dtypes=_DTYPES, device=_CPU)
    if not 1 <= plain.k <= _MAX_FEATURES:
        raise ValueError(f"weight must have 1 to {_MAX_FEATURES} input features, got {plain.k}")
    w, scale = _round_weight(plain.weight.float())
    bias = torch.zeros(plain.n) if plain.bias is None else plain.bias.float()
    return _in_panels(w, scale, bias, plain.dtype, plain.sum_bias)


def _in_panels(
    w: Tensor, scale: Tensor, bias: Tensor, dtype: torch.dtype, sum_bias: Tensor | None
) -> Int8LinearWeight:
    """w: f32 [n, k], whole numbers.  scale, bias: f32 [n]."""
    n, k = w.shape
    more_n, more_k = -n % _COLUMNS, -k % _GROUP
    panels = pad(w + 128.0, (0, more_k, 0, more_n), value=128.0).to(torch.uint8)
    panels = panels.view(-1, _COLUMNS, panels.shape[1] // _GROUP, _GROUP).transpose(1, 2)
    columns = (scale, scale * w.sum(1), bias)
    scale, weighted_sum, bias = (pad(column, (0, more_n)).contiguous() for column in columns)
    return Int8LinearWeight(
        panels.contiguous(), scale, weighted_sum, bias, n, k, dtype, sum_bias=sum_bias
    )


def _round_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(w, scale), f32: of a few scales the one with the least square error, for every output."""
    largest = weight.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny * _LARGEST) / _LARGEST
    best, scale, least = torch.empty_like(weight), largest, torch.full_like(largest, torch.inf)
    for step in range(_SCALE_STEPS):
        tried = largest * (0.8 + 0.2 * step / (_SCALE_STEPS - 1))
        rounded = (weight / tried[:, None]).round_().clamp_(-_LARGEST, _LARGEST)
        error = (rounded * tried[:, None] - weight).square_().sum(1)
        is_better = error < least
        best = torch.where(is_better[:, None], rounded, best)
        scale = torch.where(is_better, tried, scale)
        least = torch.where(is_better, error, least)
    return best, scale


def run_int8_linear(
    x: Tensor, w: Int8LinearWeight, *, activation: int, isa: str = "auto"
) -> Tensor:
    """act(x @ weight.T + bias) of checked arguments: x f32 or bf16 [m, k], contiguous.

    activation: its index in ops.linear.ACTIVATIONS; isa: a key of native.ISA_CODES.  Each row of x
    is rounded to 256 steps between its least and its largest value, 0 among them; a row that is not
    finite gives NaN. Accumulates in int32, exactly; a row's result depends on no other row.
    Returns a new [m, n] in x's dtype.
    """
    m = x.shape[0]
    d = empty_rows(m, (w.n,), x.dtype)
    launch = native.launch_args(_CPU, isa)
    num_bytes = native.require_kernel("int8_linear_workspace_bytes", _CPU)(
        m=m, k=w.k, num_threads=launch.num_threads
    )
    native.require_kernel("int8_linear", _CPU)(
        x=x,
        weight=w.panels,
        weight_scale=w.scale,
        weight_sum=w.weighted_sum,
        bias=w.bias,
        d=d,
        workspace=torch.empty(num_bytes, dtype=torch.uint8),
        workspace_bytes=num_bytes,
        m=m,
        n=w.n,
        k=w.k,
        activation=activation,
        dtype=native.DTYPE_CODES[x.dtype],
        launch=launch,
    )
    return d


Operation("int8_linear").register("native", "cpu", why_missing=lambda device: why_no_int8_linear())(
    run_int8_linear
)
