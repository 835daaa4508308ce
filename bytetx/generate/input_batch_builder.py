"""InputBatchBuilder: from the scheduler's plan of a step to its InputBatch and page table."""

from collections.abc import Sequence
from operator import attrgetter

import numpy as np

from bytetx.adapter_rows import AdapterRows
from bytetx.generate.scheduler import ScheduledRow, SchedulerOutput, SequenceState
from bytetx.runtime.input_batch import InputBatch

_ADAPTER = attrgetter("adapter")
_INITIAL_PAGES = 64  # columns of the page table at the start


class InputBatchBuilder:
    """Builds the InputBatch of each plan, in the order of the plans.

    The page lists of running sequences stay here by slot index, so that a step of decode rows is a
    few operations on arrays: copying the page lists of 256 sequences takes a millisecond.
    """

    def __init__(self, *, page_size: int, max_num_seqs: int):
        self._page_size = page_size
        self._page_table = np.zeros((max_num_seqs, _INITIAL_PAGES), dtype=np.int32)
        self._num_pages = np.zeros(max_num_seqs, dtype=np.int64)
        # By slot: the position of the token that was sampled last, -1 where the device has none.
        self._next_positions = np.full(max_num_seqs, -1)

    def build(self, plan: SchedulerOutput) -> InputBatch:
        """The arrays of a plan; call it before the plan's sequences change."""
        admitted = [sequence.slot_index for sequence in plan.admitted]
        self._num_pages[admitted], self._next_positions[admitted] = 0, -1
        for sequence in plan.with_new_pages:
            self._add_pages(sequence)
        rows, page_size = plan.rows, self._page_size
        sequences, *columns, _, drafts = zip(*rows, strict=True)
        starts, seqlens, num_logits = map(_int32, columns[:3])
        num_samples = _int32(columns[3])
        if plan.has_drafts:
            num_samples += _int32([len(draft) for draft in drafts])
        slot_indices = _int32([sequence.slot_index for sequence in sequences])
        kv_seqlens = starts + seqlens
        is_next = (self._next_positions[slot_indices] == starts) & (seqlens == 1)
        # After a draft only the host knows which of the samples is the last token.
        self._next_positions[slot_indices] = np.where(num_samples == 1, kv_seqlens, -1)
        cu_seqlens = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(seqlens, out=cu_seqlens[1:])
        sequence_of_token = np.repeat(np.arange(len(rows), dtype=np.int32), seqlens)
        positions = (starts - cu_seqlens[:-1])[sequence_of_token]
        positions += np.arange(plan.total_tokens, dtype=np.int32)
        adapters = list(map(_ADAPTER, sequences))
        page_table = self._page_table[slot_indices, : self._num_pages[slot_indices].max()]
        pages = page_table[sequence_of_token, positions // page_size]
        return InputBatch(
            input_ids=_input_ids(rows, ~slot_indices, is_next, cu_seqlens),
            positions=positions,
            slot_mapping=pages * page_size + positions % page_size,
            cu_seqlens=cu_seqlens,
            seqlens=seqlens,
            kv_seqlens=kv_seqlens,
            slot_indices=slot_indices,
            page_table=page_table,
            num_logits=num_logits,
            logits_rows=_last_of_each(cu_seqlens, num_logits),
            num_samples=num_samples,
            page_size=page_size,
            is_decode=bool(is_next.all()),
            adapters=AdapterRows.of(adapters, cu_seqlens) if any(adapters) else None,
        )

    def _add_pages(self, sequence: SequenceState) -> None:
        slot_index, pages = sequence.slot_index, sequence.pages
        first = self._num_pages[slot_index]
        if len(pages) > self._page_table.shape[1]:
            larger = np.zeros((len(self._page_table), 2 * len(pages)), dtype=np.int32)
            larger[:, : self._page_table.shape[1]] = self._page_table
            self._page_table = larger
        self._page_table[slot_index, first : len(pages)] = pages[first:]
        self._num_pages[slot_index] = len(pages)


def _input_ids(
    rows: Sequence[ScheduledRow],
    last_tokens: np.ndarray,
    is_next: np.ndarray,
    cu_seqlens: np.ndarray,
) -> np.ndarray:
    """last_tokens: [batch_size], the ids that stand for the tokens sampled last."""
    if is_next.all():
        return last_tokens
    input_ids = np.empty(cu_seqlens[-1], dtype=np.int32)
    input_ids[cu_seqlens[:-1]] = last_tokens
    for number in np.flatnonzero(~is_next).tolist():
        row, first = rows[number], cu_seqlens[number]
        tokens = row.sequence.token_ids[row.start : row.start + row.num_tokens]
        input_ids[first : first + row.num_tokens] = [*tokens, *row.draft] if row.draft else tokens
    return input_ids


def _last_of_each(cu_seqlens: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The last counts[i] row numbers of each sequence."""
    ends = np.cumsum(counts, dtype=np.int32)
    return np.repeat(cu_seqlens[1:] - ends, counts) + np.arange(counts.sum(), dtype=np.int32)


def _int32(values: Sequence[int]) -> np.ndarray:
    return np.array(values, dtype=np.int32)
