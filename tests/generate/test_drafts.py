"""Drafts change no output: the engine over a fake model, and small models of several families."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from draft_oracle import MAX_DRAFT, Oracle, oracle  # noqa: F401  (oracle: a fixture)
from generation_engines import decode, engine_of, run, whole
from generation_soak import num_free_pages, random_requests, soak
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import one_thread, random_ids, save  # noqa: F401  (one_thread: a fixture)
from tiny_decoders import tiny_decoder

import bytetx
from bytetx.errors import InputError
from bytetx.generate import scheduler as scheduling
from bytetx.generate.async_engine import AsyncEngine
from bytetx.generate.engine import GenerationEngine
from bytetx.generate.outputs import RequestOutput
from bytetx.generate.scheduler import Scheduler, SequenceState
from bytetx.model import Model
from bytetx.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=24)
AHEAD = pytest.mark.parametrize("runs_ahead", [False, True], ids=["waits", "ahead"])


def alone(prompt: list[int], params: SamplingParams, **options: object) -> list[tuple]:
    """(text, tokens, reason, stop, logprobs) of each of the n outputs, without drafts."""
    engine, _, _ = engine_of(**options)
    engine.add_request(prompt, params)
    found = outcome(run(engine), 0, params)
    assert engine.draft_counts == (0, 0)
    return found


def outcome(pieces: dict, request: int, params: SamplingParams) -> list[tuple]:
    return [
        (*whole(pieces[request, index]), logprobs_of(pieces[request, index]))
        for index in range(params.n)
    ]


def logprobs_of(pieces: list[RequestOutput]) -> list[tuple]:
    """To four decimals: a row's logits do not depend on the rows beside it, their sums may."""
    return [
        (entry.token_id, round(entry.logprob, 4), entry.rank, list(entry.top))
        for piece in pieces
        for entry in piece.logprobs or ()
    ]


MIXED = [
    GREEDY,
    replace(GREEDY, logprobs=2),
    replace(GREEDY, max_tokens=1),
    replace(GREEDY, max_tokens=2),
    replace(GREEDY, min_tokens=9, stop_token_ids=list(range(60))),
    replace(GREEDY, logit_bias={5: 4.0, 6: -np.inf}, logprobs=0),
    replace(GREEDY, prompt_logprobs=1),
    replace(GREEDY, repetition_penalty=1.3),
    SamplingParams(seed=1, max_tokens=20),
    SamplingParams(seed=2, max_tokens=20, top_k=5, n=3, logprobs=1),
    SamplingParams(seed=3, max_tokens=20, top_p=0.6, min_p=0.01, stop=["A", "bc"]),
    SamplingParams(seed=4, max_tokens=20, presence_penalty=1.0),
    SamplingParams(seed=5, max_tokens=9, logits_processors=[lambda ids, x: x * (len(ids) % 2)]),
]


@AHEAD
@pytest.mark.parametrize("num_pages", [90, 16])
def test_outputs_are_those_without_drafts(
    num_pages: int,
    runs_ahead: bool,
    oracle: type[Oracle],  # noqa: F811
) -> None:
    """16 pages of 4 tokens preempt; logprobs, seeds, stops and penalties beside drafts."""
    sizes = {"num_pages": num_pages, "eos_token_ids": (96,)}
    prompts = [[3, 1, 4, 1, 5, 9][: 1 + number % 6] for number in range(3 * len(MIXED))]
    requests = [(prompt, MIXED[number % len(MIXED)]) for number, prompt in enumerate(prompts)]
    wanted = [alone(prompt, params, **sizes) for prompt, params in requests]
    for (prompt, _), outputs in zip(requests, wanted, strict=True):
        oracle.answers += [prompt + tokens for _, tokens, *_ in outputs]
    engine, _, scheduler = engine_of(
        runs_ahead=runs_ahead, num_speculative_tokens=MAX_DRAFT, **sizes
    )
    for number, (prompt, params) in enumerate(requests):
        engine.add_request(prompt, params, priority=number % 2, streams=number % 3 > 0)
    pieces = run(engine)
    found = [outcome(pieces, number, params) for number, (_, params) in enumerate(requests)]
    assert found == wanted
    drafted, accepted = engine.draft_counts
    assert 0.2 * drafted < accepted < 0.95 * drafted
    assert scheduler.pages.num_available == num_pages
    assert (scheduler.num_preempted > 0) == (num_pages == 16)


@AHEAD
def test_an_output_ends_inside_a_draft(
    runs_ahead: bool,
    oracle: type[Oracle],  # noqa: F811
) -> None:
    """By each of its reasons, wherever in the draft its last token is."""
    oracle.errs = False
    ((text, tokens, *_),) = alone([7], GREEDY)
    oracle.answers += [[7, *tokens]]
    for place in range(2, 12):
        first = tokens.index(tokens[place])
        stops = [
            (replace(GREEDY, stop_token_ids=[tokens[place]]), ("stop", tokens[place]), first + 1),
            (
                replace(GREEDY, stop=[text[place - 1 : place + 1]]),
                ("stop", text[place - 1 :][:2]),
                0,
            ),
            (replace(GREEDY, max_tokens=place + 1), ("length", None), place + 1),
        ]
        for params, ending, num_tokens in stops:
            wanted = alone([7], params)
            engine, _, scheduler = engine_of(
                runs_ahead=runs_ahead, num_speculative_tokens=MAX_DRAFT
            )
            engine.add_request([7], params)
            found = outcome(run(engine), 0, params)
            assert found == wanted and found[0][2:4] == ending
            assert num_tokens in (0, len(found[0][1]))
            assert scheduler.pages.num_available == 64
        eos = {"eos_token_ids": (tokens[place],)}
        engine, runner, _ = engine_of(
            runs_ahead=runs_ahead, num_speculative_tokens=MAX_DRAFT, **eos
        )
        engine.add_request([7], GREEDY, streams=False)
        assert outcome(run(engine), 0, GREEDY) == alone([7], GREEDY, **eos)
        assert runner.num_steps <= 2 + first // (1 + MAX_DRAFT) + runs_ahead


def test_pieces_come_in_order_with_all_tokens_of_a_step(
    oracle: type[Oracle],  # noqa: F811
) -> None:
    oracle.errs = False
    ((text, tokens, *_),) = alone([7], GREEDY)
    oracle.answers += [[7, *tokens]]
    engine, runner, _ = engine_of(num_speculative_tokens=MAX_DRAFT)
    engine.add_request([7], GREEDY)
    pieces = run(engine)[0, 0]
    assert [len(piece.token_ids) for piece in pieces] == [6, 6, 6, 6]
    assert [piece.text for piece in pieces] == [decode(piece.token_ids) for piece in pieces]
    assert whole(pieces) == (text, tokens, "length", None) and runner.num_steps == 4
    assert engine.draft_counts == (20, 20)


@AHEAD
def test_nan_logits_behind_a_draft_end_their_request_alone(
    runs_ahead: bool,
    oracle: type[Oracle],  # noqa: F811
) -> None:
    oracle.errs = False
    prompts = [[number] * 5 for number in range(3)]
    wanted = [alone(prompt, GREEDY)[0] for prompt in prompts]
    oracle.answers += [prompt + found[1] for prompt, found in zip(prompts, wanted, strict=True)]
    others = {0, 1, 2, *wanted[0][1][:12], *wanted[1][1], *wanted[2][1]}
    bad = next(token for token in wanted[0][1] if token not in others)
    engine, runner, scheduler = engine_of(runs_ahead=runs_ahead, num_speculative_tokens=MAX_DRAFT)
    runner.bad_token = bad
    for prompt in prompts:
        engine.add_request(prompt, GREEDY)
    pieces = run(engine)
    text, tokens, reason, _ = whole(pieces[0, 0])
    count = wanted[0][1].index(bad) + 1
    assert (tokens, reason) == (wanted[0][1][:count], "error")
    assert f"after {count} tokens: the logits are NaN" in str(pieces[0, 0][-1].error)
    assert [outcome(pieces, number, GREEDY)[0] for number in (1, 2)] == wanted[1:]
    assert scheduler.pages.num_available == 64
    runner.bad_token = None
    num_cached = scheduler.num_cached_tokens
    start = prompts[0] + tokens[:4]  # two pages are back, and with them what followed would be
    engine.add_request(start, replace(GREEDY, max_tokens=1))
    run(engine)
    engine.add_request(prompts[0] + tokens, GREEDY)  # but none of the drafts of the failed one
    assert whole(run(engine)[4, 0]) == alone(prompts[0] + tokens, GREEDY)[0][:4]
    assert scheduler.num_cached_tokens == num_cached + 8


@AHEAD
def test_aborted_and_failed_steps_with_drafts(
    runs_ahead: bool,
    oracle: type[Oracle],  # noqa: F811
) -> None:
    prompts = [[number, 2, 3] for number in range(4)]
    wanted = [alone(prompt, GREEDY)[0] for prompt in prompts]
    oracle.answers += [prompt + found[1] for prompt, found in zip(prompts, wanted, strict=True)]
    engine, runner, scheduler = engine_of(runs_ahead=runs_ahead, num_speculative_tokens=MAX_DRAFT)
    for prompt in prompts:
        engine.add_request(prompt, GREEDY)
    pieces = [piece for _ in range(3) for piece in engine.step()]
    engine.abort(1)
    runner.breaks_at = runner.num_steps + 2
    for prompt in prompts[:2]:
        engine.add_request(prompt, GREEDY)
    found = run(engine)
    reasons = [found[number, 0][-1].finish_reason for number in range(4)]
    assert reasons == ["error", "abort", "error", "error"]
    for piece in pieces + found[0, 0]:
        assert piece.request_id or set(piece.token_ids) <= set(wanted[0][1])
    assert scheduler.pages.num_available == 64
    runner.breaks_at = None
    for prompt in prompts:  # with the pages that are still in the prefix cache
        engine.add_request(prompt, GREEDY)
    after = dict(sorted(run(engine).items()))
    assert [outcome(after, request, GREEDY)[0] for request, _ in after] == wanted


def test_async_callers_get_the_outputs_without_drafts(
    oracle: type[Oracle],  # noqa: F811
) -> None:
    params = [replace(MIXED[number % 7], n=1) for number in range(12)]
    wanted = [alone([1, 2], each)[0] for each in params]
    oracle.answers += [[1, 2, *found[1]] for found in wanted]
    inner, _, scheduler = engine_of(runs_ahead=True, num_speculative_tokens=MAX_DRAFT)

    async def collect(engine: AsyncEngine, each: SamplingParams) -> tuple:
        pieces = [piece async for piece in engine.generate([1, 2], each)]
        return (*whole(pieces), logprobs_of(pieces))

    async def main() -> list[tuple]:
        with AsyncEngine(inner) as engine:
            leaving = engine.generate([1, 2], GREEDY)
            await anext(leaving)
            await leaving.aclose()
            found = await asyncio.gather(*(collect(engine, each) for each in params))
            assert engine.draft_counts[1] > 0
            return found

    assert asyncio.run(main()) == wanted
    assert scheduler.pages.num_available == 64


class Eager:
    """A drafter that always has a wrong draft of full length."""

    def draft(self, token_ids: Sequence[int], most: int) -> list[int]:
        return [96] * most

    def count(self, num_accepted: int, num_tokens: int) -> None: ...


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "NgramDrafter", Eager)


def draft_lengths(
    prompts: list[list[int]], *, max_tokens: int = 20, **sizes: int
) -> tuple[list[int], Scheduler]:
    """Return the first step in which all of these sequences decode."""
    options = {"num_pages": 64, "page_size": 4, "token_budget": 64, "max_num_seqs": 8} | sizes
    scheduler = Scheduler(**options, max_positions=1000, num_speculative_tokens=6)
    for prompt in prompts:
        scheduler.add(SequenceState(list(prompt), max_tokens))
    for row in scheduler.schedule().rows:
        scheduler.append(row.sequence, 1)
    plan = scheduler.schedule()
    assert len(plan.rows) == len(prompts) and plan.num_preempted == 0
    assert plan.total_tokens == sum(1 + len(row.draft) for row in plan.rows)
    return [len(row.draft) for row in plan.rows], scheduler


def test_drafts_take_what_budget_pages_and_outputs_leave(eager: None) -> None:
    prompt = [1, 1]
    assert draft_lengths([prompt])[0] == [6]
    assert draft_lengths([prompt] * 3, max_draft_step=12)[0] == [3, 3, 3]
    assert draft_lengths([prompt] * 3, max_draft_step=5)[0] == [1, 1, 0]
    assert draft_lengths([prompt] * 3, max_draft_step=3)[0] == [0, 0, 0]
    assert draft_lengths([prompt] * 3, token_budget=9)[0] == [2, 2, 2]
    assert draft_lengths([prompt], max_tokens=5)[0] == [3]  # one from each step, and these
    assert draft_lengths([prompt], max_tokens=2)[0] == [0]
    # Two sequences of three tokens in a page each: two more pages stay free for themselves.
    for num_pages, lengths in ((4, [1, 1]), (5, [5, 1]), (6, [6, 1]), (7, [6, 5]), (8, [6, 6])):
        found, scheduler = draft_lengths([[1, 1], [2, 2]], num_pages=num_pages, max_tokens=12)
        assert found == lengths and scheduler.pages.num_available >= 2
        assert scheduler.num_preempted == 0


def test_short_shares_take_turns(eager: None) -> None:
    engine, _, scheduler = engine_of(num_speculative_tokens=4)
    scheduler._max_draft_step = 8
    for number in range(6):
        engine.add_request([number], replace(GREEDY, max_tokens=40))
    counts = np.zeros(6, dtype=int)
    schedule = scheduler.schedule

    def counted() -> object:
        plan = schedule()
        for row in plan.rows:
            counts[row.sequence.arrival] += len(row.draft)
        return plan

    scheduler.schedule = counted
    for _ in range(18):
        engine.step()
    assert counts.tolist() == [6] * 6


def test_wrong_drafts_leave_no_page_in_the_prefix_cache(eager: None) -> None:
    """Pages that only drafts filled are not found by a prompt that has those tokens."""
    engine, _, scheduler = engine_of(num_speculative_tokens=6)
    engine.add_request([7, 8], replace(GREEDY, max_tokens=6))
    pieces = run(engine)
    tokens = [7, 8, *whole(pieces[0, 0])[1]]
    assert scheduler.num_draft_tokens > 4 and scheduler.num_accepted_tokens == 0
    for first in range(1, len(tokens) + 1):
        prompt = [*tokens[:first], *[96] * 9]
        before = scheduler.num_cached_tokens
        engine.add_request(prompt, GREEDY)
        found = list(run(engine).values())[0]
        assert whole(found) == alone(prompt, GREEDY)[0][:4]
        if first <= 4:
            assert scheduler.num_cached_tokens - before in (0, first // 4 * 4)


def test_accepted_pages_are_in_the_prefix_cache(
    oracle: type[Oracle],  # noqa: F811
) -> None:
    oracle.errs = False
    ((_, tokens, *_),) = alone([7], GREEDY)
    oracle.answers += [[7, *tokens]]
    engine, _, scheduler = engine_of(num_speculative_tokens=MAX_DRAFT)
    engine.add_request([7], GREEDY)
    run(engine)
    assert scheduler.num_accepted_tokens > 15
    prompt = [7, *tokens]
    engine.add_request(prompt, GREEDY)
    assert whole(run(engine)[1, 0]) == alone(prompt, GREEDY)[0][:4]
    assert scheduler.num_cached_tokens == 24  # 25 tokens, the last one is always computed


def test_steps_run_ahead_where_nothing_repeats() -> None:
    """The tokens of the fake model are random, so that no step waits for a draft."""
    engine, _, scheduler = engine_of(runs_ahead=True, num_speculative_tokens=4)
    engine.add_request([1, 2, 3], replace(GREEDY, max_tokens=60))
    depths = []
    while engine.has_work:
        engine.step()
        depths.append(len(engine._in_flight))
    assert engine.draft_counts == (0, 0) and depths[:-1] == [1] * (len(depths) - 1)


def test_few_repeating_sequences_do_not_hold_up_the_others(
    oracle: type[Oracle],  # noqa: F811
) -> None:
    """One of nine does; one of eight waits for its tokens, and so gets drafts."""
    for num_others, has_drafts in ((8, False), (7, True)):
        scheduler = Scheduler(
            num_pages=64,
            page_size=4,
            token_budget=64,
            max_num_seqs=16,
            max_positions=99,
            num_speculative_tokens=4,
        )
        scheduler.add(SequenceState([1], 9))
        for number in range(num_others):
            other = SequenceState([2 + number], 9, params=SamplingParams(presence_penalty=1.0))
            scheduler.add(other)
        oracle.errs, oracle.answers = False, [[1, 2, 3]]
        plan = scheduler.schedule()
        assert len(plan.rows) == 1 + num_others
        assert scheduler.expects_drafts() == has_drafts


FAMILIES = [
    *("llama", "llama-dynamic", "mistral", "qwen3-window", "gpt2", "gpt_neo", "opt", "bloom"),
    *("falcon-alibi", "gemma2", "gemma3", "mixtral", "qwen3_moe", "phi3-window"),
]


def repetitive(seqlens: list[int], *, seed: int) -> list[list[int]]:
    """Prompts of few different tokens, whose n-grams come again."""
    rng = np.random.default_rng(seed)
    return [rng.choice([5, 6, 7], length).tolist() for length in seqlens]


@pytest.mark.feature("Generation", "speculation by n-grams")
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_gives_the_tokens_without_drafts(
    name: str,
    tmp_path: Path,
    oracle: type[Oracle],  # noqa: F811
) -> None:
    """Greedy and sampled, in steps of all kinds, with windows and with pages that run out."""
    checkpoint = bytetx.load(save(tiny_decoder(name), tmp_path)).checkpoint
    prompts = random_ids([1, 13, 37, 2, 30])
    greedy = SamplingParams(temperature=0, max_tokens=25, ignore_eos=True, logprobs=1)
    sampled = SamplingParams(seed=3, max_tokens=25, top_k=2, temperature=0.5, ignore_eos=True)
    for params in (greedy, sampled):
        plain = Model(checkpoint).generate(prompts, params)
        oracle.answers = [p + a.token_ids for p, a in zip(prompts, plain, strict=True)]
        for budget, cache in ((1024, None), (12, 144)):
            model = Model(checkpoint, token_budget=budget)
            found = model.generate(
                prompts, params, num_speculative_tokens=4, kv_cache_tokens=cache, max_num_seqs=5
            )
            assert [a.token_ids for a in found] == [a.token_ids for a in plain]
            for ours, theirs in zip(found, plain, strict=True):
                for one, other in zip(ours.logprobs or (), theirs.logprobs or (), strict=True):
                    assert (one.token_id, one.rank) == (other.token_id, other.rank)
                    assert abs(one.logprob - other.logprob) < 1e-4
            drafted, accepted = found.stats.num_draft_tokens, found.stats.num_accepted_tokens
            assert 0.3 * drafted < accepted < 0.9 * drafted and accepted > 30
            assert plain.stats.num_draft_tokens == 0
            engine = model.engines.idle[0].engine
            assert num_free_pages(engine) == engine._scheduler.pages.num_pages


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    from checkpoints import save_causal

    yield bytetx.load(save_causal(tmp_path_factory.mktemp("drafts"), "qwen3"))


lengths = st.lists(st.integers(1, 60), min_size=1, max_size=5)


@settings(max_examples=25, deadline=None)
@given(lengths, st.integers(0, 1000), st.integers(1, 16), st.sampled_from([None, 96]))
def test_random_prompts(
    model: Model, seqlens: list[int], seed: int, most: int, cache: int | None
) -> None:
    prompts = repetitive(seqlens, seed=seed)
    params = [
        SamplingParams(temperature=0, max_tokens=1 + (seed + number) % 30, stop=("th", "e "))
        for number in range(len(prompts))
    ]
    wanted, found = (
        model.generate(prompts, params, num_speculative_tokens=count, kv_cache_tokens=cache)
        for count in (0, most)
    )
    assert [answer.outputs for answer in found] == [answer.outputs for answer in wanted]


def test_soak_with_drafts(model: Model) -> None:
    """Requests that come, stop, are preempted and given up; every page free, equal outputs."""
    requests = random_requests(80)
    small = Model(model.checkpoint, token_budget=40)
    with_drafts = small.engine(kv_cache_tokens=112, max_num_seqs=10, num_speculative_tokens=5)
    found = soak(with_drafts, requests)
    engine: GenerationEngine = small.engine()
    place_of = {engine.add_request(p, params): n for n, (p, params) in enumerate(requests)}
    for (request_id, _), pieces in run(engine).items():
        place = place_of[request_id]
        tokens = [token for piece in pieces for token in piece.token_ids]
        if place not in found.given_up:
            assert found.tokens[place] == tokens
        assert found.tokens[place] == tokens[: len(found.tokens[place])]
    assert with_drafts.draft_counts[0] > 0


@pytest.mark.parametrize("given", [-1, 33, 1.5, True, "ngram"])
def test_a_wrong_number_of_draft_tokens_is_refused(model: Model, given: object) -> None:
    message = "num_speculative_tokens must be an integer from 0, which drafts none, to 32, got "
    with pytest.raises(InputError, match=message):
        model.generate([[5]], num_speculative_tokens=given)
    with pytest.raises(InputError, match=message):
        bytetx.AsyncModel(model, num_speculative_tokens=given)
