"""Low-rank changes of a linear layer, another one for each segment of its rows."""

from dataclasses import dataclass
from functools import cached_property
from typing import NoReturn

import numpy as np
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
    """x @ a.T @ b.T + bias, which is added to a layer's x @ w.T; a scale is part of b.

    a: [rank, k].  b: [n, rank]; rank may be 0.  bias: [n], or None.  All contiguous, of one dtype
    and on one device.
    """

    a: Tensor
    b: Tensor
    bias: Tensor | None = None

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    @property
    def num_bytes(self) -> int:
        return self.a.nbytes + self.b.nbytes + (0 if self.bias is None else self.bias.nbytes)


@dataclass(frozen=True, eq=False)
class LowRankChanges:
    """The changes of one layer, checked once for all passes; threads may share it.

    by_owner: of each owner, None where it changes nothing here; at least one is not None.
    Raises ValueError where they differ in n, k, dtype or device.
    """

    by_owner: tuple[LowRankChange | None, ...]

    def __post_init__(self) -> None:
        if not self.has_change.any():
            raise ValueError("by_owner must have a change that is not None")
        like = self.first.a
        for change in self.by_owner:
            if change is not None:
                _require_alike("a", change.a, (change.rank, self.k), like)
                _require_alike("b", change.b, (self.n, change.rank), like)
                if change.bias is not None:
                    _require_alike("bias", change.bias, (self.n,), like)

    @cached_property
    def has_change(self) -> np.ndarray:
        """bool [num_owners]"""
        return np.array([change is not None for change in self.by_owner], dtype=bool)

    @cached_property
    def has_product(self) -> np.ndarray:
        """bool [num_owners]: whether the rank is above 0."""
        return np.array([c is not None and c.rank > 0 for c in self.by_owner], dtype=bool)

    @cached_property
    def has_bias(self) -> np.ndarray:
        """bool [num_owners]"""
        return np.array([c is not None and c.bias is not None for c in self.by_owner], dtype=bool)

    @cached_property
    def first(self) -> LowRankChange:
        return next(change for change in self.by_owner if change is not None)

    @cached_property
    def max_rank(self) -> int:
        return max(change.rank for change in self.by_owner if change is not None)

    @property
    def n(self) -> int:
        return self.first.b.shape[0]

    @property
    def k(self) -> int:
        return self.first.a.shape[1]

    @cached_property
    def addresses(self) -> Tensor:
        """int64 [num_owners, 3], on the device of the changes: of a, of b, and the rank.

        The copy is waited for, since passes in other streams read it, too.
        """
        rows = [
            (0, 0, 0) if one is None else (one.a.data_ptr(), one.b.data_ptr(), one.rank)
            for one in self.by_owner
        ]
        return torch.tensor(rows, dtype=torch.int64, device=self.first.a.device)


def _require_alike(name: str, t: Tensor, shape: tuple[int, ...], other: Tensor) -> None:
    is_alike = t.shape == shape and t.dtype == other.dtype and t.device == other.device
    if not is_alike or not t.is_contiguous():
        require_tensor(name, t, shape=shape, dtypes=(other.dtype,), device=other.device)
        require_contiguous(name, t)


def add_low_rank(d: Tensor, x: Tensor, segments: RowSegments, changes: LowRankChanges) -> None:
    """Adds to the rows of each segment, in place, the change of its owner; ranks may differ.

    d: [m, n], x: [m, k], of one dtype and on one device; x is contiguous.
    Raises ValueError on shape, dtype or device mismatch.
    Source: LoRA (arXiv 2106.09685), section 4.1; segments of one step as in S-LoRA
    (arXiv 2311.03285), section 5, without padding to the largest rank.
    """
    like = changes.first.a
    require_tensor("x", x, shape=(None, changes.k), dtypes=(like.dtype,), device=like.device)
    require_contiguous("x", x)
    shape = (x.shape[0], changes.n)
    require_tensor("d", d, shape=shape, dtypes=(x.dtype,), device=x.device)
    if len(changes.by_owner) != segments.num_owners:
        raise ValueError(
            f"changes must have one entry for each of {segments.num_owners} owners, got "
            f"{len(changes.by_owner)}"
        )
    if len(segments.stops) and segments.stops[-1] > x.shape[0]:
        raise ValueError(f"segments end at row {segments.stops[-1]}, x has {x.shape[0]} rows")
    if changes.has_bias.any():
        _add_biases(d, segments, changes)
    LOW_RANK.choose(x.device, x.dtype).run(d, x, segments, changes)


def _add_biases(d: Tensor, segments: RowSegments, changes: LowRankChanges) -> None:
    for owner in np.unique(segments.owners).tolist():
        change = changes.by_owner[owner]
        if change is None or change.bias is None:
            continue
        rows = segments.rows_of(owner)
        if isinstance(rows, slice):
            d[rows].add_(change.bias)
        else:
            d.index_add_(0, rows.to(d.device), change.bias.expand(len(rows), -1))


@LOW_RANK.triton_kernel(beside="")
def _run_triton(d: Tensor, x: Tensor, segments: RowSegments, changes: LowRankChanges) -> None:
    triton_backend.kernels(x.device).add_low_rank(
        d,
        x,
        segments,
        addresses=changes.addresses,
        has_change=changes.has_product,
        max_rank=changes.max_rank,
    )


@LOW_RANK.in_torch()
def _run_torch(d: Tensor, x: Tensor, segments: RowSegments, changes: LowRankChanges) -> None:
    """Two products for each owner of rows, which are gathered where they are apart."""
    for owner in np.unique(segments.owners).tolist():
        change = changes.by_owner[owner]
        if change is None or change.rank == 0:
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
    changes: LowRankChanges

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
