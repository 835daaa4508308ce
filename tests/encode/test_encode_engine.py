"""The engine of all callers on a transformer that computes nothing: packing, faults, its end."""

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Coroutine, Hashable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bytetx.encode.engine import EncodeEngine
from bytetx.encode.model_runner import Launched, Runner
from bytetx.encode.request import Requests
from bytetx.encode.request_queue import OpenCall
from bytetx.encode.step import Capture, Step, Task
from bytetx.errors import (
    ClosedError,
    DeviceLostError,
    DeviceMemoryError,
    InputError,
    QueueFullError,
    StepError,
)
from bytetx.nn.executor import Executor
from bytetx.packed import PackedBatch

BAD, LOST = 13, 66  # tokens that make a forward pass fail
WAIT_S = 5.0  # until a test that hangs fails


@dataclass
class FakeTransformer:
    """Hidden states are the token ids. A pass waits for the gate, and stops between its layers."""

    num_layers: int = 2
    gate: threading.Semaphore | None = None
    max_tokens: int | None = None
    passes: list[list[int]] = field(default_factory=list)  # lengths of each, in order of their end
    started: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    run: Callable[[], None] | None = None

    spec = SimpleNamespace(num_token_types=0, position_offset=0)
    prefix_multiple = 0

    def interrupted_by(self, run: Callable[[], None]) -> "FakeTransformer":
        return replace(self, run=run)

    def forward(self, batch: PackedBatch) -> torch.Tensor:
        self.started.release()
        if self.gate is not None:
            assert self.gate.acquire(timeout=WAIT_S)
        if (batch.input_ids == LOST).any():
            raise DeviceLostError("the device is gone")
        if (batch.input_ids == BAD).any():
            raise RuntimeError("a kernel of the test failed")
        if self.max_tokens is not None and batch.total_tokens > self.max_tokens:
            raise torch.OutOfMemoryError("out of memory")
        for _ in range(self.num_layers):
            if self.run is not None:
                self.run()
        self.passes.append(batch.seqlens.tolist())
        return batch.input_ids.float().unsqueeze(1)


@dataclass(frozen=True)
class SumTask:
    """factor * the sum of a text's tokens."""

    factor: float = 1.0
    shares_pass: bool = True
    capture: Capture | None = None
    fails_at: int | None = None

    @property
    def key(self) -> Hashable:
        return ("sum", self.factor, self.shares_pass, self.fails_at)

    def compute(self, transformer: FakeTransformer, step: Step) -> tuple[torch.Tensor, ...]:
        return self.reduce(transformer.forward(step.batch), step)

    def reduce(self, hidden_states: torch.Tensor, step: Step) -> tuple[torch.Tensor, ...]:
        assert len(hidden_states) == step.batch.total_tokens == step.requests.total_tokens
        bounds = step.batch.cu_seqlens.tolist()
        assert bounds[0] == 0 and np.diff(bounds).tolist() == step.batch.seqlens.tolist()
        rows = zip(bounds, bounds[1:], strict=False)
        return (torch.stack([self.factor * hidden_states[a:b].sum() for a, b in rows]),)

    def are_finite(self, outputs: tuple[np.ndarray, ...], step: Step) -> np.ndarray:
        return np.isfinite(outputs[0])

    def finish(self, outputs: tuple[np.ndarray, ...], step: Step) -> Sequence[float]:
        if self.fails_at is not None and (step.requests.token_ids == self.fails_at).any():
            raise KeyError("a bug in finish")
        return outputs[0].tolist()


class Collected:
    """A receiver that keeps what it is given."""

    def __init__(self) -> None:
        self.results: dict[int, float] = {}
        self.errors: dict[int, InputError] = {}

    def put_rows(self, indices: np.ndarray, results: Sequence[float]) -> None:
        assert not set(indices.tolist()) & self.results.keys()
        self.results |= dict(zip(indices.tolist(), results, strict=True))

    def fail(self, index: int, error: InputError) -> None:
        self.errors[index] = error


def requests(texts: Sequence[Sequence[int]]) -> Requests:
    seqlens = np.array([len(text) for text in texts], dtype=np.int32)
    ids = np.array([token for text in texts for token in text], dtype=np.int32)
    return Requests(np.arange(len(texts)), seqlens, ids, np.zeros(len(texts), dtype=bool))


def make_engine(transformer: FakeTransformer, *, token_budget: int = 64, **options) -> EncodeEngine:
    runner = Runner(
        transformer, executor=Executor(), device=torch.device("cpu"), token_budget=token_budget
    )
    limits = {"max_queued_requests": 100, "max_queued_tokens": 10_000, "age_limit_s": 100.0}
    return EncodeEngine(runner, token_budget=token_budget, **(limits | options))


def submit(
    engine: EncodeEngine,
    texts: Sequence[Sequence[int]],
    task: Task = SumTask(),
    *,
    priority: int = 0,
    keeps_errors: bool = False,
) -> OpenCall:
    call = OpenCall(task, Collected(), priority=priority, keeps_errors=keeps_errors)
    tokens = sum(map(len, texts))
    engine.open(call, len(texts), tokens)
    engine.submit(call, requests(texts), num_read=len(texts), tokens=tokens)
    return call


async def answer(engine: EncodeEngine, call: OpenCall) -> dict[int, float]:
    try:
        await engine.wait(call)
    finally:
        engine.end(call)
    return call.receiver.results


def run(main: Coroutine) -> object:
    return asyncio.run(asyncio.wait_for(main, WAIT_S))


def held() -> FakeTransformer:
    """One whose passes wait for the test."""
    return FakeTransformer(gate=threading.Semaphore(0))


def sums(texts: Sequence[Sequence[int]], factor: float = 1.0) -> dict[int, float]:
    return {i: factor * sum(text) for i, text in enumerate(texts)}


def test_texts_of_all_callers_and_tasks_share_a_pass() -> None:
    transformer = held()
    engine = make_engine(transformer)
    first, second, third = [[1, 2], [3]], [[4, 5, 6]], [[7], [8, 9], [1]]

    async def main() -> None:
        blocker = submit(engine, [[1]])
        assert transformer.started.acquire(timeout=WAIT_S)
        calls = [
            submit(engine, first, SumTask(2.0)),
            submit(engine, second, SumTask(3.0)),
            submit(engine, third, SumTask(2.0)),
        ]
        transformer.gate.release(2)
        await answer(engine, blocker)
        got = [await answer(engine, call) for call in calls]
        assert got == [sums(first, 2.0), sums(second, 3.0), sums(third, 2.0)]

    run(main())
    engine.close()
    assert [len(lengths) for lengths in transformer.passes] == [1, 6]


def test_a_task_that_is_no_head_has_passes_of_its_own() -> None:
    transformer = held()
    engine = make_engine(transformer)

    async def main() -> None:
        blocker = submit(engine, [[1]])
        assert transformer.started.acquire(timeout=WAIT_S)
        calls = [
            submit(engine, [[1, 2]], SumTask(2.0)),
            submit(engine, [[3]], SumTask(5.0, shares_pass=False)),
            submit(engine, [[4]], SumTask(3.0)),
        ]
        transformer.gate.release(3)
        got = [await answer(engine, call) for call in [blocker, *calls]]
        assert got == [{0: 1.0}, {0: 6.0}, {0: 15.0}, {0: 12.0}]

    run(main())
    engine.close()
    assert sorted(map(len, transformer.passes)) == [1, 1, 2]


@pytest.mark.parametrize("where", ["forward", "finish"])
@pytest.mark.parametrize("factor", [1.0, 2.0])  # of the same task as the others, or another one
def test_a_failure_ends_the_call_whose_text_caused_it_alone(where: str, factor: float) -> None:
    transformer = held()
    engine = make_engine(transformer)
    bad = [[BAD, 1]] if where == "forward" else [[12, 1]]
    task = SumTask(factor, fails_at=12)

    async def main() -> None:
        blocker = submit(engine, [[1]])
        assert transformer.started.acquire(timeout=WAIT_S)
        others = [submit(engine, [[5], [6, i]], SumTask(fails_at=12)) for i in range(3)]
        failing = submit(engine, bad, task)
        transformer.gate.release(20)
        await answer(engine, blocker)
        for i, call in enumerate(others):
            assert await answer(engine, call) == sums([[5], [6, i]])
        with pytest.raises(RuntimeError if where == "forward" else KeyError):
            await answer(engine, failing)

    run(main())
    engine.close()


def test_a_step_beyond_the_memory_is_cut_and_one_text_alone_fails() -> None:
    transformer = held()
    transformer.max_tokens = 6
    engine = make_engine(transformer)

    async def main() -> None:
        blocker = submit(engine, [[1]])
        assert transformer.started.acquire(timeout=WAIT_S)
        fine = [submit(engine, [[i] * 2, [i] * 3], SumTask(float(i))) for i in range(1, 5)]
        keeps = submit(engine, [[1], [2] * 7, [3]], keeps_errors=True)
        raises = submit(engine, [[2] * 7], SumTask(2.0))
        transformer.gate.release(100)
        await answer(engine, blocker)
        for i, call in enumerate(fine, 1):
            assert await answer(engine, call) == sums([[i] * 2, [i] * 3], float(i))
        assert await answer(engine, keeps) == {0: 1.0, 2: 3.0}
        assert type(keeps.receiver.errors[1]) is DeviceMemoryError
        assert "text 1 with 7 tokens" in str(keeps.receiver.errors[1])
        assert keeps.failed == {1}
        with pytest.raises(StepError, match="text 0 with 7 tokens"):
            await answer(engine, raises)

    run(main())
    engine.close()


@pytest.mark.feature("Python", "short texts run between the layers of long ones")
def test_short_texts_run_between_the_layers_of_a_long_step() -> None:
    transformer = held()
    engine = make_engine(transformer, token_budget=1000)
    long = [[1] * 600]

    async def main() -> None:
        slow = submit(engine, long)
        assert transformer.started.acquire(timeout=WAIT_S)
        quick = [submit(engine, [[i, i]], SumTask(float(i))) for i in range(3)]
        beside = submit(engine, [[1] * 300])
        transformer.gate.release(10)
        assert [await answer(engine, call) for call in quick] == [{0: 0.0}, {0: 2.0}, {0: 8.0}]
        assert await answer(engine, slow) == {0: 600.0}
        assert await answer(engine, beside) == {0: 300.0}

    run(main())
    engine.close()
    assert transformer.passes == [[2, 2, 2], [600], [300]]


def test_what_runs_between_layers_is_bounded_by_the_step() -> None:
    """Short texts that never end do not hold a long one up for more than its own tokens."""
    transformer = held()
    transformer.num_layers = 50
    engine = make_engine(transformer, token_budget=1000)

    async def main() -> None:
        slow = submit(engine, [[1] * 400])
        assert transformer.started.acquire(timeout=WAIT_S)
        calls = [submit(engine, [[1] * 40]) for _ in range(60)]
        transformer.gate.release(100)
        await answer(engine, slow)
        for call in calls:
            await answer(engine, call)

    run(main())
    engine.close()
    before = transformer.passes[: transformer.passes.index([400])]
    assert 400 <= sum(map(sum, before)) <= 450


def test_a_failing_text_between_layers_leaves_the_long_step_alone() -> None:
    transformer = held()
    engine = make_engine(transformer, token_budget=1000)

    async def main() -> None:
        slow = submit(engine, [[1] * 600])
        assert transformer.started.acquire(timeout=WAIT_S)
        bad, good = submit(engine, [[BAD]]), submit(engine, [[1, 2]])
        transformer.gate.release(10)
        with pytest.raises(RuntimeError):
            await answer(engine, bad)
        assert await answer(engine, good) == {0: 3.0}
        assert await answer(engine, slow) == {0: 600.0}

    run(main())
    engine.close()


@pytest.mark.feature("Python", "priorities")
def test_priorities_and_lengths_order_what_waits() -> None:
    transformer = held()
    engine = make_engine(transformer, token_budget=4)

    async def main() -> None:
        blocker = submit(engine, [[1]])
        assert transformer.started.acquire(timeout=WAIT_S)
        calls = [
            submit(engine, [[1] * 4]),
            submit(engine, [[1] * 2]),
            submit(engine, [[1] * 3], priority=-1),
        ]
        transformer.gate.release(10)
        for call in [blocker, *calls]:
            await answer(engine, call)

    run(main())
    engine.close()
    assert transformer.passes == [[1], [3], [2], [4]]


def test_a_full_queue_says_when_to_try_again() -> None:
    transformer = held()
    engine = make_engine(transformer, max_queued_requests=3, max_queued_tokens=50)

    async def main() -> None:
        running = submit(engine, [[1]])
        assert transformer.started.acquire(timeout=WAIT_S)
        big = submit(engine, [[1] * 200])  # an empty queue takes it
        with pytest.raises(QueueFullError, match="200 of at most 50 tokens") as full:
            submit(engine, [[1]])
        assert full.value.retry_after_s > 0
        engine.end(big)
        waiting = [submit(engine, [[1]]) for _ in range(3)]
        with pytest.raises(QueueFullError, match="3 of at most 3 texts.*try again in"):
            submit(engine, [[1]])
        assert engine.counts()[0].num_refused == 2
        assert (engine.num_queued, engine.queued_tokens, engine.num_running) == (3, 3, 1)
        transformer.gate.release(10)
        for call in [running, *waiting]:
            await answer(engine, call)
        assert (engine.num_queued, engine.queued_tokens, engine.num_running) == (0, 0, 0)
        assert engine.num_calls == 0

    run(main())
    engine.close()


def test_texts_that_are_tokenised_count_as_queued() -> None:
    engine = make_engine(FakeTransformer(), max_queued_requests=4)
    call = OpenCall(SumTask(), Collected())
    engine.open(call, 4, 10)
    with pytest.raises(QueueFullError):
        submit(engine, [[1]])
    engine.end(call)
    assert (engine.num_queued, engine.queued_tokens) == (0, 0)
    engine.submit(call, requests([[1]] * 4), num_read=4, tokens=10)  # too late, and no matter
    assert (engine.num_queued, engine.queued_tokens) == (0, 0)
    engine.close()


class LeavingCall(OpenCall):
    """Its caller leaves, in another thread, just when the engine is about to wake it."""

    @property
    def has_room(self) -> bool:
        has_room = super().has_room
        if has_room:
            self.waiter = None  # as EncodeEngine.wait does where it is cancelled
        return has_room


def test_a_caller_that_leaves_while_it_is_woken_ends_no_engine() -> None:
    transformer = held()
    engine = make_engine(transformer)

    async def main() -> None:
        call = LeavingCall(SumTask(), Collected())
        engine.open(call, 1, 1)
        engine.submit(call, requests([[3]]), num_read=1, tokens=1)
        waiting = asyncio.create_task(engine.wait(call))
        await asyncio.sleep(0)  # until it waits
        transformer.gate.release(2)
        await waiting
        assert await answer(engine, submit(engine, [[4]])) == {0: 4.0}

    run(main())
    assert not engine.is_broken
    engine.close()


class EndingEngine(EncodeEngine):
    """The engine's thread takes the step that runs away between two looks at it."""

    step: SimpleNamespace | None = SimpleNamespace(short_tokens=0)

    @property
    def _current(self) -> SimpleNamespace | None:
        step, self.step = self.step, None
        return step

    @_current.setter
    def _current(self, step: SimpleNamespace | None) -> None:
        pass


def test_texts_that_come_just_when_a_step_ends_are_queued() -> None:
    engine = make_engine(FakeTransformer())
    engine.__class__ = EndingEngine

    async def main() -> None:
        assert await answer(engine, submit(engine, [[4]])) == {0: 4.0}

    run(main())
    engine.close()


def test_a_receiver_that_fails_ends_its_call_alone() -> None:
    class Broken(Collected):
        def fail(self, index: int, error: InputError) -> None:
            raise KeyError("a bug in a sink")

    engine = make_engine(FakeTransformer(max_tokens=4))

    async def main() -> None:
        call = OpenCall(SumTask(), Broken(), keeps_errors=True)
        engine.open(call, 1, 9)
        engine.submit(call, requests([[1] * 9]), num_read=1, tokens=9)
        with pytest.raises(KeyError, match="a bug in a sink"):
            await answer(engine, call)
        assert await answer(engine, submit(engine, [[4]])) == {0: 4.0}

    run(main())
    assert not engine.is_broken
    engine.close()


def test_calls_that_were_ended_run_no_more_and_are_released() -> None:
    transformer = held()
    engine = make_engine(transformer)

    async def main() -> list[weakref.ref]:
        blocker = submit(engine, [[1]])
        assert transformer.started.acquire(timeout=WAIT_S)
        calls = [submit(engine, [[2, 2]]) for _ in range(50)]
        for call in calls[1:]:
            engine.end(call)
        transformer.gate.release(10)
        assert await answer(engine, calls[0]) == {0: 4.0}
        await answer(engine, blocker)
        return [weakref.ref(call) for call in calls]

    refs = run(main())
    assert transformer.passes == [[1], [2]]
    assert engine.counts()[0].num_dropped == 49
    gc.collect()
    assert [ref() for ref in refs if ref() is not None] == []
    engine.close()


def test_a_call_that_ends_while_its_texts_run_gets_no_results() -> None:
    transformer = held()
    engine = make_engine(transformer)

    async def main() -> None:
        call, other = submit(engine, [[1]]), submit(engine, [[2]])
        assert transformer.started.acquire(timeout=WAIT_S)
        engine.end(call)
        transformer.gate.release(10)
        assert await answer(engine, other) == {0: 2.0}
        assert call.receiver.results == {}

    run(main())
    engine.close()


def test_closing_gives_what_runs_and_ends_what_waits() -> None:
    transformer = held()
    engine = make_engine(transformer, token_budget=4)

    async def main() -> None:
        running = submit(engine, [[1, 2]])
        assert transformer.started.acquire(timeout=WAIT_S)
        waiting = [submit(engine, [[1] * 3]) for _ in range(4)]
        closing = asyncio.create_task(asyncio.to_thread(engine.close))
        while not engine._is_closed:
            await asyncio.sleep(0)
        transformer.gate.release(1)
        assert await answer(engine, running) == {0: 3.0}
        for call in waiting:
            with pytest.raises(ClosedError):
                await answer(engine, call)
        await closing
        with pytest.raises(ClosedError, match="make a new one"):
            submit(engine, [[1]])

    run(main())
    engine.close()  # a second time changes nothing


def test_closing_waits_for_open_calls_where_it_is_told_to() -> None:
    transformer = held()
    engine = make_engine(transformer, token_budget=4)

    async def main() -> None:
        calls = [submit(engine, [[1] * 3]) for _ in range(4)]
        assert transformer.started.acquire(timeout=WAIT_S)
        closing = asyncio.create_task(asyncio.to_thread(engine.close, drain_s=WAIT_S))
        while not engine._is_closing:
            await asyncio.sleep(0)
        with pytest.raises(ClosedError):
            submit(engine, [[1]])
        transformer.gate.release(10)
        for call in calls:
            assert await answer(engine, call) == {0: 3.0}
        await closing

    run(main())


def test_a_lost_device_ends_every_call_and_the_engine() -> None:
    transformer = held()
    engine = make_engine(transformer, token_budget=4)

    async def main() -> None:
        calls = [submit(engine, [[LOST]]), *(submit(engine, [[1] * 4]) for _ in range(3))]
        transformer.gate.release(10)
        for call in calls:
            with pytest.raises(DeviceLostError, match="the device is gone"):
                await answer(engine, call)
        with pytest.raises(DeviceLostError, match="the device is gone"):
            submit(engine, [[1]])

    run(main())
    engine.close()


class Ahead(Runner):
    """Steps that are done when the test says so, as those of a GPU."""

    is_interruptible = False

    def __init__(self, *args: object, shares: bool = False, **options: object):
        super().__init__(*args, **options)
        self.shares = shares
        self.events: list[str] = []
        self.done = threading.Semaphore(0)
        self.launched = threading.Semaphore(0)

    def launch(self, requests: Requests, task: Task, **options: object) -> Launched:
        own = super().launch(requests, task)
        self.events.append(f"launch {requests.total_tokens}")
        self.launched.release()
        return Pending(own, self, requests.total_tokens)


class Pending:
    def __init__(self, launched: Launched, runner: Ahead, tokens: int):
        self.passes, self.failures = launched.passes, launched.failures
        self.shares_prefixes = runner.shares
        self._launched, self._runner, self._tokens = launched, runner, tokens
        self._is_done = False

    def is_ready(self) -> bool:
        self._is_done = self._is_done or self._runner.done.acquire(blocking=False)
        return self._is_done

    def outputs_by_pass(self) -> list[tuple[np.ndarray, ...]]:
        assert self._is_done or self._runner.done.acquire(timeout=WAIT_S)
        self._runner.events.append(f"collect {self._tokens}")
        return self._launched.outputs_by_pass()


def test_a_second_step_is_launched_while_one_runs() -> None:
    runner = Ahead(
        FakeTransformer(), executor=Executor(), device=torch.device("cpu"), token_budget=8
    )
    limits = {"max_queued_requests": 100, "max_queued_tokens": 10_000, "age_limit_s": 100.0}
    engine = EncodeEngine(runner, token_budget=8, **limits)

    async def main() -> None:
        calls = []
        for tokens in (2, 3, 4, 5):
            calls.append(submit(engine, [[1] * tokens]))
            if tokens < 4:  # the first two are launched before any is collected
                assert runner.launched.acquire(timeout=WAIT_S)
        runner.done.release(4)
        for call, tokens in zip(calls, (2, 3, 4, 5), strict=True):
            assert await answer(engine, call) == {0: float(tokens)}

    run(main())
    engine.close()
    assert runner.events[:3] == ["launch 2", "launch 3", "collect 2"]
    assert runner.events[-1] == "collect 5"


def test_only_a_full_step_waits_behind_one_that_shares_prefixes() -> None:
    runner = Ahead(
        FakeTransformer(),
        executor=Executor(),
        device=torch.device("cpu"),
        token_budget=8,
        shares=True,
    )
    limits = {"max_queued_requests": 100, "max_queued_tokens": 10_000, "age_limit_s": 100.0}
    engine = EncodeEngine(runner, token_budget=8, **limits)

    async def main() -> None:
        calls = [submit(engine, [[1] * 2])]
        assert runner.launched.acquire(timeout=WAIT_S)
        calls.append(submit(engine, [[1] * 3]))
        assert not runner.launched.acquire(timeout=0.05)  # it waits for more, or for the device
        calls.append(submit(engine, [[1] * 5]))
        assert runner.launched.acquire(timeout=WAIT_S)
        runner.done.release(3)
        for call, tokens in zip(calls, (2, 3, 5), strict=True):
            assert await answer(engine, call) == {0: float(tokens)}
        calls = [submit(engine, [[1] * 4])]  # nothing runs: at once
        runner.done.release(2)
        assert await answer(engine, calls[0]) == {0: 4.0}

    run(main())
    engine.close()
    assert runner.events[:4] == ["launch 2", "launch 8", "collect 2", "collect 8"]


def test_each_loop_of_each_thread_gets_its_results() -> None:
    engine = make_engine(FakeTransformer())
    got: list[float] = []

    def caller(number: int) -> None:
        async def many() -> list[dict[int, float]]:
            calls = [submit(engine, [[number] * (1 + i % 5)]) for i in range(20)]
            return await asyncio.gather(*(answer(engine, call) for call in calls))

        for i, result in enumerate(run(many())):
            assert result == {0: float(number * (1 + i % 5))}
            got.append(result[0])

    threads = [threading.Thread(target=caller, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    engine.close()
    assert len(got) == 100


def test_a_closed_loop_harms_no_other_caller() -> None:
    transformer = held()
    engine = make_engine(transformer)

    async def leave() -> None:
        call = submit(engine, [[1]])
        assert transformer.started.acquire(timeout=WAIT_S)
        call.waiter = asyncio.get_running_loop().create_future()  # of a loop that ends first

    async def main() -> None:
        call = submit(engine, [[2]])
        transformer.gate.release(10)
        assert await answer(engine, call) == {0: 2.0}

    run(leave())
    run(main())
    engine.close()
