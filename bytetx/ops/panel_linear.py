"""Products of few rows with weights in panels, and gates, by kernels of our own for CPUs."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from bytetx.ops import native
from bytetx.ops.native_params import PanelMatrix
from bytetx.ops.registry import Operation

_CPU = torch.device("cpu")
# PanelFormat of csrc/panel_ops.h.
WORDS, BF16_DOT, INT8, INT4 = range(4)
_COLUMNS = 32  # outputs of a panel of ours, as in csrc/cpu/bf16_linear.h
F32_CHAIN = 1024  # features that f32 sums in a row, as oneDNN does: errors grow with them


def why_no_panels() -> str | None:
    """Why this machine cannot run these kernels, or None where it can."""
    reason = native.why_no_kernel("panel_linear_isa", _CPU)
    if reason is None and native.require_kernel("panel_linear_isa", _CPU)() is None:
        return "it needs a CPU with AVX2 or NEON"
    return reason


def has_bf16_dot() -> bool:
    """Whether the kernels have bf16's own instruction here, vdpbf16ps or bfdot."""
    return not {"avx512_bf16", "neon_bf16"}.isdisjoint(native.available_isas())


def pack_weight(weight: Tensor) -> Tensor:
    """Our panels of a weight [n, k], f32 or bf16: int32 [ceil(n / 32), ceil(k / pair), 32].

    A word is a feature of f32 or a pair of bf16, those of 32 outputs behind one another, filled up
    with zeros.
    """
    n, k = weight.shape
    words = pad(weight, (0, k % _pair(weight.dtype), 0, -n % _COLUMNS)).contiguous()
    words = words.view(torch.int32)
    return words.view(-1, _COLUMNS, words.shape[1]).transpose(1, 2).contiguous()


def our_panels(
    packed: Tensor, bias: Tensor | None, *, n: int, k: int, dtype: torch.dtype
) -> PanelMatrix:
    """The panels that pack_weight made of a weight [n, k] of dtype, for panel_linear.

    It points into memory that the caller keeps.
    """
    features = k + k % _pair(dtype)
    chain = F32_CHAIN if dtype == torch.float32 else features
    return PanelMatrix(packed, bias, None, n, k, features, _COLUMNS, chain, WORDS)


def _pair(dtype: torch.dtype) -> int:
    """Features of a 32-bit word."""
    return 4 // dtype.itemsize


def f32_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    n: int,
    activation: int,
    is_packed: bool,
    isa: str = "auto",
) -> Tensor:
    """act(x @ weight.T + bias) of checked arguments: x f32 [m, k], contiguous.

    weight: f32 [n, k], or with is_packed what pack_weight made of it.
    activation, isa: as of panel_linear.  A row's bits depend on neither the other rows nor the
    number of threads.  Returns a new [m, n].
    """
    packed = weight if is_packed else pack_weight(weight)
    panels = our_panels(packed, bias, n=n, k=x.shape[1], dtype=torch.float32)
    return panel_linear(x, panels, activation=activation, isa=isa)


def panel_linear(x: Tensor, w: PanelMatrix, *, activation: int = 0, isa: str = "auto") -> Tensor:
    """act(x @ w.T + bias) of checked arguments: x [m, k], contiguous, f32 or bf16 as the weight.

    activation: its index in ops.linear.ACTIVATIONS.  isa: a key of native.ISA_CODES.
    A result depends on its row and output alone, bit for bit.  Returns a new [m, n].
    """
    return native.PanelProduct.of(w, x.dtype)(x, activation, isa)


def gate_blocks(both: Tensor, *, n: int, block: int, activation: int, isa: str = "auto") -> Tensor:
    """act(gates) * values of checked rows [m, 2 * n], in f32, and rounded once; a new [m, n].

    block: columns of gates that take turns with as many of values.  activation, isa: as of
    panel_linear.
    """
    out = both.new_empty((len(both), n))
    native.require_kernel("gate_blocks", _CPU)(
        both=both,
        out=out,
        m=len(both),
        n=n,
        block=block,
        activation=activation,
        dtype=native.DTYPE_CODES[both.dtype],
        launch=native.launch_args(_CPU, isa),
    )
    return out


native.register(
    f32_linear, without=["isa"], fake=lambda x, *_, n, **__: x.new_empty((x.shape[0], n))
)
Operation("panel_linear", "cpu").register(
    "native", "cpu", why_missing=lambda device: why_no_panels()
)(panel_linear)
