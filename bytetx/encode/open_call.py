"""OpenCall: a call that waits for the engine, and how the engine's thread wakes its event loop."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

import numpy as np

from bytetx.encode.request_queue import QueuedCall
from bytetx.encode.step import Task
from bytetx.errors import InputError


class Receiver(Protocol):
    """Takes the results of one call, in the engine's thread."""

    def put_rows(self, indices: np.ndarray, results: Sequence[Any]) -> None:
        """Results of some texts; arrays among them are only lent."""
        ...

    def fail(self, index: int, error: InputError) -> None:
        """A text that the device could not run, or whose numbers are not finite."""
        ...


class OpenCall(QueuedCall):
    """A call that is not answered yet; `wait` raises its error once it has one.

    keeps_errors: a text that cannot run is its receiver's; else its error ends the call.
    num_calls: of callers, where several run as one.
    num_reading, reading_tokens: texts that are being tokenised, and a guess of their tokens.
    num_open, open_tokens: texts that were queued and have no result yet.
    failed: indices of texts without a result.
    error: why the call ended early.
    """

    def __init__(
        self, task: Task[Any], receiver: Receiver, *, priority: int = 0, keeps_errors: bool = False
    ):
        super().__init__(priority)
        self.task, self.key, self.receiver = task, task.key, receiver
        self.keeps_errors = keeps_errors
        self.num_calls = 1
        self.num_reading = self.reading_tokens = 0
        self.num_open = self.open_tokens = 0
        self.error: BaseException | None = None
        self.queue_seconds = self.compute_seconds = 0.0  # sums over texts
        self.num_computed = 0
        self.failed: set[int] = set()
        self.wakes_at = 0  # open tokens below which `waiter` gets its result
        self.wakes_after_reading = False
        self.waiter: asyncio.Future[None] | None = None

    @property
    def has_room(self) -> bool:
        """Whether `waiter` need not wait any more."""
        if self.error is not None:
            return True
        if self.num_reading and self.wakes_after_reading:
            return False
        is_idle = not self.num_open and not self.num_reading
        return is_idle or self.open_tokens + self.reading_tokens < self.wakes_at


def waiters_of(calls: Sequence[OpenCall]) -> "list[asyncio.Future[None]]":
    """The waiters of calls that need not wait any more; under the lock."""
    found = []
    for call in calls:
        waiter = call.waiter  # read once: a call that is cancelled takes it away without the lock
        if waiter is not None and call.has_room:
            found.append(waiter)
    return found


def wake(waiters: "Sequence[asyncio.Future[None]]") -> None:
    """Sets the results of waiters: one call into each event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
    for waiter in waiters:
        by_loop.setdefault(waiter.get_loop(), []).append(waiter)
    for loop, own in by_loop.items():
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(_set_results, own)


def _set_results(waiters: "Sequence[asyncio.Future[None]]") -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)
