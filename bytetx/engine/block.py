"""A step's integers as one int32 block, so that one copy takes all of them to the GPU."""

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch

from bytetx.engine.buckets import FILLER_TOKENS, Bucket
from bytetx.engine.step import Step
from bytetx.packed import PackedBatch

_ALIGNMENT = 4  # int32s: every part starts at a multiple of 16 bytes
# Blocks before one is used again; above the steps that a run keeps in flight, so nobody waits.
_RING_BLOCKS = 8
_MIN_BLOCK_INTS = 4096


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """cu_seqlens | prompt_tokens | input_ids | position_ids | token_type_ids, if there are any."""

    bucket: Bucket
    has_token_types: bool

    def offsets(self) -> tuple[int, int, int, int, int, int]:
        """Where each part starts, and the int32s of the whole block."""
        sequences, tokens = self.bucket.batch_size, _aligned(self.bucket.total_tokens)
        prompts = _aligned(sequences + 1)
        ids = prompts + _aligned(sequences)
        types = ids + 2 * tokens
        return 0, prompts, ids, ids + tokens, types, types + self.has_token_types * tokens

    def write(self, block: np.ndarray, step: Step) -> None:
        """Fills a host block from a step on the host: its texts, empty places, fillers."""
        seqs, prompts, ids, positions, types, _ = self.offsets()
        batch, requests, bucket = step.batch, step.requests, self.bucket
        num_texts, num_tokens = batch.batch_size, batch.total_tokens
        fillers = seqs + bucket.num_texts + 1
        block[seqs : seqs + num_texts + 1] = batch.cu_seqlens.numpy()
        block[seqs + num_texts + 1 : fillers] = num_tokens
        if bucket.num_fillers:
            ends = num_tokens + FILLER_TOKENS * np.arange(1, bucket.num_fillers + 1)
            block[fillers : fillers + bucket.num_fillers] = ends.clip(max=bucket.total_tokens)
        block[prompts:ids] = 0
        if requests.prompt_tokens is not None:
            block[prompts : prompts + num_texts] = requests.prompt_tokens
        parts = [(ids, batch.input_ids), (positions, batch.position_ids)]
        if self.has_token_types:
            parts.append((types, batch.token_type_ids))
        tokens = _aligned(self.bucket.total_tokens)
        for start, values in parts:
            block[start : start + num_tokens] = values.numpy()
            block[start + num_tokens : start + tokens] = 0

    def read(self, block: torch.Tensor, step: Step, *, max_seqlen: int) -> Step:
        """The step with views of a device block; `seqlens` stays that of the texts alone."""
        seqs, prompts, ids, positions, types, _ = self.offsets()
        sequences, tokens = self.bucket.batch_size, self.bucket.total_tokens
        batch = PackedBatch(
            input_ids=block[ids : ids + tokens],
            position_ids=block[positions : positions + tokens],
            token_type_ids=block[types : types + tokens] if self.has_token_types else None,
            cu_seqlens=block[seqs : seqs + sequences + 1],
            seqlens=step.batch.seqlens,
            max_seqlen=max_seqlen,
        )
        return Step(step.requests, batch, block[prompts : prompts + sequences])


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


def _aligned(num_ints: int) -> int:
    return -(-num_ints // _ALIGNMENT) * _ALIGNMENT


def _capacity(num_ints: int) -> int:
    return 1 << (max(num_ints, _MIN_BLOCK_INTS) - 1).bit_length()
