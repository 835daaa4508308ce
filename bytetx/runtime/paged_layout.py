"""A step of generation as one int32 block of few sizes, so that a CUDA graph serves many steps.

Sizes are rounded up to buckets. What a step leaves free is filled so that no row keeps what earlier
work left in memory, and kernels take the same tiles whatever is in the step:

- A *decode* step has one row a sequence, the token that the sequence sampled last. The device knows
  that token by the sequence's seat, so that the host may write a block before it does. A free row
  is a sequence of one key, whatever page 0 holds; its own key is written nowhere, and its token
  goes to a seat that nobody reads.
- A *mixed* step has pieces of prompts as well. Behind its own sequences stands one more, which has
  all the free rows; it reads whatever page 0 holds and writes nowhere. Launched one by one, the
  kernels of such a step take the host longer than the GPU: 250 of them for 28 layers, whatever its
  tokens. As one graph they give a prompt of 50 to 500 tokens its first token after 2.4 ms instead
  of 9.0 (Qwen3-0.6B's shape, H200, 2026-11-21).
"""

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch

from bytetx.packed import PackedBatch, Past
from bytetx.runtime.input_batch import StepColumns
from bytetx.runtime.step_layout import Field, StepLayout

# Above, the GPU is slower than the host for any model that has 20 layers or more (H200).
MAX_MIXED_TOKENS = 2048
# Decode rows share tiles of 64 in the GEMMs and cost attention nothing, so that few buckets lose
# little; below, a step is the read of the weights whatever its rows.
_FEW_ROWS = (1, 2, 4, 8, 16, 32)
_ROW_STEPS = ((256, 32), (1024, 64))
_MANY_ROWS_STEP = 256
_MIN_PAGES = 64
# Of mixed steps a quarter of an octave: a prompt costs what its rows cost, and graphs stay few.
_MIN_TOKENS = 32
_FEW_SEQUENCES = (8, 32)
_SEQUENCE_STEP = 64


@dataclass(frozen=True, slots=True)
class PagedStep:
    """A step's arrays on the device, views of its block.

    batch: its ids below 0 are ~seat; a decode step's are its seats.
    seats: int32 [rows that sample], whose tokens they are.
    logits_rows: int32 [rows that sample], where they stand; None: all rows sample.
    """

    batch: PackedBatch
    seats: torch.Tensor
    logits_rows: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class PagedLayout:
    """The block of a decode or mixed step.

    num_rows: tokens.  num_seqs: sequences, without the one that fills a mixed step.
    num_pages: columns of the page table.
    """

    num_rows: int
    num_seqs: int
    num_pages: int
    is_decode: bool
    block: StepLayout = field(compare=False)

    @property
    def num_ints(self) -> int:
        return self.block.num_ints

    def write(
        self, block: np.ndarray, columns: StepColumns, *, position_offset: int, idle_seat: int
    ) -> None:
        """Fills a host block.  position_offset: position id of a sequence's first token."""
        arrays = {
            "kv_seqlens": columns.kv_seqlens,
            "positions": columns.positions + position_offset,
            "slot_mapping": columns.slot_mapping,
            "page_table": columns.page_table,
        }
        fillers = {"positions": position_offset, "slot_mapping": -1, "seats": idle_seat}
        if self.is_decode:
            arrays["cu_seqlens"] = np.arange(self.num_rows + 1, dtype=np.int32)
            arrays["seats"] = columns.seats
            self.block.write(block, arrays, fillers=fillers | {"kv_seqlens": 1})
            return
        free_rows = np.int32(self.num_rows - len(columns.positions))
        arrays["cu_seqlens"] = columns.cu_seqlens
        arrays["kv_seqlens"] = np.append(columns.kv_seqlens, free_rows)
        arrays["input_ids"] = columns.input_ids
        arrays["logits_rows"] = columns.logits_rows
        arrays["seats"] = columns.seats[columns.samples]
        fillers |= {"cu_seqlens": self.num_rows, "logits_rows": self.num_rows - 1}
        self.block.write(block, arrays, fillers=fillers)

    def read(self, block: torch.Tensor, *, page_size: int) -> PagedStep:
        """The step of a device block."""
        views = self.block.views(block)
        table = views["page_table"]
        past = Past(
            table,
            views["kv_seqlens"],
            views["slot_mapping"],
            page_size,
            self.num_pages * page_size,
            # Each row is the token that its sequence sampled last: no page was found this step.
            is_settled=self.is_decode,
        )
        batch = PackedBatch(
            input_ids=views["seats"] if self.is_decode else views["input_ids"],
            position_ids=views["positions"],
            token_type_ids=None,
            cu_seqlens=views["cu_seqlens"],
            # Of a mixed step the device alone knows the lengths.
            seqlens=torch.full((len(table),), int(self.is_decode), dtype=torch.int32),
            max_seqlen=1 if self.is_decode else self.num_rows,
            past=past,
        )
        return PagedStep(batch, views["seats"], views.get("logits_rows"))


@lru_cache(maxsize=256)
def decode_layout(num_rows: int, num_pages: int) -> PagedLayout:
    """The layout of the smallest bucket that holds such a decode step."""
    rows, pages = round_rows(num_rows), _round_pages(num_pages)
    fields = (
        Field("cu_seqlens", (rows + 1,)),
        *(Field(name, (rows,)) for name in ("kv_seqlens", "seats", "positions", "slot_mapping")),
        Field("page_table", (rows, pages)),
    )
    return PagedLayout(rows, rows, pages, is_decode=True, block=StepLayout(fields))


@lru_cache(maxsize=256)
def mixed_layout(total_tokens: int, num_seqs: int, num_pages: int) -> PagedLayout:
    """The layout of the smallest bucket that holds such a mixed step."""
    rows, seqs = _round_tokens(total_tokens), _round_seqs(num_seqs)
    pages = _round_pages(num_pages)
    fields = (
        Field("cu_seqlens", (seqs + 2,)),
        Field("kv_seqlens", (seqs + 1,)),
        *(Field(name, (rows,)) for name in ("input_ids", "positions", "slot_mapping")),
        *(Field(name, (seqs,)) for name in ("logits_rows", "seats")),
        Field("page_table", (seqs + 1, pages)),
    )
    return PagedLayout(rows, seqs, pages, is_decode=False, block=StepLayout(fields))


def round_rows(num_rows: int) -> int:
    """The rows of the smallest bucket that holds a decode step of this many."""
    for rows in _FEW_ROWS:
        if num_rows <= rows:
            return rows
    step = next((step for most, step in _ROW_STEPS if num_rows <= most), _MANY_ROWS_STEP)
    return -(-num_rows // step) * step


def _round_pages(num_pages: int) -> int:
    return max(_MIN_PAGES, 1 << (num_pages - 1).bit_length())


def _round_tokens(total_tokens: int) -> int:
    octave = 1 << max(total_tokens - 1, 0).bit_length() >> 1  # octave < total_tokens
    step = max(octave // 4, _MIN_TOKENS)
    return -(-total_tokens // step) * step


def _round_seqs(count: int) -> int:
    few = [most for most in _FEW_SEQUENCES if count <= most]
    return few[0] if few else -(-count // _SEQUENCE_STEP) * _SEQUENCE_STEP
