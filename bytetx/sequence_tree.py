"""Which sequences of a packed batch continue which, so that a shared prefix is computed once."""

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

# Sequences that one may continue, one after the other: instruction, examples, state, question.
MAX_ANCESTORS = 4

# Tiles run the longest first, in steps of a quarter of an octave of the keys that they see.
_STEPS_PER_OCTAVE = 4


class TreeTiles(NamedTuple):
    """Runs of query rows whose sequences have the same ancestors, as attention kernels read them.

    tiles: int32 [num_tiles, 4] of {first row, rows, first key, one past the last key}, where keys
        are those of its own sequences; in the order in which they should run.
    ancestors: int32 [num_tiles, MAX_ANCESTORS, 2], first and one past the last row of each, the
        first of them first; {0, 0} behind the last one.
    row_bounds: int32 [num_rows, 2], first and one past the last row of each row's sequence.
    """

    tiles: np.ndarray
    ancestors: np.ndarray
    row_bounds: np.ndarray


def rows_of(starts: np.ndarray, seqlens: np.ndarray) -> np.ndarray:
    """The rows of sequences, one sequence after the other: seqlens[i] of them from starts[i] on.

    starts, seqlens: integers [n].  Returns int64 [seqlens.sum()].
    """
    ends = np.cumsum(seqlens, dtype=np.int64)
    # The distance from each new row to the old one, and then the old row.
    rows = np.repeat(starts - (ends - seqlens), seqlens)
    rows += np.arange(len(rows))
    return rows


@dataclass(frozen=True, eq=False)
class SequenceTree:
    """The sequences of a batch, of which some continue others; on the host.

    A token of a causal model sees all tokens of its sequence's ancestors, and then those of its own
    sequence up to itself; positions count from the start of the first ancestor.
    parents: int32 [batch_size], the sequence that each one continues, -1 where it continues none.
    seqlens: int32 [batch_size], tokens of each sequence without its ancestors.
    num_rows: tokens that are computed, where the last sequences are keys alone; None means all.
    Raises ValueError where a parent is no sequence, where a sequence has more than MAX_ANCESTORS
    ancestors (or itself among them), or where num_rows lies inside of a sequence.
    """

    parents: np.ndarray
    seqlens: np.ndarray
    num_rows: int = -1

    def __post_init__(self) -> None:
        if len(self.parents) != len(self.seqlens):
            raise ValueError(
                f"parents must have one entry a sequence ({len(self.seqlens)}), got "
                f"{len(self.parents)}"
            )
        if len(self.parents) and not -1 <= self.parents.min() <= self.parents.max() < len(self):
            raise ValueError(
                f"parents must be sequences of the batch, below {len(self)}, or -1, got "
                f"{self.parents.min()} to {self.parents.max()}"
            )
        if self.num_rows < 0:
            object.__setattr__(self, "num_rows", self.total_keys)
        if self.num_rows not in self.starts:
            raise ValueError(f"num_rows must end a sequence, got {self.num_rows}")
        if (self._chains[:, 0] >= 0).any():
            raise ValueError(
                f"a sequence may have at most {MAX_ANCESTORS} ancestors, and none may be its own; "
                f"sequence {int(np.flatnonzero(self._chains[:, 0] >= 0)[0])} has more"
            )

    def __len__(self) -> int:
        return len(self.seqlens)

    @cached_property
    def starts(self) -> np.ndarray:
        """int64 [batch_size + 1]: the first row of each sequence, and the number of all rows."""
        starts = np.zeros(len(self) + 1, dtype=np.int64)
        np.cumsum(self.seqlens, out=starts[1:])
        return starts

    @property
    def total_keys(self) -> int:
        """Rows of keys: the tokens of all sequences."""
        return int(self.starts[-1])

    @cached_property
    def _chains(self) -> np.ndarray:
        """int64 [batch_size, MAX_ANCESTORS + 1]: ancestors of each, the last one its parent, -1
        before the first."""
        chains = np.full((len(self), MAX_ANCESTORS + 1), -1, dtype=np.int64)
        above = self.parents.astype(np.int64)
        for depth in range(MAX_ANCESTORS, -1, -1):
            chains[:, depth] = above
            above = np.where(above >= 0, self.parents[above], -1)
        return chains

    @cached_property
    def prefix_lens(self) -> np.ndarray:
        """int64 [batch_size]: tokens of all ancestors of each sequence."""
        chains = self._chains
        lens: np.ndarray = np.where(chains >= 0, self.seqlens[chains], 0).sum(axis=1)
        return lens

    def positions(self) -> np.ndarray:
        """int32 [total_keys]: each token's index from the start of its first ancestor."""
        shift = np.repeat(self.prefix_lens - self.starts[:-1], self.seqlens)
        return (np.arange(self.total_keys) + shift).astype(np.int32)

    def key_rows(self) -> tuple[np.ndarray, np.ndarray]:
        """(rows, cu_keys) of the keys that each sequence with query rows sees, its own last.

        rows: int32 [cu_keys[-1]], rows of keys.  cu_keys: int64 [batch_size + 1], where each
        sequence's begin; those of a sequence without query rows are none.
        """
        has_rows = self.starts[:-1] < self.num_rows
        cu_keys = np.zeros(len(self) + 1, dtype=np.int64)
        np.cumsum(np.where(has_rows, self.prefix_lens + self.seqlens, 0), out=cu_keys[1:])
        return self.rows_of(np.flatnonzero(has_rows)).astype(np.int32), cu_keys

    def rows_of(self, sequences: np.ndarray) -> np.ndarray:
        """int64: the rows of each of some sequences, those of its ancestors before its own."""
        chains = np.concatenate([self._chains[sequences], sequences[:, None]], axis=1).ravel()
        chains = chains[chains >= 0]
        return rows_of(self.starts[chains], self.seqlens[chains])

    def tiles(self, tile_rows: int, *, window: int = 0, batch_invariant: bool = False) -> TreeTiles:
        """Tiles of at most tile_rows query rows each.

        A tile holds whole sequences with one parent as long as they fit; a longer sequence fills
        tiles of its own, and leaves the rest of its last one to the next.  batch_invariant: every
        sequence opens a tile.  window: a token sees so many keys, its own the last; 0: all.
        """
        starts = self.starts.tolist()
        run_end = self._run_ends()
        num_sequences = bisect_right(starts, self.num_rows - 1)
        tiles: list[tuple[int, int, int, int, int]] = []  # and the first sequence
        at = 0
        while at < num_sequences:
            start, stop, first = starts[at], starts[at + 1], at
            if start == stop:
                at += 1
                continue
            full = (stop - start - 1) // tile_rows
            limit = start + (full + 1) * tile_rows
            at += 1
            if not batch_invariant:
                last = min(run_end[first], num_sequences)
                at = max(at, min(bisect_right(starts, limit) - 1, last))
            end = starts[at]
            for row in range(start, start + full * tile_rows + 1, tile_rows):
                rows = min(tile_rows, end - row)
                first_key = max(start, row + 1 - window) if window else start
                tiles.append((row, rows, first_key, row + rows, first))
        found = np.array(tiles, dtype=np.int64).reshape(-1, 5)
        sequences = found[:, 4]
        found = found[self._run_order(found[:, 3] - found[:, 2] + self.prefix_lens[sequences])]
        chains = self._chains[found[:, 4], 1:]
        # To the front: what has fewer ancestors has -1 before them.
        order = np.argsort(chains < 0, axis=1, kind="stable")
        chains = np.take_along_axis(chains, order, axis=1)
        ancestors = np.stack([self.starts[chains], self.starts[chains] + self.seqlens[chains]], -1)
        ancestors[chains < 0] = 0
        bounds = np.stack([self.starts[:-1], self.starts[1:]], axis=1)
        row_bounds = np.repeat(bounds, self.seqlens, axis=0)[: self.num_rows]
        return TreeTiles(
            found[:, :4].astype(np.int32),
            ancestors.astype(np.int32),
            row_bounds.astype(np.int32),
        )

    def _run_ends(self) -> list[int]:
        """The sequence behind the run of neighbours with one parent that each sequence is in."""
        changes = np.flatnonzero(np.diff(self.parents)) + 1
        ends = np.append(changes, len(self))
        return np.repeat(ends, np.diff(np.append(0, ends))).tolist() if len(self) else []

    @staticmethod
    def _run_order(num_keys: np.ndarray) -> np.ndarray:
        """Longest first and, among tiles about as long, the last rows first, as they see most."""
        steps = np.floor(np.log2(np.maximum(num_keys, 1)) * _STEPS_PER_OCTAVE)
        backwards = np.arange(len(num_keys))[::-1]
        order: np.ndarray = backwards[np.argsort(-steps[backwards], kind="stable")]
        return order
