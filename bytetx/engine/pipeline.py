"""A whole run: windows tokenised ahead of the forward pass, results in the caller's order."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from bytetx.engine.request import Failure, Request, RunCounter
from bytetx.engine.runner import Launched, Runner, Task
from bytetx.engine.scheduler import plan_steps
from bytetx.errors import InputError

T = TypeVar("T")
R = TypeVar("R")

Prepare = Callable[[Sequence[T]], Sequence[Request | Failure]]


def run(
    windows: Iterator[Sequence[T]],
    prepare: Prepare[T],
    task: Task[R],
    *,
    runner: Runner,
    token_budget: int,
    counter: RunCounter,
) -> Iterator[list[R | InputError]]:
    """Yields each window's results in the caller's order; a text that failed is its InputError.

    prepare: tokenises a window; the next window's runs in a thread while this one computes.
    The input itself is pulled in the caller's thread. At most two windows are held, and the thread
    has ended when the iterator ends or is closed.
    """
    try:
        for items in _prepare_ahead(windows, prepare):
            results = _run_window(items, task, runner=runner, token_budget=token_budget)
            for item in items:
                counter.add(item)
            yield results
    finally:
        counter.stop()


def _prepare_ahead(
    windows: Iterator[Sequence[T]], prepare: Prepare[T]
) -> Iterator[Sequence[Request | Failure]]:
    """The first window is prepared at once; no thread starts where there is no second one."""
    first = next(windows, None)
    if first is None:
        return
    pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="bytetx-tokenizer")
    try:
        ready = prepare(first)
        for window in windows:
            following = pool.submit(prepare, window)
            yield ready
            ready = following.result()
        yield ready
    finally:
        pool.shutdown(cancel_futures=True)


def _run_window(
    items: Sequence[Request | Failure], task: Task[R], *, runner: Runner, token_budget: int
) -> list[R | InputError]:
    """Launches each step before it waits for the one before, so that a GPU is never idle."""
    results: dict[int, R | InputError] = {
        item.index: item.error for item in items if isinstance(item, Failure)
    }
    requests = [item for item in items if isinstance(item, Request)]
    running = None
    for step in plan_steps(requests, token_budget=token_budget):
        launched = runner.launch(step, task)
        if running is not None:
            _collect(running, task, results)
        running = launched
    if running is not None:
        _collect(running, task, results)
    return [results[item.index] for item in items]


def _collect(launched: Launched, task: Task[R], results: dict[int, R | InputError]) -> None:
    finished = task.finish(launched.outputs(), launched.step)
    for request, result in zip(launched.step.requests, finished, strict=True):
        results[request.index] = result
