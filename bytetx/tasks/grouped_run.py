"""GroupedRun: several calls of `embed` with the same options share one way through an engine."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, cast

import numpy as np

from bytetx.encode.engine import EncodeEngine
from bytetx.encode.request import RunStats, Window
from bytetx.errors import InputError, QueueFullError
from bytetx.tasks.call import TaskCall
from bytetx.tasks.embed import VectorSink
from bytetx.tasks.futures import as_it_is, forward
from bytetx.tasks.reading_pool import ReadingPool
from bytetx.tasks.results import Embeddings
from bytetx.tasks.run import AsyncRun


class GroupedRun(AsyncRun[Embeddings]):
    """Their texts are read and queued together; each call is answered once its own texts are done.

    A call that fails with the others runs again alone, and has the error that it has there.
    """

    def __init__(
        self,
        call: TaskCall[Embeddings],
        engine: EncodeEngine,
        pool: ReadingPool,
        *,
        alone: Callable[[int], Coroutine[Any, Any, Embeddings]],
        sizes: Sequence[int],
        max_window_texts: int,
    ):
        """call: of the texts of all calls, one after the other, with on_error="return".

        alone: runs the call of that number on its own.  sizes: texts of each.
        """
        super().__init__(
            call,
            engine,
            pool,
            max_window_texts=max_window_texts,
            priority=0,
        )
        count, self._loop = len(sizes), asyncio.get_running_loop()
        self._alone, self._tasks = alone, set[asyncio.Task[Any]]()
        self.open.num_calls, self.open.receiver = count, _Watched(self)
        self._starts = np.cumsum([0, *sizes])
        self._num_left = np.array(sizes, dtype=np.int64)
        self._has_failed = np.zeros(count, dtype=bool)
        self._num_tokens, self._num_truncated = np.zeros((2, count), dtype=np.int64)
        self.answers: list[asyncio.Future[Embeddings]] = [
            self._loop.create_future() for _ in range(count)
        ]

    def start(self) -> "list[asyncio.Future[Embeddings]]":
        """The answers, one a call; a call whose answer is cancelled is left out where it can be."""
        main = self._spawn(self._main())
        for answer in self.answers:
            answer.add_done_callback(lambda _: main.cancel() if self._is_left() else None)
        self._deliver(np.flatnonzero(self._num_left == 0).tolist())  # calls without texts
        return self.answers

    async def _main(self) -> None:
        try:
            await self._feed()
            await self._engine.wait(self.open)
        except QueueFullError as error:
            for answer in self.answers:
                if not answer.done():
                    answer.set_exception(error)
        except Exception:  # perhaps one call caused it: each finds its own
            for number in range(len(self.answers)):
                self._run_alone(number)
        finally:
            self._engine.end(self.open)

    def accept(self, window: Window) -> None:
        requests = window.requests
        owners = self._owners(requests.indices)
        np.add.at(self._num_tokens, owners, requests.seqlens)
        np.add.at(self._num_truncated, owners, requests.is_truncated)
        super().accept(window)
        if window.failures:
            self.count([failure.index for failure in window.failures], failed=True)

    def count(self, indices: "np.ndarray | Sequence[int]", *, failed: bool = False) -> None:
        """Texts that have a vector or none.  From the engine's thread and those that tokenise, so
        that the event loop alone keeps the numbers."""
        owners = self._owners(np.array(indices, dtype=np.int64))
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._count, owners, failed)

    def _count(self, owners: np.ndarray, failed: bool) -> None:
        self._has_failed[owners] |= failed
        np.subtract.at(self._num_left, owners, 1)
        self._deliver(np.unique(owners[self._num_left[owners] == 0]).tolist())

    def put_rows(self, indices: np.ndarray, results: Sequence[Any]) -> None:
        self.sink.put_rows(indices, results)
        self.count(indices)

    def _deliver(self, numbers: Sequence[int]) -> None:
        computed = max(self.open.num_computed, 1)
        vectors = cast(VectorSink, self.sink).rows
        for number in numbers:
            answer = self.answers[number]
            if answer.done():
                continue  # cancelled
            if self._has_failed[number]:
                self._run_alone(number)
                continue
            start, stop = int(self._starts[number]), int(self._starts[number + 1])
            stats = RunStats(
                num_texts=stop - start,
                num_tokens=int(self._num_tokens[number]),
                num_truncated=int(self._num_truncated[number]),
                seconds=self.counter.seconds(),
                tokenize_seconds=self._tokenize_seconds,
                queue_seconds=self.open.queue_seconds / computed,
                compute_seconds=self.open.compute_seconds / computed,
            )
            answer.set_result(Embeddings(vectors[start:stop].copy(), stats, {}))

    def _run_alone(self, number: int) -> None:
        answer = self.answers[number]
        if answer.done():
            return
        forward(self._spawn(self._alone(number)), answer, as_it_is)

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _is_left(self) -> bool:
        """Whether nobody waits any more."""
        return all(answer.cancelled() for answer in self.answers)

    def _owners(self, indices: np.ndarray) -> np.ndarray:
        """The call of each text."""
        return np.searchsorted(self._starts, indices, side="right") - 1


class _Watched:
    """The receiver of all calls' results."""

    def __init__(self, run: GroupedRun):
        self._run = run

    def put_rows(self, indices: np.ndarray, results: Sequence[Any]) -> None:
        self._run.put_rows(indices, results)

    def fail(self, index: int, error: InputError) -> None:
        self._run.count([index], failed=True)
