"""Mixture of experts on packed rows: each row goes through the experts that its router chooses."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bytetx.ops.check import require_contiguous, require_tensor
from bytetx.ops.fp8_linear import Fp8LinearWeight, e4m3_copy, keep_e4m3_copy
from bytetx.ops.gated import GATES, GatedWeight, clamped_gate
from bytetx.ops.linear import ACTIVATIONS, LinearWeight, linear
from bytetx.ops.weight import QuantizedWeight, Weight

GroupedMm = Callable[[Tensor, Tensor, Tensor], Tensor]

# Bytes of which the rows that torch's grouped product reads must be a multiple; of E4M3 rows, both
# sizes of a matrix.
_GROUPED_BYTES = 16


@dataclass(frozen=True, slots=True)
class Fp8Stack:
    """The matrices of all experts in E4M3, about rows * scale[..., None]."""

    rows: Tensor  # float8_e4m3fn [num_experts, n, k]
    scale: Tensor  # f32 [num_experts, n]


@dataclass(frozen=True, slots=True)
class ExpertsWeight:
    """The experts of one layer and their router.

    router: [num_experts, hidden_size].  first, out: each expert's linear layers, hidden_size ->
    inner and inner -> hidden_size.  first_stack, out_stack: the same weights as one tensor
    [num_experts, n, k], or in E4M3, where a grouped product may read them, else None.
    top_k: experts of a row.  normalizes: whether a row's weights of its experts are divided by
    their sum.  bias: [hidden_size], added once to the experts' weighted sum.
    first_bias, out_bias: a bias of each expert's layers, [num_experts, n]; first's in the order of
    its weight's rows.  gate_limit, gate_alpha: of gated experts whose gates are as of clamped_gate;
    a limit of 0: they are as an activation's name says.
    """

    router: LinearWeight
    first: tuple[Weight, ...]
    out: tuple[Weight, ...]
    top_k: int
    normalizes: bool
    bias: Tensor | None = None
    first_stack: Tensor | Fp8Stack | None = None
    out_stack: Tensor | Fp8Stack | None = None
    first_bias: Tensor | None = None
    out_bias: Tensor | None = None
    gate_limit: float = 0.0
    gate_alpha: float = 1.0

    @property
    def num_bytes(self) -> int:
        biases = [b.nbytes for b in (self.first_bias, self.out_bias) if b is not None]
        return sum(w.num_bytes for w in (self.router, *self.first, *self.out)) + sum(biases)

    def activated(self, both: Tensor, activation: str) -> Tensor:
        """The gates or the activation of the first layer's product."""
        first = self.first[0]
        if not self.gate_limit:
            return first.activated(both, activation)
        assert isinstance(first, GatedWeight)
        return clamped_gate(both, first, limit=self.gate_limit, alpha=self.gate_alpha)

    def converted(self, convert: Callable[[LinearWeight], Weight]) -> "ExpertsWeight":
        """The same experts, with convert(matrix) in place of each layer's matrix."""
        first, out = (
            tuple(w.with_matrix(convert(w.dense)) for w in weights)
            for weights in (self.first, self.out)
        )
        return stack_experts(replace(self, first=first, out=out, first_stack=None, out_stack=None))


def stack_experts(
    w: ExpertsWeight, *, stacks: tuple[Tensor, Tensor] | None = None
) -> ExpertsWeight:
    """The same experts, their weights in one tensor where a grouped product may read them.

    stacks: tensors that hold the weights of both layers already, [num_experts, n, k] each.
    """
    if not _takes_grouped(w):
        return w
    if stacks is not None:
        return replace(w, first_stack=stacks[0], out_stack=stacks[1])
    first, first_stack = _stacked(w.first)
    out, out_stack = _stacked(w.out)
    return replace(w, first=first, out=out, first_stack=first_stack, out_stack=out_stack)


def _stacked(weights: tuple[Weight, ...]) -> tuple[tuple[Weight, ...], Tensor | Fp8Stack]:
    """(the same layers, each of its matrix in the stack; the stack)"""
    coded = [m for m in map(_matrix, weights) if isinstance(m, Fp8LinearWeight)]
    if coded:
        codes = torch.stack([m.rows.view(torch.uint8) for m in coded])
        both = Fp8Stack(codes.view(torch.float8_e4m3fn), torch.stack([m.scale for m in coded]))
        layers = zip(weights, coded, both.rows, both.scale, strict=True)
        return tuple(w.with_matrix(replace(m, rows=r, scale=s)) for w, m, r, s in layers), both
    stack = torch.stack([one.dense.weight for one in weights])
    plain = zip(weights, stack, strict=True)
    return tuple(w.with_matrix(replace(w.dense, weight=t)) for w, t in plain), stack


def _matrix(w: Weight) -> Weight:
    return w.fused if isinstance(w, GatedWeight) else w


def route(x: Tensor, w: ExpertsWeight) -> tuple[Tensor, Tensor]:
    """(weights f32 [m, top_k], experts int64 [m, top_k]) of each row of x [m, hidden_size].

    The largest values of softmax(x @ router.T), computed in f32; of equal ones those that
    torch.topk takes.  A router in f32 multiplies in it.  No row depends on another.
    """
    weights, experts = (
        linear(x.to(w.router.dtype), w.router).float().softmax(-1).topk(w.top_k, dim=-1)
    )
    if w.normalizes:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, experts


def run_experts(x: Tensor, w: ExpertsWeight, *, activation: str) -> Tensor:
    """The weighted sum of what each row's experts give, without w.bias.

    x: [m, hidden_size] in the weights' dtype, contiguous.  activation: of gated experts one of
    ops.gated.GATES, else one of ops.linear.ACTIVATIONS.
    Rows are sorted by expert, and each expert multiplies its rows at once: one grouped product for
    all experts on a GPU in bf16 or E4M3, else one for each expert that has rows.  The sum is taken
    in f32, in the order of the row's weights.
    Returns f32 [m, hidden_size].  Raises ValueError on shape, dtype or device mismatch.
    Source: sparsely-gated mixture of experts (arXiv 1701.06538), section 2; sorted rows as in
    MegaBlocks (arXiv 2211.15841), section 4.
    """
    k, device = w.router.k, w.router.weight.device
    require_tensor("x", x, shape=(None, k), dtypes=(w.first[0].dtype,), device=device)
    require_contiguous("x", x)
    known = GATES if w.first[0].block else ACTIVATIONS
    if activation not in known:
        raise ValueError(f"activation must be one of {', '.join(known)}, got {activation!r}")
    if not x.shape[0]:
        return x.new_empty((0, w.out[0].n), dtype=torch.float32)
    weights, experts = route(x, w)
    ids, order = experts.flatten().sort(stable=True)
    sources = order // w.top_k
    rows = x[sources]  # [m * top_k, hidden_size], those of one expert side by side
    if isinstance(w.first_stack, Fp8Stack):  # a row is rounded once, for all of its experts
        codes, scale = e4m3_copy(x)
        codes = codes.view(torch.uint8)[sources].view(torch.float8_e4m3fn)
        keep_e4m3_copy(rows, (codes, scale[sources]))
    ends = torch.searchsorted(ids, torch.arange(len(w.first), device=device), right=True)
    grouped = _grouped_mm(w)
    if grouped is None:
        found = _in_turn(rows, w, ends.tolist(), activation=activation)
    else:
        found = run_grouped(rows, ids, w, ends.int(), grouped, activation=activation)
    by_row = torch.empty_like(found).index_copy_(0, order, found).unflatten(0, (-1, w.top_k))
    out = torch.zeros((x.shape[0], found.shape[1]), dtype=torch.float32, device=device)
    for i in range(w.top_k):
        out += by_row[:, i].float() * weights[:, i, None]
    return out


def run_grouped(
    rows: Tensor,
    ids: Tensor,
    w: ExpertsWeight,
    ends: Tensor,
    grouped: GroupedMm,
    *,
    activation: str,
) -> Tensor:
    """All experts on their rows by one grouped product for each of their layers.

    rows: sorted by expert.  ids: the expert of each.  ends: int32 [num_experts], where the rows of
    each expert end.
    grouped: (a [m, k], b [num_experts, k, n], ends) -> [m, n].  Nothing here waits for the GPU.
    """
    assert w.first_stack is not None and w.out_stack is not None  # stack_experts made them
    both = _product(rows, w.first_stack, ends, grouped)
    if w.first_bias is not None:
        both += w.first_bias[ids]
    out = _product(w.activated(both, activation), w.out_stack, ends, grouped)
    return out if w.out_bias is None else out.add_(w.out_bias[ids])


def _product(a: Tensor, stack: Tensor | Fp8Stack, ends: Tensor, grouped: GroupedMm) -> Tensor:
    if isinstance(stack, Fp8Stack):
        return _fp8_grouped_mm(*e4m3_copy(a), stack, ends)
    return grouped(a, stack.transpose(1, 2), ends)


def _fp8_grouped_mm(rows: Tensor, scale: Tensor, stack: Fp8Stack, ends: Tensor) -> Tensor:
    """rows: E4M3 [m, k].  scale: f32 [m].  Returns bf16 [m, n]."""
    product: Tensor = torch._scaled_grouped_mm(
        rows,
        stack.rows.transpose(1, 2),
        scale,
        stack.scale,
        offs=ends,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,  # as ops.fp8_linear's kernel adds up
    )
    return product


def _in_turn(rows: Tensor, w: ExpertsWeight, ends: Sequence[int], *, activation: str) -> Tensor:
    """One expert after another; an expert without rows is left out."""
    found = rows.new_empty((len(rows), w.out[0].n))
    is_plain = w.first_bias is None and w.out_bias is None and not w.gate_limit
    for e, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if start == end:
            continue
        own, first, out = slice(start, end), w.first[e], w.out[e]
        if is_plain:
            found[own] = out.matmul(first.matmul(rows[own], activation=activation))
            continue
        both = first.product(rows[own], bias=None if w.first_bias is None else w.first_bias[e])
        inner = w.activated(both, activation)
        found[own] = out.product(inner, bias=None if w.out_bias is None else w.out_bias[e])
    return found


def _takes_grouped(w: ExpertsWeight) -> bool:
    """Whether torch's grouped product takes these weights: on a GPU, with results in bf16, aligned,
    no biases."""
    matrices = [_matrix(one) for one in (*w.first, *w.out)]
    coded = [one for one in matrices if isinstance(one, Fp8LinearWeight)]
    if coded:
        return (
            len(coded) == len(matrices)
            and all(one.rows.is_cuda and one.dtype == torch.bfloat16 for one in coded)
            and all(one.bias is None for one in coded)
            and all(size % _GROUPED_BYTES == 0 for one in coded for size in (one.n, one.k))
            and hasattr(torch, "_scaled_grouped_mm")
            and _torch_grouped_mm(coded[0].rows.device) is not None
        )
    if any(isinstance(one, QuantizedWeight) for one in matrices):
        return False
    layers = [one.dense for one in matrices]
    return (
        all(one.weight.is_cuda and one.dtype == torch.bfloat16 for one in layers)
        and all(one.bias is None and one.weight.is_contiguous() for one in layers)
        and all(size * 2 % _GROUPED_BYTES == 0 for one in layers for size in (one.n, one.k))
        and _torch_grouped_mm(layers[0].weight.device) is not None
    )


def _grouped_mm(w: ExpertsWeight) -> GroupedMm | None:
    stack = w.first_stack.rows if isinstance(w.first_stack, Fp8Stack) else w.first_stack
    return None if stack is None else _torch_grouped_mm(stack.device)


def _torch_grouped_mm(device: torch.device) -> GroupedMm | None:
    """torch's grouped product, which takes bf16 on Hopper GPUs; None where there is none."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return None
    function = getattr(torch, "_grouped_mm", None)
    if function is None:
        return None

    def grouped(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
        product: Tensor = function(a, b, offs=ends)
        return product

    return grouped
