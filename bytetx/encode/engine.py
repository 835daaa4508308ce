"""EncodeEngine: the thread that runs the texts of all callers through one model, step by step."""

import asyncio
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from threading import Condition, Thread
from typing import Any

import numpy as np

from bytetx.encode.finite import not_finite_error
from bytetx.encode.model_runner import Launched, Runner
from bytetx.encode.open_call import OpenCall, waiters_of, wake
from bytetx.encode.request import Failure, Requests
from bytetx.encode.request_queue import QueuedCall, RequestQueue, Taken
from bytetx.encode.shared_pass import Part, SharedPass, join_requests
from bytetx.encode.step import is_head
from bytetx.errors import (
    ClosedError,
    DeviceLostError,
    ForkError,
    QueueFullError,
    TooLargeError,
)
from bytetx.runtime.forking import OwnProcess, computing

# Steps that a device has: one runs while the next one waits behind it.
_STEPS_IN_FLIGHT = 2
# While a device computes and nothing waits, it is asked so often whether it is done.
_POLL_S = 1e-4
# A step is long where calls with at least so many tokens in it have half of its tokens. A call is
# short beside it where the largest of these shares is so many times as long.
_LONG_TOKENS, _SHORT = 256, 8
# While short calls arrive beside long ones, steps are cut to about so long; and so long after one.
_TARGET_STEP_S, _SHORT_MEMORY_S = 0.03, 1.0
_MIN_STEP_TOKENS = 256
# The estimate of tokens per second: the weight of a step, and the fewest tokens of one that counts.
_RATE_WEIGHT, _RATE_TOKENS = 0.2, 64
_MIN_RETRY_S, _UNKNOWN_RETRY_S = 0.01, 1.0
_MAX_RECENT = 512


@dataclass(frozen=True, slots=True)
class StepStats:
    """One forward pass.

    time: of its end, as time.time().  padded_tokens: tokens of the same batch padded to its
    longest text.  seconds: from its start to its results.
    """

    time: float
    num_sequences: int
    total_tokens: int
    padded_tokens: int
    seconds: float


@dataclass(slots=True)
class EngineCounts:
    """Counts of an engine's texts since it was made; see AsyncStats."""

    num_done: int = 0
    num_failed: int = 0
    num_dropped: int = 0
    num_refused: int = 0
    total_tokens: int = 0
    padded_tokens: int = 0
    num_steps: int = 0


@dataclass(slots=True)
class _Rows:
    """The rows start to stop of a step: texts of one call."""

    call: OpenCall
    taken: Taken
    indices: np.ndarray
    start: int
    stop: int


@dataclass(slots=True, eq=False)
class _Step:
    """Texts that run together.

    short_tokens: of a call that is short beside the step; 0 where none is.
    nested_tokens, nested_seconds: of short steps that ran between its layers.
    """

    rows: list[_Rows]
    requests: Requests
    task: SharedPass
    short_tokens: int
    start_time: float = 0.0
    nested_tokens: int = 0
    nested_seconds: float = 0.0
    launched: Launched | None = None
    failures: Sequence[Failure] = field(default_factory=tuple)

    @property
    def calls(self) -> list[OpenCall]:
        return list(dict.fromkeys(rows.call for rows in self.rows))


class EncodeEngine:
    """Packs the texts of all open calls into steps and runs these, in a thread of its own.

    Texts of several tasks share a step where their tasks are heads on the last hidden states. On a
    GPU the next step is launched while one runs. On a CPU a step computes in this thread; texts
    that are short beside it run between its layers.  An error that no text caused ends all calls
    with that error and closes the engine.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        token_budget: int,
        max_queued_requests: int,
        max_queued_tokens: int,
        age_limit_s: float,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """token_budget: tokens of a step.  The limits count texts that are being tokenised, too;
        an empty queue takes whatever comes."""
        self._runner, self._token_budget, self._clock = runner, token_budget, clock
        self._max_requests, self.max_queued_tokens = max_queued_requests, max_queued_tokens
        self._changed = Condition()
        self._queue = RequestQueue(age_limit_s=age_limit_s)
        self._open: set[OpenCall] = set()
        self._num_reading = self._reading_tokens = 0
        self._planned: deque[_Step] = deque()  # to run before anything is taken from the queue
        self._running: deque[_Step] = deque()
        self._current: _Step | None = None
        self._short_seen = -np.inf
        self._rate: float | None = None
        self._last_end = 0.0
        self._is_closing = self._is_closed = False
        self._error: BaseException | None = None
        self._thread: Thread | None = None
        self._process = OwnProcess()
        self._counts, self.recent = EngineCounts(), deque[StepStats](maxlen=_MAX_RECENT)

    # What callers use, from any thread.

    def open(
        self, call: OpenCall, num_texts: int, tokens: int, *, is_bounded: bool = False
    ) -> None:
        """Registers a call whose first texts are about to be tokenised.

        tokens: a guess.  is_bounded: refuse what is more than the limits even if nothing waits.
        Raises QueueFullError, TooLargeError, or why the engine takes no calls.
        """
        if self._thread is not None:
            self._process.check("an AsyncModel that was used")
        with self._changed:
            if self._is_closing:
                raise self._closed_error()
            if is_bounded:
                self._check_size(num_texts, tokens)
            self._check_room(num_texts, tokens, num_calls=call.num_calls)
            if self._thread is None:
                self._process = OwnProcess()
                self._thread = Thread(target=self._run, name="bytetx-encode", daemon=True)
                self._thread.start()
            self._open.add(call)
            self._count_reading(call, num_texts, tokens)

    @contextmanager
    def reserve(self, num_texts: int, tokens: int) -> Iterator[None]:
        """Counts work without a forward pass, such as tokenising alone, as texts that are read.

        Raises QueueFullError, TooLargeError, or why the engine takes no calls.
        """
        with self._changed:
            self.check_open()
            self._check_size(num_texts, tokens)
            self._check_room(num_texts, tokens, num_calls=1)
            self._num_reading += num_texts
            self._reading_tokens += tokens
        try:
            yield
        finally:
            with self._changed:
                self._num_reading -= num_texts
                self._reading_tokens -= tokens

    @property
    def is_broken(self) -> bool:
        """Whether an error has ended the thread."""
        return self._error is not None

    def check_open(self) -> None:
        """Raises why the engine takes no calls, where it takes none."""
        if self._is_closing:
            raise self._closed_error()

    def extend(self, call: OpenCall, num_texts: int, tokens: int) -> None:
        """More texts of an open call are about to be tokenised."""
        with self._changed:
            if self._is_closed:
                raise self._closed_error()
            if not call.is_dropped:
                self._count_reading(call, num_texts, tokens)

    def submit(self, call: OpenCall, requests: Requests, *, num_read: int, tokens: int) -> None:
        """Queues texts whose tokenisation ended; num_read and tokens as they were announced."""
        with self._changed:
            if call.is_dropped:  # and what it had announced with it
                return
            self._count_reading(call, -num_read, -tokens)
            if self._is_closed:
                self._fail(call, self._closed_error())
            else:
                self._add(call, requests)
            waiters = waiters_of([call])
        wake(waiters)

    def fail(self, call: OpenCall, error: BaseException) -> None:
        """Ends a call with an error, such as one of its tokenisation."""
        with self._changed:
            self._fail(call, error)
            waiters = waiters_of([call])
        wake(waiters)

    async def wait(
        self, call: OpenCall, *, below_tokens: int = 0, after_reading: bool = False
    ) -> None:
        """Until all announced texts of a call are done, or fewer tokens are open; or it failed.

        after_reading: at least until what was announced is in the queue.
        Raises the call's error.
        """
        with self._changed:
            call.wakes_at, call.wakes_after_reading = below_tokens, after_reading
            if not call.has_room:
                call.waiter = asyncio.get_running_loop().create_future()
        if call.waiter is not None:
            try:
                await call.waiter
            finally:
                call.waiter = None
        if call.error is not None:
            raise call.error

    def end(self, call: OpenCall) -> None:
        """Forgets a call that was answered, or that nobody waits for any more."""
        if not self._process.is_this:
            return  # a forked child, where the lock may stay locked
        with self._changed:
            self._drop(call)
            self._open.discard(call)
            if self._is_closing:
                self._changed.notify_all()

    def close(self, *, drain_s: float = 0.0) -> None:
        """Takes no more calls, waits for open ones that long, and ends the others and the thread.

        Steps that run end, and their results are given.
        """
        if not self._process.is_this:
            return
        with self._changed:
            self._is_closing = True
            if drain_s > 0 and self._thread is not None:
                self._changed.wait_for(lambda: not self._open or self._is_closed, drain_s)
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    @property
    def num_queued(self) -> int:
        """Texts that wait, those that are tokenised among them."""
        return self._queue.num_queued + self._num_reading

    @property
    def queued_tokens(self) -> int:
        return self._queue.queued_tokens + self._reading_tokens

    @property
    def num_running(self) -> int:
        with self._changed:
            return sum(call.num_open - call.num_queued for call in self._open)

    @property
    def num_calls(self) -> int:
        with self._changed:
            return sum(call.num_calls for call in self._open)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second in the last steps; 0 before the first."""
        return self._rate or 0.0

    def counts(self) -> tuple[EngineCounts, list[StepStats]]:
        """Sums, and the last steps, oldest first; both are the caller's."""
        with self._changed:
            counts = EngineCounts(
                *(getattr(self._counts, name) for name in EngineCounts.__dataclass_fields__)
            )
            return counts, list(self.recent)

    def _check_size(self, num_texts: int, tokens: int) -> None:
        """Raises TooLargeError for what would be refused whenever anything else waits."""
        if num_texts > self._max_requests:
            raise TooLargeError(
                f"{num_texts} texts are more than may wait at all, which is {self._max_requests} "
                "(max_queued_requests): send fewer at a time"
            )
        if tokens > self.max_queued_tokens:
            raise TooLargeError(
                f"{num_texts} texts with about {tokens} tokens are more than may wait at all, "
                f"which is {self.max_queued_tokens} tokens (max_queued_tokens): send fewer or "
                "shorter texts at a time"
            )

    def _check_room(self, num_texts: int, tokens: int, *, num_calls: int) -> None:
        queued, queued_tokens = self.num_queued, self.queued_tokens
        if not queued:
            return
        excess_texts = queued + num_texts - self._max_requests
        excess_tokens = queued_tokens + tokens - self.max_queued_tokens
        if excess_texts <= 0 and excess_tokens <= 0:
            return
        self._counts.num_refused += num_calls
        to_run = max(excess_tokens, excess_texts * queued_tokens / queued)
        seconds = _UNKNOWN_RETRY_S if self._rate is None else to_run / self._rate
        seconds = max(seconds, _MIN_RETRY_S)
        what = f"{queued} of at most {self._max_requests} texts (max_queued_requests)"
        if excess_texts <= 0:
            what = f"{queued_tokens} of at most {self.max_queued_tokens} tokens (max_queued_tokens)"
        raise QueueFullError(
            f"the queue holds {what}, and {num_texts} more with about {tokens} tokens do not fit; "
            f"try again in {seconds:.2f} s",
            retry_after_s=seconds,
        )

    def has_room(self, num_texts: int, tokens: int) -> bool:
        """Whether the limits allow more texts of a call that is open."""
        return (
            self.num_queued + num_texts <= self._max_requests
            and self.queued_tokens + tokens <= self.max_queued_tokens
        )

    def _add(self, call: OpenCall, requests: Requests) -> None:
        now = self._clock()
        call.num_open += len(requests)
        call.open_tokens += requests.total_tokens
        self._queue.add(call, requests, now)
        if self._current is not None and requests.total_tokens <= self._current.short_tokens:
            self._short_seen = now
        self._changed.notify_all()

    def _count_reading(self, call: OpenCall, num_texts: int, tokens: int) -> None:
        call.num_reading += num_texts
        call.reading_tokens += tokens
        self._num_reading += num_texts
        self._reading_tokens += tokens

    def _closed_error(self) -> BaseException:
        if self._error is not None:
            return self._error.with_traceback(None)  # that of every caller before would grow
        return ClosedError("the AsyncModel is closed; make a new one of the Model")

    def _fail(self, call: OpenCall, error: BaseException) -> None:
        if call.error is None:
            call.error = error
            self._drop(call)

    def _drop(self, call: OpenCall) -> None:
        """Drops a call's texts from the queue, and later its results."""
        if call.is_dropped:
            return
        self._counts.num_dropped += call.num_open
        self._num_reading -= call.num_reading
        self._reading_tokens -= call.reading_tokens
        call.num_reading = call.reading_tokens = 0
        self._queue.drop(call)
        call.num_open = call.open_tokens = 0

    # The thread.

    def _run(self) -> None:
        error: BaseException = ClosedError("the AsyncModel was closed before this call had results")
        try:
            while self._turn():
                pass
            while self._running:
                self._collect(self._running.popleft())
        except BaseException as raised:
            error = self._error = raised
        with self._changed:
            self._is_closing = self._is_closed = True
            calls = list(self._open)
            for call in calls:
                if call.num_open or call.num_reading:
                    self._fail(call, error)
            self._planned.clear()
            self._running.clear()
            waiters = waiters_of(calls)
            self._changed.notify_all()
        wake(waiters)

    def _turn(self) -> bool:
        """Launches a step where one can run, collects what is done; False once it is closed."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._queue or self._planned or self._running or self._is_closed
            )
            if self._is_closed:
                return False
            step = self._next_step() if len(self._running) < _STEPS_IN_FLIGHT else None
        if step is not None:
            self._launch(step)
        if self._running and (
            len(self._running) >= _STEPS_IN_FLIGHT or _is_ready(self._running[0])
        ):
            self._collect(self._running.popleft())
        elif self._running and step is None:
            with self._changed:
                if not self._queue and not self._is_closed:
                    self._changed.wait(_POLL_S)
        return True

    def _next_step(self) -> _Step | None:
        if not self._planned:
            taken = self._queue.take(self._step_tokens(), self._clock())
            self._planned += self._plan(taken)
        return self._planned.popleft() if self._planned else None

    def _step_tokens(self) -> int:
        """The budget of the next step: smaller while short calls come beside long ones."""
        is_alone = self._clock() - self._short_seen > _SHORT_MEMORY_S
        if is_alone or self._rate is None:
            return self._token_budget
        target = max(int(self._rate * _TARGET_STEP_S), _MIN_STEP_TOKENS)
        return min(target, self._token_budget)

    def _plan(self, taken: Sequence[Taken]) -> list[_Step]:
        """Steps of these texts: one of all tasks that share a pass, and one of each other task."""
        by_key: dict[Any, list[Taken]] = {}
        for some in taken:
            by_key.setdefault(_open(some).key, []).append(some)
        sharing: list[list[Taken]] = []
        steps: list[_Step] = []
        for group in by_key.values():
            if is_head(_open(group[0]).task):
                sharing.append(group)
            else:
                steps.append(_step([group]))
        return [_step(sharing), *steps] if sharing else steps

    def _launch(self, step: _Step, *, may_interrupt: bool = True) -> None:
        """Starts a step; where that fails, its calls run alone, or the only one gets the error."""
        step.start_time = self._clock()
        for rows in step.rows:
            waited = step.start_time - rows.taken.piece.time
            rows.call.queue_seconds += rows.taken.num_texts * waited
        between = None
        if may_interrupt and step.short_tokens and self._runner.is_interruptible:
            between = partial(self._run_short, step)
        outer, self._current = self._current, step
        try:
            with computing(self._runner.device):
                step.launched = self._runner.launch(
                    step.requests, step.task, between_layers=between
                )
        except (DeviceLostError, ForkError):
            raise
        except Exception as error:
            self._run_alone(step, error)
            return
        finally:
            if outer is not None or self._runner.is_interruptible:
                self._current = outer
        self._running.append(step)

    def _run_short(self, outer: _Step) -> None:
        """Before a linear layer of a step: runs texts that are short beside it.

        They get at most as many tokens as the step has.
        """
        if outer.nested_tokens >= outer.requests.total_tokens or not self._queue:
            return
        with self._changed:
            taken = self._queue.take_short(outer.short_tokens)
            if not taken:
                return
            self._short_seen = self._clock()
            steps = self._plan(taken)
        start = self._clock()
        for step in steps:
            outer.nested_tokens += step.requests.total_tokens
            self._launch(step, may_interrupt=False)
            while self._running:
                self._collect(self._running.pop())
        outer.nested_seconds += self._clock() - start

    def _run_alone(self, step: _Step, error: Exception) -> None:
        """After a failure that no text is known to have caused."""
        if len(step.calls) == 1:
            self.fail(step.calls[0], error)
            return
        error.__traceback__ = None  # its frames hold the step
        by_call: dict[QueuedCall, list[Taken]] = {}
        for rows in step.rows:
            by_call.setdefault(rows.call, []).append(rows.taken)
        with self._changed:
            kept = {call: taken for call, taken in by_call.items() if not call.is_dropped}
            self._planned.extendleft(_step([taken]) for taken in reversed(kept.values()))

    def _collect(self, step: _Step) -> None:
        """Waits for a step and gives its results to their calls."""
        launched = step.launched
        assert launched is not None
        if self._current is step:
            self._current = None
        try:
            outputs = launched.part_outputs()
            finished = [
                found
                for part, own in zip(launched.parts, outputs, strict=True)
                if len(part.step.requests)
                for found in step.task.finish_parts(own, part.step)
            ]
        except (DeviceLostError, ForkError):
            raise
        except Exception as error:
            self._run_alone(step, error)
            return
        end = self._clock()
        starts = [rows.start for rows in step.rows]
        failures = list(launched.failures)
        for numbers, results, failed in finished:
            self._deliver(step.rows, starts, numbers, results)
            failures += [Failure(number, not_finite_error(number)) for number in failed]
        for failure in failures:
            self._deliver_failure(step.rows[bisect_right(starts, failure.index) - 1], failure)
        with self._changed:
            self._count_step(step, end, num_failed=len(failures))
            waiters = waiters_of(step.calls)
        wake(waiters)

    def _deliver(
        self,
        rows: Sequence[_Rows],
        starts: Sequence[int],
        numbers: np.ndarray,
        results: Sequence[Any],
    ) -> None:
        """Gives each call its share of the results of the rows `numbers`, which rise."""
        if not len(numbers):
            return
        first, last = int(numbers[0]), int(numbers[-1])
        for own in rows[bisect_right(starts, first) - 1 :]:
            if own.start > last:
                return
            start, end = np.searchsorted(numbers, (own.start, own.stop)).tolist()
            if own.call.is_dropped or start == end:
                continue
            indices = own.indices[numbers[start:end] - own.start]
            try:
                own.call.receiver.put_rows(indices, results[start:end])
            except Exception as error:
                self.fail(own.call, error)

    def _deliver_failure(self, rows: _Rows, failure: Failure) -> None:
        if rows.call.is_dropped:
            return
        index = int(rows.indices[failure.index - rows.start])
        text = str(failure.error).replace(f"text {failure.index} ", f"text {index} ", 1)
        error = type(failure.error)(text)
        error.__cause__ = failure.error.__cause__
        if rows.call.keeps_errors:
            rows.call.failed.add(index)
            try:
                rows.call.receiver.fail(index, error)
            except Exception as raised:
                self.fail(rows.call, raised)
        else:
            self.fail(rows.call, error)

    def _count_step(self, step: _Step, end: float, *, num_failed: int) -> None:
        seconds = end - step.start_time
        for rows in step.rows:
            call, num_texts = rows.call, rows.taken.num_texts
            if call.is_dropped:
                continue
            call.compute_seconds += num_texts * seconds
            call.num_computed += num_texts
            call.num_open -= num_texts
            call.open_tokens -= rows.taken.total_tokens
        requests = step.requests
        padded = len(requests) * int(requests.seqlens.max(initial=0))
        counts = self._counts
        counts.num_done += len(requests) - num_failed
        counts.num_failed += num_failed
        counts.total_tokens += requests.total_tokens
        counts.padded_tokens += padded
        counts.num_steps += 1
        stats = StepStats(time.time(), len(requests), requests.total_tokens, padded, seconds)
        self.recent.append(stats)
        alone = end - max(step.start_time, self._last_end) - step.nested_seconds
        if step.nested_tokens:
            alone = seconds - step.nested_seconds
        self._last_end = end
        if alone > 0 and (self._rate is None or requests.total_tokens >= _RATE_TOKENS):
            rate = requests.total_tokens / alone
            old = rate if self._rate is None else self._rate
            self._rate = old + _RATE_WEIGHT * (rate - old)


def _step(groups: Sequence[Sequence[Taken]]) -> _Step:
    """The texts of some tasks, those of each task together."""
    parts: list[Part] = []
    rows: list[_Rows] = []
    pieces: list[Requests] = []
    shares: dict[QueuedCall, int] = {}
    start = 0
    for group in groups:
        first = start
        for taken in group:
            call, own = _open(taken), taken.requests()
            rows.append(_Rows(call, taken, own.indices, start, start + len(own)))
            pieces.append(own)
            shares[call] = shares.get(call, 0) + own.total_tokens
            start += len(own)
        task = rows[-1].call.task
        parts.append(Part(task, first, start))
    requests = join_requests(pieces)
    large = [share for share in shares.values() if share >= _LONG_TOKENS]
    is_long = 2 * sum(large) >= requests.total_tokens
    short_tokens = max(large, default=0) // _SHORT if is_long else 0
    return _Step(rows, requests, SharedPass(parts), short_tokens)


def _open(taken: Taken) -> OpenCall:
    assert isinstance(taken.call, OpenCall)  # no other call is queued
    return taken.call


def _is_ready(step: _Step) -> bool:
    assert step.launched is not None
    return step.launched.is_ready()
