"""Which sequences of a packed batch continue which, so that a shared prefix is computed once."""

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

    @cached_property
    def num_query_sequences(self) -> int:
        """Sequences before the first one that is keys alone."""
        return int(np.searchsorted(self.starts, self.num_rows))

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
        lens: np.ndarray = np.append(self.seqlens, 0)[self._chains].sum(axis=1)
        return lens

    def positions(self) -> np.ndarray:
        """int32 [total_keys]: each token's index from the start of its first ancestor."""
        shift = np.repeat(self.prefix_lens - self.starts[:-1], self.seqlens)
        positions: np.ndarray = (np.arange(self.total_keys) + shift).astype(np.int32)
        return positions

    def key_rows(self) -> tuple[np.ndarray, np.ndarray]:
        """(rows, cu_keys) of the keys that each sequence with query rows sees, its own last.

        rows: int32 [cu_keys[-1]], rows of keys.  cu_keys: int64 [num_query_sequences + 1], where
        each sequence's begin.
        """
        count = self.num_query_sequences
        cu_keys = np.zeros(count + 1, dtype=np.int64)
        np.cumsum((self.prefix_lens + self.seqlens)[:count], out=cu_keys[1:])
        return self.rows_of(np.arange(count)).astype(np.int32), cu_keys

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
        first, behind = self._openings(tile_rows, batch_invariant)
        begin, end = self.starts[first], self.starts[behind]
        counts = -((begin - end) // tile_rows)
        opening = np.repeat(np.arange(len(first)), counts)
        index = np.arange(len(opening)) - np.repeat(np.cumsum(counts) - counts, counts)
        row = begin[opening] + index * tile_rows
        last_key = np.minimum(row + tile_rows, end[opening])
        first_key = np.maximum(begin[opening], row + 1 - window) if window else begin[opening]
        tiles = np.stack([row, last_key - row, first_key, last_key], axis=1).astype(np.int32)
        order = self._run_order(last_key - first_key + self.prefix_lens[first][opening])
        bounds = np.stack([self.starts, np.append(self.starts[1:], 0)], axis=1)
        bounds[-1] = 0  # where chains have -1
        pairs = bounds.astype(np.int32).view(np.int64).ravel()  # two int32 as one number
        chains = self._chains[first]
        # Ancestors to the front, and behind them the -1 that stand before them.
        missing = (chains[:, 1:] < 0).sum(axis=1)[:, None]
        places = (missing + np.arange(1, MAX_ANCESTORS + 1)) % (MAX_ANCESTORS + 1)
        ancestors = pairs[np.take_along_axis(chains, places, axis=1)]
        num_sequences = self.num_query_sequences
        row_bounds = np.repeat(pairs[:num_sequences], self.seqlens[:num_sequences])
        return TreeTiles(
            tiles[order],
            ancestors[opening[order]].view(np.int32).reshape(-1, MAX_ANCESTORS, 2),
            row_bounds.view(np.int32).reshape(-1, 2),
        )

    def _openings(self, tile_rows: int, batch_invariant: bool) -> tuple[np.ndarray, np.ndarray]:
        """Sequences that open a tile, and the one behind those that share its tiles."""
        num_sequences = self.num_query_sequences
        first = np.arange(num_sequences)
        behind = first + 1
        if batch_invariant:
            return first, behind
        starts, seqlens = self.starts[:num_sequences], self.seqlens[:num_sequences]
        limit = starts + np.maximum(-(-seqlens // tile_rows), 1) * tile_rows
        fitting = np.searchsorted(self.starts, limit, side="right") - 1
        changes = np.append(np.flatnonzero(np.diff(self.parents)) + 1, len(self))
        run_end = changes[np.searchsorted(changes, first, side="right")]
        behind = np.maximum(behind, np.minimum(np.minimum(fitting, run_end), num_sequences))
        follows, openings, at = behind.tolist(), [], 0
        while at < num_sequences:
            openings.append(at)
            at = follows[at]
        first = np.array(openings, dtype=np.int64)
        return first, behind[first]

    @staticmethod
    def _run_order(num_keys: np.ndarray) -> np.ndarray:
        """Longest first and, among tiles about as long, the last rows first, as they see most."""
        steps = np.floor(np.log2(np.maximum(num_keys, 1)) * _STEPS_PER_OCTAVE)
        backwards = np.arange(len(num_keys))[::-1]
        order: np.ndarray = backwards[np.argsort(-steps[backwards], kind="stable")]
        return order
