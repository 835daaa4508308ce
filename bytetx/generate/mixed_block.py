"""A small mixed step's integers as one int32 block of few sizes: pieces of prompts and decode rows.

Launched one by one, the kernels of such a step take the host longer than the GPU: 250 of them for
28 layers, whatever its tokens. As one graph they give a prompt of 50 to 500 tokens its first token
after 2.4 ms instead of 9.0 (Qwen3-0.6B's shape, H200, 2026-11-21).

Behind the step's own sequences stands one more, a filler of as many rows as the bucket has to
spare. It reads whatever page 0 holds and writes nowhere. Places for sequences that the step does
not have are empty.
"""

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch

from bytetx.packed import PackedBatch, Past
from bytetx.runtime.block import aligned
from bytetx.runtime.decode_block import round_pages
from bytetx.runtime.input_batch import StepColumns

# Above, the GPU is the slower one for any model that has 20 layers or more (H200).
MAX_MIXED_TOKENS = 2048
# A quarter of an octave: a prompt costs what its rows cost, and graphs stay few.
_MIN_TOKENS = 32
_FEW_SEQUENCES = (8, 32)
_SEQUENCE_STEP = 64


@dataclass(frozen=True, slots=True)
class MixedLayout:
    """cu_seqlens | kv_seqlens | ids | positions | slots | logits_rows | seats | page_table.

    num_rows: tokens.  num_sequences: without the filler, and rows of logits.  num_pages: columns of
    the page table.  The rest is where each part but the first starts, and the int32s of all.
    """

    num_rows: int
    num_sequences: int
    num_pages: int
    kv_seqlens: int = field(compare=False)
    ids: int = field(compare=False)
    positions: int = field(compare=False)
    slots: int = field(compare=False)
    logits_rows: int = field(compare=False)
    seats: int = field(compare=False)
    pages: int = field(compare=False)
    num_ints: int = field(compare=False)

    def write(
        self, block: np.ndarray, columns: StepColumns, *, position_offset: int, idle_seat: int
    ) -> None:
        """Fills a host block.  position_offset: position id of a sequence's first token."""
        count, total_tokens = len(columns.seats), len(columns.positions)
        rows, sequences = self.num_rows, self.num_sequences
        seats = columns.seats[columns.samples]
        parts = (
            (0, columns.cu_seqlens, sequences + 2, rows),
            (self.kv_seqlens, columns.kv_seqlens, sequences + 1, 0),
            (self.ids, columns.input_ids, rows, 0),
            (self.positions, columns.positions + position_offset, rows, position_offset),
            (self.slots, columns.slot_mapping, rows, -1),
            (self.logits_rows, columns.logits_rows, sequences, rows - 1),
            (self.seats, seats, sequences, idle_seat),
        )
        for first, values, length, filler in parts:
            end = first + len(values)
            block[first:end] = values
            block[end : first + length] = filler
        block[self.kv_seqlens + count] = rows - total_tokens
        table = block[self.pages : self.num_ints].reshape(sequences + 1, self.num_pages)
        table[:count, : columns.page_table.shape[1]] = columns.page_table
        table[count] = 0

    def read(
        self, block: torch.Tensor, *, page_size: int
    ) -> tuple[PackedBatch, torch.Tensor, torch.Tensor]:
        """(the batch, whose ids below 0 are ~seat; seats of the rows of logits; those rows), views
        of a device block."""
        rows, sequences = self.num_rows, self.num_sequences
        ids, positions, slots = (
            block[first : first + rows] for first in (self.ids, self.positions, self.slots)
        )
        kv_seqlens = block[self.kv_seqlens : self.kv_seqlens + sequences + 1]
        table = block[self.pages : self.num_ints].view(sequences + 1, self.num_pages)
        past = Past(table, kv_seqlens, slots, page_size, self.num_pages * page_size)
        batch = PackedBatch(
            input_ids=ids,
            position_ids=positions,
            token_type_ids=None,
            cu_seqlens=block[: sequences + 2],
            seqlens=torch.zeros(sequences + 1, dtype=torch.int32),  # the device alone knows them
            max_seqlen=rows,
            past=past,
        )
        seats = block[self.seats : self.seats + sequences]
        return batch, seats, block[self.logits_rows : self.logits_rows + sequences]


@lru_cache(maxsize=256)
def mixed_layout(total_tokens: int, num_sequences: int, num_pages: int) -> MixedLayout:
    """The layout of the smallest bucket that holds such a step."""
    rows, sequences = _round_tokens(total_tokens), _round_sequences(num_sequences)
    pages = round_pages(num_pages)
    sizes = (sequences + 2, sequences + 1, rows, rows, rows, sequences, sequences)
    ends = np.cumsum([aligned(size) for size in sizes]).tolist()
    num_ints = ends[-1] + (sequences + 1) * pages
    return MixedLayout(rows, sequences, pages, *ends, num_ints)


def _round_tokens(total_tokens: int) -> int:
    octave = 1 << max(total_tokens - 1, 0).bit_length() >> 1  # octave < total_tokens
    step = max(octave // 4, _MIN_TOKENS)
    return -(-total_tokens // step) * step


def _round_sequences(count: int) -> int:
    few = [most for most in _FEW_SEQUENCES if count <= most]
    return few[0] if few else -(-count // _SEQUENCE_STEP) * _SEQUENCE_STEP
