"""CallRun: one call on its way through an engine that other callers use as well."""

import asyncio
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np

from bytetx.arguments import check_iterable
from bytetx.encode.engine import EncodeEngine
from bytetx.encode.open_call import OpenCall
from bytetx.encode.request import Failure, Requests, RunCounter, Window
from bytetx.encode.scheduler import MAX_WINDOW_STEPS, windows
from bytetx.errors import InputError, NotFiniteError
from bytetx.requests.inputs import Input
from bytetx.tasks.call import Call, Sink
from bytetx.tasks.chunks import ChunkTask, merge_parts
from bytetx.tasks.futures import in_own_thread
from bytetx.tasks.progress import num_texts
from bytetx.tasks.reading_pool import Reading, ReadingPool

T = TypeVar("T")

# A result of more texts is put together in a thread.
_MAX_INLINE_TEXTS = 256


class CallRun(Generic[T]):
    """Reads a call's texts in windows, queues them, and collects what the engine gives.

    A call of many texts has a bounded number of tokens in the queue.  One window at a time is
    tokenised, in the pool's threads; input that is no list is pulled in a thread as well.
    """

    def __init__(
        self,
        call: Call[T],
        engine: EncodeEngine,
        pool: ReadingPool,
        *,
        token_budget: int,
        max_window_texts: int,
        priority: int,
        is_bounded: bool = False,
    ):
        """is_bounded: refuse first texts that are more than the queue takes, even an empty one."""
        reader = replace(call.reader, max_chunk_tokens=engine.max_queued_tokens)
        call = replace(call, reader=reader)
        self._call, self._engine, self._pool = call, engine, pool
        self._token_budget, self._max_window_texts = token_budget, max_window_texts
        self._is_bounded = is_bounded
        sink = call.new_sink(num_texts(check_iterable("texts", call.texts)))
        self._sink = sink
        merge, task = call.merge, call.task
        keeps_errors = call.reader.keeps_errors
        receiver = sink if merge is None else _ChunkSink(sink, merge, keeps_errors=keeps_errors)
        self._chunks = receiver if isinstance(receiver, _ChunkSink) else None
        self.open = OpenCall(
            task if merge is None else ChunkTask(task),
            receiver,
            priority=priority,
            keeps_errors=keeps_errors,
        )
        self._counter = RunCounter()
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
        if self._counter.num_done() <= _MAX_INLINE_TEXTS:
            return self._result()
        return await asyncio.to_thread(self._result)

    async def _feed(self) -> None:
        """Announces texts and has them tokenised, window after window; does not wait for the last.

        The next window is announced once the one before it is in the queue.
        """
        limit = MAX_WINDOW_STEPS * self._token_budget
        start, is_first = 0, True
        pull = partial(next, self._windows(), None)
        is_list = isinstance(self._call.texts, list | tuple)
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
            self._pool.put(Reading(self, self._call.reader, window, start))
            start, is_first = start + len(window), False

    def _has_room(self, num_texts: int, tokens: int, limit: int) -> bool:
        if not self.open.open_tokens:
            return True
        return self.open.open_tokens < limit and self._engine.has_room(num_texts, tokens)

    def _windows(self) -> Iterator[tuple[list[Input], int]]:
        """(texts, a guess of their tokens)"""
        estimate, most = self._call.reader.estimate_tokens, self._max_window_texts
        texts, budget = self._call.texts, self._token_budget
        for window in windows(texts, estimate_tokens=estimate, token_budget=budget):
            for first in range(0, len(window), most):
                piece = window[first : first + most]
                yield piece, sum(map(estimate, piece))

    @property
    def is_dropped(self) -> bool:
        return self.open.is_dropped

    def accept(self, window: Window) -> None:
        """Queues a window's texts."""
        self._counter.add(window)
        self._counter.add_done(window.num_texts)
        self._failures += window.failures
        if self._chunks is not None:
            self._chunks.expect(window.requests)
        self._tokenize_seconds += time.perf_counter() - self._called
        num_read, tokens = self._reading
        self._engine.submit(self.open, window.requests, num_read=num_read, tokens=tokens)

    def refuse(self, error: Exception) -> None:
        """Ends the call."""
        self._engine.fail(self.open, error)

    def _result(self) -> T:
        for failure in self._failures:
            self._sink.fail(failure.index, failure.error)
        chunks = self._chunks
        self._counter.add_failures(self.open.failed if chunks is None else chunks.failed)
        count = max(self.open.num_computed, 1)
        self._counter.tokenize_seconds = self._tokenize_seconds
        self._counter.queue_seconds = self.open.queue_seconds / count
        self._counter.compute_seconds = self.open.compute_seconds / count
        self._counter.stop()
        return self._sink.result(self._counter.num_done(), self._counter.stats())


class _ChunkSink:
    """Makes one result of those of a text's chunks, as soon as all are there."""

    def __init__(self, sink: Sink[Any], merge: Callable[[list[Any]], Any], *, keeps_errors: bool):
        self._sink, self._merge, self._keeps_errors = sink, merge, keeps_errors
        self._num_chunks: dict[int, int] = {}
        self._chunks: dict[int, list[tuple[int, Any]]] = {}
        self.failed: set[int] = set()  # texts

    def expect(self, requests: Requests) -> None:
        """Texts, by their chunks, before any of these is queued."""
        indices, counts = np.unique(requests.indices, return_counts=True)
        self._num_chunks.update(zip(indices.tolist(), counts.tolist(), strict=True))

    def put_rows(self, indices: np.ndarray, results: Sequence[tuple[int, Any]]) -> None:
        for index, chunk in zip(indices.tolist(), results, strict=True):
            if index not in self._num_chunks:  # another chunk of its text failed
                continue
            chunks = self._chunks.setdefault(index, [])
            chunks.append(chunk)
            if len(chunks) == self._num_chunks[index]:
                whole = merge_parts(index, chunks, self._merge)
                if isinstance(whole, NotFiniteError):
                    if not self._keeps_errors:
                        raise whole
                    self.fail(index, whole)
                    continue
                del self._num_chunks[index], self._chunks[index]
                self._sink.put_rows(np.array([index]), [whole])

    def fail(self, index: int, error: InputError) -> None:
        if self._num_chunks.pop(index, None) is not None:
            self._chunks.pop(index, None)
            self.failed.add(index)
            self._sink.fail(index, error)
