"""A step's integers as one int32 block, so that one copy takes all of them to the GPU."""

from collections import deque
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch

from bytetx.encode.step import Step
from bytetx.packed import PackedBatch
from bytetx.runtime.buckets import FILLER_TOKENS, Bucket

_ALIGNMENT = 4  # int32s: every part starts at a multiple of 16 bytes
# Blocks before one is used again; above the steps that a run keeps in flight, so nobody waits.
_RING_BLOCKS = 8
_MIN_BLOCK_INTS = 4096


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """cu_seqlens | prompt_tokens | input_ids | position_ids | token_type_ids, if there are any.

    bucket: its sizes.  The rest is where each part but the first starts, and the int32s of all.
    """

    bucket: Bucket
    has_token_types: bool
    prompts: int = field(compare=False)
    ids: int = field(compare=False)
    positions: int = field(compare=False)
    types: int = field(compare=False)
    num_ints: int = field(compare=False)

    def write(self, block: np.ndarray, step: Step) -> None:
        """Fills a host block from a step on the host: its texts, empty places, fillers."""
        batch, prompt_tokens, bucket = step.batch, step.requests.prompt_tokens, self.bucket
        num_texts, num_tokens = batch.batch_size, batch.total_tokens
        block[: num_texts + 1] = batch.cu_seqlens.numpy()
        fillers, end = bucket.num_texts + 1, num_tokens
        block[num_texts + 1 : fillers] = num_tokens
        for place in range(fillers, fillers + bucket.num_fillers):
            end = min(end + FILLER_TOKENS, bucket.total_tokens)
            block[place] = end
        block[self.prompts : self.ids] = 0
        if prompt_tokens is not None:
            block[self.prompts : self.prompts + num_texts] = prompt_tokens
        self._write_tokens(block, self.ids, batch.input_ids)
        self._write_tokens(block, self.positions, batch.position_ids)
        if self.has_token_types:
            self._write_tokens(block, self.types, batch.token_type_ids)

    def read(self, block: torch.Tensor, step: Step, *, max_seqlen: int) -> Step:
        """The step with views of a device block; `seqlens` stays that of the texts alone."""
        sequences, tokens = self.bucket.batch_size, self.bucket.total_tokens
        batch = PackedBatch(
            input_ids=block[self.ids : self.ids + tokens],
            position_ids=block[self.positions : self.positions + tokens],
            token_type_ids=block[self.types : self.types + tokens]
            if self.has_token_types
            else None,
            cu_seqlens=block[: sequences + 1],
            seqlens=step.batch.seqlens,
            max_seqlen=max_seqlen,
        )
        return Step(step.requests, batch, block[self.prompts : self.prompts + sequences])

    def _write_tokens(self, block: np.ndarray, start: int, values: torch.Tensor) -> None:
        end = start + values.shape[0]
        block[start:end] = values.numpy()
        block[end : start + self.bucket.total_tokens] = 0


@lru_cache(maxsize=256)
def block_layout(bucket: Bucket, *, has_token_types: bool) -> BlockLayout:
    """The layout of a step of these sizes."""
    sequences, tokens = bucket.batch_size, aligned(bucket.total_tokens)
    prompts = aligned(sequences + 1)
    ids = prompts + aligned(sequences)
    positions, types = ids + tokens, ids + 2 * tokens
    num_ints = types + has_token_types * tokens
    return BlockLayout(bucket, has_token_types, prompts, ids, positions, types, num_ints)


class PinnedBlock:
    """Pinned host memory, and the event after which the GPU no longer reads it."""

    def __init__(self, num_ints: int):
        self.tensor = torch.empty(num_ints, dtype=torch.int32, pin_memory=True)
        self.array = self.tensor.numpy()
        self.is_free: torch.cuda.Event | None = None


class PinnedRing:
    """A few pinned blocks in turn; they grow to the largest step and are then reused for ever."""

    def __init__(self) -> None:
        self._blocks: deque[PinnedBlock] = deque()

    def take(self, num_ints: int) -> PinnedBlock:
        """A block of at least num_ints int32s; waits where all of them are still being read."""
        if len(self._blocks) < _RING_BLOCKS:
            self._blocks.append(PinnedBlock(_capacity(num_ints)))
            return self._blocks[-1]
        self._blocks.rotate(-1)
        block = self._blocks[-1]
        if block.is_free is not None:
            block.is_free.synchronize()
        if len(block.array) < num_ints:
            block = self._blocks[-1] = PinnedBlock(_capacity(num_ints))
        return block


def aligned(num_ints: int) -> int:
    """The next place where a part of a block may start."""
    return -(-num_ints // _ALIGNMENT) * _ALIGNMENT


def _capacity(num_ints: int) -> int:
    return 1 << (max(num_ints, _MIN_BLOCK_INTS) - 1).bit_length()
