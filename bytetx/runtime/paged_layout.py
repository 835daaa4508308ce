"""A step of generation as one int32 block of few sizes, so that a CUDA graph serves many steps.

Sizes are rounded up to buckets. The padding rows of a bucket are initialised, so that no row reads
memory that an earlier step left, and kernels use the same tiles for every step of a bucket:

- A *decode* step has one row per sequence: the token that the sequence sampled last. The device
  finds that token by the sequence's slot index, so that the host can write a block before it knows
  the token. A padding row is a sequence with one key, the first of page 0. Its own key is not
  written, and its token goes to a slot that nobody reads.
- A *mixed* step has prefill chunks, too. After its sequences comes one padding sequence with all
  padding rows; it reads page 0 and writes nowhere. Launched one by one, the kernels of such a step
  take the host longer than the GPU: 250 kernels for 28 layers, for any number of tokens. As one
  graph they give a prompt of 50 to 500 tokens its first token after 2.4 ms instead of 9.0
  (Qwen3-0.6B's shape, H200, 2026-11-21).
"""

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch

from bytetx.adapter_rows import AdapterRows
from bytetx.packed import PackedBatch, Past
from bytetx.runtime.adapter_block import adapter_arrays, adapter_fields, on_device
from bytetx.runtime.input_batch import InputBatch
from bytetx.runtime.step_layout import BlockField, StepLayout

# With more tokens the GPU takes longer than the host for any model of 20 or more layers (H200).
MAX_MIXED_TOKENS = 2048
# Decode rows share GEMM tiles of 64 rows and padding rows cost attention nothing, so that few
# buckets lose little. Below 64 rows the time of a step is the time to read the weights.
_FEW_ROWS = (1, 2, 4, 8, 16, 32)
_ROW_STEPS = ((256, 32), (1024, 64))
_MANY_ROWS_STEP = 256
_MIN_PAGES = 64
# Buckets of mixed steps are a quarter of an octave apart: time follows the rows, graphs stay few.
_MIN_TOKENS = 32
_FEW_SEQUENCES = (8, 32)
_SEQUENCE_STEP = 64

_DECODE_COLUMNS = ("kv_seqlens", "slot_indices", "positions", "slot_mapping")


@dataclass(frozen=True, slots=True)
class PagedStep:
    """A step's arrays on the device, views of its block.

    batch: ids below 0 are ~slot_index; all ids of a decode step are slot indices.
    slot_indices: int32 [num_samples], the slots that get the sampled tokens.
    logits_rows: int32 [num_samples], their rows of the batch; None: all rows sample.
    """

    batch: PackedBatch
    slot_indices: torch.Tensor
    logits_rows: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class PagedLayout:
    """The block of a decode or mixed step.

    num_rows: tokens.  num_seqs: sequences, without the padding sequence of a mixed step.
    num_pages: columns of the page table.  num_samples: tokens that are sampled.
    has_adapters: whether some of its sequences may have one.  has_states: whether layers remember
    sequences by their slots.
    """

    num_rows: int
    num_seqs: int
    num_pages: int
    num_samples: int
    is_decode: bool
    has_adapters: bool
    has_states: bool
    block: StepLayout = field(compare=False)

    @property
    def num_ints(self) -> int:
        return self.block.num_ints

    def write(
        self,
        block: np.ndarray,
        input_batch: InputBatch,
        *,
        position_offset: int,
        padding_slot_index: int,
    ) -> None:
        """Fills a host block.  position_offset: position id of a sequence's first token."""
        arrays = {
            "kv_seqlens": input_batch.kv_seqlens,
            "positions": input_batch.positions + position_offset,
            "slot_mapping": input_batch.slot_mapping,
            "page_table": input_batch.page_table,
        }
        fillers = {
            "positions": position_offset,
            "slot_mapping": -1,
            "slot_indices": padding_slot_index,
            "state_slots": padding_slot_index,
        }
        if self.has_adapters and input_batch.adapters is not None:
            arrays |= adapter_arrays(input_batch.adapters, self.num_rows)
        if self.is_decode:
            arrays["cu_seqlens"] = np.arange(self.num_rows + 1, dtype=np.int32)
            arrays["slot_indices"] = input_batch.slot_indices
            self.block.write(block, arrays, fillers=fillers | {"kv_seqlens": 1})
            return
        padding_rows = np.int32(self.num_rows - len(input_batch.positions))
        arrays["cu_seqlens"] = input_batch.cu_seqlens
        arrays["kv_seqlens"] = np.append(input_batch.kv_seqlens, padding_rows)
        arrays["input_ids"] = input_batch.input_ids
        arrays["logits_rows"] = input_batch.logits_rows
        arrays["slot_indices"] = np.repeat(input_batch.slot_indices, input_batch.num_samples)
        if self.has_states:
            arrays["state_slots"] = input_batch.slot_indices
        fillers |= {"cu_seqlens": self.num_rows, "logits_rows": self.num_rows - 1}
        self.block.write(block, arrays, fillers=fillers)

    def read(
        self, block: torch.Tensor, *, page_size: int, adapters: AdapterRows | None = None
    ) -> PagedStep:
        """The step of a device block.  adapters: of its rows."""
        views = self.block.views(block)
        table = views["page_table"]
        past = Past(
            table,
            views["kv_seqlens"],
            views["slot_mapping"],
            page_size,
            self.num_pages * page_size,
            # In decode, earlier steps wrote all keys but those of this step.
            allows_early_read=self.is_decode,
            state_slots=self._state_slots(views),
        )
        batch = PackedBatch(
            input_ids=views["slot_indices"] if self.is_decode else views["input_ids"],
            position_ids=views["positions"],
            token_type_ids=None,
            cu_seqlens=views["cu_seqlens"],
            # Only the device knows the lengths of a mixed step.
            seqlens=torch.full((len(table),), int(self.is_decode), dtype=torch.int32),
            max_seqlen=1 if self.is_decode else self.num_rows,
            past=past,
            adapters=None if adapters is None else on_device(adapters, views, self.num_rows),
        )
        return PagedStep(batch, views["slot_indices"], views.get("logits_rows"))

    def _state_slots(self, views: dict[str, torch.Tensor]) -> torch.Tensor | None:
        if not self.has_states:
            return None
        return views["slot_indices" if self.is_decode else "state_slots"]


@lru_cache(maxsize=256)
def decode_layout(
    num_rows: int, num_pages: int, *, has_adapters: bool = False, has_states: bool = False
) -> PagedLayout:
    """The layout of the smallest bucket that holds such a decode step."""
    rows, pages = round_rows(num_rows), _round_pages(num_pages)
    fields = (
        *(adapter_fields(rows, rows) if has_adapters else ()),
        BlockField("cu_seqlens", (rows + 1,)),
        *(
            BlockField(name, (rows,))
            for name in ("kv_seqlens", "slot_indices", "positions", "slot_mapping")
        ),
        BlockField("page_table", (rows, pages)),
    )
    block = StepLayout(fields)
    sizes = (rows, rows, pages, rows)
    kinds = {"has_adapters": has_adapters, "has_states": has_states}
    return PagedLayout(*sizes, is_decode=True, **kinds, block=block)


@lru_cache(maxsize=256)
def mixed_layout(
    total_tokens: int,
    num_seqs: int,
    num_pages: int,
    num_samples: int = 0,
    *,
    has_adapters: bool = False,
    has_states: bool = False,
) -> PagedLayout:
    """The layout of the smallest bucket that holds such a mixed step.

    num_samples: more than num_seqs only with drafts.
    """
    rows, seqs = _round_tokens(total_tokens), _round_seqs(num_seqs)
    pages, samples = _round_pages(num_pages), _round_seqs(max(num_seqs, num_samples))
    fields = (
        *(adapter_fields(rows, seqs) if has_adapters else ()),
        BlockField("cu_seqlens", (seqs + 2,)),
        BlockField("kv_seqlens", (seqs + 1,)),
        *((BlockField("state_slots", (seqs + 1,)),) if has_states else ()),
        *(BlockField(name, (rows,)) for name in ("input_ids", "positions", "slot_mapping")),
        *(BlockField(name, (samples,)) for name in ("logits_rows", "slot_indices")),
        BlockField("page_table", (seqs + 1, pages)),
    )
    block = StepLayout(fields)
    sizes = (rows, seqs, pages, samples)
    kinds = {"has_adapters": has_adapters, "has_states": has_states}
    return PagedLayout(*sizes, is_decode=False, **kinds, block=block)


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
