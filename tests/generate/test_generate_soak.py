"""The engine over a real model: hundreds of requests that come, stop and are given up."""

import asyncio
from collections import defaultdict
from dataclasses import replace

import pytest
from checkpoints import SENTENCES, save_causal
from generation_soak import random_requests, soak
from tiny import one_thread  # noqa: F401  (a fixture)

import bytetx
from bytetx.generate.async_engine import AsyncEngine
from bytetx.model import Model
from bytetx.sampling_params import SamplingParams

TEXTS = [text for text in SENTENCES if text]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return bytetx.load(save_causal(tmp_path_factory.mktemp("soak"), "qwen3-window"))


def test_hundreds_of_requests_leave_all_pages_free(model: Model) -> None:
    requests = random_requests(300)
    budgeted = Model(model.checkpoint, token_budget=24)
    found = soak(budgeted.engine(kv_cache_tokens=200, max_num_seqs=12), requests)
    ended = [place for place, reason in found.reasons.items() if reason != "abort"]
    assert len(ended) > 200 and found.reasons.keys() - set(ended) <= found.given_up
    for place in ended[::5]:
        prompt, params = requests[place]
        assert model.generate([prompt], params)[0].token_ids == found.tokens[place]


def test_a_stream_that_is_dropped_leaves_the_engine_whole(model: Model) -> None:
    params = SamplingParams(max_tokens=20, seed=1, ignore_eos=True)
    own = Model(model.checkpoint)
    wanted = [answer.token_ids for answer in own.generate(TEXTS, params)]
    engine = own.engines.idle[0].engine
    for stream in ("pieces", True):
        dropped = own.generate(TEXTS * 3, params, stream=stream)
        next(dropped)
        dropped.close()
        assert own.engines.idle[0].engine is engine and not engine.has_work
    pages = engine._scheduler.pages
    assert pages.num_available == pages.num_pages
    assert [answer.token_ids for answer in own.generate(TEXTS, params)] == wanted


def test_prompts_are_pulled_as_sequences_end(model: Model) -> None:
    params, num_pulled = SamplingParams(temperature=0, max_tokens=4), 0

    def prompts():
        nonlocal num_pulled
        for number in range(40):
            num_pulled += 1
            yield [5 + number % 80, 7]

    stream = model.generate(prompts(), params, stream=True, max_num_seqs=4)
    next(stream)
    assert num_pulled <= 12
    assert len(list(stream)) == 39 and stream.stats.num_texts == 40
    assert stream.stats.num_tokens >= 80 + 40


def test_two_runs_at_a_time_have_an_engine_each(model: Model) -> None:
    params = SamplingParams(temperature=0, max_tokens=6)
    first = model.generate(TEXTS, params, stream=True)
    second = model.generate(TEXTS[::-1], params, stream=True)
    pairs = list(zip(first, second, strict=True))
    wanted = [answer.text for answer in model.generate(TEXTS, params)]
    assert [one.text for one, _ in pairs] == wanted
    assert [other.text for _, other in pairs] == wanted[::-1]


def test_an_event_loop_listens_to_many(model: Model) -> None:
    params = SamplingParams(seed=2, max_tokens=12)
    prompts = model.encode_prompts(TEXTS[:6])

    async def listen(engine: AsyncEngine, prompt: list[int]) -> str:
        return "".join([piece.text async for piece in engine.generate(prompt, params)])

    async def listen_to_all() -> list[str]:
        with AsyncEngine(model.engine(max_num_seqs=4)) as engine:
            return await asyncio.gather(*(listen(engine, prompt) for prompt in prompts))

    wanted = [answer.text for answer in model.generate(prompts, params)]
    assert asyncio.run(listen_to_all()) == wanted


def test_an_engines_own_seed_repeats_a_run(model: Model) -> None:
    def run(seed: int | None) -> list[list[int]]:
        engine, tokens = model.engine(seed=seed), defaultdict(list)
        for _ in range(3):
            engine.add_request([5, 6, 7], replace(SamplingParams(), max_tokens=8))
        while engine.has_work:
            for piece in engine.step():
                tokens[piece.request_id] += piece.token_ids
        return [tokens[number] for number in range(3)]

    assert run(4) == run(4) != run(5)
    first, second, third = run(4)
    assert first != second != third
