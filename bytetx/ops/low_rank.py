"""Low-rank changes of a linear layer, another one for each segment of its rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from bytetx.ops import triton_backend
from bytetx.ops.check import require_contiguous, require_tensor
from bytetx.ops.gated import GatedWeight
from bytetx.ops.registry import Operation
from bytetx.ops.weight import QuantizedWeight, Weight
from bytetx.packed import RowSegments

# Shape class: dtype.  run(d, x, segments, changes) as of add_low_rank.
LOW_RANK = Operation("low_rank")


@dataclass(frozen=True, slots=True, eq=False)
class LowRankChange:
    """x @ a.T @ b.T, which is added to a layer's x @ w.T; a scale is part of b.

    a: [rank, k].  b: [n, rank].  Both contiguous, of one dtype and on one device.
    """

    a: Tensor
    b: Tensor

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    @property
    def num_bytes(self) -> int:
        return self.a.nbytes + self.b.nbytes


def add_low_rank(
    d: Tensor, x: Tensor, segments: RowSegments, changes: Sequence[LowRankChange | None]
) -> None:
    """Adds to the rows of each segment, in place, the change of its owner; ranks may differ.

    d: [m, n], x: [m, k], of one dtype and on one device; x is contiguous.  changes: of each owner,
    None where it changes nothing here.
    Raises ValueError on shape, dtype or device mismatch.
    Source: LoRA (arXiv 2106.09685), section 4.1; segments of one step as in S-LoRA
    (arXiv 2311.03285), section 5, without padding to the largest rank.
    """
    require_tensor("x", x, shape=(None, None))
    require_contiguous("x", x)
    require_tensor("d", d, shape=(x.shape[0], None), dtypes=(x.dtype,), device=x.device)
    if len(changes) != segments.num_owners:
        raise ValueError(
            f"changes must have one entry for each of {segments.num_owners} owners, got "
            f"{len(changes)}"
        )
    for change in changes:
        if change is not None:
            a, b = (None, x.shape[1]), (d.shape[1], change.rank)
            require_tensor("a", change.a, shape=a, dtypes=(x.dtype,), device=x.device)
            require_tensor("b", change.b, shape=b, dtypes=(x.dtype,), device=x.device)
    if len(segments.stops) and segments.stops[-1] > x.shape[0]:
        raise ValueError(f"segments end at row {segments.stops[-1]}, x has {x.shape[0]} rows")
    LOW_RANK.choose(x.device, x.dtype).run(d, x, segments, changes)


@LOW_RANK.triton_kernel(beside="")
def _run_triton(
    d: Tensor, x: Tensor, segments: RowSegments, changes: Sequence[LowRankChange | None]
) -> None:
    factors = [None if change is None else (change.a, change.b) for change in changes]
    triton_backend.kernels(x.device).add_low_rank(d, x, segments, factors)


@LOW_RANK.in_torch()
def _run_torch(
    d: Tensor, x: Tensor, segments: RowSegments, changes: Sequence[LowRankChange | None]
) -> None:
    """Two products for each owner, whose rows are gathered where they are apart."""
    for owner, change in enumerate(changes):
        if change is None:
            continue
        rows = segments.rows_of(owner)
        if isinstance(rows, slice):
            d[rows].addmm_(x[rows] @ change.a.T, change.b.T)
            continue
        rows = rows.to(x.device)
        d.index_add_(0, rows, x[rows] @ change.a.T @ change.b.T)


@dataclass(frozen=True, slots=True, eq=False)
class AdaptedWeight(QuantizedWeight):
    """A layer's weight for the rows of one step, some of which have a change each.

    It has no kernels of its own: the change is added before the activation and what follows it.
    Other members: as of bytetx.ops.weight.Weight.
    """

    base: Weight
    segments: RowSegments
    changes: tuple[LowRankChange | None, ...]

    @property
    def n(self) -> int:
        return self.base.n

    @property
    def k(self) -> int:
        return self.base.k

    @property
    def dtype(self) -> torch.dtype:
        return self.base.dtype

    @property
    def sum_bias(self) -> Tensor | None:
        return self.base.sum_bias

    def shard(self, *, outputs: range | None = None, inputs: range | None = None) -> NoReturn:
        raise TypeError("a weight with adapters is of one step, and is not divided")

    def matmul(
        self, x: Tensor, *, activation: str = "none", residual: Tensor | None = None
    ) -> Tensor:
        base = self.base
        # All rows of a gated weight: the change is that of gates and values, before their product.
        d = (base.fused if isinstance(base, GatedWeight) else base).matmul(x)
        add_low_rank(d, x, self.segments, self.changes)
        d = base.activated(d, activation)
        return d if residual is None else d.add_(residual)
