"""Runs a task on a stream: tokenises windows ahead, gives results in the caller's order."""

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, TypedDict, TypeVar

import numpy as np

from bytetx.encode.finite import finish_finite, not_finite_error
from bytetx.encode.model_runner import Launched, Runner
from bytetx.encode.request import Failure, RunCounter, Window
from bytetx.encode.scheduler import plan_steps
from bytetx.encode.step import Task
from bytetx.errors import InputError
from bytetx.ops.heap import release_heap
from bytetx.runtime.forking import OwnProcess, computing

T = TypeVar("T")
R = TypeVar("R")

Prepare = Callable[[Sequence[T], int], Window]

# Windows that are tokenised or wait for the device, a thread each: the tokenizer's own threads go
# on with one window while Python takes the ids out of the other, which no two threads can do.
_WINDOWS_AHEAD = 2
# Steps launched and not collected: one runs, one waits behind it, one is copied to the host.
_STEPS_RUNNING = 3
# Fills a window's list until its steps have ended; each text gets a result or its error.
_NO_RESULT = InputError("the engine gave no result")


class EngineOptions(TypedDict):
    """Arguments that `run` takes of a model and of a call."""

    runner: Runner
    token_budget: int
    counter: RunCounter
    keeps_errors: bool


@dataclass(frozen=True, slots=True)
class Finished(Generic[R]):
    """The results of one step, or of none in a window that has nothing to run.

    indices: int64 [num_texts], in the caller's order.  results: one per text, in that order.
    is_last: nothing of the window is missing but its failures.  failures: of this step.
    """

    window: Window
    indices: np.ndarray
    results: Sequence[R]
    is_last: bool
    failures: Sequence[Failure] = ()


def run(
    windows: Iterator[Sequence[T]],
    prepare: Prepare[T],
    task: Task[R],
    *,
    runner: Runner,
    token_budget: int,
    counter: RunCounter,
    keeps_errors: bool,
) -> Generator[Finished[R], None, None]:
    """Yields each step's results as soon as they are on the host, window after window.

    keeps_errors: a text that the device cannot run is a failure of its step; else it is raised.
    prepare: tokenises a window whose texts are numbered from its second argument on; it runs in
    threads, ahead of the device.  The input itself is pulled in the caller's thread.  A bounded
    number of windows is held, and the threads have ended when the generator ends or is closed.  A
    device never waits for results to be collected: the next steps, of the next window too, are
    launched behind the one whose results are awaited.
    """
    collect = partial(
        _collect, task=task, runner=runner, counter=counter, keeps_errors=keeps_errors
    )
    with computing(runner.device), closing(_WindowsAhead(windows, prepare)) as ahead:
        running: deque[_Running] = deque()
        try:
            while True:
                ahead.check_process()
                # While no window is ready there is time to collect; queued steps keep running.
                if running and not ahead.is_ready():
                    yield collect(running.popleft())
                    continue
                window = ahead.take()
                if window is None:
                    break
                for step in _launch_each(window, task, runner, token_budget, keeps_errors):
                    running.append(step)
                    while running and (len(running) > _STEPS_RUNNING or running[0].is_ready()):
                        yield collect(running.popleft())
            while running:
                yield collect(running.popleft())
        finally:
            counter.stop()


def run_at_once(
    inputs: Sequence[T],
    prepare: Prepare[T],
    task: Task[R],
    *,
    runner: Runner,
    token_budget: int,
    counter: RunCounter,
    keeps_errors: bool,
) -> list[Finished[R]]:
    """`run` for a few inputs, which are one window: in this thread, with nothing ahead of it."""
    with computing(runner.device):
        try:
            window = prepare(inputs, 0)
            running = list(_launch_each(window, task, runner, token_budget, keeps_errors))
            return [
                _collect(step, task, runner, counter, keeps_errors=keeps_errors) for step in running
            ]
        finally:
            counter.stop()


def in_order(
    finished: Generator[Finished[R], None, None],
) -> Generator[list[R | InputError], None, None]:
    """Each window's results in the caller's order; a text that failed is its InputError."""
    results: list[R | InputError] = []
    with closing(finished):
        for step in map(_owned, finished):
            start = step.window.start
            if not results:
                results = [_NO_RESULT] * step.window.num_texts
            for index, result in zip(step.indices.tolist(), step.results, strict=True):
                results[index - start] = result
            for failure in step.failures:
                results[failure.index - start] = failure.error
            if step.is_last:
                for failure in step.window.failures:
                    results[failure.index - start] = failure.error
                yield results
                results = []


def _owned(step: Finished[R]) -> Finished[R]:
    """Copies array rows, which a caller may hold, out of the pinned memory of their step."""
    if isinstance(step.results, np.ndarray):
        return replace(step, results=step.results.copy())
    return step


class _WindowsAhead(Generic[T]):
    """Windows prepared in threads before they are asked for, and given out in order.

    The first window is prepared at once, and no thread starts where there is no second one.
    """

    def __init__(self, windows: Iterator[Sequence[T]], prepare: Prepare[T]):
        self._windows, self._prepare = windows, prepare
        self._pool: ThreadPoolExecutor | None = None
        self._queue: deque[Future[Window]] = deque()
        self._num_pulled = 0
        self._process = OwnProcess()

    def check_process(self) -> None:
        """Raises ForkError in a forked child, where no thread prepares windows any more."""
        self._process.check("a stream of results")

    def is_ready(self) -> bool:
        """Whether `take` returns at once."""
        return not self._queue or self._queue[0].done()

    def take(self) -> Window | None:
        """The next window, or None at the end."""
        if not self._num_pulled:
            first = next(self._windows, None)
            if first is None:
                return None
            self._num_pulled = len(first)
            ready = self._prepare(first, 0)
            self._pull()
            return ready
        if not self._queue:
            return None
        next_window = self._queue.popleft()
        self._pull()
        return next_window.result()

    def close(self) -> None:
        if self._pool is not None and self._process.is_this:
            self._pool.shutdown(cancel_futures=True)

    def _pull(self) -> None:
        while len(self._queue) < _WINDOWS_AHEAD:
            window = next(self._windows, None)
            if window is None:
                return
            if self._pool is None:
                self._pool = ThreadPoolExecutor(_WINDOWS_AHEAD, "bytetx-tokenizer")
            self._queue.append(self._pool.submit(self._prepare, window, self._num_pulled))
            self._num_pulled += len(window)


@dataclass(frozen=True, slots=True)
class _Running:
    """A launched step of a window; launched is None for a window without runnable texts."""

    window: Window
    launched: Launched | None
    is_last: bool

    def is_ready(self) -> bool:
        return self.launched is None or self.launched.is_ready()


def _launch_each(
    window: Window, task: Task[R], runner: Runner, token_budget: int, keeps_errors: bool
) -> Iterator[_Running]:
    steps = plan_steps(window.requests, token_budget=token_budget)
    for number, requests in enumerate(steps, start=1):
        launched = runner.launch(requests, task)
        if launched.failures and not keeps_errors:
            raise launched.failures[0].error
        yield _Running(window, launched, is_last=number == len(steps))
    if not steps:
        yield _Running(window, None, is_last=True)


def _collect(
    running: _Running, task: Task[R], runner: Runner, counter: RunCounter, *, keeps_errors: bool
) -> Finished[R]:
    window, launched = running.window, running.launched
    if running.is_last:
        counter.add_done(len(window.failures))
        counter.add(window)
        if window.start and runner.device.type == "cpu":
            release_heap()  # a short call's only window keeps its pages for the next call
    if launched is None:
        return Finished(window, np.empty(0, dtype=np.int64), [], running.is_last)
    requests = launched.step.requests
    num_texts = len(requests) if requests.chunks is None else np.count_nonzero(requests.chunks == 0)
    counter.add_done(int(num_texts) + len(launched.failures))
    indices = launched.step.requests.indices
    failures = launched.failures
    results: Sequence[R] = []
    if len(indices):
        results, is_finite = finish_finite(task, launched.outputs(), launched.step)
        if is_finite is not None:
            bad = indices[~is_finite].tolist()
            failures += tuple(Failure(index, not_finite_error(index)) for index in bad)
            indices = indices[is_finite]
    if failures and not keeps_errors:
        raise failures[0].error
    counter.add_failures(failure.index for failure in failures)
    return Finished(window, indices, results, running.is_last, failures)
