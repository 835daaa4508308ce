"""AsyncRun: one call on its way through an engine that other callers use as well."""

import asyncio
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TypeVar

from bytetx.encode.engine import EncodeEngine
from bytetx.encode.request import Failure, Window
from bytetx.requests.inputs import Input
from bytetx.tasks.call import TaskCall
from bytetx.tasks.futures import in_own_thread
from bytetx.tasks.reading_pool import Reading, ReadingPool
from bytetx.tasks.run import MAX_WINDOW_STEPS, CallRun, windows

T = TypeVar("T")

# A result of more texts is put together in a thread.
_MAX_INLINE_TEXTS = 256


class AsyncRun(CallRun[T]):
    """Reads a call's texts in windows, queues them, and collects what the engine gives.

    A call of many texts has a bounded number of tokens in the queue.  One window at a time is
    tokenised, in the pool's threads; input that is no list is pulled in a thread as well.
    """

    def __init__(
        self,
        call: TaskCall[T],
        engine: EncodeEngine,
        pool: ReadingPool,
        *,
        max_window_texts: int,
        priority: int,
        is_bounded: bool = False,
    ):
        """is_bounded: refuse first texts that are more than the queue takes, even an empty one."""
        reader = replace(call.reader, max_chunk_tokens=engine.max_queued_tokens)
        super().__init__(replace(call, reader=reader), priority=priority)
        self._engine, self._pool = engine, pool
        self._max_window_texts = max_window_texts
        self._is_bounded = is_bounded
        self._tokenize_seconds = 0.0
        self._failures: list[Failure] = []  # the texts that were refused
        self._reading, self._called = (0, 0), 0.0  # as announced, and when

    async def result(self) -> T:
        """The call's result. Raises its error; cancelling drops what is queued."""
        try:
            await self._feed()
            await self._engine.wait(self.open)
        finally:
            self._engine.end(self.open)
        if self.counter.num_done() <= _MAX_INLINE_TEXTS:
            return self._result()
        return await asyncio.to_thread(self._result)

    async def _feed(self) -> None:
        """Announces texts and has them tokenised, window after window; does not wait for the last.

        The next window is announced once the one before it is in the queue.
        """
        limit = MAX_WINDOW_STEPS * self._engine.token_budget
        start, is_first = 0, True
        pull = partial(next, self._windows(), None)
        is_list = isinstance(self.call.texts, list | tuple)
        while (found := pull() if is_list else await in_own_thread(pull)) is not None:
            window, tokens = found
            if is_first:
                self._engine.open(self.open, len(window), tokens, is_bounded=self._is_bounded)
            else:
                await self._engine.wait(self.open, below_tokens=sys.maxsize, after_reading=True)
                while not self._has_room(len(window), tokens, limit):
                    await self._engine.wait(self.open, below_tokens=self.open.open_tokens)
                self._engine.extend(self.open, len(window), tokens)
            self._reading, self._called = (len(window), tokens), time.perf_counter()
            self._pool.put(Reading(self, self.call.reader, window, start))
            start, is_first = start + len(window), False

    def _has_room(self, num_texts: int, tokens: int, limit: int) -> bool:
        if not self.open.open_tokens:
            return True
        return self.open.open_tokens < limit and self._engine.has_room(num_texts, tokens)

    def _windows(self) -> Iterator[tuple[list[Input], int]]:
        """(texts, a guess of their tokens)"""
        estimate, most = self.call.reader.estimate_tokens, self._max_window_texts
        texts, budget = self.call.texts, self._engine.token_budget
        for window in windows(texts, estimate_tokens=estimate, token_budget=budget):
            for first in range(0, len(window), most):
                piece = window[first : first + most]
                yield piece, sum(map(estimate, piece))

    @property
    def is_dropped(self) -> bool:
        return self.open.is_dropped

    def accept(self, window: Window) -> None:
        """Queues a window's texts."""
        self.counter.add(window)
        self.counter.add_done(window.num_texts)
        self._failures += window.failures
        if self.chunks is not None:
            self.chunks.expect(window.requests)
        self._tokenize_seconds += time.perf_counter() - self._called
        num_read, tokens = self._reading
        self._engine.submit(self.open, window.requests, num_read=num_read, tokens=tokens)

    def refuse(self, error: Exception) -> None:
        """Ends the call."""
        self._engine.fail(self.open, error)

    def _result(self) -> T:
        for failure in self._failures:
            self.sink.fail(failure.index, failure.error)
        self.counter.add_failures(self.failed)
        count = max(self.open.num_computed, 1)
        self.counter.tokenize_seconds = self._tokenize_seconds
        self.counter.queue_seconds = self.open.queue_seconds / count
        self.counter.compute_seconds = self.open.compute_seconds / count
        self.counter.stop()
        result: T = self.sink.result(self.counter.num_done(), self.counter.stats())
        return result
