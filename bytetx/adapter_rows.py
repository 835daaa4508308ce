"""Which rows of a batch have which adapter, on the host."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from bytetx.sequence_tree import rows_of


@dataclass(frozen=True, eq=False)
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

    @cached_property
    def by_owner(self) -> tuple[np.ndarray, list[tuple[int, int, int]]]:
        """(all rows, int64, one owner's after another's; each owner, and its start and end there).

        Rows of an owner keep their order.
        """
        order = np.argsort(self.owners, kind="stable")
        seqlens = (self.stops - self.starts)[order]
        rows, ends = rows_of(self.starts[order], seqlens), np.cumsum(seqlens)
        owners, first = np.unique(self.owners[order], return_index=True)
        starts = (ends - seqlens)[first].tolist()
        stops = [*starts[1:], len(rows)][: len(starts)]
        return rows, list(zip(owners.tolist(), starts, stops, strict=True))


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
