"""Adapters of single rows of a pass: what they add to the products of a model's layers."""

import secrets
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from threading import Lock

import numpy as np
from torch import Tensor

from bytetx.nn.layer import Rows
from bytetx.ops.linear_rotary import HeadRotation
from bytetx.ops.low_rank import AdaptedWeight, LowRankChange, LowRankChanges
from bytetx.ops.norm import RowNorm
from bytetx.ops.weight import Weight
from bytetx.packed import AdapterRows, RowSegments

# Numbers of (adapter, first token) that stand for a text's first token; none is given twice.
_NUMBERS = count(1)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
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


class _Owners:
    """The adapters that passes have used, with a number each, and the changes of each weight.

    It holds the changes of adapters, but not the adapters.
    given_up: called when nobody has one of them any more.
    """

    def __init__(self, adapters: Sequence[Adapter], given_up: Callable[[object], None]):
        self.adapters = [weakref.ref(adapter, given_up) for adapter in adapters]
        self.numbers = {adapter.uid: i for i, adapter in enumerate(adapters)}
        self._changes = [adapter.changes for adapter in adapters]
        self._of_weight: dict[int, LowRankChanges | None] = {}

    def changes_of(self, w: Weight) -> LowRankChanges | None:
        """None where no adapter changes the weight."""
        key = id(w)
        if key not in self._of_weight:
            found = tuple(changes.get(key) for changes in self._changes)
            is_changed = any(change is not None for change in found)
            self._of_weight[key] = LowRankChanges(found) if is_changed else None
        return self._of_weight[key]


class AdapterTables:
    """Numbers and changes of a model's adapters, kept between passes; threads may share it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._owners: _Owners | None = None

    def owners_of(self, adapters: Sequence[Adapter]) -> _Owners:
        """The numbers and changes of these adapters, and of others that live."""
        kept = self._owners
        if kept is not None and all(adapter.uid in kept.numbers for adapter in adapters):
            return kept
        with self._lock:
            before = () if self._owners is None else self._owners.adapters
            known = {found.uid: found for ref in before if (found := ref()) is not None}
            known |= {adapter.uid: adapter for adapter in adapters}
            self._owners = owners = _Owners(list(known.values()), self._forget)
        return owners

    def _forget(self, _: object) -> None:
        """Let go of the changes of an adapter that nobody has any more, and of all tables."""
        self._owners = None


class AdaptedRows(Rows):
    """The rows of a pass of which some have an adapter, all in this process."""

    def __init__(self, rows: AdapterRows, tables: AdapterTables):
        adapters = [adapter for adapter in rows.adapters if isinstance(adapter, Adapter)]
        assert len(adapters) == len(rows.adapters)
        self._owners = tables.owners_of(adapters)
        numbers = [self._owners.numbers[adapter.uid] for adapter in adapters]
        self._numbers = np.array(numbers, dtype=np.int64)
        own = rows.segments
        owners = self._numbers[own.owners]
        self._segments = RowSegments(own.starts, own.stops, owners, len(self._owners.numbers))

    def _adapted(self, w: Weight) -> Weight:
        """The weight with the changes of this pass's adapters, where one has some."""
        changes = self._owners.changes_of(w)
        if changes is None or not changes.has_change[self._numbers].any():
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
