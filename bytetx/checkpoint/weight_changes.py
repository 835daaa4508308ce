"""Changes that an adapter makes to tensors of its base model: low-rank sums, lengths, biases."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from bytetx.checkpoint.saved_tensor import Part, SavedTensor, take_part


@dataclass(frozen=True, slots=True)
class LowRank:
    """An addition to a weight [n, k]: scaling * left @ right, in f32.

    left [n, r], right [r, k]; where is_transposed, they are saved as [r, n] and [k, r].
    first_row: of a weight that stacks several, the row where the n rows begin.
    magnitude: DoRA's lengths: a row of the sum gets its own, [n]; where is_transposed a column,
    [k].
    """

    left: SavedTensor
    right: SavedTensor
    scaling: float
    is_transposed: bool = False
    first_row: int = 0
    magnitude: SavedTensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(n, k)"""
        if self.is_transposed:
            return self.left.shape[1], self.right.shape[0]
        return self.left.shape[0], self.right.shape[1]

    @property
    def needs_all(self) -> bool:
        """Whether a part of the weight cannot be changed without the rest of it."""
        return self.magnitude is not None

    def factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(left [n, r], right [r, k]), f32."""
        left, right = self.left.read(torch.float32), self.right.read(torch.float32)
        return (left.t(), right.t()) if self.is_transposed else (left, right)

    def apply_to(self, weight: torch.Tensor, part: Part | None) -> None:
        """weight: f32, the complete one or a part of it; changed in place."""
        left, right = self.factors()
        if part is not None and part.dim == 1:
            right, part = take_part(right, part), None
        for its, own in _common_rows(range(self.first_row, self.first_row + len(left)), part):
            weight[its].addmm_(left[own], right, alpha=self.scaling)
        if self.magnitude is not None:
            changed = weight[self.first_row : self.first_row + len(left)]
            dim = 0 if self.is_transposed else 1
            lengths = torch.linalg.vector_norm(changed, dim=dim, keepdim=True)
            changed.mul_(self.magnitude.read(torch.float32).view_as(lengths) / lengths)


@dataclass(frozen=True, slots=True)
class BiasChange:
    """An addition to a bias [n]: scaling * saved, in f32; or what takes the place of its rows.

    first_row: of a bias that stacks several, the row where the n rows begin.
    """

    saved: SavedTensor
    scaling: float = 1.0
    first_row: int = 0
    replaces: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """(n,)"""
        return self.saved.shape

    @property
    def needs_all(self) -> bool:
        return False

    def apply_to(self, bias: torch.Tensor, part: Part | None) -> None:
        """bias: f32, the complete one or a part of it; changed in place."""
        change = self.saved.read(torch.float32)
        for its, own in _common_rows(range(self.first_row, self.first_row + len(change)), part):
            if self.replaces:
                bias[its] = change[own]
            else:
                bias[its].add_(change[own], alpha=self.scaling)


Change = LowRank | BiasChange


def _common_rows(rows: range, part: Part | None) -> Iterator[tuple[slice, slice]]:
    """Where a tensor, or a part of its rows, has some of `rows`, and where `rows` has these."""
    place = 0  # in the tensor, of the first row of the next range
    for wanted in (range(rows.stop),) if part is None else part.ranges:
        start, stop = max(wanted.start, rows.start), min(wanted.stop, rows.stop)
        if start < stop:
            begin = place + start - wanted.start
            yield slice(begin, begin + stop - start), slice(start - rows.start, stop - rows.start)
        place += len(wanted)
