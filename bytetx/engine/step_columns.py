"""StepColumns: a planned step as the flat int32 arrays that kernels take."""

from dataclasses import dataclass
from itertools import chain

import numpy as np

from bytetx.engine.generation import StepPlan, StepRow


@dataclass(frozen=True, slots=True)
class StepColumns:
    """The arrays of a PackedBatch and its Past, on the host.

    input_ids, positions, slot_mapping: int32 [total_tokens]; a position is the token's index in
    its sequence, a slot page * page_size + offset.
    cu_seqlens: int32 [batch_size + 1]; seqlens, kv_seqlens: int32 [batch_size], tokens of this
    step, and keys with them.  page_table: int32 [batch_size, max_pages]; places behind a
    sequence's last page hold page 0.
    logits_rows: int32 [num_logits], rows whose logits are wanted, in order.
    """

    input_ids: np.ndarray
    positions: np.ndarray
    slot_mapping: np.ndarray
    cu_seqlens: np.ndarray
    seqlens: np.ndarray
    kv_seqlens: np.ndarray
    page_table: np.ndarray
    logits_rows: np.ndarray
    page_size: int


def columns_of(plan: StepPlan, *, page_size: int) -> StepColumns:
    """The columns of a plan, read before its sequences change."""
    rows = plan.rows
    starts = _int32([row.start for row in rows])
    seqlens = _int32([row.num_tokens for row in rows])
    cu_seqlens = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum(seqlens, out=cu_seqlens[1:])
    positions = np.repeat(starts - cu_seqlens[:-1], seqlens)
    positions += np.arange(plan.total_tokens, dtype=np.int32)
    page_table = _page_table([row.sequence.pages for row in rows])
    owners = np.repeat(np.arange(len(rows), dtype=np.int32), seqlens)
    slots = page_table[owners, positions // page_size] * page_size + positions % page_size
    return StepColumns(
        _int32(list(chain.from_iterable(_tokens(row) for row in rows))),
        positions,
        slots,
        cu_seqlens,
        seqlens,
        starts + seqlens,
        page_table,
        _last_of_each(cu_seqlens, _int32([row.num_logits for row in rows])),
        page_size,
    )


def _tokens(row: StepRow) -> list[int]:
    return row.sequence.token_ids[row.start : row.start + row.num_tokens]


def _page_table(pages: list[list[int]]) -> np.ndarray:
    counts = _int32([len(row) for row in pages])
    table = np.zeros((len(pages), int(counts.max(initial=1))), dtype=np.int32)
    table[np.arange(table.shape[1]) < counts[:, np.newaxis]] = _int32(
        list(chain.from_iterable(pages))
    )
    return table


def _last_of_each(cu_seqlens: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The last counts[i] row numbers of each sequence."""
    ends = np.cumsum(counts, dtype=np.int32)
    return np.repeat(cu_seqlens[1:] - ends, counts) + np.arange(counts.sum(), dtype=np.int32)


def _int32(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int32)
