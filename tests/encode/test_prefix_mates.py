"""Texts of several callers that begin alike: steps have them together, and nobody waits long."""

import asyncio
import gc
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import save_causal
from decisions import save_decider
from hypothesis import given, settings
from hypothesis import strategies as st
from test_encode_engine import BAD, WAIT_S, FakeTransformer, SumTask, answer, make_engine, submit
from test_encode_engine import run as run_main
from test_prefixes import requests_of, texts_with_prefixes
from tiny import one_thread  # noqa: F401  (autouse)

import bytetx
from bytetx.encode.prefix_index import PrefixIndex
from bytetx.encode.prefixes import MIN_PREFIX_TOKENS, common_length
from bytetx.encode.request_queue import OpenCall, RequestQueue, Taken
from bytetx.errors import QueueFullError

STATE, OTHER = [7] * 60, [8] * 60


def new_queue(*, age_limit_s: float = 99.0) -> RequestQueue:
    return RequestQueue(age_limit_s=age_limit_s, shares_prefixes=True)


def add(
    queue: RequestQueue, texts: Sequence[list[int]], *, priority: int = 0, task: object = "task"
) -> OpenCall:
    call = OpenCall(task, None, priority=priority)
    queue.add(call, requests_of(list(texts)), 0.0)
    return call


def calls_of(taken: Sequence[Taken]) -> list[OpenCall]:
    return [some.call for some in taken]


def texts_of(taken: Sequence[Taken]) -> list[list[int]]:
    return [ids.tolist() for some in taken for ids in some.requests().split()]


def num_nodes(texts: Sequence[list[int]]) -> int:
    """Tokens of texts with each common prefix, however short, once."""
    return len({tuple(text[: n + 1]) for text in texts for n in range(len(text))})


@given(
    texts=st.lists(
        st.lists(st.integers(0, 2), max_size=60).map(lambda ids: [5] * MIN_PREFIX_TOKENS + ids),
        min_size=1,
        max_size=20,
    ),
    removed=st.sets(st.integers(0, 19)),
)
def test_the_nearest_texts_come_first(texts: list[list[int]], removed: set[int]) -> None:
    index: PrefixIndex[int] = PrefixIndex()
    arrays = [np.array([*text, 1], dtype=np.int32) for text in texts]
    places = [index.put(ids, n) for n, ids in enumerate(arrays)]
    list(index.near(arrays[0]))
    index.put(np.array([6] * 40, dtype=np.int32), -1)
    for n in removed:
        if n < len(places):
            index.remove(places[n])
    kept = set(range(len(texts))) - removed
    for ids in arrays:
        found = list(index.near(ids))
        assert {n for _, n in found} == kept
        assert found == sorted(found, key=lambda one: -one[0])
        assert all(common == common_length(arrays[n], ids) for common, n in found)
    assert index.has(arrays[0]) == bool(kept)


def test_texts_of_other_calls_that_begin_alike_come_along_and_count_what_is_new() -> None:
    queue = new_queue()
    small = [add(queue, [[20 + n] * 65]) for n in range(3)]
    mates = [add(queue, [STATE + [n] * 10]) for n in range(3)]
    first = queue.take(300, 0.0)  # three others of 65 and one state of 60 with 3 * 10
    assert set(calls_of(first)) == {*small, *mates} and not queue


def test_those_with_the_longest_prefix_come_first() -> None:
    """All texts have an instruction in common; some of them a state behind it."""
    queue, instruction = new_queue(), [3] * 40
    begun = add(queue, [instruction + STATE + [1]])
    others = [add(queue, [instruction + [9, n] * 31]) for n in range(4)]
    same = [add(queue, [instruction + STATE + [2, n, 2]]) for n in range(4)]
    taken = calls_of(queue.take(130, 0.0))
    assert taken[0] is begun and set(taken[1:5]) == set(same)
    assert set(calls_of(queue.take(1000, 0.0))) == set(others)


def test_a_call_of_several_states_meets_others_at_each_of_them() -> None:
    queue, states = new_queue(), [[n] * 60 for n in range(4)]
    for n in range(5):
        add(queue, [[*state, 50 + n, k] for state in states for k in range(3)])
    steps = []
    while queue:
        steps.append(texts_of(queue.take(150, 0.0)))
    assert sum(map(num_nodes, steps)) < 6 * 60 + 5 * 4 * 6
    assert sorted(text for step in steps for text in step) == sorted(
        [*state, 50 + n, k] for n in range(5) for state in states for k in range(3)
    )


@settings(max_examples=150, deadline=None)
@given(
    calls=st.lists(st.tuples(texts_with_prefixes(), st.integers(-1, 1)), min_size=1, max_size=6),
    budget=st.sampled_from([40, 100, 300, 1000]),
    age_limit_s=st.sampled_from([0.0, 2.0, 99.0]),
    dropped=st.sets(st.integers(0, 5), max_size=2),
)
def test_every_text_is_taken_once_in_steps_that_have_the_tokens(
    calls: list[tuple[list[list[int]], int]], budget: int, age_limit_s: float, dropped: set[int]
) -> None:
    queue, waiting = new_queue(age_limit_s=age_limit_s), []
    for number, (texts, priority) in enumerate(calls):
        call = add(queue, texts, priority=priority)
        if number in dropped:
            queue.drop(call)
        else:
            waiting += texts
    found: list[list[int]] = []
    now = 0.0
    while queue:
        step = texts_of(queue.take(budget, now))
        assert step and (num_nodes(step) <= budget or len(step) == 1)
        found += step
        now += 1.0
    assert sorted(found) == sorted(waiting)
    assert (queue.num_queued, queue.queued_tokens, bool(queue._nexts)) == (0, 0, False)


def test_what_a_step_of_many_callers_expands_to_is_bounded() -> None:
    queue = new_queue()
    for n in range(80):
        add(queue, [[5] * 3200 + [n]])
    assert sum(map(len, texts_of(queue.take(4000, 0.0)))) <= 32 * 4000


@pytest.mark.parametrize("length", [20, 61, 150, 199, 900])
def test_a_stream_of_mates_delays_nobody_by_more_than_two_steps(length: int) -> None:
    """Each step more callers of one state come than a step has room for."""
    queue = new_queue()
    for n in range(40):
        add(queue, [STATE + [n] * 5])
    queue.take(200, 0.0)
    other = add(queue, [[9] * length])
    for steps in range(1, 9):
        if other in calls_of(queue.take(200, 0.0)):
            break
        for n in range(40):
            add(queue, [STATE + [n, steps] * 2])
    assert steps <= 3


def test_mates_have_half_of_a_step_at_most_while_others_wait() -> None:
    """The mates are longer than the others, and one short text brings them along."""
    queue = new_queue()
    others = [add(queue, [[10 + n] * 65]) for n in range(20)]
    for step in range(3):
        add(queue, [STATE + [step]])
        for n in range(30):
            add(queue, [STATE + [n, step] * 10])
        taken = queue.take(601, 0.0)
        assert sum(call in others for call in calls_of(taken)) >= 3


def test_priorities_stay() -> None:
    """A mate of a worse class waits for its turn, and then counts what is new."""
    queue = new_queue()
    fast = [add(queue, [STATE + [n]], priority=-1) for n in range(2)]
    middle = add(queue, [OTHER], priority=0)
    slow = add(queue, [STATE + [5] * 9], priority=1)
    late = add(queue, [[4] * 61], priority=1)
    assert set(calls_of(queue.take(131, 0.0))) == {*fast, middle, slow}
    assert calls_of(queue.take(131, 0.0)) == [late]
    other = new_queue()
    for n in range(2):
        add(other, [STATE + [n]], priority=-1)
    middle, slow = add(other, [OTHER], priority=0), add(other, [STATE + [5] * 9], priority=1)
    assert slow not in calls_of(other.take(125, 0.0)) and slow in calls_of(other.take(125, 0.0))


def test_texts_that_no_pass_has_together_count_in_full() -> None:
    queue = new_queue()
    alone = [add(queue, [STATE + [n] * 5], task=SumTask(1.0 + n, False)) for n in range(3)]
    shared = [add(queue, [STATE + [n] * 5], task=SumTask(1.0 + n)) for n in range(3)]
    assert len(calls_of(queue.take(80, 0.0))) == 1
    taken = calls_of(queue.take(140, 0.0))
    assert len(set(taken) & set(shared)) == 3 or len(set(taken) & set(alone)) <= 2


def test_dropped_calls_are_forgotten() -> None:
    queue = new_queue()
    kept = add(queue, [STATE + [1]])
    queue.take(1, 0.0)
    kept = add(queue, [STATE + [1] * 5])
    calls = [add(queue, [STATE + [n] * 5, [9] * 3]) for n in range(500)]
    add(queue, [OTHER])
    queue.take(70, 0.0)  # all are among the texts that wait now
    refs = [weakref.ref(call) for call in calls]
    for call in calls:
        queue.drop(call)
    assert not any(call is kept for call in calls)
    del calls, call
    gc.collect()
    assert sum(ref() is not None for ref in refs) < 200
    while queue:
        queue.take(70, 0.0)
    assert not queue._nexts


class SharingTransformer(FakeTransformer):
    """One whose texts have each common prefix once. `computed` has the tokens of each pass."""

    prefix_multiple = 1

    def forward(self, batch: Any) -> Any:
        self.__dict__.setdefault("computed", []).append(
            batch.total_tokens if batch.shared is None else batch.shared.batch.total_tokens
        )
        return super().forward(batch)


@pytest.mark.parametrize("where", ["forward", "finish"])
def test_a_mate_that_fails_ends_its_own_call_alone(where: str) -> None:
    transformer = SharingTransformer(gate=threading.Semaphore(0))
    engine = make_engine(transformer, token_budget=100)
    bad = STATE + [BAD if where == "forward" else 12]

    async def main() -> None:
        blocker = submit(engine, [[1]])
        assert transformer.started.acquire(timeout=WAIT_S)
        calls = [submit(engine, [STATE + [n]], SumTask(fails_at=12)) for n in range(4)]
        failing = submit(engine, [bad], SumTask(2.0, fails_at=12))
        other = submit(engine, [OTHER], SumTask())
        transformer.gate.release(50)
        await answer(engine, blocker)
        for n, call in enumerate(calls):
            assert await answer(engine, call) == {0: 7.0 * 60 + n}
        assert await answer(engine, other) == {0: 8.0 * 60}
        with pytest.raises(RuntimeError if where == "forward" else KeyError):
            await answer(engine, failing)

    run_main(main())
    engine.close()
    assert transformer.computed[:3] == [1, 60, 60 + 5]


class Held:
    """Holds the passes of a model until `open` is called, and counts the rows that they compute."""

    def __init__(self, model: bytetx.Model, monkeypatch: pytest.MonkeyPatch):
        self.rows: list[int] = []
        self._gate, self.started = threading.Event(), threading.Event()
        layers = model.checkpoint.transformer.layers
        run = layers.run

        def held(embed: Any, batch: Any, *args: Any, **options: Any) -> Any:
            self.started.set()
            assert self._gate.wait(60)
            self.rows.append(batch.total_tokens)
            return run(embed, batch, *args, **options)

        monkeypatch.setattr(layers, "run", held)

    def open(self) -> None:
        self._gate.set()


async def held_calls(
    model: bytetx.AsyncModel, held: Held, calls: Sequence[Any], num_texts: int
) -> "list[asyncio.Task[Any]]":
    """Tasks of calls that are all in the queue, behind a pass that is held."""
    blocker = asyncio.ensure_future(model.score([[5, 6, 7]]))
    await asyncio.to_thread(held.started.wait, 60)
    tasks = [asyncio.ensure_future(call) for call in calls]
    (engine,) = model._engines.values()
    while engine._queue.num_queued < num_texts:
        await asyncio.sleep(0)
    return [blocker, *tasks]


def test_callers_of_one_state_have_it_computed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One pass has all eight, though they are more than its tokens; those of others follow."""
    folder = save_decider(tmp_path)
    state = "the quick brown fox jumps over the lazy dog " * 8

    def request(number: int, state: str = state) -> dict[str, Any]:
        question = {"type": "noul", "instructions": f"are there {number} foxes?"}
        return {"state": state, "questions": {"q": question}}

    others = [request(n, f"{n} " + "a dog " * 70) for n in range(6)]
    requests = [request(n) for n in range(8)]
    model = bytetx.load(folder, device="cpu", token_budget=512, prefix_cache_bytes=0)
    alone = [model.decide([one])[0] for one in [*requests, *others]]
    lengths = [model.decide([one]).stats.num_tokens for one in (requests[0], others[0])]
    assert sum(lengths) < 512 < 8 * lengths[0]
    held = Held(model, monkeypatch)

    async def main() -> list[Any]:
        async with bytetx.AsyncModel(model) as served:
            calls = [served.decide([one]) for one in [*requests, *others]]
            tasks = await held_calls(served, held, calls, len(calls))
            held.open()
            return [found[0] for found in (await asyncio.gather(*tasks))[1:]]

    assert asyncio.run(main()) == alone
    assert lengths[0] < held.rows[1] < 512 and len(held.rows) <= 5


def test_cancelled_callers_and_mixed_tasks_of_one_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = bytetx.load(save_causal(tmp_path), device="cpu", token_budget=128, prefix_cache_bytes=0)
    rng = np.random.default_rng(0)
    context = rng.integers(3, 60, 64).tolist()
    texts = [context + rng.integers(3, 60, 6).tolist() for _ in range(10)]
    scores = [model.score([text])[0].token_log_likelihoods for text in texts[:6]]
    vectors = [np.asarray(model.embed([text], pooling="mean"))[0] for text in texts[6:]]
    held = Held(model, monkeypatch)

    async def main() -> None:
        async with bytetx.AsyncModel(model) as served:
            calls = [served.score([text]) for text in texts[:6]]
            calls += [served.embed([text], pooling="mean") for text in texts[6:]]
            tasks = await held_calls(served, held, calls, len(calls))
            for cancelled in (tasks[2], tasks[5], tasks[8]):
                cancelled.cancel()
            await asyncio.sleep(0)
            held.open()
            found = await asyncio.gather(*tasks, return_exceptions=True)
            for number, got in enumerate(found[1:]):
                if number in (1, 4, 7):
                    assert isinstance(got, asyncio.CancelledError)
                elif number < 6:
                    assert np.array_equal(got[0].token_log_likelihoods, scores[number])
                else:
                    assert np.array_equal(np.asarray(got)[0], vectors[number - 6])

    asyncio.run(main())
    assert held.rows[1:] == [64 + 7 * 6]


def test_rates_and_waits_are_of_the_tokens_that_passes_compute() -> None:
    now = [0.0]

    class Timed(SharingTransformer):
        def forward(self, batch: Any) -> Any:
            now[0] += 0.5
            return super().forward(batch)

    transformer = Timed(gate=threading.Semaphore(0))
    engine = make_engine(transformer, token_budget=200, max_queued_tokens=300, clock=lambda: now[0])
    texts = [STATE + [n] * 10 for n in range(10)]

    async def main() -> None:
        transformer.gate.release(1)
        await answer(engine, submit(engine, texts))
        assert engine.tokens_per_second == (60 + 10 * 10) / 0.5
        blocker = submit(engine, [[1]])
        while engine.num_queued:
            await asyncio.sleep(0)
        waiting = submit(engine, [[4] * 250])
        with pytest.raises(QueueFullError) as raised:
            submit(engine, [[5] * 210])
        assert raised.value.retry_after_s == 160 / 320
        transformer.gate.release(5)
        await answer(engine, blocker)
        await answer(engine, waiting)

    run_main(main())
    engine.close()
    counts, recent = engine.counts()
    assert (counts.total_tokens, counts.computed_tokens) == (700 + 1 + 250, 160 + 1 + 250)
    assert [(step.total_tokens, step.computed_tokens) for step in recent][0] == (700, 160)


def test_stats_have_the_tokens_that_are_computed_and_those_of_the_texts(tmp_path: Path) -> None:
    model = bytetx.load(save_causal(tmp_path), device="cpu", prefix_cache_bytes=1 << 20)
    texts = [[9] * 40 + [n, 5] for n in range(10, 18)]

    async def main() -> list[tuple[int, int]]:
        async with bytetx.AsyncModel(model) as served:
            found = []
            for _ in range(3):
                await served.score(texts)
                stats = served.stats()
                found.append((stats.total_tokens, stats.computed_tokens))
            return found

    (first, own), (_, kept), (_, last) = asyncio.run(main())
    assert first == 8 * 42 and own == 40 + 8 * 2
    assert kept - own in (own, 8 * 2) and last - kept == 8 * 2  # the prefix came from the cache
