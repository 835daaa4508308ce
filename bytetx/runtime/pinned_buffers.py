"""Pinned host buffers that a GPU reads, used in turn and again once their copy is done."""

from collections import deque

import torch

# Blocks before one is used again; above the steps that a run keeps in flight, so nobody waits.
_RING_BLOCKS = 8
_MIN_BLOCK_INTS = 4096


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


def _capacity(num_ints: int) -> int:
    return 1 << (max(num_ints, _MIN_BLOCK_INTS) - 1).bit_length()
