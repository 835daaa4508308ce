"""EncodeEngine: runs texts through one model, step by step, for one caller or for all of them."""

import asyncio
import sys
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from threading import Condition, Thread
from typing import Any, Protocol

import numpy as np

from bytetx.encode.model_runner import EncodeStep, Runner, Share, step_of, steps_of
from bytetx.encode.request import EngineCounts, Failure, Requests, StepStats
from bytetx.encode.request_queue import (
    OpenCall,
    RequestQueue,
    even_share,
    longest_first,
    waiters_of,
    wake,
)
from bytetx.encode.step import (
    SharedPass,
    finish_finite,
    not_finite_error,
)
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
# After a step that shares prefixes the next one waits so long for texts that are being read.
_GATHER_S = 0.01
# While short calls arrive beside long ones, steps are cut to about so long; and so long after one.
_TARGET_STEP_S, _SHORT_MEMORY_S = 0.03, 1.0
_MIN_STEP_TOKENS = 256
# The estimate of tokens per second: the weight of a step, and the fewest tokens of one that counts.
_RATE_WEIGHT, _RATE_TOKENS = 0.2, 64
_MIN_RETRY_S, _UNKNOWN_RETRY_S = 0.01, 1.0
_MAX_RECENT = 512


class TextSource(Protocol):
    """Texts from elsewhere, such as other processes; the engine's thread asks for them."""

    def feed(self) -> None:
        """Queues what has come by `EncodeEngine.put`; before each step, and between its layers."""
        ...

    def give(self) -> None:
        """Hands on the results that the receivers of its calls got since the last time."""
        ...

    def may_wait(self) -> bool:
        """Whether nothing has come; then `EncodeEngine.wake` is called once something has."""
        ...

    def end(self) -> None:
        """The thread has ended: its calls have no results any more."""
        ...


class EncodeEngine:
    """Runs steps of texts: `plan`, `launch` and `collect`.

    A caller alone does so in its own thread, with the texts of its call.  The texts of all calls
    that are opened are packed into steps together, which run in a thread of the engine. Texts of
    several tasks share a step where their tasks are heads on the last hidden states. On a GPU the
    next step is launched while one runs. On a CPU a step computes in this thread; texts that are
    short beside it run between its layers.  An error that no text caused ends all calls with that
    error and closes the engine.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        token_budget: int,
        max_queued_requests: int = sys.maxsize,
        max_queued_tokens: int = sys.maxsize,
        age_limit_s: float = 2.0,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """token_budget: tokens of a step.  The limits count texts that are being tokenised, too;
        an empty queue takes whatever comes."""
        self.runner, self.token_budget, self._clock = runner, token_budget, clock
        self._max_requests, self.max_queued_tokens = max_queued_requests, max_queued_tokens
        # Whether a step computes tokens that texts have in common once.
        self.shares_prefixes = runner.prefix_multiple > 0
        self._changed = Condition()
        self._queue = self._new_queue(age_limit_s)
        self._open: set[OpenCall] = set()
        self._num_reading = self._reading_tokens = 0
        self._planned: deque[EncodeStep] = deque()  # to run before anything is taken from the queue
        self._running: deque[EncodeStep] = deque()
        self._current: EncodeStep | None = None
        self._has_shared = False  # the step that was launched last
        self._short_seen = -np.inf
        self._rate: float | None = None
        self._last_end = 0.0
        self._sources: list[TextSource] = []
        self._is_closing = self._is_closed = self._is_woken = False
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
            self._start_thread()
            self._open.add(call)
            self._count_reading(call, num_texts, tokens)

    def _start_thread(self) -> None:
        if self._thread is None:
            self._process = OwnProcess()
            self._thread = Thread(target=self._run, name="bytetx-encode", daemon=True)
            self._thread.start()

    def add_source(self, source: TextSource) -> None:
        """The thread runs its texts, too, as long as it runs."""
        with self._changed:
            self._sources.append(source)
            self._start_thread()

    def put(self, call: OpenCall, requests: Requests) -> None:
        """Opens a call of a source, whose texts are read already, and queues them.

        Raises QueueFullError, or why the engine takes no calls.
        """
        with self._changed:
            self.check_open()
            self._check_room(len(requests), requests.total_tokens, num_calls=call.num_calls)
            self._open.add(call)
            self._add(call, requests)

    def runs_at_once(self, tokens: int) -> bool:
        """Whether the next step has room for all that waits and a source's texts of so many tokens.

        For the thread: asked by a source that is about to put them.
        """
        is_nested = self._current is not None and self.runner.is_interruptible
        return not is_nested and self._queue.queued_tokens + tokens <= self._step_tokens()

    def wake(self) -> None:
        """Has the thread ask its sources."""
        with self._changed:
            self._is_woken = True
            self._changed.notify_all()

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
            call.error = None  # raised by now; its frames hold the call
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
        """Computed tokens per second in the last steps; 0 before the first."""
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
        current = self._current  # read once: the thread that runs steps takes it away
        if current is not None and requests.total_tokens <= current.short_tokens:
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

    # What a caller alone uses in its own thread, and the engine's thread for all others.

    def plan(self, call: OpenCall, requests: Requests) -> list[EncodeStep]:
        """Steps of texts that wait for no others."""
        call.num_open += len(requests)
        call.open_tokens += requests.total_tokens
        now, budget = self._clock(), self.token_budget
        if requests.total_tokens <= budget:
            own = longest_first(requests) if len(requests) > 1 else requests
            return [step_of([[Share(call, own, own.total_tokens, now)]])] if len(own) else []
        queue, steps = self._new_queue(np.inf), list[EncodeStep]()
        queue.add(call, requests, now)
        while queue:
            steps += steps_of(queue.take(even_share(queue.queued_tokens, budget), now))
        return steps

    def _new_queue(self, age_limit_s: float) -> RequestQueue:
        return RequestQueue(age_limit_s=age_limit_s, shares_prefixes=self.shares_prefixes)

    def launch(self, step: EncodeStep, *, between_layers: Callable[[], None] | None = None) -> None:
        """Starts a step; where that fails, its calls run alone, or the only one gets the error."""
        step.start_time = self._clock()
        try:
            step.launched = self.runner.launch(
                step.requests, step.task, between_layers=between_layers
            )
        except (DeviceLostError, ForkError):
            raise
        except Exception as error:
            self._run_alone(step, error)

    def collect(self, step: EncodeStep) -> None:
        """Waits for a step that was launched and gives its results to their calls, once."""
        launched, step.launched = step.launched, None  # it holds the outputs
        if launched is None:  # it failed
            return
        try:
            outputs = launched.outputs_by_pass()
            finished = [
                found
                for one, own in zip(launched.passes, outputs, strict=True)
                if len(one.step.requests)
                for found in (
                    step.task.finish_parts(own, one.step)
                    if isinstance(step.task, SharedPass)
                    else [finish_finite(step.task, own, one.step)]
                )
            ]
        except (DeviceLostError, ForkError):
            raise
        except Exception as error:
            self._run_alone(step, error)
            return
        end = self._clock()
        starts = [share.start for share in step.shares]
        failures = list(launched.failures)
        for numbers, results, failed in finished:
            self._deliver(step.shares, starts, numbers, results)
            failures += [Failure(number, not_finite_error(number)) for number in failed]
        for failure in failures:
            self._deliver_failure(step.shares[bisect_right(starts, failure.index) - 1], failure)
        with self._changed:
            computed = sum(map(attrgetter("computed_tokens"), launched.passes))
            self._count_step(step, end, computed=computed, num_failed=len(failures))
            waiters = waiters_of(step.calls) if self._open else []
        if waiters:
            wake(waiters)

    def _run_alone(self, step: EncodeStep, error: Exception) -> None:
        """After a failure that no text is known to have caused."""
        if len(step.calls) == 1:
            self.fail(step.calls[0], error)
            return
        error.__traceback__ = None  # its frames hold the step
        by_call: dict[OpenCall, list[Share]] = {}
        for share in step.shares:
            by_call.setdefault(share.call, []).append(share)
        with self._changed:
            kept = [shares for call, shares in by_call.items() if not call.is_dropped]
            self._planned.extendleft(step_of([shares]) for shares in reversed(kept))

    def _deliver(
        self,
        shares: Sequence[Share],
        starts: Sequence[int],
        numbers: np.ndarray,
        results: Sequence[Any],
    ) -> None:
        """Gives each call its share of the results of the rows `numbers`, which rise."""
        if not len(numbers):
            return
        first, last = int(numbers[0]), int(numbers[-1])
        for own in shares[bisect_right(starts, first) - 1 :]:
            if own.start > last:
                return
            start, end = np.searchsorted(numbers, (own.start, own.stop)).tolist()
            if own.call.is_dropped or start == end:
                continue
            indices = own.requests.indices[numbers[start:end] - own.start]
            try:
                own.call.receiver.put_rows(indices, results[start:end])
            except Exception as error:
                self.fail(own.call, error)

    def _deliver_failure(self, share: Share, failure: Failure) -> None:
        if share.call.is_dropped:
            return
        index = int(share.requests.indices[failure.index - share.start])
        text = str(failure.error).replace(f"text {failure.index} ", f"text {index} ", 1)
        error = type(failure.error)(text)
        error.__cause__ = failure.error.__cause__
        if share.call.keeps_errors:
            share.call.failed.add(index)
            try:
                share.call.receiver.fail(index, error)
            except Exception as raised:
                self.fail(share.call, raised)
        else:
            self.fail(share.call, error)

    def _count_step(self, step: EncodeStep, end: float, *, computed: int, num_failed: int) -> None:
        seconds = end - step.start_time
        for share in step.shares:
            call, num_texts = share.call, len(share.requests)
            if call.is_dropped:
                continue
            call.compute_seconds += num_texts * seconds
            call.num_computed += num_texts
            call.num_open -= num_texts
            call.open_tokens -= share.requests.total_tokens
        requests = step.requests
        padded = len(requests) * int(requests.seqlens.max(initial=0))
        counts = self._counts
        counts.num_done += len(requests) - num_failed
        counts.num_failed += num_failed
        counts.total_tokens += requests.total_tokens
        counts.computed_tokens += computed
        counts.padded_tokens += padded
        counts.num_steps += 1
        tokens = (requests.total_tokens, computed, padded)
        self.recent.append(StepStats(time.time(), len(requests), *tokens, seconds))
        alone = end - max(step.start_time, self._last_end) - step.nested_seconds
        if step.nested_tokens:
            alone = seconds - step.nested_seconds
        self._last_end = end
        if alone > 0 and (self._rate is None or computed >= _RATE_TOKENS):
            rate = computed / alone
            old = rate if self._rate is None else self._rate
            self._rate = old + _RATE_WEIGHT * (rate - old)

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
        for source in self._sources:
            source.end()

    def _turn(self) -> bool:
        """Launches a step where one can run, collects what is done; False once it is closed."""
        for source in self._sources:
            source.feed()
        with self._changed:
            if not self._has_work():
                if all([source.may_wait() for source in self._sources]):
                    self._changed.wait_for(lambda: self._has_work() or self._is_woken)
                self._is_woken = False
                return True
            if self._is_closed:
                return False
            step = None
            if self._may_launch():
                if not self._planned:
                    taken = self._queue.take(self._step_tokens(), self._clock())
                    self._planned += steps_of(taken)
                step = self._planned.popleft() if self._planned else None
        if step is not None:
            self._launch(step)
        if self._running and (
            len(self._running) >= _STEPS_IN_FLIGHT or self._running[0].is_ready()
        ):
            self._collect(self._running.popleft())
        elif step is None:
            with self._changed:
                if not self._may_launch() and not self._is_closed:
                    self._changed.wait(_POLL_S if self._running else _GATHER_S)
        return True

    def _has_work(self) -> bool:
        return bool(self._queue or self._planned or self._running or self._is_closed)

    def _may_launch(self) -> bool:
        """Whether a step runs or may wait behind the one that does.

        The operations of a step that shares prefixes are launched one by one: many small ones would
        take the time in which texts are read. So only a full step waits behind one, and after one
        what is being read is waited for.
        """
        if len(self._running) >= _STEPS_IN_FLIGHT or not (self._planned or self._queue):
            return False
        is_full = self._queue.queued_tokens >= self.token_budget
        if self._planned or is_full or not self._has_shared:
            return True
        since = self._clock() - self._last_end
        return not self._running and (since > _GATHER_S or not self._num_reading)

    def _step_tokens(self) -> int:
        """The budget of the next step: smaller while short calls come beside long ones."""
        is_alone = self._clock() - self._short_seen > _SHORT_MEMORY_S
        if is_alone or self._rate is None:
            return self.token_budget
        target = max(int(self._rate * _TARGET_STEP_S), _MIN_STEP_TOKENS)
        return min(target, self.token_budget)

    def _launch(self, step: EncodeStep, *, may_interrupt: bool = True) -> None:
        between = None
        if may_interrupt and step.short_tokens and self.runner.is_interruptible:
            between = partial(self._run_short, step)
        now = self._clock()
        for share in step.shares:
            share.call.queue_seconds += len(share.requests) * (now - share.queued_time)
        outer, self._current = self._current, step
        try:
            with computing(self.runner.device):
                self.launch(step, between_layers=between)
        finally:
            if outer is not None or self.runner.is_interruptible or step.launched is None:
                self._current = outer
        if step.launched is not None:
            waits = not self.runner.is_interruptible  # a CPU computes in this thread
            self._has_shared = waits and step.launched.shares_prefixes
            self._running.append(step)

    def _run_short(self, outer: EncodeStep) -> None:
        """Before a linear layer of a step: runs texts that are short beside it.

        They get at most as many tokens as the step has.
        """
        if outer.nested_tokens >= outer.requests.total_tokens:
            return
        for source in self._sources:
            source.feed()
        if not self._queue:
            return
        with self._changed:
            taken = self._queue.take_short(outer.short_tokens)
            if not taken:
                return
            self._short_seen = self._clock()
            steps = steps_of(taken)
        start = self._clock()
        for step in steps:
            outer.nested_tokens += step.requests.total_tokens
            self._launch(step, may_interrupt=False)
            while self._running:
                self._collect(self._running.pop())
        outer.nested_seconds += self._clock() - start

    def _collect(self, step: EncodeStep) -> None:
        if self._current is step:
            self._current = None
        self.collect(step)
        for source in self._sources:
            source.give()
