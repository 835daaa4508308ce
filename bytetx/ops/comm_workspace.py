"""The memory that ranks share for linear layers that communicate."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bytetx.ops import comm_kernels
from bytetx.ops.comm_copies import CopyMemory


@dataclass(frozen=True, slots=True)
class Workspace:
    """Memory of every rank that this device can read and write, of one size and layout on all.

    buffers: each rank's data, as addresses on this device, of buffer_bytes each, 1024-byte aligned.
    flags: each rank's flag words, uint32, num_flags each, zero at first and used by nothing else
        (apart from torch's signal pads). What they count never decreases (epochs), so that CUDA
        graphs can be replayed.
    epochs: int32 [16] in this device's own memory, zero at first, for kernels to count in
        and for the host to say that they need not wait any more.
    memory: what the kernels are told of all this, None where there are none.
    fault: int32 [8] in pinned memory, where a kernel whose wait timed out says for which rank.
    copies: a region of every rank for what copy engines move; None where there is none.
    owner: keeps it all alive.
    """

    buffers: tuple[int, ...]
    flags: tuple[int, ...]
    buffer_bytes: int
    num_flags: int
    epochs: Tensor
    memory: object | None
    fault: Tensor
    copies: CopyMemory | None = None
    owner: object = None

    def has_copies_of(self, num_bytes: int) -> bool:
        """Whether there is a region for copies, and these bytes fit it."""
        return self.copies is not None and 0 < num_bytes <= self.copies.own.numel()

    def fault_text(self) -> str | None:
        """Which rank of this device timed out waiting, and for whom; None where none has."""
        return comm_kernels.fault_text(self.fault)

    def give_up(self) -> None:
        """Ends kernels that wait for a rank which is gone; from then on results are wrong."""
        comm_kernels.give_up(self.epochs)


# Flag words of a rank, for all fused ops together: two kinds, odd and even calls, 8 ranks, and for
# each of them 1023 counters of tiles or chunks of 128 rows that one rank owns; then the staging
# buffers.
NUM_FLAGS = comm_kernels.STAGING_FLAG + 2 * comm_kernels.STAGING_BYTES // 4
_NUM_EPOCHS = 16  # words that kernels count calls in


def make_workspace(
    buffers: Sequence[int],
    flags: Sequence[int],
    *,
    buffer_bytes: int,
    rank: int,
    device: torch.device,
    copies: Sequence[int] = (),
    own_copies: Tensor | None = None,
    owner: object = None,
) -> Workspace:
    """A workspace of rank's, from the addresses of what all ranks share.

    copies: each rank's region for copies, as addresses; own_copies: this one's, uint8.
    """
    epochs = torch.zeros(_NUM_EPOCHS, dtype=torch.int32, device=device)
    fault = comm_kernels.new_fault()
    memory = comm_kernels.peer_memory(
        buffers,
        flags,
        epochs=epochs,
        buffer_bytes=buffer_bytes,
        num_flags=NUM_FLAGS,
        fault=fault,
        rank=rank,
    )
    region = None
    if own_copies is not None and memory is not None:
        region = CopyMemory(memory, tuple(copies), own_copies, torch.cuda.Stream(device), rank)
    shared = (tuple(buffers), tuple(flags), buffer_bytes, NUM_FLAGS)
    return Workspace(*shared, epochs, memory, fault, region, owner)


def workspace_bytes(*, max_tokens: int, hidden_size: int, size: int, itemsize: int) -> int:
    """Bytes of each rank's data that the fused ops need, for passes of up to max_tokens rows.

    Four quarters: gathered rows, and a slot a rank of its largest share of rows (a share has at
    most one tile of 256 rows more than total_tokens / size), for odd and for even calls.
    """
    return 4 * (max_tokens + 256 * size) * hidden_size * itemsize
