"""Limits on what a forked child computes: it never waits for threads that only its parent has.

fork copies the calling thread alone. OpenMP's pool (of torch, oneDNN and the CPU kernels) and the
tokenizer's pool have no threads in the child, but look as if they had, and locks that another
thread held stay locked: a parallel loop in the child would wait forever. With one thread no pool is
used, as in the workers of torch's DataLoader, which fork as well. So a child computes with one
thread where its parent was idle, and is refused where the parent computed in that moment.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from bytetx.errors import ForkError

logger = logging.getLogger("bytetx")

_SPAWN = 'start processes with multiprocessing.get_context("spawn")'


@dataclass(slots=True)
class _ForkHistory:
    """The history of this process and of those that it was forked from.

    running: computations that go on, one object each; adding and discarding is atomic.
    num_forks: between the process that imported this module and this one.
    """

    has_computed: bool = False
    is_forked: bool = False
    refusal: str = ""
    running: set[object] = field(default_factory=set)
    num_forks: int = 0


_PROCESS = _ForkHistory()  # one per process, as there is one of each thread pool


@contextmanager
def computing(device: torch.device | None = None) -> Iterator[None]:
    """Around everything that computes; None for what needs no device, as a tokenizer.

    Raises ForkError where this process was forked and cannot compute.
    """
    if _PROCESS.is_forked:
        _check_fork(device)
    own = object()
    running = _PROCESS.running
    _PROCESS.has_computed = True
    running.add(own)
    try:
        yield
    finally:
        running.discard(own)


def check_device_after_fork(device: torch.device | None) -> None:
    """Raises ForkError where CUDA was in use before this process was forked.

    device: None for a choice of one: CUDA looks absent then, and the CPU would be taken instead.
    """
    is_cuda = device is None or device.type == "cuda"
    if is_cuda and torch.cuda._is_in_bad_fork():
        raise ForkError(
            "this process was forked from one that uses CUDA, which does not work in the child; "
            f'{_SPAWN}, or load the model with device="cpu"'
        )


class OwnProcess:
    """Remembers the process that made something which no other process can use."""

    def __init__(self) -> None:
        self._num_forks = _PROCESS.num_forks

    @property
    def is_this(self) -> bool:
        """Asked at every call, so without a system call."""
        return self._num_forks == _PROCESS.num_forks

    def check(self, what: str) -> None:
        """Raises ForkError in another process. what: begins the error, such as "the stream"."""
        if not self.is_this:
            raise ForkError(
                f"{what} belongs to the process that this one was forked from and does not work "
                f"here; make it anew in this process, or {_SPAWN}"
            )


def _check_fork(device: torch.device | None) -> None:
    if _PROCESS.refusal:
        raise ForkError(_PROCESS.refusal)
    if device is not None:
        check_device_after_fork(device)
    if torch.get_num_threads() != 1:  # somebody asked for more threads since
        torch.set_num_threads(1)
    if not _PROCESS.has_computed:
        logger.warning(
            "this process was forked from one that had used bytetx, so it computes with one "
            "thread; for more, %s",
            _SPAWN,
        )


def _after_fork() -> None:
    """In a child: forgets the parent's threads. Called by the thread that forked."""
    _PROCESS.num_forks += 1
    if not _PROCESS.has_computed:
        return
    if _PROCESS.running:
        _PROCESS.refusal = (
            "this process was forked while bytetx was computing in another thread, or had an "
            f"unfinished stream, and could wait forever for what they hold; {_SPAWN}"
        )
    else:
        torch.set_num_threads(1)
        # The tokenizers library does this by itself unless the variable was set to "true".
        os.putenv("TOKENIZERS_PARALLELISM", "false")
    _PROCESS.is_forked, _PROCESS.has_computed = True, False
    _PROCESS.running = set()


os.register_at_fork(after_in_child=_after_fork)
