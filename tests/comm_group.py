"""A group of ranks in one process, one a GPU, with symmetric memory between them."""

import torch
from comm_layers import Group

from bytetx.ops.comm_gemm import Peers
from bytetx.ops.comm_workspace import NUM_FLAGS, make_workspace

BUFFER_BYTES, COPY_BYTES = 256 << 20, 64 << 20


def make_group(size: int) -> Group:
    reach_one_another(size)
    fill_caches(size)
    options = [{"device": torch.device("cuda", rank)} for rank in range(size)]
    buffers = [torch.zeros(BUFFER_BYTES // 2, dtype=torch.float16, **o) for o in options]
    flags = [torch.zeros(NUM_FLAGS, dtype=torch.int32, **o) for o in options]
    copies = [torch.zeros(COPY_BYTES, dtype=torch.uint8, **o) for o in options]
    addresses = [[t.data_ptr() for t in tensors] for tensors in (buffers, flags, copies)]
    peers = {
        rank: Peers(
            rank,
            size,
            None,
            make_workspace(
                *addresses[:2],
                buffer_bytes=BUFFER_BYTES,
                rank=rank,
                copies=addresses[2],
                own_copies=copies[rank],
                owner=flags,
                **o,
            ),
            is_even=False,
        )
        for rank, o in enumerate(options)
    }
    group = Group(
        peers, [*buffers, *(c.view(torch.float16) for c in copies)], [o["device"] for o in options]
    )
    group.wait()
    return group


def reach_one_another(size: int) -> None:
    """A copy between two GPUs makes torch enable their access to each other's memory."""
    for here in range(size):
        for there in range(size):
            torch.zeros(1, device=f"cuda:{here}").to(f"cuda:{there}")


def fill_caches(size: int) -> None:
    """All that the tests need is torch's before kernels wait for one another: memory that is new to
    a GPU is mapped on those that reach it, too, which may wait for their kernels."""
    for rank in range(size):
        held = [torch.empty(1 << 19, dtype=torch.uint8, device=f"cuda:{rank}") for _ in range(128)]
        held.append(torch.empty(1 << 30, dtype=torch.uint8, device=f"cuda:{rank}"))
        del held
