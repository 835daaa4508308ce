"""AsyncModel: every task equals Model's, mixed and from many loops, and what callers do to it."""

import asyncio
import gc
import random
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import (
    SENTENCES,
    cosine_distance,
    save_asymmetric,
    save_causal,
    save_checkpoint,
    save_m3,
    texts,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import one_thread  # noqa: F401  (autouse)

import bytetx
from bytetx.async_model import AsyncModel
from bytetx.errors import (
    ClosedError,
    DeadlineError,
    GroupError,
    InputError,
    OptionError,
    QueueFullError,
    TooLongError,
)
from bytetx.model import Model

WAIT_S = 60.0  # until a test that hangs fails
LABELS = {"id2label": {0: "no", 1: "yes", 2: "maybe"}, "label2id": {"no": 0, "yes": 1, "maybe": 2}}
TAGS = {"id2label": {0: "O", 1: "B-A", 2: "I-A"}, "label2id": {"O": 0, "B-A": 1, "I-A": 2}}
LONG = " ".join(SENTENCES[:5] * 3)
# Pooled rows of one text do not depend on what else is in the step: bitwise on a CPU.
Work = Callable[[Any], Any]


def run(main: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(main, WAIT_S))


def loaded(folder: Path, **options: Any) -> Model:
    return bytetx.load(folder, device="cpu", **options)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    """A small model of each kind of head; steps of 64 tokens."""
    folder = tmp_path_factory.mktemp("models")
    saved = {
        "classes": save_checkpoint(folder / "a", head="ForSequenceClassification", **LABELS),
        "tags": save_checkpoint(folder / "b", head="ForTokenClassification", **TAGS),
        "masks": save_checkpoint(folder / "c", head="ForMaskedLM"),
        "pairs": save_checkpoint(folder / "d", head="ForSequenceClassification", num_labels=1),
        "answers": save_checkpoint(folder / "e", head="ForQuestionAnswering", num_labels=2),
        "m3": save_m3(folder / "f", suffix=".safetensors"),
        "causal": save_causal(folder / "g"),
    }
    return {name: loaded(path, token_budget=64) for name, path in saved.items()}


@pytest.fixture(scope="module")
def model(models: dict[str, Model]) -> Model:
    return models["classes"]


def same(got: Any, wanted: Any) -> None:
    """Equal results of a task, bit for bit; stats aside."""
    if isinstance(wanted, np.ndarray):
        np.testing.assert_array_equal(got, wanted)
    elif isinstance(wanted, InputError):
        assert (type(got), str(got)) == (type(wanted), str(wanted))
    elif isinstance(wanted, list | tuple):
        assert len(got) == len(wanted)
        for ours, theirs in zip(got, wanted, strict=True):
            same(ours, theirs)
    elif isinstance(wanted, dict):
        assert list(got) == list(wanted)
        same(list(got.values()), list(wanted.values()))
    elif hasattr(wanted, "__dataclass_fields__"):
        for name in wanted.__dataclass_fields__:
            if name != "stats":
                same(getattr(got, name), getattr(wanted, name))
    else:
        assert got == wanted


INPUTS = [*texts(12, max_words=4), [5, 6, 7], "New York is big"]
SPANNED = [SENTENCES[0], "a dog", "New York"]
MASKED = ["a [MASK] dog", "[MASK] is big and [MASK]", "no mask", "New [MASK]"]
QUESTIONS = [("Who met Zaphod?", SENTENCES[1]), ("is it big", LONG), ("Where?", SENTENCES[4])]
# name: (model, work on a Model or an AsyncModel)
TASKS: dict[str, tuple[str, Work]] = {
    "embed": ("classes", lambda m: m.embed(INPUTS, pooling="mean")),
    "embed prompt": ("masks", lambda m: m.embed(INPUTS[:3], prompt="a dog: ", pooling="cls")),
    "embed int8": ("classes", lambda m: m.embed(INPUTS, pooling="mean", precision="int8")),
    "embed binary": ("classes", lambda m: m.embed(INPUTS, precision="binary", dimensions=16)),
    "embed errors": ("classes", lambda m: m.embed(["a", 3.5, LONG], on_error="return")),
    "embed chunks": ("classes", lambda m: m.embed(["a", LONG, "b"], overflow="chunk", stride=3)),
    "embed truncated": ("classes", lambda m: m.embed([LONG, "b"], truncate=True)),
    "embed_chunks": ("classes", lambda m: m.embed_chunks(["a", LONG, "b"], stride=3)),
    "embed_chunks of none": ("classes", lambda m: m.embed_chunks([])),
    "embed_spans": ("classes", lambda m: m.embed_spans(SPANNED, [[(0, 3), (2, 9)], [], [(0, 1)]])),
    "embed nothing": ("classes", lambda m: m.embed([])),
    "embed_sparse": ("masks", lambda m: m.embed_sparse(INPUTS, max_active_dims=20)),
    "embed_sparse m3": ("m3", lambda m: m.embed_sparse(INPUTS)),
    "embed_tokens": ("m3", lambda m: m.embed_tokens(INPUTS)),
    "embed_all": ("m3", lambda m: m.embed_all([*INPUTS, LONG], on_error="return")),
    "classify": ("classes", lambda m: m.classify(INPUTS, top_k=2)),
    "classify raw": ("classes", lambda m: m.classify([("a", "b"), "c"], raw_scores=True)),
    "classify chunks": ("classes", lambda m: m.classify(["a", LONG], overflow="chunk", stride=2)),
    "tag": ("tags", lambda m: m.tag(INPUTS, aggregation="average")),
    "tag chunks": ("tags", lambda m: m.tag(["a", LONG], overflow="chunk", stride=5)),
    "fill_mask": ("masks", lambda m: m.fill_mask(MASKED, on_error="return")),
    "fill_mask targets": ("masks", lambda m: m.fill_mask(MASKED[:2], targets=["dog", "big"])),
    "score": ("causal", lambda m: m.score(INPUTS)),
    "answer": ("answers", lambda m: m.answer(QUESTIONS, top_k=3, stride=8)),
    "answer errors": ("answers", lambda m: m.answer([*QUESTIONS, "no pair"], on_error="return")),
    "hidden_states": ("classes", lambda m: m.hidden_states(INPUTS, layers=(0, -1))),
    "rerank": ("pairs", lambda m: m.rerank("a dog", SENTENCES[:5], top_k=3)),
    "rerank errors": ("pairs", lambda m: m.rerank("a", ["b", LONG, "c"], on_error="return")),
}


@pytest.mark.feature("Python", "`AsyncModel`: every task, awaitable")
@pytest.mark.parametrize("name", TASKS)
def test_a_task_gives_what_model_gives(name: str, models: dict[str, Model]) -> None:
    own, work = TASKS[name]

    async def main() -> Any:
        async with AsyncModel(models[own]) as batched:
            return await work(batched)

    wanted, got = work(models[own]), run(main())
    assert type(got) is type(wanted)
    same(got, wanted)
    if hasattr(got, "errors"):
        same(dict(got.errors), dict(wanted.errors))
    assert got.stats.num_texts == wanted.stats.num_texts
    assert got.stats.num_tokens == wanted.stats.num_tokens
    assert got.stats.num_truncated == wanted.stats.num_truncated
    assert got.stats.num_errors == wanted.stats.num_errors


@pytest.mark.parametrize("own", ["classes", "tags", "masks", "m3", "answers"])
def test_all_tasks_of_a_model_at_once(own: str, models: dict[str, Model]) -> None:
    works = [work for name, work in TASKS.values() if name == own] * 3
    wanted = [work(models[own]) for work in works]

    async def main() -> list[Any]:
        async with AsyncModel(models[own]) as batched:
            return await asyncio.gather(*map(work_on(batched), works))

    for got, theirs in zip(run(main()), wanted, strict=True):
        same(got, theirs)


def work_on(batched: AsyncModel) -> Callable[[Work], Awaitable[Any]]:
    return lambda work: work(batched)


@pytest.mark.feature("Python", "callers share forward passes")
def test_callers_of_one_text_share_steps(model: Model) -> None:
    inputs = texts(60, max_words=4)
    wanted = model.embed(inputs)

    async def main() -> None:
        async with AsyncModel(model) as batched:
            rows = await asyncio.gather(*(batched.embed([text]) for text in inputs))
            np.testing.assert_array_equal(np.concatenate([row.vectors for row in rows]), wanted)
            stats = batched.stats()
            assert stats.num_done == 60 and stats.num_steps < 60
            assert stats.total_tokens == wanted.stats.num_tokens <= stats.padded_tokens
            assert sum(step.num_sequences for step in stats.recent) == 60
            assert stats.tokens_per_second > 0
            assert (stats.num_queued, stats.num_running, stats.num_calls) == (0, 0, 0)
            assert all(row.stats.compute_seconds > 0 for row in rows)
            assert all(row.stats.tokenize_seconds > 0 for row in rows)
            assert all(row.stats.seconds >= row.stats.compute_seconds for row in rows)

    run(main())


def test_many_threads_and_loops_beside_the_model_itself(model: Model) -> None:
    inputs = texts(20, max_words=4)
    wanted = model.embed(inputs).vectors
    labels = model.classify(inputs)
    errors: list[BaseException] = []
    batched = AsyncModel(model)

    def caller(seed: int) -> None:
        order = list(range(len(inputs)))
        random.Random(seed).shuffle(order)

        async def ask(i: int) -> None:
            if (i + seed) % 2:
                same(await batched.classify([inputs[i]]), [labels[i]])
            else:
                same((await batched.embed([inputs[i]])).vectors[0], wanted[i])

        async def all_of_them() -> None:
            await asyncio.gather(*map(ask, order))

        try:
            run(all_of_them())
            same(model.embed(inputs).vectors, wanted)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=caller, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    run(batched.aclose())
    assert errors == []


def test_a_call_of_many_texts_has_few_in_the_queue(model: Model) -> None:
    """Its input is read as it runs: it goes on until single callers have been answered."""
    text, most_texts = "a quick dog", 1_000_000
    num_read, most_queued, is_answered = 0, 0, False

    def inputs() -> Iterator[str]:
        nonlocal num_read
        while not is_answered and num_read < most_texts:
            num_read += 1
            yield text

    async def main() -> None:
        nonlocal most_queued, is_answered
        async with AsyncModel(model, max_queued_requests=200) as batched:
            bulk = asyncio.create_task(batched.embed(inputs()))
            while not batched.stats().num_running:
                await asyncio.sleep(0)
            for _ in range(5):
                most_queued = max(most_queued, batched.stats().num_queued)
                one = await batched.embed(["one"])
            is_answered = True
            vectors = await bulk
            same(vectors.vectors, np.repeat(model.embed([text]).vectors, num_read, axis=0))
            assert vectors.stats.num_texts == num_read
            same(one.vectors, model.embed(["one"]).vectors)

    run(main())
    assert num_read < most_texts
    assert most_queued <= 200


def test_cancelled_callers_leave_nothing(model: Model) -> None:
    inputs = texts(300, max_words=4)
    wanted = model.embed(inputs).vectors
    generator = random.Random(0)

    async def main() -> list[weakref.ref]:
        async with AsyncModel(model) as batched:
            tasks = [asyncio.create_task(batched.embed([text])) for text in inputs]
            refs = [weakref.ref(task) for task in tasks]
            dropped = set(generator.sample(range(len(tasks)), 100))
            for number in dropped:
                if number % 3 == 0:
                    await asyncio.sleep(0)
                tasks[number].cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            for number, result in enumerate(results):
                if isinstance(result, asyncio.CancelledError):
                    assert number in dropped
                else:
                    same(result.vectors[0], wanted[number])
            stats = batched.stats()
            assert (stats.num_queued, stats.queued_tokens, stats.num_calls) == (0, 0, 0)
            assert await batched.embed(["still here"])
            return refs

    refs = run(main())
    gc.collect()
    assert [ref() for ref in refs if ref() is not None] == []


@pytest.mark.feature("Python", "deadlines of calls")
def test_a_late_call_has_a_deadline_error(model: Model) -> None:
    async def main() -> None:
        async with AsyncModel(model) as batched:
            with pytest.raises(DeadlineError, match=r"after timeout_s \(0 s\)"):
                await batched.embed(["a"] * 500, timeout_s=0)
            late = batched.embed(["a"] * 3000, timeout_s=0.02)
            in_time = batched.embed(["a"], timeout_s=WAIT_S)
            results = await asyncio.gather(late, in_time, return_exceptions=True)
            assert isinstance(results[0], DeadlineError) and isinstance(results[0], TimeoutError)
            same(results[1].vectors, model.embed(["a"]).vectors)
            with pytest.raises(OptionError, match="timeout_s must be a number of seconds"):
                await batched.embed(["a"], timeout_s=-1)
            while batched.stats().num_queued:
                await asyncio.sleep(0)

    run(main())


def test_a_full_queue_refuses_at_once(model: Model) -> None:
    async def main() -> None:
        async with AsyncModel(model, max_queued_requests=4, max_queued_tokens=1000) as batched:
            calls = [asyncio.create_task(batched.embed(["a", "b"])) for _ in range(50)]
            results = await asyncio.gather(*calls, return_exceptions=True)
            refused = [result for result in results if isinstance(result, QueueFullError)]
            assert refused and len(refused) == batched.stats().num_refused
            assert all(error.retry_after_s > 0 for error in refused)
            answered = [result for result in results if not isinstance(result, QueueFullError)]
            assert len(answered) >= 2
            for result in answered:
                same(result.vectors, model.embed(["a", "b"]).vectors)

    run(main())


def test_bad_texts_fail_their_own_call(model: Model) -> None:
    async def main() -> None:
        async with AsyncModel(model) as batched:
            calls = [
                batched.embed(["fine"]),
                batched.embed(["fine", 3.5]),
                batched.classify([LONG]),
                batched.embed("one text"),
                batched.embed([[1, 10**6]]),
                batched.tag(["no such head"]),
                batched.embed(["a"], pooling="none"),
            ]
            results = await asyncio.gather(*calls, return_exceptions=True)
            same(results[0].vectors, model.embed(["fine"]).vectors)
            kinds = [type(result) for result in results[1:]]
            assert kinds == [
                InputError, TooLongError, InputError, InputError, InputError, OptionError
            ]  # fmt: skip
            assert batched.stats().num_calls == 0

    run(main())


def test_calls_that_run_as_one(model: Model) -> None:
    """Each has what its own call of `embed` gives: vectors, counts, and the error of a bad text."""
    calls: list[list[Any]] = [
        SENTENCES[:3],
        [],
        [SENTENCES[3], LONG],
        [LONG],
        [SENTENCES[4], ""],
        [7],
        [(SENTENCES[0], SENTENCES[1])],
    ]

    async def main(**options: Any) -> list[Any]:
        async with AsyncModel(model) as batched:
            found = await asyncio.gather(
                *(batched.embed_soon(one, **options) for one in calls), return_exceptions=True
            )
            while batched.stats().num_calls:
                await asyncio.sleep(0.01)
        return found

    for truncate in (False, True):
        found = run(main(truncate=truncate, normalize=True))
        assert len(found) == len(calls)
        for own, texts_of in zip(found, calls, strict=True):
            try:
                wanted = model.embed(texts_of, truncate=truncate, normalize=True)
            except InputError as error:
                assert type(own) is type(error) and str(own) == str(error)
                continue
            same(own.vectors, wanted.vectors)
            for name in ("num_texts", "num_tokens", "num_truncated", "num_errors"):
                assert getattr(own.stats, name) == getattr(wanted.stats, name), name


def test_a_full_queue_refuses_calls_that_run_as_one(model: Model) -> None:
    async def main() -> None:
        async with AsyncModel(model, max_queued_requests=12) as batched:
            calls = [["a"], ["b", "c"]]  # a group is a quarter of the queue
            waiting = [batched.embed_soon(one) for one in calls * 50]
            found = await asyncio.gather(*waiting, return_exceptions=True)
            refused = [isinstance(one, QueueFullError) for one in found]
            assert any(refused) and sum(refused) == batched.stats().num_refused
            assert not all(refused) and refused[::2] == refused[1::2]
            for one, is_refused, texts_of in zip(found, refused, calls * 50, strict=True):
                if not is_refused:
                    same(one.vectors, model.embed(texts_of).vectors)

    run(main())


def test_each_of_several_calls_is_answered_when_it_is_done(model: Model) -> None:
    """A short call does not wait for a long one beside it; and one may leave."""

    async def main() -> None:
        async with AsyncModel(model) as batched:
            calls = [["a"], [SENTENCES[0]] * 64, ["b"]]
            short, long, leaves = map(batched.embed_soon, calls)
            await asyncio.sleep(0)  # they start
            leaves.cancel()
            await short
            assert not long.done()
            same((await long).vectors, model.embed(calls[1]).vectors)
            all_leave = [batched.embed_soon([SENTENCES[i]] * 64) for i in range(2)]
            while not batched.stats().num_calls:
                await asyncio.sleep(0)
            for one in all_leave:
                one.cancel()
            while batched.stats().num_calls:
                await asyncio.sleep(0.01)
            assert batched.stats().num_queued == 0

    run(main())


def test_closing_ends_open_calls(model: Model) -> None:
    async def main() -> None:
        batched = AsyncModel(model)
        calls = [asyncio.create_task(batched.embed(["a dog"] * 2000)) for _ in range(3)]
        while not batched.stats().num_running:
            await asyncio.sleep(0)
        await batched.aclose()
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(result) for result in results] == [ClosedError] * 3
        for again in (batched.embed(["a"]), batched.similarity(np.eye(2), np.eye(2))):
            with pytest.raises(ClosedError):
                await again
        await batched.aclose()
        assert batched.model.embed(["a"]).shape == (1, 48)  # the Model stays open

    run(main())


def test_closing_may_answer_what_is_open(model: Model) -> None:
    async def main() -> None:
        batched = AsyncModel(model)
        calls = [asyncio.create_task(batched.embed(["a dog"] * 100)) for _ in range(3)]
        await asyncio.sleep(0)
        await batched.aclose(drain_s=WAIT_S)
        for result in await asyncio.gather(*calls):
            assert result.shape == (100, 48)

    run(main())


def test_a_model_that_was_never_used_closes(model: Model) -> None:
    async def main() -> None:
        async with AsyncModel(model) as batched:
            assert batched.model is model
            assert batched.stats().num_steps == 0

    run(main())


def test_options_are_checked(model: Model) -> None:
    for options in ({"max_queued_requests": 0}, {"max_queued_tokens": -1}, {"age_limit_s": "1"}):
        with pytest.raises(OptionError, match=next(iter(options))):
            AsyncModel(model, **options)
    with pytest.raises(OptionError, match="tokenizer_threads"):
        AsyncModel(model, tokenizer_threads=0)

    async def main() -> None:
        async with AsyncModel(model) as batched:
            with pytest.raises(OptionError, match="priority must be an integer, got 'high'"):
                await batched.embed(["a"], priority="high")
            with pytest.raises(OptionError, match="drain_s must be a number of seconds"):
                await batched.aclose(drain_s="long")
            assert len(await batched.embed(["a"], priority=np.int64(3))) == 1

    run(main())


def test_a_router_s_tasks_run_on_models_of_their_own(tmp_path: Path) -> None:
    """At once, each in the queue of its route; a task without a route is refused."""
    model = loaded(save_asymmetric(tmp_path))
    given = [*SENTENCES, "a", "the fox"]
    wanted = {
        task: model.embed(given, task=task, truncate=True) for task in ("query", "document", None)
    }
    assert not np.allclose(wanted["query"].vectors, wanted["document"].vectors, atol=1e-2)
    chunks = model.embed_chunks([LONG, "a"], task="query")

    async def main() -> None:
        async with AsyncModel(model) as batched:
            tasks = [*wanted] * 8
            got = await asyncio.gather(
                *(batched.embed(given, task=task, truncate=True) for task in tasks)
            )
            for task, ours in zip(tasks, got, strict=True):
                same(ours, wanted[task])
            assert batched.stats().num_done == len(tasks) * len(given)
            same(await batched.embed_chunks([LONG, "a"], task="query"), chunks)
            with pytest.raises(OptionError, match="one of 'query', 'document'"):
                await batched.embed(["a"], task="other")
        with pytest.raises(ClosedError):
            await batched.embed(["a"], task="query")

    run(main())


def test_ranks_of_a_tensor_parallel_model_serve_many_callers(tmp_path: Path) -> None:
    """One rank ends: open and later calls get the group's error, and none waits for ever."""
    folder = save_checkpoint(tmp_path, num_attention_heads=4)
    with loaded(folder, tp=2) as model:
        wanted = model.embed(INPUTS)

        async def main() -> None:
            async with AsyncModel(model) as batched:
                got = await asyncio.gather(*(batched.embed([text]) for text in INPUTS * 4))
                for ours, row in zip(got, [*wanted.vectors] * 4, strict=True):
                    np.testing.assert_allclose(ours.vectors[0], row, atol=1e-6)
                (worker,) = model.checkpoint.executor.workers._processes
                worker.kill()
                worker.wait()
                results = await asyncio.gather(
                    *(batched.embed([text]) for text in INPUTS * 4), return_exceptions=True
                )
                assert all(isinstance(result, GroupError) for result in results)

        run(main())


def test_similarity_is_the_checkpoints(model: Model) -> None:
    async def main() -> None:
        async with AsyncModel(model) as batched:
            a, b = (await batched.embed(INPUTS[:4])), (await batched.embed(INPUTS[4:]))
            got = await batched.similarity(a, b)
            assert torch.equal(got, model.similarity(a, b))

    run(main())


@settings(max_examples=15)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(1, 40), min_size=0, max_size=8),
            st.sampled_from(["embed", "classify", "hidden_states"]),
            st.integers(-1, 1),
        ),
        max_size=12,
    )
)
def test_random_lengths_tasks_and_priorities(
    models: dict[str, Model], calls: list[tuple[list[int], str, int]]
) -> None:
    model = models["classes"]
    rng = np.random.default_rng(len(calls))
    given = [([rng.integers(5, 100, n).tolist() for n in lengths], *o) for lengths, *o in calls]

    async def main() -> list[Any]:
        async with AsyncModel(model) as batched:
            return await asyncio.gather(
                *(getattr(batched, task)(ids, priority=priority) for ids, task, priority in given)
            )

    for got, (ids, task, _) in zip(run(main()), given, strict=True):
        same(got, getattr(model, task)(ids))


GREEDY = bytetx.SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS: list[Any] = ["a quick dog", [5, 6, 7, 8], "New York"]


async def collect(pieces: Any) -> list[list[int]]:
    """The token ids of each output."""
    found: dict[int, list[int]] = {}
    async for piece in pieces:
        found.setdefault(piece.index, []).extend(piece.token_ids)
    return [found[index] for index in sorted(found)]


def test_generated_tokens_are_models(models: dict[str, Model]) -> None:
    model = models["causal"]
    wanted = [list(result.token_ids) for result in model.generate(PROMPTS, GREEDY)]

    async def main() -> None:
        async with AsyncModel(model, kv_cache_tokens=512) as batched:
            streams = [batched.generate(prompt, GREEDY) for prompt in PROMPTS]
            got = await asyncio.gather(*map(collect, streams))
            assert [outputs for (outputs,) in got] == wanted
            assert streams[1].num_prompt_tokens == 4
            assert streams[1].stats.num_tokens == 10
            assert streams[1].stats.seconds >= streams[1].stats.compute_seconds > 0
            both = bytetx.SamplingParams(n=2, seed=3, max_tokens=5, ignore_eos=True)
            assert [len(ids) for ids in await collect(batched.generate("a", both))] == [5, 5]
            assert batched.stats().num_generating == 0
            scored = await batched.score(["a quick dog"])
            same(scored, model.score(["a quick dog"]))

    run(main())


def test_generation_ends_early_late_and_with_errors(models: dict[str, Model]) -> None:
    long = bytetx.SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)

    async def main() -> None:
        batched = AsyncModel(models["causal"], kv_cache_tokens=512, max_queued_requests=1)
        stream = batched.generate("a", long)
        assert (await anext(stream)).finish_reason is None
        assert batched.stats().num_generating == 1
        with pytest.raises(QueueFullError, match="1 prompts are open"):
            await collect(batched.generate("b", GREEDY))
        await stream.aclose()
        assert batched.stats().num_generating == 0
        with pytest.raises(DeadlineError, match=r"timeout_s \(0 s\)"):
            await collect(batched.generate("a", long, timeout_s=0))
        with pytest.raises(InputError):
            await collect(batched.generate([10**6], GREEDY))
        with pytest.raises(InputError, match="params must be SamplingParams"):
            batched.generate("a", "greedy")
        assert len((await collect(batched.generate("a", GREEDY)))[0]) == 6
        await batched.aclose()
        with pytest.raises(ClosedError):
            await collect(batched.generate("a", GREEDY))

    run(main())


def test_closing_ends_open_generations(models: dict[str, Model]) -> None:
    long = bytetx.SamplingParams(n=50, temperature=1, max_tokens=80, ignore_eos=True)

    async def main() -> None:
        batched = AsyncModel(models["causal"])
        stream = batched.generate("a", long)
        await anext(stream)
        await batched.aclose()
        with pytest.raises(ClosedError, match="closed before the outputs ended"):
            await collect(stream)
        assert not batched.is_broken

    run(main())


def test_rerank_by_a_causal_model(tmp_path: Path, models: dict[str, Model]) -> None:
    """Its prompts are made in a thread; a missing token is an error as Model's."""
    model = models["causal"]
    with pytest.raises(InputError) as wanted:
        model.rerank("a", ["b"])

    async def main() -> None:
        async with AsyncModel(model) as batched:
            with pytest.raises(InputError) as got:
                await batched.rerank("a", ["b"])
            assert str(got.value) == str(wanted.value)

    run(main())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_callers_and_tasks_on_a_gpu(tmp_path: Path, dtype: str) -> None:
    """GEMMs choose other tiles for other row counts, and round otherwise."""
    folder = save_checkpoint(tmp_path, head="ForSequenceClassification", **LABELS)
    model = bytetx.load(folder, device="cuda", dtype=dtype)
    inputs = texts(64, max_words=4)
    vectors, labels = model.embed(inputs, pooling="mean").vectors, model.classify(inputs)
    tolerance = 1e-5 if dtype == "float32" else 1e-3

    async def main() -> None:
        async with AsyncModel(model) as batched:
            for _ in range(4):  # eagerly, captured, replayed
                rows = await asyncio.gather(*(batched.embed([t], pooling="mean") for t in inputs))
                got = np.concatenate([row.vectors for row in rows])
                assert cosine_distance(got, vectors) < tolerance
            mixed = [
                batched.classify([text]) if i % 2 else batched.embed([text], pooling="mean")
                for i, text in enumerate(inputs)
            ]
            for i, result in enumerate(await asyncio.gather(*mixed)):
                if i % 2:
                    scores = {label.label: label.score for label in result[0]}
                    for label in labels[i]:
                        assert scores[label.label] == pytest.approx(label.score, abs=tolerance)
                else:
                    assert cosine_distance(result.vectors, vectors[i : i + 1]) < tolerance

    run(main())


def test_half_types_agree_within_rounding(tmp_path: Path) -> None:
    """GEMMs of bf16 on a CPU choose their blocks by the number of rows."""
    model = loaded(save_checkpoint(tmp_path), dtype="bfloat16")
    inputs: Sequence[str] = texts(30, max_words=4)
    wanted = model.embed(inputs).vectors

    async def main() -> np.ndarray:
        async with AsyncModel(model) as batched:
            rows = await asyncio.gather(*(batched.embed([text]) for text in inputs))
            return np.concatenate([row.vectors for row in rows])

    assert cosine_distance(run(main()), wanted) < 1e-4
