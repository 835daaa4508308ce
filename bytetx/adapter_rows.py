"""Which rows of a batch have which adapter, on the host."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from bytetx.sequence_tree import rows_of


@dataclass(frozen=True, slots=True)
class RowSegments:
    """Consecutive rows of a batch that have one owner of several; other rows have none.

    starts, stops, owners: int64 [num_segments], ascending; a segment is rows start to stop - 1, and
    owners[i] is the number of its owner, below num_owners.
    """

    starts: np.ndarray
    stops: np.ndarray
    owners: np.ndarray
    num_owners: int

    @classmethod
    def of(cls, owners: np.ndarray, bounds: np.ndarray) -> "RowSegments":
        """The segments of sequences by the owner of each, below 0 for none.

        A sequence is rows bounds[i] to bounds[i + 1] - 1.
        """
        changes = np.flatnonzero(owners[1:] != owners[:-1]) + 1
        starts = np.concatenate([np.zeros(min(len(owners), 1), dtype=np.int64), changes])
        stops = bounds[np.append(starts[1:], len(owners))] if len(starts) else starts
        owners, starts = owners[starts], bounds[starts]
        own = (owners >= 0) & (stops > starts)
        num_owners = int(owners.max(initial=-1)) + 1
        return cls(starts[own], stops[own], owners[own], num_owners)

    def rows_of(self, owner: int) -> slice | np.ndarray:
        """The rows of an owner: a slice where they are consecutive, else int64."""
        own = np.flatnonzero(self.owners == owner)
        starts, stops = self.starts[own], self.stops[own]
        if not len(own):
            return slice(0, 0)
        if (starts[1:] == stops[:-1]).all():
            return slice(int(starts[0]), int(stops[-1]))
        return rows_of(starts, stops - starts)


class SlottedAdapter(Protocol):
    """An adapter of a transformer, as its batches name it.

    slot: its number among the transformer's adapters.  changes: of all of them.
    """

    @property
    def slot(self) -> int: ...

    @property
    def changes(self) -> object: ...


@dataclass(frozen=True, slots=True, eq=False)
class AdapterRows:
    """Which rows of a batch have which adapter; the other rows are the base's.

    changes: of the adapters by slot, as their transformer has them.  segments: by slot.
    tiles: the same rows in the block of a step on a GPU; None: they are still to be made.
    """

    changes: object
    segments: RowSegments
    tiles: object = None

    @classmethod
    def of(
        cls, adapters: Sequence[SlottedAdapter | None], bounds: np.ndarray
    ) -> "AdapterRows | None":
        """None where no sequence has an adapter.

        adapters: of each sequence; all of one transformer.
        bounds: integers [batch_size + 1], where the sequences start, and the last one ends.
        """
        first = next((adapter for adapter in adapters if adapter is not None), None)
        if first is None:
            return None
        slots = np.array([-1 if adapter is None else adapter.slot for adapter in adapters])
        return cls(first.changes, RowSegments.of(slots, bounds))
