"""A decode step's integers as one int32 block of few sizes, so that a CUDA graph serves many steps.

Each of its rows is the token that a sequence sampled last; the device knows it, by the sequence's
seat, so that the host may write a block before it does. Rows that fill a bucket up are sequences of
one key, whatever page 0 holds, so that no row is left as earlier work left it; their own key goes
nowhere, and their token to a seat that nobody reads.
"""

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch

from bytetx.packed import PackedBatch, Past
from bytetx.runtime.block import aligned
from bytetx.runtime.input_batch import StepColumns

# Rows share tiles of 64 in the GEMMs and cost attention nothing, so that few buckets lose little;
# below, a step is the read of the weights whatever its rows.
_FEW_ROWS = (1, 2, 4, 8, 16, 32)
_ROW_STEPS = ((256, 32), (1024, 64))
_MANY_ROWS_STEP = 256
_MIN_PAGES = 64


@dataclass(frozen=True, slots=True)
class DecodeLayout:
    """cu_seqlens | kv_seqlens | seats | positions | slots | page_table, of a bucket's sizes.

    num_rows, num_pages: sequences, and columns of the page table.  The rest is where each part
    but the first starts, and the int32s of all.
    """

    num_rows: int
    num_pages: int
    kv_seqlens: int = field(compare=False)
    seats: int = field(compare=False)
    positions: int = field(compare=False)
    slots: int = field(compare=False)
    pages: int = field(compare=False)
    num_ints: int = field(compare=False)

    def write(
        self, block: np.ndarray, columns: StepColumns, *, position_offset: int, idle_seat: int
    ) -> None:
        """Fills a host block.  position_offset: position id of a sequence's first token."""
        n, rows = len(columns.seats), self.num_rows
        block[: rows + 1] = np.arange(rows + 1)
        parts = (
            (self.kv_seqlens, columns.kv_seqlens, 1),
            (self.seats, columns.seats, idle_seat),
            (self.positions, columns.positions + position_offset, position_offset),
            (self.slots, columns.slot_mapping, -1),
        )
        for first, values, filler in parts:
            block[first : first + n] = values
            block[first + n : first + rows] = filler
        table = block[self.pages : self.num_ints].reshape(rows, self.num_pages)
        table[:n, : columns.page_table.shape[1]] = columns.page_table
        table[n:, 0] = 0

    def read(self, block: torch.Tensor, *, page_size: int) -> tuple[PackedBatch, torch.Tensor]:
        """(the batch without its tokens, which are 0 here; seats), views of a device block."""
        rows = self.num_rows
        kv_seqlens, seats, positions, slots = (
            block[first : first + rows]
            for first in (self.kv_seqlens, self.seats, self.positions, self.slots)
        )
        table = block[self.pages : self.num_ints].view(rows, self.num_pages)
        sizes = (page_size, self.num_pages * page_size)
        # Each row is the token that its sequence sampled last: no page of it was found this step.
        past = Past(table, kv_seqlens, slots, *sizes, is_settled=True)
        batch = PackedBatch(
            input_ids=seats,
            position_ids=positions,
            token_type_ids=None,
            cu_seqlens=block[: rows + 1],
            seqlens=torch.ones(rows, dtype=torch.int32),
            max_seqlen=1,
            past=past,
        )
        return batch, seats


@lru_cache(maxsize=256)
def decode_layout(num_rows: int, num_pages: int) -> DecodeLayout:
    """The layout of the smallest bucket that holds such a step."""
    rows, pages = round_rows(num_rows), round_pages(num_pages)
    kv_seqlens = aligned(rows + 1)
    seats, positions, slots, table = (kv_seqlens + i * aligned(rows) for i in range(1, 5))
    return DecodeLayout(
        rows, pages, kv_seqlens, seats, positions, slots, table, table + rows * pages
    )


def round_rows(num_rows: int) -> int:
    """The rows of the smallest bucket that holds this many."""
    for rows in _FEW_ROWS:
        if num_rows <= rows:
            return rows
    step = next((step for most, step in _ROW_STEPS if num_rows <= most), _MANY_ROWS_STEP)
    return -(-num_rows // step) * step


def round_pages(num_pages: int) -> int:
    """The columns of the smallest table of pages that holds this many."""
    return max(_MIN_PAGES, 1 << (num_pages - 1).bit_length())
