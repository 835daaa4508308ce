"""Where NCCL listens, which only environment variables can set."""

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
