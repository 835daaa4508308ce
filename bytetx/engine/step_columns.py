"""StepColumns: a planned step as the flat int32 arrays that kernels take."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from bytetx.engine.generation import StepPlan, StepRow
from bytetx.engine.sequence import SequenceState

_FIRST_PAGES = 64  # columns that a table of pages starts with


@dataclass(frozen=True, slots=True)
class StepColumns:
    """The arrays of a PackedBatch and its Past, on the host.

    input_ids, positions, slot_mapping: int32 [total_tokens]; an id below 0 is ~seat, the token that
    the sequence on this seat sampled last, which nobody here knows yet; a position is the token's
    index in its sequence, a slot page * page_size + offset.
    cu_seqlens: int32 [batch_size + 1]; seqlens, kv_seqlens, seats: int32 [batch_size], tokens of
    this step, keys with them, and whose seat.  page_table: int32 [batch_size, max_pages]; places
    behind a sequence's last page hold any number.
    logits_rows: int32 [num_logits], rows whose logits are wanted, in order.
    is_decode: each row is the one token that its sequence sampled last.
    """

    input_ids: np.ndarray
    positions: np.ndarray
    slot_mapping: np.ndarray
    cu_seqlens: np.ndarray
    seqlens: np.ndarray
    kv_seqlens: np.ndarray
    seats: np.ndarray
    page_table: np.ndarray
    logits_rows: np.ndarray
    page_size: int
    is_decode: bool

    @property
    def has_unknown(self) -> bool:
        """Whether an id is a seat."""
        return bool((self.input_ids < 0).any())


class ColumnWriter:
    """Plans -> columns, in the order of the plans.

    Keeps the pages of running sequences by their seats, so that a step only adds what is new: a
    table of 256 sequences of 1024 tokens takes a millisecond to write.
    """

    def __init__(self, *, page_size: int, max_num_seqs: int):
        self._page_size = page_size
        self._table = np.zeros((max_num_seqs, _FIRST_PAGES), dtype=np.int32)
        self._num_pages = [0] * max_num_seqs
        self._owners: list[tuple[SequenceState | None, int]] = [(None, 0)] * max_num_seqs
        self._next = np.full(max_num_seqs, -1)  # places of tokens that were sampled last

    def columns_of(self, plan: StepPlan) -> StepColumns:
        """The columns of a plan, read before its sequences change."""
        rows = plan.rows
        sequences, starts, counts, num_logits, samples, _ = map(list, zip(*rows, strict=True))
        seats = _int32([sequence.seat for sequence in sequences])
        page_table = self._table_of(rows, seats)
        starts, seqlens, is_sampling = _int32(starts), _int32(counts), np.array(samples)
        kv_seqlens = starts + seqlens
        is_decode = len(rows) == plan.total_tokens and bool(is_sampling.all())
        is_decode = is_decode and bool((self._next[seats] == starts).all())
        self._next[seats] = np.where(is_sampling, kv_seqlens, -1)
        cu_seqlens = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(seqlens, out=cu_seqlens[1:])
        if len(rows) == plan.total_tokens:
            input_ids = [_token(row) for row in rows]
            owners, positions = np.arange(len(rows)), starts
        else:
            input_ids = list(chain.from_iterable(map(_tokens, rows)))
            owners = np.repeat(np.arange(len(rows), dtype=np.int32), seqlens)
            positions = np.repeat(starts - cu_seqlens[:-1], seqlens)
            positions += np.arange(plan.total_tokens, dtype=np.int32)
        size = self._page_size
        return StepColumns(
            _int32(input_ids),
            positions,
            page_table[owners, positions // size] * size + positions % size,
            cu_seqlens,
            seqlens,
            kv_seqlens,
            seats,
            page_table,
            _last_of_each(cu_seqlens, _int32(num_logits)),
            size,
            is_decode,
        )

    def _table_of(self, rows: Sequence[StepRow], seats: np.ndarray) -> np.ndarray:
        """The pages of each row's sequence, after what is new was written down."""
        counts, owners, width = self._num_pages, self._owners, 1
        for row, seat in zip(rows, seats.tolist(), strict=True):
            pages = row.sequence.pages
            owner, epoch = owners[seat]
            if owner is not row.sequence or epoch != row.epoch:
                owners[seat], counts[seat] = (row.sequence, row.epoch), 0
                self._next[seat] = -1
            num_pages = len(pages)
            if num_pages > width:
                width = num_pages
            if num_pages > counts[seat]:
                self._write(seat, counts[seat], pages)
        return self._table[seats, :width]

    def _write(self, seat: int, first: int, pages: list[int]) -> None:
        if len(pages) > self._table.shape[1]:
            grown = np.zeros((len(self._table), 2 * len(pages)), dtype=np.int32)
            grown[:, : self._table.shape[1]] = self._table
            self._table = grown
        self._table[seat, first : len(pages)] = pages[first:]
        self._num_pages[seat] = len(pages)


def _tokens(row: StepRow) -> list[int]:
    tokens = row.sequence.token_ids[row.start : row.start + row.num_tokens]
    return tokens or [~row.sequence.seat]  # a decode row of a token that is not known yet


def _token(row: StepRow) -> int:
    sequence = row.sequence
    tokens = sequence.token_ids
    return tokens[row.start] if row.start < len(tokens) else ~sequence.seat


def _last_of_each(cu_seqlens: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The last counts[i] row numbers of each sequence."""
    ends = np.cumsum(counts, dtype=np.int32)
    return np.repeat(cu_seqlens[1:] - ends, counts) + np.arange(counts.sum(), dtype=np.int32)


def _int32(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int32)
