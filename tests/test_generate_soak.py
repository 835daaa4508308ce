"""The engine over a real model: hundreds of requests that come, stop and are given up."""

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from test_causal_model import save_causal
from test_generate import TEXTS
from tiny import one_thread  # noqa: F401  (a fixture)

import bytetx
from bytetx.generate.async_engine import AsyncEngine
from bytetx.generate.engine import GenerationEngine
from bytetx.model import Model
from bytetx.sampling_params import SamplingParams

VOCAB_SIZE = 90  # ids that every tokenizer of these tests has


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return bytetx.load(save_causal(tmp_path_factory.mktemp("soak"), "qwen3-window"))


def num_free_pages(engine: GenerationEngine) -> int:
    return engine._scheduler.pages.num_available


def random_requests(count: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts that often share their first pages, greedy and sampled, with stops of each kind."""
    rng = np.random.default_rng(5)
    shared = rng.integers(5, VOCAB_SIZE, (3, 40)).tolist()
    requests = []
    for number in range(count):
        start = shared[rng.integers(3)][: rng.integers(0, 40)]
        prompt = start + rng.integers(5, VOCAB_SIZE, rng.integers(1, 12)).tolist()
        params = SamplingParams(
            seed=number,
            temperature=float(rng.choice([0, 0.8, 1.5])),
            max_tokens=int(rng.integers(1, 45)),
            top_k=int(rng.choice([0, 20])),
            top_p=float(rng.choice([1, 0.9])),
            stop=("th", "e ") if number % 3 == 0 else (),
            stop_token_ids=rng.integers(5, VOCAB_SIZE, 3).tolist() if number % 3 == 1 else (),
            frequency_penalty=float(rng.choice([0, 0.5])),
        )
        requests.append((prompt, params))
    return requests


@dataclass
class Soaked:
    """What became of requests, by their places: why each ended, its tokens, who was given up."""

    reasons: dict[int, str] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    given_up: set[int] = field(default_factory=set)


def soak(engine: GenerationEngine, requests: list[tuple[list[int], SamplingParams]]) -> Soaked:
    """Requests that come a few at a time and are given up at random; every page is free after."""
    num_free, rng = num_free_pages(engine), np.random.default_rng(6)
    waiting, place_of, found = list(enumerate(requests)), {}, Soaked()
    while waiting or engine.has_work:
        for _ in range(min(len(waiting), int(rng.integers(0, 4)))):
            place, (prompt, params) = waiting.pop()
            place_of[engine.add_request(prompt, params, priority=int(rng.integers(2)))] = place
        for piece in engine.step():
            found.tokens[place_of[piece.request_id]] += piece.token_ids
            if piece.finish_reason is not None:
                found.reasons[place_of[piece.request_id]] = piece.finish_reason
        if place_of and rng.random() < 0.1:
            request_id = int(rng.choice(list(place_of)))
            engine.abort(request_id)
            found.given_up.add(place_of[request_id])
    assert num_free_pages(engine) == num_free
    assert found.reasons.keys() == set(range(len(requests)))
    assert set(found.reasons.values()) == {"stop", "length", "abort"}
    assert engine._scheduler.num_preempted and engine._scheduler.num_found_tokens
    return found


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
    _, engine = own._idle_engines[0]
    for stream in ("pieces", True):
        dropped = own.generate(TEXTS * 3, params, stream=stream)
        next(dropped)
        dropped.close()
        assert own._idle_engines[0][1] is engine and not engine.has_work
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
