"""RingMemory: texts and vectors in memory that a front-end and the engine's process share.

csrc/cpu/text_ring.h says what stands where, and whose each slot is. The memory is a file without a
name: it is gone once neither process has it any more, however they ended.
"""

import mmap
import os
import tempfile
from dataclasses import dataclass

import numpy as np

from bytetx.ops import host

# SlotFacts of csrc/cpu/text_ring.h.
FACTS = np.dtype(
    [
        ("kind", np.int32),
        ("group", np.int32),
        ("seqlen", np.int32),
        ("prompt_tokens", np.int32),
        ("is_truncated", np.int32),
        ("state", np.int32),
        ("queue_seconds", np.float32),
        ("compute_seconds", np.float32),
    ]
)
HAS_VECTOR, HAS_NONE = 0, 1  # states


@dataclass(frozen=True, slots=True)
class RingSizes:
    """Texts at a time, tokens of one, and numbers of its vector."""

    num_slots: int
    max_tokens: int
    width: int

    def row(self) -> tuple[int, int, int]:
        return self.num_slots, self.max_tokens, self.width


class RingMemory:
    """One end of a ring.

    ring: the native core's TextRing.  facts: FACTS [num_slots].  token_ids: int32 [num_slots,
    max_tokens].  vectors: f32 [num_slots, width].
    """

    def __init__(self, descriptor: int, sizes: RingSizes):
        """descriptor: of a file of num_bytes(sizes) zeros at first; the caller closes it.

        Raises ValueError where it is smaller.
        """
        make = host.text_ring()
        num_bytes = make.num_bytes(*sizes.row())
        if os.fstat(descriptor).st_size < num_bytes:  # mapped beyond its end, reading is fatal
            raise ValueError(f"the memory of a ring is smaller than {num_bytes} bytes")
        memory = mmap.mmap(descriptor, num_bytes)
        self.sizes, self.ring = sizes, make(memory, *sizes.row())
        facts, token_ids, vectors = self.ring.starts()
        slots = sizes.num_slots
        self.facts = np.ndarray((slots,), FACTS, memory, facts)
        self.token_ids = np.ndarray((slots, sizes.max_tokens), np.int32, memory, token_ids)
        self.vectors = np.ndarray((slots, sizes.width), np.float32, memory, vectors)


def new_memory(sizes: RingSizes) -> int:
    """The descriptor of zeros for a ring, which is the caller's to close."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("bytetx-ring")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, host.text_ring().num_bytes(*sizes.row()))
    return descriptor
