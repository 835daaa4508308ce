"""CallRun: one call on its way through an engine: alone, in its own thread, or among others.

ReadingPool's threads tokenise the texts of all calls, those of many small calls together.
"""

import asyncio
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Sequence, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from bytetx.arguments import check_iterable
from bytetx.encode.engine import EncodeEngine
from bytetx.encode.model_runner import EncodeStep
from bytetx.encode.request import Failure, RunCounter, Window
from bytetx.encode.request_queue import OpenCall
from bytetx.encode.step import needs_no_step
from bytetx.errors import OptionError
from bytetx.ops.host import release_heap, release_heap_after
from bytetx.requests.inputs import Input, InputReader
from bytetx.runtime.forking import OwnProcess, computing
from bytetx.tasks.call import ListSink, Sink, TaskCall
from bytetx.tasks.chunks import ChunkSink, ChunkTask
from bytetx.tasks.progress import with_progress
from bytetx.tasks.results import Results, Stream

S = TypeVar("S")
T = TypeVar("T")


def forward(
    source: "asyncio.Future[S]", target: "asyncio.Future[T]", change: Callable[[S], T]
) -> None:
    """The target gets the source's result as `change` makes it, its error, or its cancellation.

    Cancelling the target cancels the source. Both are of one event loop; what `change` raises is
    the target's error.
    """

    def pass_on(_: object) -> None:
        if source.cancelled():
            target.cancel()
            return
        error = source.exception()  # seen, even where nobody waits any more
        if target.done():
            return
        if error is not None:
            target.set_exception(error)
            return
        try:
            target.set_result(change(source.result()))
        except Exception as raised:
            target.set_exception(raised)

    source.add_done_callback(pass_on)
    target.add_done_callback(lambda _: source.cancel())


def as_it_is(result: T) -> T:
    """The change of a result that is passed on as it is."""
    return result


async def in_own_thread(function: Callable[[], T]) -> T:
    """Runs a caller's code, which may block for as long as it likes, even for ever.

    The thread is its own, for those of asyncio.to_thread are few, and the interpreter waits for
    them at its end.
    """
    loop, context = asyncio.get_running_loop(), copy_context()
    future: asyncio.Future[T] = loop.create_future()

    def finish(result: T | None, error: BaseException | None) -> None:
        if future.done():  # cancelled
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]  # T may be None

    def run() -> None:
        result, error = None, None
        try:
            result = context.run(function)
        except BaseException as raised:
            error = raised
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(finish, result, error)

    Thread(target=run, name="bytetx-input", daemon=True).start()
    return await future


# Calls of at most so many texts are tokenised with others, and so many calls at a time.
_MAX_SMALL_TEXTS, _MAX_CALLS = 32, 64


class Owner(Protocol):
    """Who asked for texts to be read; called in a thread of the pool."""

    @property
    def is_dropped(self) -> bool:
        """Whether nobody needs the texts any more."""
        ...

    def accept(self, window: Window) -> None:
        """The texts as token ids."""
        ...

    def refuse(self, error: Exception) -> None:
        """Why there are none."""
        ...


@dataclass(frozen=True, slots=True)
class Reading:
    """Texts of one call, numbered from `start`."""

    owner: Owner
    reader: InputReader
    texts: Sequence[Input]
    start: int


class ReadingPool:
    """A thread takes what has come since it was busy, so that many callers share one tokenizer
    call and wake one thread.  Threads start with the first texts."""

    def __init__(self, num_threads: int):
        self._num_threads = num_threads
        self._readings: SimpleQueue[Reading | None] = SimpleQueue()
        self._threads: list[Thread] = []
        self._starting = Lock()

    def put(self, reading: Reading) -> None:
        """Has texts read; their owner hears of it."""
        self._readings.put(reading)
        if not self._threads:
            with self._starting:
                if not self._threads:
                    self._threads = [self._start(number) for number in range(self._num_threads)]

    def close(self) -> None:
        """Ends the threads, after what they were given."""
        for _ in self._threads:
            self._readings.put(None)

    def _start(self, number: int) -> Thread:
        thread = Thread(target=self._run, name=f"bytetx-tokenizer-{number}", daemon=True)
        thread.start()
        return thread

    def _run(self) -> None:
        while (first := self._readings.get()) is not None:
            readings = [first, *self._others()]
            num_tokens = sum(map(_num_tokens, readings))
            _read(readings)
            del readings, first  # while this thread waits it holds nothing of a caller
            release_heap_after(num_tokens)

    def _others(self) -> list[Reading]:
        """Readings that wait beside the first one, a share of it where there are other threads."""
        most = min(-(-self._readings.qsize() // self._num_threads), _MAX_CALLS)
        found: list[Reading] = []
        while len(found) < most:
            try:
                reading = self._readings.get_nowait()
            except Empty:
                break
            if reading is None:  # the end, which this thread finds again
                self._readings.put(None)
                break
            found.append(reading)
        return found


def _num_tokens(reading: Reading) -> int:
    """A guess of the tokens of a reading's texts before they are cut."""
    return sum(map(reading.reader.estimate_tokens, reading.texts))


def _read(readings: Sequence[Reading]) -> None:
    """Reads texts: those of small calls with readers that do the same in one tokenizer call."""
    groups: dict[Hashable, list[Reading]] = {}
    for reading in readings:
        if not reading.owner.is_dropped:
            groups.setdefault(_key(reading), []).append(reading)
    for group in groups.values():
        for reading in _read_together(group) if len(group) > 1 else group:
            _read_alone(reading)


def _key(reading: Reading) -> Hashable:
    """Equal for readings that one reader can do."""
    reader = reading.reader
    is_plain = type(reader) is InputReader and not (
        reader.cuts
        or reader.with_alignment
        or reader.needs_mask
        or reader.expansion
        or reader.prompts is not None
    )
    if not is_plain or len(reading.texts) > _MAX_SMALL_TEXTS:
        return id(reading)
    return id(reader.tokenizer), reader.prompt, reader.truncate, reader.max_tokens


def _read_together(group: Sequence[Reading]) -> Sequence[Reading]:
    """Reads the texts of several calls.  Returns calls with a bad text, whose errors name it by
    its number among all texts."""
    texts = [text for reading in group for text in reading.texts]
    starts = np.cumsum([0, *(len(reading.texts) for reading in group)]).tolist()
    try:
        with computing():
            window = replace(group[0].reader, keeps_errors=True).read(texts, 0)
    except Exception:
        return group
    requests = window.requests
    bad = np.searchsorted(starts, [failure.index for failure in window.failures], side="right") - 1
    pieces = requests.cut(np.searchsorted(requests.indices, starts).tolist())
    for number, (reading, piece) in enumerate(zip(group, pieces, strict=True)):
        if number in bad:
            continue
        own = replace(piece, indices=piece.indices + (reading.start - starts[number]))
        _accept(reading, Window(reading.start, len(reading.texts), own))
    return [group[number] for number in dict.fromkeys(bad.tolist())]


def _read_alone(reading: Reading) -> None:
    try:
        with computing():
            window = reading.reader.read(reading.texts, reading.start)
    except Exception as error:
        reading.owner.refuse(error)
    else:
        _accept(reading, window)


def _accept(reading: Reading, window: Window) -> None:
    try:
        reading.owner.accept(window)
    except Exception as error:
        reading.owner.refuse(error)


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
_WINDOW_STEPS = (1, 2, MAX_WINDOW_STEPS)  # the first one's, the second one's, and all others'
# What is read and not computed, as a common prefix is for each text but one, is admitted as a part
# of what is computed.
_READ_PART = 4
# The same where a GPU computes common prefixes once: it waits for the first window, of which many
# times more is read than computed.
_SHARED_WINDOW_STEPS = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 1)
# A step that computes common prefixes once may hold as many times the tokens of another, or more.
_SHARED_STEPS = 8
# A result of more texts is put together in a thread.
_MAX_INLINE_TEXTS = 256


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

    def expect(self, window: Window) -> Window:
        """A window that was read, with the call's adapters; its chunks are awaited."""
        adapters = self.call.adapters
        if adapters is not None:
            window = replace(window, requests=window.requests.with_adapters(adapters))
        if self.chunks is not None:
            self.chunks.expect(window.requests)
        return window


def windows(
    inputs: Iterable[Input],
    *,
    estimate_tokens: Callable[[Input], int],
    token_budget: int,
    num_steps: Sequence[float] = _WINDOW_STEPS,
) -> Iterator[list[Input]]:
    """Cuts the input into windows, pulling no more of it than the window that is asked for.

    The first window is about one step long, so that the first forward pass starts at once.
    estimate_tokens: a cheap guess of one input's tokens; it must be at least 1, so that a window
    always ends.  num_steps: of each window; the last one's is that of all after it.
    """
    number, limits = 0, [steps * token_budget * _WINDOW_FILL for steps in num_steps]
    window: list[Input] = []
    num_tokens = 0
    for item in inputs:
        window.append(item)
        num_tokens += estimate_tokens(item)
        if num_tokens >= limits[min(number, len(limits) - 1)]:
            yield window
            window, num_tokens = [], 0
            number += 1
    if window:
        yield window


def _estimate_work(reader: InputReader, engine: EncodeEngine) -> Callable[[Input], int]:
    """A guess of the tokens that each of consecutive inputs adds to a step that has the one before.

    They are its own, less what it has in common with that one where the engine shares prefixes.
    """
    if not engine.shares_prefixes:
        return reader.estimate_tokens
    before: Input = ""

    def estimate(item: Input) -> int:
        nonlocal before
        tokens, before = reader.estimate_work(item, before), item
        return tokens

    return estimate


class HasEncoder(Protocol):
    """A Model, for a call that runs."""

    encoder: EncodeEngine


def run_encode(
    call: TaskCall[Any], model: HasEncoder, *, stream: object, show_progress: bool
) -> Any:
    """All results of a call, computed in this thread; or a Stream, while it is read.

    Raises OptionError for a stream where results depend on all texts.
    """
    if stream and call.why_no_stream is not None:
        raise OptionError(call.why_no_stream)
    sink = ListSink[Results[Any]](lambda results: results) if stream else None
    run = CallRun(call, sink=sink)
    if run.num_given == 1 and sink is None and not show_progress:
        _run_text(run, model.encoder)
    else:
        steps = _steps(run, model.encoder)
        if show_progress:
            title, total = call.title, run.num_given
            steps = with_progress(steps, lambda: run.counter.num_done, title=title, total=total)
        if sink is not None:
            return Stream(_by_windows(steps, sink), run.counter.stats)
        for _ in steps:
            pass
    stats = run.counter.stats()
    return run.sink.result(stats.num_texts, stats)


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


def _steps(run: CallRun[Any], engine: EncodeEngine) -> Generator[Window | None, None, None]:
    """Runs a call: yields after each step, and then its window where the step is the last of it.

    Texts are tokenised in threads, ahead of the device; the input itself is pulled in this thread.
    A bounded number of windows is held, and the threads have ended when the generator ends or is
    closed.  A device never waits for results to be collected: the next steps, of the next window
    too, are launched behind the one whose results are awaited.
    """
    reader, device = run.call.reader, engine.runner.device
    is_shared = device.type == "cuda" and engine.shares_prefixes
    cut = windows(
        run.call.texts,
        estimate_tokens=_estimate_work(reader, engine),
        token_budget=engine.token_budget,
        num_steps=_SHARED_WINDOW_STEPS if is_shared else _WINDOW_STEPS,
    )
    running: deque[tuple[EncodeStep, Window | None]] = deque()
    collect = partial(_collect, run, engine)
    with (
        computing(device),
        closing(_read_ahead(cut, reader.read, running)) as ahead,
    ):
        try:
            for window in ahead:
                if window is None:
                    yield collect(*running.popleft())
                    continue
                window = run.expect(window)
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


def _run_text(run: CallRun[Any], engine: EncodeEngine) -> None:
    """Runs a call of one text, beside which no other could be read or computed."""
    try:
        with computing(engine.runner.device):
            window = run.expect(run.call.reader.read([*run.call.texts], 0))
            requests, task = window.requests, run.open.task
            rows: Any = None
            if needs_no_step(task):
                rows = task.without_step(engine.runner.transformer, requests)
            if rows is not None:
                run.sink.put_rows(requests.indices, rows)
                run.counter.num_done += len(requests)
            else:
                for step in engine.plan(run.open, requests):  # one, or those of its chunks
                    engine.launch(step)
                    _collect(run, engine, step, None)
            _collect(run, engine, None, window)
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
        counter.num_done += len(first)
    if run.open.error is not None:
        try:
            raise run.open.error
        finally:
            run.open.error = None  # its frames hold the call
    if window is None:
        return None
    for failure in window.failures:
        run.sink.fail(failure.index, failure.error)
    counter.num_done += len(window.failures)
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
    first = next(windows, None)
    if first is None:
        return
    num_pulled, queue = len(first), deque([Future[Window]()])
    queue[0].set_result(read(first, 0))
    try:
        while True:
            while len(queue) <= _WINDOWS_AHEAD and (texts := next(windows, None)) is not None:
                if pool is None:
                    process = OwnProcess()
                    pool = ThreadPoolExecutor(_WINDOWS_AHEAD, "bytetx-tokenizer")
                queue.append(pool.submit(read, texts, num_pulled))
                num_pulled += len(texts)
            if not queue:
                return
            while running and not queue[0].done():
                yield None
            yield queue.popleft().result()
    finally:
        if pool is not None and process.is_this:
            pool.shutdown(cancel_futures=True)


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
        self.tokenize_seconds = 0.0
        # Hears of each window before the engine does.
        self.on_read: Callable[[Window], None] | None = None
        self._failures: list[Failure] = []  # the texts that were refused
        self._reading, self._called = (0, 0), 0.0  # as announced, and when

    async def result(self) -> T:
        """The call's result. Raises its error; cancelling drops what is queued."""
        await self.done()
        if self.counter.num_done <= _MAX_INLINE_TEXTS:
            return self._result()
        return await asyncio.to_thread(self._result)

    async def done(self) -> None:
        """Waits for the results of all texts."""
        try:
            await self._feed()
            await self._engine.wait(self.open)
        finally:
            self._engine.end(self.open)

    async def _feed(self) -> None:
        """Announces texts and has them tokenised, window after window; does not wait for the last.

        The next window is announced once the one before it is in the queue.
        """
        limit = MAX_WINDOW_STEPS * self._engine.token_budget
        if self._engine.shares_prefixes:
            limit *= _SHARED_STEPS
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
        most, reader = self._max_window_texts, self.call.reader
        # One for the windows and one for their pieces: each remembers the text before.
        work, estimate = (_estimate_work(reader, self._engine) for _ in range(2))
        texts, budget = self.call.texts, self._engine.token_budget
        for window in windows(texts, estimate_tokens=work, token_budget=budget):
            for first in range(0, len(window), most):
                piece = window[first : first + most]
                tokens = sum(map(estimate, piece))
                if self._engine.shares_prefixes:
                    read = sum(map(reader.estimate_tokens, piece))
                    tokens = max(tokens, read // _READ_PART)
                yield piece, tokens

    @property
    def is_dropped(self) -> bool:
        return self.open.is_dropped

    def accept(self, window: Window) -> None:
        """Queues a window's texts."""
        if self.call.adapters is not None:
            requests = window.requests.with_adapters(self.call.adapters)
            window = replace(window, requests=requests)
        if self.on_read is not None:
            self.on_read(window)
        self.counter.add(window)
        self.counter.num_done += window.num_texts
        self._failures += window.failures
        if self.chunks is not None:
            self.chunks.expect(window.requests)
        self.tokenize_seconds += time.perf_counter() - self._called
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
        self.counter.tokenize_seconds = self.tokenize_seconds
        self.counter.queue_seconds = self.open.queue_seconds / count
        self.counter.compute_seconds = self.open.compute_seconds / count
        self.counter.stop()
        result: T = self.sink.result(self.counter.num_done, self.counter.stats())
        return result
