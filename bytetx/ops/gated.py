"""Gated linear layers (GEGLU, SwiGLU): act(x @ gate.T) * (x @ up.T) in one product."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from bytetx.ops import native, reference, triton_backend
from bytetx.ops.check import is_aligned, require_tensor
from bytetx.ops.fp8_linear import Fp8LinearWeight, has_fp8_linear
from bytetx.ops.grouped_blocks import GroupedBlocks
from bytetx.ops.linear import (
    ACTIVATIONS,
    DTYPE_NAMES,
    LinearWeight,
    linear,
    prepare_linear,
    require_rows,
    run_kernel,
)
from bytetx.ops.linear_plan import LinearPlan, plan_gated, plan_invariant
from bytetx.ops.panel_linear import gate_blocks, why_no_panels
from bytetx.ops.registry import Operation
from bytetx.ops.weight import Weight

GATES = ("gelu", "gelu_tanh", "silu")
# Gates and values take turns in blocks of this many rows, so that a tile of the product holds both.
BLOCK = 32
_ROWS_IN_F32 = 64

# Shape class: dtype and whether the Hopper kernel takes the weight and the rows.
# run(both, w, activation) as of gate.
GATE_ROWS = Operation("gate_rows")


@dataclass(frozen=True, slots=True)
class GatedWeight:
    """fused: rows of gates and of values in turn, `block` of each: [2 * n, k].

    has_kernel: whether the Hopper kernels take it; x must be aligned as well.
    Other members: as of bytetx.ops.weight.Weight.
    """

    fused: Weight
    n: int
    block: int
    has_kernel: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "has_kernel", self.fused.has_kernel and self.block == BLOCK)

    @property
    def k(self) -> int:
        return self.fused.k

    @property
    def is_plain(self) -> bool:
        return self.fused.is_plain

    @property
    def dtype(self) -> torch.dtype:
        return self.fused.dtype

    @property
    def sum_bias(self) -> Tensor | None:
        return self.fused.sum_bias

    @property
    def num_bytes(self) -> int:
        return self.fused.num_bytes

    @property
    def dense(self) -> LinearWeight:
        return self.fused.dense

    def with_matrix(self, matrix: Weight) -> "GatedWeight":
        return replace(self, fused=matrix)

    def shard(self, *, outputs: range | None = None, inputs: range | None = None) -> "GatedWeight":
        if outputs is None:
            return replace(self, fused=self.fused.shard(inputs=inputs))
        if outputs.start % self.block or outputs.stop % self.block:
            raise ValueError(
                f"outputs must be whole blocks of {self.block} gates, got {outputs.start} to "
                f"{outputs.stop}"
            )
        rows = range(2 * outputs.start, 2 * outputs.stop)
        return replace(self, fused=self.fused.shard(outputs=rows, inputs=inputs), n=len(outputs))

    def matmul(
        self, x: Tensor, *, activation: str = "none", residual: Tensor | None = None
    ) -> Tensor:
        d = _product(x, self, activation)
        return d if residual is None else d.add_(residual)

    def product(
        self, x: Tensor, *, bias: Tensor | None = None, residual: Tensor | None = None
    ) -> Tensor:
        return self.fused.product(x, bias=bias, residual=residual)

    def activated(self, product: Tensor, activation: str) -> Tensor:
        return gate(product, self, activation=activation)


def prepare_gated(
    gate: Tensor,
    up: Tensor,
    *,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    prepack: bool,
    batch_invariant: bool = False,
) -> GatedWeight:
    """One weight of gate [n, k] and up [n, k], with both biases [n] or neither; a copy.

    prepack, batch_invariant: as prepare_linear's.
    Raises ValueError on shape, dtype or device mismatch.
    """
    require_tensor("gate", gate, shape=(None, None))
    require_tensor("up", up, shape=tuple(gate.shape), dtypes=(gate.dtype,), device=gate.device)
    if (gate_bias is None) != (up_bias is None):
        raise ValueError("gate_bias and up_bias must be given both, or neither")
    n = gate.shape[0]
    block = gate_block(n)
    bias = None
    if gate_bias is not None and up_bias is not None:
        for name, t in (("gate_bias", gate_bias), ("up_bias", up_bias)):
            require_tensor(name, t, shape=(n,), dtypes=(gate.dtype,), device=gate.device)
        bias = in_turn(gate_bias, up_bias, block)
    both = in_turn(gate, up, block)
    fused = prepare_linear(both, bias, prepack=prepack, batch_invariant=batch_invariant)
    return GatedWeight(fused, n, block)


def gated_linear(x: Tensor, w: GatedWeight, *, activation: str) -> Tensor:
    """act(x @ gate.T + gate_bias) * (x @ up.T + up_bias).

    x: [m, k] in w's dtype, contiguous.  activation: one of GATES.  Returns a new [m, n].
    Raises ValueError on shape, dtype or device mismatch, or an unknown activation.
    Source: GLU variants (arXiv 2002.05202), section 2.
    """
    fused = w.dense
    require_rows("x", x, fused.k, fused)
    if activation not in GATES:
        raise ValueError(f"activation must be one of {', '.join(GATES)}, got {activation!r}")
    if torch.compiler.is_compiling():
        return _gate(linear(x, fused), w, activation)
    return _product(x, w, activation)


def _product(x: Tensor, w: GatedWeight, activation: str) -> Tensor:
    """gated_linear on checked arguments."""
    if w.has_kernel:
        fused = w.dense
        x = x.clone() if fused.batch_invariant and not is_aligned(x) else x
        plan = _plan(x, fused)
        if plan.tiling is not None:
            return run_kernel(x, fused, plan=plan, activation=activation, is_gated=True)
    if isinstance(w.fused, GroupedBlocks) and w.block == BLOCK:
        if w.fused.decodes(x.shape[0]):
            return w.fused.matmul(x, activation=activation, is_gated=True)
        written = replace(w, fused=w.fused.written_out())
        return _product(w.fused.in_order(x), written, activation)
    if isinstance(w.fused, Fp8LinearWeight) and w.block == BLOCK and has_fp8_linear(w.fused):
        return w.fused.matmul(x, activation=activation, is_gated=True)
    return gate(w.fused.matmul(x), w, activation=activation)


def gate(both: Tensor, w: GatedWeight, *, activation: str) -> Tensor:
    """act(gates) * values of the fused product, [m, 2 * n] -> [m, n]."""
    if torch.compiler.is_compiling():
        return _gate(both, w, activation)
    fits = w.has_kernel and is_aligned(both)
    gated: Tensor = GATE_ROWS.choose(both.device, both.dtype, fits).run(both, w, activation)
    return gated


@GATE_ROWS.native_kernel("cuda", takes=lambda device, dtype, fits: fits)
def _run_kernel(both: Tensor, w: GatedWeight, activation: str) -> Tensor:
    out = both.new_empty((len(both), w.n))
    native.require_kernel("gate_rows", both.device)(
        both=both,
        out=out,
        m=len(both),
        n=w.n,
        activation=ACTIVATIONS.index(activation),
        dtype=native.DTYPE_CODES[both.dtype],
        launch=native.launch_args(both.device),
    )
    return out


@GATE_ROWS.triton_kernel()
def _run_triton(both: Tensor, w: GatedWeight, activation: str) -> Tensor:
    gated: Tensor = triton_backend.kernels(both.device).gate_rows(
        both, w.n, block=w.block, activation=activation
    )
    return gated


@GATE_ROWS.register(
    "native",
    "cpu",
    why_missing=lambda device: why_no_panels(),
    takes=lambda device, dtype, fits: (
        device.type == "cpu" and dtype in (torch.float32, torch.bfloat16)
    ),
)
def _run_blocks(both: Tensor, w: GatedWeight, activation: str) -> Tensor:
    return gate_blocks(both, n=w.n, block=w.block, activation=ACTIVATIONS.index(activation))


@GATE_ROWS.in_torch()
def _run_torch(both: Tensor, w: GatedWeight, activation: str) -> Tensor:
    if both.is_cuda or both.dtype == torch.float32:
        return _gate(both, w, activation)
    # In f32, and rounded once; some rows at a time, whose f32 copies stay in a cache.
    out = both.new_empty((len(both), w.n))
    for rows, some in zip(both.split(_ROWS_IN_F32), out.split(_ROWS_IN_F32), strict=True):
        some.copy_(_gate(rows.float(), w, activation))
    return out


def _gate(both: Tensor, w: GatedWeight, activation: str) -> Tensor:
    gates, values = both.view(len(both), w.n // w.block, 2, w.block).unbind(2)
    return (reference.activate(gates, activation) * values).reshape(len(both), w.n)


def clamped_gate(both: Tensor, w: GatedWeight, *, limit: float, alpha: float) -> Tensor:
    """(u + 1) * g * sigmoid(alpha * g) of the fused product, [m, 2 * n] -> [m, n].

    g: the gates, at most limit.  u: the values, from -limit to limit.  In f32, rounded once; some
    rows at a time on a CPU, whose f32 copies stay in a cache.
    Source: gpt-oss (arXiv 2508.10925), section 2.
    """
    out = both.new_empty((len(both), w.n))
    num_rows = max(1, len(both)) if both.is_cuda else _ROWS_IN_F32
    for rows, some in zip(both.split(num_rows), out.split(num_rows), strict=True):
        blocks = rows.view(len(rows), w.n // w.block, 2, w.block).float()
        gates, values = blocks[:, :, 0].clamp(max=limit), blocks[:, :, 1].clamp(-limit, limit)
        gates *= torch.sigmoid(alpha * gates)
        some.view(gates.shape).copy_(values.add_(1).mul_(gates))
    return out


def _plan(x: Tensor, fused: LinearWeight) -> LinearPlan:
    if not is_aligned(x):
        return LinearPlan(None)
    if fused.batch_invariant:
        return plan_invariant(fused.n, fused.k, is_gated=True)
    return plan_gated(x.shape[0], fused.n, fused.k, dtype=DTYPE_NAMES[fused.dtype])


def gate_block(n: int) -> int:
    """Rows of a weight's n gates that take turns with as many of values."""
    return BLOCK if n % BLOCK == 0 else n


def in_turn(gate: Tensor, up: Tensor, block: int) -> Tensor:
    """Rows of gates and of values in turn, `block` of each, as those of a GatedWeight."""
    tail = gate.shape[1:]
    pair = (gate.reshape(-1, block, *tail), up.reshape(-1, block, *tail))
    return torch.stack(pair, 1).reshape(-1, *tail)
