"""Adapters of single rows of a pass: what they add to the products of a model's layers."""

import secrets
import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from threading import Lock

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bytetx.adapter_rows import AdapterRows
from bytetx.nn.layer import Rows
from bytetx.ops.linear_rotary import HeadRotation
from bytetx.ops.low_rank import (
    AdaptedWeight,
    LowRankChange,
    LowRankChanges,
    RowTiles,
    start_low_rank,
    tiles_on,
)
from bytetx.ops.norm import RowNorm
from bytetx.ops.weight import Weight

# Numbers of (adapter, first token) that stand for a text's first token; none is given twice.
_NUMBERS = count(1)
_LEAST_SLOTS = 8


@dataclass(frozen=True, slots=True, eq=False)
class LayerChanges:
    """The changes of a model's weights by slot of its adapters.

    version: another one for other tables, which CUDA graphs hold by their addresses.
    of_weight: by id() of the weight, and of word_rows.
    word_rows: as of AdapterSlots.
    """

    version: int
    num_slots: int
    of_weight: Mapping[int, LowRankChanges]
    word_rows: Tensor | None = None

    @property
    def tables(self) -> tuple[Tensor, ...]:
        """The tensors that a CUDA graph reads, beside the factors of its batch's adapters."""
        every = self.of_weight.values()
        own = () if self.word_rows is None else (self.word_rows,)
        return (*own, *(table for one in every for table in (one.addresses, one.ranges)))

    def admits(self, changes: Mapping[int, LowRankChange]) -> bool:
        """Whether an adapter with these changes can have a slot."""
        own = self.of_weight
        return all(key in own and own[key].admits(one) for key, one in changes.items())

    def put(self, slot: int, changes: Mapping[int, LowRankChange]) -> None:
        for key, one in self.of_weight.items():
            one.put(slot, changes.get(key))

    def finish(self) -> None:
        """Wait until the device's tables have what was put into them, for passes of any stream."""
        for device in {one.addresses.device for one in self.of_weight.values()}:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()

    def forget(self, slot: int) -> None:
        """Let go of the changes in a slot that no pass has; the device's tables keep addresses."""
        for one in self.of_weight.values():
            one.by_owner[slot] = None


class AdapterSlots:
    """The slots of a model's adapters; threads may share it.

    word_rows: [vocab_size, size], by which adapters change words: that of each token is multiplied
    as the inputs of a layer are.
    current: of all adapters that live. A pass takes it once, after its adapters were made.
    """

    def __init__(self, word_rows: Tensor | None = None) -> None:
        self._lock, self._word_rows = Lock(), word_rows
        self._changes: dict[int, Mapping[int, LowRankChange]] = {}  # by slot
        self._given_up: deque[int] = deque()
        self.current = LayerChanges(0, 0, {}, word_rows)

    def take(self, changes: Mapping[int, LowRankChange]) -> int:
        """A slot that has these changes, on the device, too, until it is given up."""
        with self._lock:
            self._sweep()
            used, found = self._changes, self.current
            slot = next(slot for slot in range(len(used) + 1) if slot not in used)
            used[slot] = changes
            try:
                if slot < found.num_slots and found.admits(changes):
                    found.put(slot, changes)
                else:
                    found = self._larger()
                found.finish()
            except BaseException:
                del used[slot]
                raise
            self.current = found
        self._sweep_if_free()
        return slot

    def give_up(self, slot: int) -> None:
        """Nobody has the adapter any more; any thread may say so, also one that takes a slot."""
        self._given_up.append(slot)
        self._sweep_if_free()

    def _sweep_if_free(self) -> None:
        # Who has the lock looks for slots that were given up meanwhile when it has let go of it.
        while self._given_up and self._lock.acquire(blocking=False):
            try:
                self._sweep()
            finally:
                self._lock.release()

    def _sweep(self) -> None:
        """Free the slots that were given up."""
        while self._given_up:
            slot = self._given_up.popleft()
            del self._changes[slot]
            self.current.forget(slot)

    def _larger(self) -> LayerChanges:
        """Tables for twice as many adapters as there are, for their ranks and weights, and for
        those of adapters that were there before."""
        before = self.current.of_weight
        num_slots = max(_LEAST_SLOTS, self.current.num_slots, 2 * len(self._changes))
        given: dict[int, list[LowRankChange]] = {key: [] for key in before}
        for changes in self._changes.values():
            for key, one in changes.items():
                given.setdefault(key, []).append(one)
        tables = {
            key: LowRankChanges.for_these(found, num_owners=num_slots, before=before.get(key))
            for key, found in given.items()
        }
        larger = LayerChanges(self.current.version + 1, num_slots, tables, self._word_rows)
        for slot, changes in self._changes.items():
            larger.put(slot, changes)
        return larger


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Adapter:
    """A LoRA adapter in memory, of one model.

    It lives as long as a request that uses it.
    num_bytes: of its changes of layers.  slot: of `slots`, its own as long as it lives.
    uid: 16 bytes that no other adapter has, also none of the same name or folder.
    """

    name: str
    folder: Path
    num_bytes: int
    slots: AdapterSlots
    slot: int
    uid: bytes = field(default_factory=lambda: secrets.token_bytes(16))
    _first_ids: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls, name: str, folder: Path, changes: Mapping[int, LowRankChange], slots: AdapterSlots
    ) -> "Adapter":
        """changes: of the layers' weights, by id() of each."""
        num_bytes = sum(change.num_bytes for change in changes.values())
        adapter = cls(name, folder, num_bytes, slots, slots.take(changes))
        weakref.finalize(adapter, slots.give_up, adapter.slot).atexit = False
        return adapter

    @property
    def changes(self) -> LayerChanges:
        """Those of all adapters of the model."""
        return self.slots.current

    def first_id(self, token_id: int) -> int:
        """A number below 0 that stands for a text's first token, and for this adapter."""
        found = self._first_ids.get(token_id)
        if found is None:
            found = self._first_ids.setdefault(token_id, -next(_NUMBERS))
        return found


def read_by_graphs(rows: AdapterRows | None) -> tuple[int | None, tuple[Tensor, ...]]:
    """(the version of the tables, the tables) that a captured pass of such rows reads."""
    if rows is None:
        return None, ()
    assert isinstance(rows.changes, LayerChanges)
    return rows.changes.version, rows.changes.tables


class AdaptedRows(Rows):
    """The rows of a pass of which some have an adapter, all in this process."""

    def __init__(self, rows: AdapterRows, total_rows: int, device: torch.device):
        assert isinstance(rows.changes, LayerChanges)
        self._changes, self._segments = rows.changes, rows.segments
        # None where the pass may be captured, and run again with other adapters.
        self._slots: list[int] | None = None
        assert rows.tiles is None or isinstance(rows.tiles, RowTiles)
        self._tiles = rows.tiles
        if rows.tiles is None:
            self._slots = np.unique(rows.segments.owners).tolist()
            if device.type == "cuda":
                self._tiles = tiles_on(device, rows.segments, total_rows)

    @property
    def changes_words(self) -> bool:  # type: ignore[override]
        return self._word_changes is not None

    @property
    def _word_changes(self) -> LowRankChanges | None:
        changes = self._changes.of_weight.get(id(self._changes.word_rows))
        return None if changes is None or not self._has_some(changes) else changes

    def changed_words(self, words: Tensor, input_ids: Tensor) -> Tensor:
        changes, table = self._word_changes, self._changes.word_rows
        if changes is not None and table is not None:
            x = F.embedding(input_ids, table)
            sums, add = start_low_rank(
                x, self._segments, changes, tiles=self._tiles, residual=words
            )
            words = words if sums is None else sums
            if add is not None:
                add(words)
        return words

    def _adapted(self, w: Weight) -> Weight:
        """The weight with the changes of this pass's adapters, where one has some."""
        changes = self._changes.of_weight.get(id(w))
        if changes is None or not self._has_some(changes):
            return w
        return AdaptedWeight(w, self._segments, changes, self._tiles)

    def _has_some(self, changes: LowRankChanges) -> bool:
        own, slots = changes.by_owner, self._slots
        return slots is None or any(own[slot] is not None for slot in slots)

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
        norm: RowNorm | None,
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
