"""From the scheduler's plan of a step to its InputBatch."""

from collections.abc import Sequence

import numpy as np

from bytetx.generate.scheduler import StepPlan, StepRow
from bytetx.generate.sequence import SequenceState
from bytetx.runtime.input_batch import StepColumns

_FIRST_PAGES = 64  # columns that a table of pages starts with


class ColumnWriter:
    """Plans -> columns, in the order of the plans.

    Keeps by their seats what it knows of running sequences, so that a step of decode rows is a few
    operations on arrays: to write down the pages of 256 sequences alone takes a millisecond.
    """

    def __init__(self, *, page_size: int, max_num_seqs: int):
        self._page_size = page_size
        self._table = np.zeros((max_num_seqs, _FIRST_PAGES), dtype=np.int32)
        self._num_pages = np.zeros(max_num_seqs, dtype=np.int64)
        self._next = np.full(max_num_seqs, -1)  # places of the tokens that were sampled last

    def columns_of(self, plan: StepPlan) -> StepColumns:
        """The columns of a plan, read before its sequences change."""
        seated = [sequence.seat for sequence in plan.seated]
        self._num_pages[seated], self._next[seated] = 0, -1
        for sequence in plan.grown:
            self._write(sequence)
        rows = plan.rows
        sequences, *columns, _ = zip(*rows, strict=True)
        starts, seqlens, num_logits = map(_int32, columns[:3])
        samples = np.array(columns[3])
        seats = _int32([sequence.seat for sequence in sequences])
        kv_seqlens = starts + seqlens
        is_next = self._next[seats] == starts
        self._next[seats] = np.where(samples, kv_seqlens, -1)
        cu_seqlens = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(seqlens, out=cu_seqlens[1:])
        owners = np.repeat(np.arange(len(rows), dtype=np.int32), seqlens)
        positions = (starts - cu_seqlens[:-1])[owners]
        positions += np.arange(plan.total_tokens, dtype=np.int32)
        page_table, size = self._table[seats, : self._num_pages[seats].max()], self._page_size
        return StepColumns(
            _input_ids(rows, ~seats, is_next, cu_seqlens),
            positions,
            page_table[owners, positions // size] * size + positions % size,
            cu_seqlens,
            seqlens,
            kv_seqlens,
            seats,
            page_table,
            num_logits,
            _last_of_each(cu_seqlens, num_logits),
            samples,
            size,
            bool(is_next.all()),
        )

    def _write(self, sequence: SequenceState) -> None:
        seat, pages = sequence.seat, sequence.pages
        first = self._num_pages[seat]
        if len(pages) > self._table.shape[1]:
            grown = np.zeros((len(self._table), 2 * len(pages)), dtype=np.int32)
            grown[:, : self._table.shape[1]] = self._table
            self._table = grown
        self._table[seat, first : len(pages)] = pages[first:]
        self._num_pages[seat] = len(pages)


def _input_ids(
    rows: Sequence[StepRow], last_tokens: np.ndarray, is_next: np.ndarray, cu_seqlens: np.ndarray
) -> np.ndarray:
    """last_tokens: [batch_size], what stands for the tokens that sequences sampled last."""
    if is_next.all():
        return last_tokens
    input_ids = np.empty(cu_seqlens[-1], dtype=np.int32)
    input_ids[cu_seqlens[:-1]] = last_tokens
    for number in np.flatnonzero(~is_next).tolist():
        row, first = rows[number], cu_seqlens[number]
        tokens = row.sequence.token_ids[row.start : row.start + row.num_tokens]
        input_ids[first : first + row.num_tokens] = tokens
    return input_ids


def _last_of_each(cu_seqlens: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The last counts[i] row numbers of each sequence."""
    ends = np.cumsum(counts, dtype=np.int32)
    return np.repeat(cu_seqlens[1:] - ends, counts) + np.arange(counts.sum(), dtype=np.int32)


def _int32(values: Sequence[int]) -> np.ndarray:
    return np.array(values, dtype=np.int32)
