"""Adapters of single rows of a pass: what they add to the products of a model's layers."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from torch import Tensor

from bytetx.nn.layer import Rows
from bytetx.ops.linear_rotary import HeadRotation
from bytetx.ops.low_rank import AdaptedWeight, LowRankChange
from bytetx.ops.norm import RowNorm
from bytetx.ops.weight import Weight
from bytetx.packed import AdapterRows

# Numbers of (adapter, first token) that stand for a text's first token; none is given twice.
_NUMBERS = count(1)


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """A LoRA adapter in memory, of one model.

    It lives as long as a request that uses it.
    changes: of the layers' weights, by id() of each.
    uid: 16 bytes that no other adapter has, also none of the same name or folder.
    """

    name: str
    folder: Path
    changes: Mapping[int, LowRankChange]
    uid: bytes = field(default_factory=lambda: secrets.token_bytes(16))
    _first_ids: dict[int, int] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Bytes of the changes of layers."""
        return sum(change.num_bytes for change in self.changes.values())

    def first_id(self, token_id: int) -> int:
        """A number below 0 that stands for a text's first token, and for this adapter."""
        found = self._first_ids.get(token_id)
        if found is None:
            found = self._first_ids.setdefault(token_id, -next(_NUMBERS))
        return found


class AdaptedRows(Rows):
    """The rows of a pass of which some have an adapter, all in this process."""

    def __init__(self, rows: AdapterRows):
        self._segments = rows.segments
        self._changes: list[Mapping[int, LowRankChange]] = []
        for adapter in rows.adapters:
            assert isinstance(adapter, Adapter)
            self._changes.append(adapter.changes)

    def _adapted(self, w: Weight) -> Weight:
        """The weight with the changes of this pass's adapters, where one has some."""
        changes = tuple(own.get(id(w)) for own in self._changes)
        if all(change is None for change in changes):
            return w
        return AdaptedWeight(w, self._segments, changes)

    def project(self, x: Tensor, w: Weight) -> Tensor:
        return super().project(x, self._adapted(w))

    def column_parallel(self, x: Tensor, w: Weight, *, activation: str = "none") -> Tensor:
        return super().column_parallel(x, self._adapted(w), activation=activation)

    def project_heads(self, x: Tensor, w: Weight, rotation: HeadRotation) -> Tensor:
        return super().project_heads(x, self._adapted(w), rotation)

    def row_parallel_partial(self, x: Tensor, w: Weight) -> Tensor:
        return super().row_parallel_partial(x, self._adapted(w))

    def row_parallel(
        self,
        x: Tensor,
        w: Weight,
        *,
        residual: Tensor,
        norm: RowNorm,
        partial: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        w = self._adapted(w)
        return super().row_parallel(x, w, residual=residual, norm=norm, partial=partial)

    def row_parallel_post_norm(
        self, x: Tensor, w: Weight, *, residual: Tensor, norm: RowNorm
    ) -> Tensor:
        w = self._adapted(w)
        return super().row_parallel_post_norm(x, w, residual=residual, norm=norm)

    def row_parallel_output_norm(
        self,
        x: Tensor,
        w: Weight,
        *,
        residual: Tensor,
        output_norm: RowNorm,
        norm: RowNorm | None,
    ) -> tuple[Tensor, Tensor]:
        w = self._adapted(w)
        return super().row_parallel_output_norm(
            x, w, residual=residual, output_norm=output_norm, norm=norm
        )
