"""What of NCCL and of torch's symmetric memory only environment variables set."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

_INTERFACE = "NCCL_SOCKET_IFNAME"


@contextmanager
def loopback_sockets() -> Iterator[None]:
    """NCCL's first communicator of a process, made inside, puts all its sockets on loopback.

    NCCL chooses once a process, and otherwise takes an interface that other machines reach. An
    interface that the user names stays. The variable is removed afterwards, because processes that
    this one starts may span machines.
    """
    if _INTERFACE in os.environ or "NCCL_COMM_ID" in os.environ:
        yield
        return
    os.environ[_INTERFACE] = "=lo"
    try:
        yield
    finally:
        os.environ.pop(_INTERFACE, None)


def disable_multicast() -> None:
    """For NCCL and torch's symmetric memory, in this process: not every host's NVLink has it, and
    where it fails, it fails after minutes.
    """
    os.putenv("NCCL_NVLS_ENABLE", "0")
    os.putenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")


def allow_shared_gpus() -> None:
    """For ranks that share a GPU, in this process."""
    os.putenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
