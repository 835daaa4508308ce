"""Linear layers on packed rows: our kernels on Hopper GPUs and CPUs, or oneDNN."""

import platform
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from bytetx.ops import native, reference, triton_backend
from bytetx.ops.bf16_linear import bf16_linear, why_no_bf16_linear
from bytetx.ops.check import is_aligned, is_operand, require_contiguous, require_tensor
from bytetx.ops.linear_plan import (
    EPILOGUES,
    RESIDUAL,
    LinearPlan,
    leaves_residual,
    plan_invariant,
    plan_linear,
)
from bytetx.ops.native import num_tile_rows, padded, tile_rows
from bytetx.ops.panel_linear import f32_linear, pack_weight, why_no_panels
from bytetx.ops.registry import Backend, Operation

MaybeTensor = TypeVar("MaybeTensor", Tensor, Tensor | None)
W = TypeVar("W")

ACTIVATIONS = ("none", "gelu", "gelu_tanh", "relu", "silu", "tanh")

# What the Hopper kernel takes: f16 and bf16, n and k in these steps, 16-byte aligned operands.
DTYPE_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16"}
KERNEL_COLUMNS = 32
KERNEL_FEATURES = 8
# Features that oneDNN reads of a bf16 row at a time where the CPU has AMX: the last ones come from
# the row behind it, times zero, which is NaN if they are (oneDNN's issue 5717, mended in 2026).
# Rows of other widths are copied there, with a row of zeros behind the last one.
_AMX_FEATURES = 32
# Of fewer rows in f16 oneDNN sums in an order that depends on how many they are, with AVX-512 FP16.
_LEAST_F16_ROWS = 16
# Rows that oneDNN lays a prepacked weight out for; a hint, every m runs.
_PREPACK_ROWS = 4096
# Of oneDNN 3.12's inner product, whatever its sizes: 0.53 to 0.61 MiB on AVX2. oneDNN keeps so many
# primitives, and drops the one that was not used for longest.
_PRIMITIVE_BYTES = 576 << 10
_MAX_PRIMITIVES = 1024
# (attribute, algorithm) of torch.ops.mkldnn._linear_pointwise for each activation.
_ONEDNN_ACTIVATIONS = {
    "none": ("none", ""),
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
    "relu": ("relu", ""),
    "silu": ("swish", ""),
    "tanh": ("tanh", ""),
}
# At most so many rows run with oneDNN's weight by our kernel, where that has its bits. Above, our
# kernel is no faster.
MAX_FEW_ROWS = 12
# The activations that torch has with the bits of oneDNN's, which it calls; in bf16 a product is
# rounded before them.
_FEW_ROWS_ACTIVATIONS: dict[torch.dtype, dict[str, Callable[[Tensor], Tensor]]] = {
    torch.float32: {
        "none": lambda x: x,
        "relu": torch.relu,
        "gelu": torch.nn.functional.gelu,
    },
    torch.bfloat16: {"none": lambda x: x},
}
_CPU_KERNELS = {torch.float32: f32_linear, torch.bfloat16: bf16_linear}

# Shape class: a weight's layout ("plain", "oneDNN's", our "panels"), its dtype, whether the
# Hopper kernel takes it, and whether it is batch-invariant: it is chosen once a weight.
# run(x, w, *, activation, residual) as of linear.
LINEAR = Operation("linear")


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """A layer's weight as `linear` takes it: plain [n, k], or laid out for a CPU.

    has_kernel: whether the Hopper kernel takes it; x and residual must be aligned as well.
    batch_invariant: a row's bits do not depend on the other rows, nor on how many there are.
    few_rows: runs at most MAX_FEW_ROWS rows of a weight that oneDNN runs, with the same bits; it
    is found when the weight is in use, see PanelFinder.find_few_rows.
    backend: LINEAR's for all products with it.
    Other members: as of bytetx.ops.weight.Weight.
    """

    block: ClassVar[int] = 0

    weight: Tensor
    bias: Tensor | None
    n: int
    k: int
    dtype: torch.dtype
    is_prepacked: bool
    has_kernel: bool
    batch_invariant: bool = False
    sum_bias: Tensor | None = None
    few_rows: native.PanelProduct | None = field(default=None, compare=False, repr=False)
    backend: Backend = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.few_rows is not None and self.few_rows.panels.bias is not self.bias:
            object.__setattr__(self, "few_rows", None)  # another bias was given
        calls = (self._layout, self.dtype, self.has_kernel, self.batch_invariant)
        object.__setattr__(self, "backend", LINEAR.choose(self.weight.device, *calls))

    def take_few_rows(self, few_rows: native.PanelProduct) -> None:
        """Run few rows so from now on, with the same bits.

        The weight stays the same object, for adapters know weights by their identity.
        """
        object.__setattr__(self, "few_rows", few_rows)

    @property
    def _layout(self) -> str:
        if self.is_prepacked:  # our panels are int32, see pack_weight
            return "panels" if self.weight.dtype == torch.int32 else "oneDNN's"
        return "plain"

    @property
    def is_plain(self) -> bool:
        return not self.is_prepacked

    @property
    def num_bytes(self) -> int:
        return tensors_bytes(self)

    @property
    def dense(self) -> "LinearWeight":
        return self

    def with_matrix(self, matrix: W) -> W:
        return matrix

    def shard(self, *, outputs: range | None = None, inputs: range | None = None) -> "LinearWeight":
        if self.is_prepacked:
            raise TypeError("a prepacked weight is not divided; prepack its shards")
        weight = taken(taken(self.weight, outputs), inputs, dim=1)
        bias, sum_bias = taken_biases(self.bias, self.sum_bias, outputs=outputs, inputs=inputs)
        n, k = weight.shape
        has_kernel = _has_kernel(weight, bias)
        return replace(
            self, weight=weight, bias=bias, sum_bias=sum_bias, n=n, k=k, has_kernel=has_kernel
        )

    def matmul(
        self, x: Tensor, *, activation: str = "none", residual: Tensor | None = None
    ) -> Tensor:
        d: Tensor = self.backend.run(x, self, activation=activation, residual=residual)
        return d

    def product(
        self, x: Tensor, *, bias: Tensor | None = None, residual: Tensor | None = None
    ) -> Tensor:
        if self.bias is not None:
            raise ValueError("w must have no bias: every rank would add it; give it as bias")
        w = self if bias is None else replace(self, bias=bias)
        return w.matmul(x, residual=residual)

    def activated(self, product: Tensor, activation: str) -> Tensor:
        return reference.activate(product, activation)


def few_rows_activations(dtype: torch.dtype) -> tuple[str, ...]:
    """Activations behind LinearWeight.few_rows of this dtype, in order of their cost."""
    return tuple(_FEW_ROWS_ACTIVATIONS.get(dtype, ()))


def prepare_linear(
    weight: Tensor, bias: Tensor | None = None, *, prepack: bool, batch_invariant: bool = False
) -> LinearWeight:
    """A LinearWeight of weight [n, k] and bias [n]; plain weights are kept without a copy.

    prepack: lay the weight out once (a copy) for oneDNN or for our kernel, where one runs it on a
    CPU; elsewhere the plain weight is kept.
    batch_invariant: as of LinearWeight; on a GPU with the native kernels.
    """
    require_tensor("weight", weight, shape=(None, None))
    n, k = weight.shape
    if bias is not None:
        require_tensor("bias", bias, shape=(n,), dtypes=(weight.dtype,), device=weight.device)
    w = LinearWeight(
        weight,
        bias,
        n,
        k,
        weight.dtype,
        is_prepacked=False,
        has_kernel=_has_kernel(weight, bias),
        batch_invariant=batch_invariant,
    )
    return prepack_linear(w) if prepack else w


def prepack_linear(w: LinearWeight) -> LinearWeight:
    """A plain weight laid out (a copy) for the kernel that runs it on a CPU; elsewhere itself."""
    if w.backend.run is _run_panels:
        return replace(w, weight=pack_weight(w.weight.detach()), is_prepacked=True)
    if w.backend.run is _run_onednn:
        dense = w.weight.detach().contiguous()
        packed = torch.ops.mkldnn._reorder_linear_weight(dense, _PREPACK_ROWS)
        return replace(w, weight=packed, is_prepacked=True)
    return w


def taken(t: MaybeTensor, part: range | None, *, dim: int = 0) -> MaybeTensor:
    """A part of a tensor; None of either is all of it."""
    return t if t is None or part is None else t.narrow(dim, part.start, len(part)).contiguous()


def taken_biases(
    bias: Tensor | None, sum_bias: Tensor | None, *, outputs: range | None, inputs: range | None
) -> tuple[Tensor | None, Tensor | None]:
    """(bias, sum_bias) of a rank's share of the outputs and inputs, as of Weight.shard."""
    bias, sum_bias = taken(bias, outputs), taken(sum_bias, outputs)
    if inputs is None:
        return bias, sum_bias
    return None, sum_bias if bias is None else bias


def tensors_bytes(weight: Any) -> int:
    """Bytes of the tensors that a dataclass holds."""
    values = (getattr(weight, one.name) for one in fields(weight))
    return sum(t.numel() * t.element_size() for t in values if isinstance(t, Tensor))


def require_rows(
    name: str, rows: Tensor, width: int, w: LinearWeight, *, m: int | None = None
) -> None:
    """Check an operand of w's product: contiguous [m, width], of its dtype and on its device.

    m: None is any number.  Raises as require_tensor and require_contiguous do.
    """
    if isinstance(rows, Tensor):
        shape = (*rows.shape[:1], width) if m is None else (m, width)
        if is_operand(rows, shape, w.dtype, w.weight.get_device()):
            return
    require_tensor(name, rows, shape=(m, width), dtypes=(w.dtype,), device=w.weight.device)
    require_contiguous(name, rows)


def linear(
    x: Tensor, w: LinearWeight, *, activation: str = "none", residual: Tensor | None = None
) -> Tensor:
    """act(x @ w.T + bias) (+ residual).

    x: [m, k] in w's dtype, contiguous.  activation: one of ACTIVATIONS.  residual: [m, n].
    Returns a new [m, n].  A row's result does not depend on the other rows; bitwise with oneDNN
    (plain f32 weights: from torch 2.13 on), and on Hopper among batches whose plan is the same
    (bytetx/ops/linear_plan.py), or all where w is batch-invariant.
    Raises ValueError on shape, dtype or device mismatch, or an unknown activation.
    """
    require_rows("x", x, w.k, w)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    if residual is not None:
        require_rows("residual", residual, w.n, w, m=x.shape[0])
    if x.is_cuda and torch.compiler.is_compiling():
        return reference.linear(x, w.weight, w.bias, activation=activation, residual=residual)
    return w.matmul(x, activation=activation, residual=residual)


def fuses_residual(m: int, w: LinearWeight) -> bool:
    """Whether `linear` on m rows adds a residual for free; else whoever reads d next should."""
    if torch.compiler.is_compiling() or not w.has_kernel:
        return False
    if w.batch_invariant:
        return True  # one rounding for all m
    return not leaves_residual(m, w.n, w.k, dtype=DTYPE_NAMES[w.dtype])


def primitives_bytes(weights: Iterable[LinearWeight], *, most_rows: int) -> int:
    """Heap that oneDNN comes to keep for layers that run on 1 to most_rows rows.

    0 where oneDNN does not run them.
    """
    layers = (w for w in weights if w.backend.run is _run_onednn)
    shapes = {(w.n, w.k, w.dtype, w.bias is None) for w in layers}
    return min(len(shapes) * num_tile_rows(most_rows), _MAX_PRIMITIVES) * _PRIMITIVE_BYTES


def _takes_kernel(
    device: torch.device, layout: str, dtype: torch.dtype, has_kernel: bool, batch_invariant: bool
) -> bool:
    return has_kernel or batch_invariant


@LINEAR.native_kernel("cuda", takes=_takes_kernel)
def _run_native(x: Tensor, w: LinearWeight, *, activation: str, residual: Tensor | None) -> Tensor:
    if w.batch_invariant:
        return _run_invariant(x, w, activation=activation, residual=residual)
    if not is_aligned(x):
        return _run_torch(x, w, activation=activation, residual=residual)
    fuses = residual is not None and activation == "none" and is_aligned(residual)
    epilogue = RESIDUAL if fuses else EPILOGUES[activation]
    plan = plan_linear(x.shape[0], w.n, w.k, dtype=DTYPE_NAMES[w.dtype], epilogue=epilogue)
    if plan.tiling is None:
        return _run_torch(x, w, activation=activation, residual=residual)
    fused = residual if fuses else None
    d = run_kernel(x, w, plan=plan, activation=activation, residual=fused)
    return d if residual is None or fuses else d.add_(residual)


def _takes_triton(
    device: torch.device, layout: str, dtype: torch.dtype, has_kernel: bool, batch_invariant: bool
) -> bool:
    return layout == "plain" and dtype in DTYPE_NAMES


@LINEAR.triton_kernel(takes=_takes_triton)
def _run_triton(x: Tensor, w: LinearWeight, *, activation: str, residual: Tensor | None) -> Tensor:
    # A product alone is cuBLAS's; the epilogue saves a pass over what it gives.
    if activation == "none" or not w.weight.is_contiguous():
        return _run_torch(x, w, activation=activation, residual=residual)
    d: Tensor = triton_backend.kernels(x.device).linear(
        x, w.weight, w.bias, activation=activation, residual=residual
    )
    return d


def _run_invariant(
    x: Tensor, w: LinearWeight, *, activation: str, residual: Tensor | None
) -> Tensor:
    """linear on a GPU by one plan for every number of rows."""
    if not w.has_kernel:
        d = reference.activate(_linear_any(x, w), activation)
        return d if residual is None else d.add_(residual)
    x = x if is_aligned(x) else x.clone()
    fused = None
    if residual is not None and activation == "none":
        fused = residual if is_aligned(residual) else residual.clone()
    plan = plan_invariant(w.n, w.k)
    d = run_kernel(x, w, plan=plan, activation=activation, residual=fused)
    return d if residual is None or fused is not None else d.add_(residual)


def _linear_any(x: Tensor, w: LinearWeight) -> Tensor:
    """x @ w.T + bias by the kernel that takes any size and dtype."""
    d = x.new_empty((x.shape[0], w.n))
    weight = w.weight.contiguous()
    native.require_kernel("linear_any", x.device)(
        a=x,
        b=weight,
        bias=w.bias,
        d=d,
        m=x.shape[0],
        n=w.n,
        k=w.k,
        dtype=native.DTYPE_CODES[x.dtype],
        launch=native.launch_args(x.device),
    )
    return d


def run_kernel(
    x: Tensor,
    w: LinearWeight,
    *,
    plan: LinearPlan,
    activation: str = "none",
    residual: Tensor | None = None,
    is_gated: bool = False,
) -> Tensor:
    """The Hopper kernel on checked arguments, cut as `plan` says (plan.tiling is not None)."""
    m = x.shape[0]
    d = x.new_empty((m, w.n // 2 if is_gated else w.n))
    native.require_kernel("linear", x.device)(
        a=x,
        b=w.weight,
        bias=w.bias,
        residual=residual,
        d=d,
        m=m,
        n=w.n,
        k=w.k,
        activation=ACTIVATIONS.index(activation),
        gated=is_gated,
        tiling=plan.tiling,
        split_k=plan.split_k,
        dtype=native.DTYPE_CODES[x.dtype],
        launch=native.launch_args(x.device),
    )
    return d


def _why_no_onednn(device: torch.device) -> str | None:
    if device.type != "cpu":
        return "oneDNN is for CPUs"
    return None if torch.backends.mkldnn.is_available() else "torch was built without oneDNN"


def _takes_onednn(
    device: torch.device, layout: str, dtype: torch.dtype, has_kernel: bool, batch_invariant: bool
) -> bool:
    if layout == "plain":
        is_ours = _runs_cpu_kernel(dtype, batch_invariant)
        return device.type == "cpu" and _has_onednn(dtype) and not is_ours
    return layout == "oneDNN's"


@LINEAR.register("oneDNN through torch", "cpu", why_missing=_why_no_onednn, takes=_takes_onednn)
def _run_onednn(x: Tensor, w: LinearWeight, *, activation: str, residual: Tensor | None) -> Tensor:
    m = x.shape[0]
    if m == 0:
        return x.new_empty((0, w.n))
    if (
        m <= MAX_FEW_ROWS
        and w.few_rows is not None
        and activation in _FEW_ROWS_ACTIVATIONS[w.dtype]
        and not torch.compiler.is_compiling()
    ):
        few = _FEW_ROWS_ACTIVATIONS[w.dtype][activation](w.few_rows(x))
        return few if residual is None else few.add_(residual)
    attribute, algorithm = _ONEDNN_ACTIVATIONS[activation]
    d: Tensor = torch.ops.mkldnn._linear_pointwise(
        _rows_for_onednn(x), w.weight, w.bias, attribute, [], algorithm
    )[:m]
    return d if residual is None else d.add_(residual)


def _takes_panels(
    device: torch.device, layout: str, dtype: torch.dtype, has_kernel: bool, batch_invariant: bool
) -> bool:
    if layout == "plain":
        return device.type == "cpu" and _runs_cpu_kernel(dtype, batch_invariant)
    return layout == "panels"


@LINEAR.register("native", "cpu", takes=_takes_panels)
def _run_panels(x: Tensor, w: LinearWeight, *, activation: str, residual: Tensor | None) -> Tensor:
    run = _CPU_KERNELS[w.dtype]
    if torch.compiler.is_compiling():
        run = getattr(torch.ops.bytetx, run.__name__)
    weight = w.weight if w.is_prepacked else w.weight.contiguous()
    index = ACTIVATIONS.index(activation)
    bias = None if w.bias is None else w.bias.contiguous()
    d: Tensor = run(x, weight, bias, n=w.n, activation=index, is_packed=w.is_prepacked)
    return d if residual is None else d.add_(residual)


def _rows_for_onednn(x: Tensor) -> Tensor:
    """x [m, k] and rows behind it, as many as oneDNN has a primitive for: [tile_rows(m), k].

    A copy where nothing lies behind x.
    """
    m, k = x.shape
    if torch.compiler.is_compiling():
        # A compiled graph has one row count, or symbols for it; see rows.py for two.
        return x.expand(2, -1).contiguous() if m == 1 else x
    rows = tile_rows(m)
    if x.dtype == torch.bfloat16 and k % _AMX_FEATURES and _has_amx():
        return padded(x, rows + 1)[:rows]
    if rows == m:
        return x
    # One row of a slice of columns counts as contiguous, with the stride of the whole rows.
    end = x.storage_offset() + (rows - 1) * x.stride(0) + k
    if end * x.element_size() > x.untyped_storage().nbytes():
        return padded(x, rows)
    return x.as_strided((rows, k), x.stride())


@LINEAR.in_torch()
def _run_torch(x: Tensor, w: LinearWeight, *, activation: str, residual: Tensor | None) -> Tensor:
    m = x.shape[0]
    if x.dtype == torch.float16 and not x.is_cuda and 0 < m < _LEAST_F16_ROWS:
        d = _run_torch(padded(x, _LEAST_F16_ROWS), w, activation=activation, residual=None)[:m]
        return d if residual is None else d.add_(residual)
    return reference.linear(x, w.weight, w.bias, activation=activation, residual=residual)


@cache
def _has_amx() -> bool:
    return torch.cpu._is_amx_tile_supported()


def _has_kernel(weight: Tensor, bias: Tensor | None) -> bool:
    n, k = weight.shape
    if not weight.is_cuda or native.kernel("linear", weight.device) is None:
        return False
    if weight.dtype not in DTYPE_NAMES or n % KERNEL_COLUMNS or k % KERNEL_FEATURES:
        return False
    return all(is_aligned(t) and t.is_contiguous() for t in (weight, bias) if t is not None)


def has_invariant_f32() -> bool:
    """Whether batch-invariant layers of float32 run on this CPU."""
    return _runs_f32_kernel(True) or not _is_arm()


def has_invariant_bf16() -> bool:
    """Whether batch-invariant layers of bf16 run on this CPU."""
    return _runs_bf16_kernel(True) or (has_cpu_bf16() and not _chooses_bf16_by_rows())


def has_fixed_bf16() -> bool:
    """Whether a row of bf16 has its bits in any batch on this CPU without batch_invariant, too."""
    return _runs_bf16_kernel(False) or (has_cpu_bf16() and not _chooses_bf16_by_rows())


def _runs_cpu_kernel(dtype: torch.dtype, batch_invariant: bool) -> bool:
    """Whether our kernel runs layers of dtype on this CPU, where oneDNN could, too."""
    kinds = {torch.float32: _runs_f32_kernel, torch.bfloat16: _runs_bf16_kernel}
    return dtype in kinds and kinds[dtype](batch_invariant)


@native.cached_lookup
def _runs_f32_kernel(batch_invariant: bool) -> bool:
    """On ARM oneDNN hands plain products to ACL, whose order of sums depends on the rows."""
    return batch_invariant and _is_arm() and why_no_panels() is None


@native.cached_lookup
def _runs_bf16_kernel(batch_invariant: bool) -> bool:
    """oneDNN's results depend neither on the number of rows nor on that of threads with AVX-512
    bf16 alone.

    With AVX-512 it splits k among many threads for few rows; with AMX, and on ARM with bf16, it
    chooses by rows and threads between kernels that sum in other orders, but they are several times
    faster.
    """
    if why_no_bf16_linear() is not None:
        return False
    if not has_cpu_bf16() or not (torch.cpu._is_avx512_bf16_supported() or _is_arm()):
        return True
    return batch_invariant and _chooses_bf16_by_rows()


def _chooses_bf16_by_rows() -> bool:
    """Whether oneDNN's sums of bf16 here may depend on the number of rows."""
    return _has_amx() or _is_arm()


def _is_arm() -> bool:
    return platform.machine() in ("aarch64", "arm64")


def _has_onednn(dtype: torch.dtype) -> bool:
    """Whether torch runs such a plain weight on a CPU through oneDNN's fused linear."""
    return dtype == torch.float32 or (dtype == torch.bfloat16 and has_cpu_bf16())


def has_cpu_bf16() -> bool:
    """Whether this CPU computes with bf16, through oneDNN."""
    is_available = torch.backends.mkldnn.is_available()
    return is_available and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def is_bf16_faster() -> bool:
    """Whether layers of bf16 are faster than those of f32 on this CPU, by instructions for it.

    On Intel's processors those of AVX-512 alone make fewer products a cycle than f32's.
    """
    if not has_cpu_bf16():
        return False
    has_dot = torch.cpu._is_avx512_bf16_supported()
    return _has_amx() or _is_arm() or (has_dot and "slow_bf16_dot" not in native.available_isas())
