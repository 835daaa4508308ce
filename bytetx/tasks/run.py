"""CallRun: one call on its way through an engine, in the caller's thread where it is alone."""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np

from bytetx.arguments import check_iterable
from bytetx.encode.engine import EncodeEngine, EncodeStep
from bytetx.encode.request import RunCounter, Window
from bytetx.encode.request_queue import OpenCall
from bytetx.errors import OptionError
from bytetx.ops.heap import release_heap
from bytetx.requests.inputs import Input
from bytetx.runtime.forking import OwnProcess, computing
from bytetx.tasks.call import ListSink, Sink, TaskCall
from bytetx.tasks.chunks import ChunkSink, ChunkTask
from bytetx.tasks.progress import with_progress
from bytetx.tasks.results import Results, Stream

T = TypeVar("T")

# Windows that are tokenised or wait for the device, a thread each: the tokenizer's own threads go
# on with one window while Python takes the ids out of the other, which no two threads can do.
_WINDOWS_AHEAD = 2
# Steps launched and not collected: one runs, one waits behind it, one is copied to the host.
_STEPS_RUNNING = 3
# A window ends a little before its steps are full: tokens are only estimated, and steps get equal
# shares, so that a slight excess adds a step and leaves all of them much emptier.
_WINDOW_FILL = 31 / 32
# Steps that one window holds at most: enough to order lengths in and to keep the last, partly
# filled step of a window rare, few enough that streaming stays prompt and memory small.
MAX_WINDOW_STEPS = 4


class CallRun(Generic[T]):
    """A call with what collects its results: texts go to `open`, and the counts to `counter`."""

    def __init__(self, call: TaskCall[T], *, sink: Sink[Any] | None = None, priority: int = 0):
        """sink: None is the call's own."""
        self.call, self.counter = call, RunCounter()
        texts = call.texts
        if not isinstance(texts, list):
            check_iterable("texts", texts)
        self.num_given = len(texts) if isinstance(texts, Sized) else None  # else nobody knows
        self.sink: Sink[Any] = call.new_sink(self.num_given) if sink is None else sink
        keeps_errors = call.reader.keeps_errors
        self.chunks: ChunkSink | None = None
        if call.merge is not None:
            self.chunks = ChunkSink(self.sink, call.merge, keeps_errors=keeps_errors)
        self.open = OpenCall(
            call.task if call.merge is None else ChunkTask(call.task),
            self.chunks or self.sink,
            priority=priority,
            keeps_errors=keeps_errors,
        )
        # Texts that were fine and have no result.
        self.failed = self.open.failed if self.chunks is None else self.chunks.failed


def windows(
    inputs: Iterable[Input], *, estimate_tokens: Callable[[Input], int], token_budget: int
) -> Iterator[list[Input]]:
    """Cuts the input into windows, pulling no more of it than the window that is asked for.

    The first window is about one step long, so that the first forward pass starts at once; each
    next one is twice as long, up to MAX_WINDOW_STEPS steps.  estimate_tokens: a cheap guess of one
    input's tokens; it must be at least 1, so that a window always ends.
    """
    num_steps = 1
    window: list[Input] = []
    num_tokens = 0
    for item in inputs:
        window.append(item)
        num_tokens += estimate_tokens(item)
        if num_tokens >= num_steps * token_budget * _WINDOW_FILL:
            yield window
            window, num_tokens = [], 0
            num_steps = min(2 * num_steps, MAX_WINDOW_STEPS)
    if window:
        yield window


def perform(call: TaskCall[T], engine: EncodeEngine, *, show_progress: bool = False) -> T:
    """All results of a call, computed in this thread."""
    run = CallRun(call)
    steps = _steps(run, engine)
    for _ in _with_bar(run, steps) if show_progress else steps:
        pass
    stats = run.counter.stats()
    result: T = run.sink.result(stats.num_texts, stats)
    return result


def stream(
    call: TaskCall[Any], engine: EncodeEngine, *, show_progress: bool = False
) -> Stream[Any]:
    """The results of a call, computed in the reader's thread while they are read.

    Raises OptionError where results depend on all texts.
    """
    if call.why_no_stream is not None:
        raise OptionError(call.why_no_stream)
    sink = ListSink[Results[Any]](lambda results: results)
    run = CallRun(call, sink=sink)
    steps = _steps(run, engine)
    if show_progress:
        steps = _with_bar(run, steps)
    return Stream(_by_windows(steps, sink), run.counter.stats)


def _by_windows(
    steps: Generator[Window | None, None, None], sink: ListSink[Any]
) -> Generator[list[Any], None, None]:
    """Each window's results in the caller's order; a text that failed is its InputError."""
    process = OwnProcess()
    with closing(steps):
        for window in steps:
            if window is not None:
                yield sink.take(window.start, window.num_texts)
                process.check("a stream of results")


def _with_bar(
    run: CallRun[Any], steps: Generator[Window | None, None, None]
) -> Generator[Window | None, None, None]:
    return with_progress(steps, run.counter.num_done, title=run.call.title, total=run.num_given)


def _steps(run: CallRun[Any], engine: EncodeEngine) -> Generator[Window | None, None, None]:
    """Runs a call: yields after each step, and then its window where the step is the last of it.

    Texts are tokenised in threads, ahead of the device; the input itself is pulled in this thread.
    A bounded number of windows is held, and the threads have ended when the generator ends or is
    closed.  A device never waits for results to be collected: the next steps, of the next window
    too, are launched behind the one whose results are awaited.
    """
    reader = run.call.reader
    cut = windows(
        run.call.texts, estimate_tokens=reader.estimate_tokens, token_budget=engine.token_budget
    )
    running: deque[tuple[EncodeStep, Window | None]] = deque()
    collect = partial(_collect, run, engine)
    device = engine.runner.device
    with computing(device), closing(_read_ahead(cut, reader.read, running)) as ahead:
        try:
            for window in ahead:
                if window is None:
                    yield collect(*running.popleft())
                    continue
                if run.chunks is not None:
                    run.chunks.expect(window.requests)
                steps = deque(engine.plan(run.open, window.requests))
                if not steps:  # none of its texts runs
                    while running:
                        yield collect(*running.popleft())
                    yield collect(None, window)
                while steps:
                    step = steps.popleft()
                    engine.launch(step)
                    running.append((step, None if steps else window))
                    while running and (len(running) > _STEPS_RUNNING or running[0][0].is_ready()):
                        yield collect(*running.popleft())
            while running:
                yield collect(*running.popleft())
        finally:
            run.counter.stop()


def _collect(
    run: CallRun[Any], engine: EncodeEngine, step: EncodeStep | None, window: Window | None
) -> Window | None:
    """Gives a step's results to the call. window: where the step is the last one of it, or None."""
    counter = run.counter
    if step is not None:
        engine.collect(step)
        chunks = step.requests.chunks
        first = step.requests.seqlens if chunks is None else np.flatnonzero(chunks == 0)
        counter.add_done(len(first))
    if run.open.error is not None:
        try:
            raise run.open.error
        finally:
            run.open.error = None  # its frames hold the call
    if window is None:
        return None
    for failure in window.failures:
        run.sink.fail(failure.index, failure.error)
    counter.add_done(len(window.failures))
    counter.add(window)
    if run.failed:
        counter.add_failures(run.failed)
    if window.start and engine.runner.device.type == "cpu":
        release_heap()  # a short call's only window keeps its pages for the next call
    return window


def _read_ahead(
    windows: Iterator[Sequence[Input]],
    read: Callable[[Sequence[Input], int], Window],
    running: Sequence[object],
) -> Generator[Window | None, None, None]:
    """Windows in order, read in threads before they are asked for; None while the next is not.

    running: steps that can be collected meanwhile; where there are none, a window is awaited.
    The first window is read at once, and no thread starts where there is no second one.
    """
    pool = None
    queue: deque[Future[Window]] = deque()
    first = next(windows, None)
    if first is None:
        return
    num_pulled, coming = len(first), Future[Window]()
    coming.set_result(read(first, 0))
    try:
        while True:
            while len(queue) < _WINDOWS_AHEAD and (texts := next(windows, None)) is not None:
                if pool is None:
                    process = OwnProcess()
                    pool = ThreadPoolExecutor(_WINDOWS_AHEAD, "bytetx-tokenizer")
                queue.append(pool.submit(read, texts, num_pulled))
                num_pulled += len(texts)
            yield coming.result()
            if not queue:
                return
            while running and not queue[0].done():
                yield None
            coming = queue.popleft()
    finally:
        if pool is not None and process.is_this:
            pool.shutdown(cancel_futures=True)
