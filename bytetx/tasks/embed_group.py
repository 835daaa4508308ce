"""EmbedGroup: small calls of `embed` that come together run as one: a call costs more than its
text."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, cast

import numpy as np

from bytetx.encode.request import RunStats, Window
from bytetx.errors import InputError, QueueFullError
from bytetx.tasks.embed import VectorSink
from bytetx.tasks.results import Embeddings
from bytetx.tasks.run import AsyncRun, as_it_is, forward

# A larger call gains nothing: it has much to compute.
_MAX_TEXTS, _MAX_CHARACTERS = 32, 4096
_MAX_GROUP_TEXTS = 512
_PART_OF_QUEUE = 4  # a group may be this fraction (1 / 4) of what may wait


def is_small(texts: Sequence[Any]) -> bool:
    """Whether a call of these texts gains by running with others."""
    if len(texts) > _MAX_TEXTS or not all(type(text) is str for text in texts):
        return False
    return sum(map(len, texts)) <= _MAX_CHARACTERS


class EmbedGroup:
    """Calls of one turn of an event loop with the same options.

    Where the loop is idle a call runs at once and alone; the busier it is, the more calls a turn
    has, and the less each of them costs.  Their texts are read and queued together, and each call
    is answered once its own texts are done.  A call that fails with the others runs again alone,
    and has the error that it has there.
    """

    def __init__(
        self,
        run_of: Callable[[Sequence[Any]], AsyncRun[Embeddings]],
        alone: Callable[[Sequence[Any]], Coroutine[Any, Any, Embeddings]],
        *,
        queue_limits: tuple[int, int],
    ):
        """run_of: all calls' texts, with on_error="return".  alone: a call on its own.

        queue_limits: texts and tokens that may wait.
        """
        self._run_of, self._alone = run_of, alone
        self._most_texts = min(_MAX_GROUP_TEXTS, queue_limits[0] // _PART_OF_QUEUE)
        self._most_characters = queue_limits[1] // _PART_OF_QUEUE  # a token has one or more
        self._loop = asyncio.get_running_loop()
        self._calls: list[Sequence[Any]] = []
        self._answers: list[asyncio.Future[Embeddings]] = []
        self._num_texts = self._num_characters = 0
        self._tasks = set[asyncio.Task[Any]]()

    def add(self, texts: Sequence[Any]) -> "asyncio.Future[Embeddings] | None":
        """The call's answer; cancel it where nobody waits any more. None where the group is full.

        A first call of any size is taken.
        """
        num_texts = self._num_texts + len(texts)
        num_characters = self._num_characters + sum(map(_length, texts))
        is_full = num_texts > self._most_texts or num_characters > self._most_characters
        if is_full and self._calls:
            return None
        self._num_texts, self._num_characters = num_texts, num_characters
        answer: asyncio.Future[Embeddings] = self._loop.create_future()
        self._calls.append(texts)
        self._answers.append(answer)
        return answer

    def start(self) -> None:
        """Runs the calls whose answers somebody waits for. No call is added from now on."""
        left = [number for number, answer in enumerate(self._answers) if not answer.done()]
        self._calls = [self._calls[number] for number in left]
        self._answers = [self._answers[number] for number in left]
        if len(left) == 1:
            self._run_alone(0)
        if len(left) < 2:
            return
        try:
            run = self._run_of([text for texts in self._calls for text in texts])
        except Exception as error:  # wrong options
            for answer in self._answers:
                answer.set_exception(error)
            return
        sizes = [len(texts) for texts in self._calls]
        self._run, self._starts = run, np.cumsum([0, *sizes])
        run.open.num_calls, run.open.receiver, run.on_read = len(sizes), self, self._count_read
        self._num_left = np.array(sizes, dtype=np.int64)
        self._has_failed = np.zeros(len(sizes), dtype=bool)
        self._num_tokens, self._num_truncated = np.zeros((2, len(sizes)), dtype=np.int64)
        main = self._spawn(self._main())
        for answer in self._answers:
            answer.add_done_callback(lambda _: main.cancel() if self._is_left() else None)
        self._deliver(np.flatnonzero(self._num_left == 0).tolist())  # calls without texts

    async def _main(self) -> None:
        try:
            await self._run.done()
        except QueueFullError as error:
            for answer in self._answers:
                if not answer.done():
                    answer.set_exception(error)
        except Exception:  # perhaps one call caused it: each finds its own
            for number in range(len(self._answers)):
                self._run_alone(number)
        finally:
            self._run.open.receiver, self._run.on_read = self._run.sink, None  # which hold this

    def put_rows(self, indices: np.ndarray, results: Sequence[Any]) -> None:
        """Results of some texts of all calls, as those of a call's own receiver."""
        self._run.sink.put_rows(indices, results)
        self._count(indices)

    def fail(self, index: int, error: InputError) -> None:
        self._count([index], failed=True)

    def _count_read(self, window: Window) -> None:
        """Counts texts that are tokenised, before the engine has them."""
        requests = window.requests
        owners = self._owners(requests.indices)
        np.add.at(self._num_tokens, owners, requests.seqlens)
        np.add.at(self._num_truncated, owners, requests.is_truncated)
        if window.failures:
            self._count([failure.index for failure in window.failures], failed=True)

    def _count(self, indices: "np.ndarray | Sequence[int]", *, failed: bool = False) -> None:
        """Texts that have a vector or none.  From the engine's thread and those that tokenise, so
        that the event loop alone keeps the numbers."""
        owners = self._owners(np.array(indices, dtype=np.int64))
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._count_done, owners, failed)

    def _count_done(self, owners: np.ndarray, failed: bool) -> None:
        self._has_failed[owners] |= failed
        np.subtract.at(self._num_left, owners, 1)
        self._deliver(np.unique(owners[self._num_left[owners] == 0]).tolist())

    def _deliver(self, numbers: Sequence[int]) -> None:
        run = self._run
        computed, vectors = max(run.open.num_computed, 1), cast(VectorSink, run.sink).rows
        for number in numbers:
            answer = self._answers[number]
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
                seconds=run.counter.seconds(),
                tokenize_seconds=run.tokenize_seconds,
                queue_seconds=run.open.queue_seconds / computed,
                compute_seconds=run.open.compute_seconds / computed,
            )
            answer.set_result(Embeddings(vectors[start:stop].copy(), stats, {}))

    def _run_alone(self, number: int) -> None:
        answer = self._answers[number]
        if not answer.done():
            forward(self._spawn(self._alone(self._calls[number])), answer, as_it_is)

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _is_left(self) -> bool:
        """Whether nobody waits any more."""
        return all(answer.cancelled() for answer in self._answers)

    def _owners(self, indices: np.ndarray) -> np.ndarray:
        """The call of each text."""
        return np.searchsorted(self._starts, indices, side="right") - 1


def _length(text: Any) -> int:
    """Characters of a str, tokens of token ids; what is no text is refused when it is read."""
    return len(text) if hasattr(text, "__len__") else 0
