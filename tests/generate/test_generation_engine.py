"""The engine over a fake model: text, stops, seeds, logprobs, errors; alone or among others."""

import asyncio
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from generation_engines import decode, engine_of, run, whole

from bytetx.errors import ClosedError, InputError, TooLongError
from bytetx.generate.async_engine import AsyncEngine
from bytetx.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8)
AHEAD = pytest.mark.parametrize("runs_ahead", [False, True], ids=["waits", "ahead"])


def alone(prompt: list[int], params: SamplingParams, **options) -> tuple:
    engine, _, _ = engine_of(**options)
    engine.add_request(prompt, params)
    return whole(run(engine)[0, 0])


def test_greedy_answers_are_the_argmax_tokens() -> None:
    engine, runner, _ = engine_of()
    engine.add_request([1, 2, 3], GREEDY)
    text, token_ids, reason, stop = whole(run(engine)[0, 0])
    tokens = [1, 2, 3]
    for _ in range(8):
        tokens.append(int(runner.logits(tokens).argmax()))
    assert (token_ids, text) == (tokens[3:], decode(tokens[3:]))
    assert (reason, stop) == ("length", None)


MIXED = [
    GREEDY,
    SamplingParams(seed=1, max_tokens=20),
    SamplingParams(seed=2, max_tokens=20, top_k=5, temperature=2.0),
    SamplingParams(seed=3, max_tokens=20, top_p=0.6, stop=["A", "bc"]),
    SamplingParams(seed=4, max_tokens=30, repetition_penalty=1.8, min_p=0.05),
    SamplingParams(seed=5, max_tokens=30, presence_penalty=1.0, frequency_penalty=0.5),
    SamplingParams(seed=6, max_tokens=12, logit_bias={5: 4.0, 6: -np.inf}, stop_token_ids=[5]),
    SamplingParams(seed=7, max_tokens=25, min_tokens=10, stop_token_ids=list(range(48))),
    SamplingParams(seed=8, max_tokens=9, logits_processors=[lambda ids, x: x * (len(ids) % 2)]),
    SamplingParams(temperature=0, max_tokens=30, repetition_penalty=1.2, logprobs=2),
]


@AHEAD
@pytest.mark.parametrize("num_pages", [60, 16])
def test_an_answer_is_the_same_among_others(num_pages: int, runs_ahead: bool) -> None:
    """16 pages of 4 tokens preempt; penalties, seeds and stops must survive that."""
    engine, _, scheduler = engine_of(
        num_pages=num_pages, eos_token_ids=(96,), runs_ahead=runs_ahead
    )
    prompts = [[3, 1, 4, 1, 5, 9][: 1 + number % 6] for number in range(2 * len(MIXED))]
    expected = []
    for number, prompt in enumerate(prompts):
        params = MIXED[number % len(MIXED)]
        engine.add_request(prompt, params, priority=number % 2, streams=number % 3 > 0)
        expected.append(alone(prompt, params, eos_token_ids=(96,)))
    pieces = run(engine)
    assert [whole(pieces[number, 0]) for number in range(len(prompts))] == expected
    assert scheduler.pages.num_available == num_pages
    assert (scheduler.num_preempted > 0) == (num_pages == 16)


def test_limits_hold() -> None:
    text, tokens, reason, stop = alone([1], MIXED[6])
    assert (reason, stop, tokens[-1]) == ("stop", 5, 5) and 6 not in tokens
    assert text == decode(tokens[:-1])  # the stop token is no text
    text, tokens, reason, stop = alone([1], MIXED[7])
    assert len(tokens) >= 11 and all(token >= 48 for token in tokens[:10]) and reason == "stop"
    for max_tokens in (None, 1000):  # the model's positions end first
        text, tokens, reason, stop = alone([1, 2], SamplingParams(max_tokens=max_tokens, seed=1))
        assert (len(tokens), reason) == (198, "length")


@AHEAD
def test_stop_strings_end_the_text_before_them(runs_ahead: bool) -> None:
    free = alone([7], GREEDY)[0]
    params = SamplingParams(temperature=0, max_tokens=8, stop=[free[3:5], "~~"])
    text, tokens, reason, stop = alone([7], params)
    assert (text, reason, stop, len(tokens)) == (free[:3], "stop", free[3:5], 5)
    engine, _, _ = engine_of(runs_ahead=runs_ahead)
    engine.add_request([7], params)
    shown = [piece.text for piece in run(engine)[0, 0]]
    assert shown == [*free[:3], "", ""]  # held back, then cut


def test_stop_strings_wait_for_min_tokens() -> None:
    free = alone([7], GREEDY)[0]
    params = SamplingParams(temperature=0, max_tokens=8, min_tokens=4, stop=[free[1:3], free[5:7]])
    assert alone([7], params)[0] == free[:5]
    stop = free[1:3]
    assert stop not in free[2:]
    for min_tokens, text in ((2, free[:1]), (3, free)):  # complete behind min_tokens, or with it
        params = replace(GREEDY, min_tokens=min_tokens, stop=[stop])
        assert alone([7], params)[0] == text


def test_min_tokens_forbids_the_end_of_text_that_ignore_eos_goes_past() -> None:
    free = alone([7], GREEDY)[1]
    params = replace(GREEDY, ignore_eos=True, min_tokens=4)
    tokens = alone([7], params, eos_token_ids=(free[0], free[1]))[1]
    assert len(tokens) == 8 and not {free[0], free[1]} & set(tokens[:4])


@AHEAD
def test_n_answers_differ_and_come_again_with_their_seed(runs_ahead: bool) -> None:
    engine, _, _ = engine_of(runs_ahead=runs_ahead)
    engine.add_request([1, 2], SamplingParams(n=4, seed=11, max_tokens=10))
    engine.add_request([1, 2], SamplingParams(n=4, max_tokens=10))
    pieces = run(engine)
    first = [whole(pieces[0, index])[0] for index in range(4)]
    unseeded = [whole(pieces[1, index])[0] for index in range(4)]
    assert len({*first, *unseeded}) == 8
    assert first[0] == alone([1, 2], SamplingParams(seed=11, max_tokens=10))[0]


@AHEAD
def test_logprobs_are_the_models_own(runs_ahead: bool) -> None:
    engine, runner, _ = engine_of(runs_ahead=runs_ahead)
    prompt = list(range(30))  # over the budget: scored in pieces
    params = SamplingParams(seed=1, max_tokens=3, temperature=2.0, logprobs=2, prompt_logprobs=1)
    engine.add_request(prompt, params)
    pieces = run(engine)[0, 0]
    tokens = prompt + whole(pieces)[1]
    assert len(pieces[0].prompt_logprobs) == 29 and pieces[1].prompt_logprobs is None
    entries = [*pieces[0].prompt_logprobs, *(e for piece in pieces for e in piece.logprobs)]
    for place, entry in enumerate(entries, start=1):
        exact = runner.logits(tokens[:place]).double().log_softmax(0)
        assert entry.token_id == tokens[place]
        assert entry.logprob == pytest.approx(float(exact[tokens[place]]), abs=1e-5)
        assert entry.rank == 1 + int((exact > exact[tokens[place]]).sum())
        assert list(entry.top) == exact.topk(1 if place < 30 else 2).indices.tolist()


@AHEAD
def test_nan_logits_end_their_request_alone(runs_ahead: bool) -> None:
    engine, runner, scheduler = engine_of(runs_ahead=runs_ahead)
    runner.bad_token = 96
    engine.add_request([96] * 9, GREEDY)
    engine.add_request([1, 2, 3], GREEDY)
    pieces = run(engine)
    assert pieces[0, 0][-1].finish_reason == "error"
    assert "the logits are NaN" in str(pieces[0, 0][-1].error)
    assert whole(pieces[1, 0]) == alone([1, 2, 3], GREEDY)
    assert (scheduler.pages.num_available, scheduler.pages.find_cached([b"any"])) == (64, [])
    runner.bad_token = None
    engine.add_request([96] * 9, GREEDY)  # and no page of the bad one is found
    assert whole(run(engine)[2, 0]) == alone([96] * 9, GREEDY)


@AHEAD
def test_a_bad_request_takes_no_other_of_its_prefix_with_it(runs_ahead: bool) -> None:
    engine, runner, scheduler = engine_of(runs_ahead=runs_ahead)
    runner.bad_token = 96
    options = {"repetition_penalty": 1.5, "logit_bias": {96: -np.inf}, "max_tokens": 12}
    params = [SamplingParams(seed=seed, **options) for seed in range(3)]
    for last, param in zip((96, 1, 2), params, strict=True):
        engine.add_request([5] * 8 + [last], param)
    pieces = run(engine)
    assert whole(pieces[0, 0])[2] == "error"
    for number in (1, 2):
        assert whole(pieces[number, 0]) == alone([5] * 8 + [number], params[number])
    assert scheduler.num_preempted == 2  # both found pages of the bad one, and started again


@AHEAD
def test_a_processor_that_raises_ends_its_request_alone(runs_ahead: bool) -> None:
    def broken(token_ids: tuple[int, ...], logits: torch.Tensor) -> torch.Tensor:
        return logits[:5] if len(token_ids) > 4 else logits

    engine, _, _ = engine_of(runs_ahead=runs_ahead)
    engine.add_request([1, 2, 3], SamplingParams(logits_processors=[broken]))
    engine.add_request([1, 2, 3], GREEDY)
    pieces = run(engine)
    assert "processor broken failed: TypeError: it must return" in str(pieces[0, 0][-1].error)
    assert whole(pieces[0, 0])[2] == "error" and len(whole(pieces[0, 0])[1]) == 2
    assert whole(pieces[1, 0]) == alone([1, 2, 3], GREEDY)


@AHEAD
def test_a_failed_step_ends_its_rows_and_the_others_go_on(runs_ahead: bool) -> None:
    engine, runner, scheduler = engine_of(runs_ahead=runs_ahead)
    for first in range(10):  # two more than run at a time
        engine.add_request([first, 2, 3], GREEDY)
    runner.breaks_at = 3
    reasons = [whole(answer)[2] for answer in dict(sorted(run(engine).items())).values()]
    assert reasons == ["error"] * 8 + ["length"] * 2
    assert scheduler.pages.num_available == 64


@AHEAD
def test_an_abort_ends_a_request_in_the_middle(runs_ahead: bool) -> None:
    engine, _, scheduler = engine_of(runs_ahead=runs_ahead)
    request_id = engine.add_request([1], SamplingParams(n=2, seed=0, max_tokens=50))
    engine.add_request([1, 2, 3], GREEDY)
    for _ in range(3):
        engine.step()
    engine.abort(request_id)
    engine.abort(request_id)
    engine.abort(99)
    pieces = run(engine)
    assert [pieces[request_id, index][-1].finish_reason for index in range(2)] == ["abort"] * 2
    assert pieces[1, 0][-1].finish_reason == "length"
    assert scheduler.pages.num_available == 64


@pytest.mark.parametrize(
    ("prompt", "params", "error", "message"),
    [
        ([], GREEDY, InputError, "the prompt has no tokens"),
        ([97], GREEDY, InputError, r"tokens must be below vocab_size \(97\), got 97"),
        ([1.5], GREEDY, InputError, "token ids that fit int32"),
        (["a"], GREEDY, InputError, "token ids that fit int32"),
        ([1] * 200, GREEDY, TooLongError, "200 tokens leaves room for 0, and 1 are wanted"),
        ([1] * 195, SamplingParams(min_tokens=6), TooLongError, "room for 5, and 6 are wanted"),
        ([1], SamplingParams(logit_bias={97: 1.0}), InputError, "logit_bias must name tokens"),
        ([1], SamplingParams(stop_token_ids=[97]), InputError, "stop_token_ids must name tokens"),
    ],
)
def test_a_bad_request_is_refused_alone(
    prompt: list, params: SamplingParams, error: type[Exception], message: str
) -> None:
    engine, _, _ = engine_of()
    with pytest.raises(error, match=message):
        engine.add_request(prompt, params)
    assert not engine.has_work


def test_token_ids_alone_need_no_text() -> None:
    assert alone([1, 2], GREEDY, new_detokenizer=None)[:2] == ("", alone([1, 2], GREEDY)[1])
    with pytest.raises(InputError, match="the model has no tokenizer: use stop_token_ids"):
        alone([1, 2], SamplingParams(stop="x"), new_detokenizer=None)


async def collect(engine: AsyncEngine, prompt: list[int], params: SamplingParams) -> tuple:
    return whole([piece async for piece in engine.generate(prompt, params)])


@AHEAD
def test_async_callers_get_their_own_answers(runs_ahead: bool) -> None:
    inner, _, scheduler = engine_of(runs_ahead=runs_ahead)
    params = [SamplingParams(seed=seed, max_tokens=15) for seed in range(20)]

    async def main() -> list[tuple]:
        with AsyncEngine(inner) as engine:
            with pytest.raises(InputError, match="the prompt has no tokens"):
                await collect(engine, [], GREEDY)
            leaving = engine.generate([5], SamplingParams(max_tokens=None))
            await anext(leaving)
            await leaving.aclose()
            both = [piece async for piece in engine.generate([5], SamplingParams(n=2, seed=1))]
            assert sum(piece.finish_reason is not None for piece in both) == 2
            return await asyncio.gather(*(collect(engine, [1, 2], p) for p in params))

    assert asyncio.run(main()) == [alone([1, 2], p) for p in params]
    assert scheduler.pages.num_available == 64


def test_an_error_of_adding_a_request_is_that_request_s_alone() -> None:
    inner, _, scheduler = engine_of()
    own = inner._new_detokenizer
    broken = iter([1, 0])  # the second output of the next request fails

    def new_detokenizer(*args: object) -> object:
        if next(broken, 1):
            return None if own is None else own(*args)
        raise RuntimeError("a bug in a detokenizer")

    inner._new_detokenizer = new_detokenizer

    async def main() -> tuple:
        with AsyncEngine(inner) as engine:
            with pytest.raises(RuntimeError, match="a bug in a detokenizer"):
                await collect(engine, [1], SamplingParams(n=2, seed=0))
            return await collect(engine, [1, 2], SamplingParams(seed=1, max_tokens=15))

    assert asyncio.run(main()) == alone([1, 2], SamplingParams(seed=1, max_tokens=15))
    assert scheduler.pages.num_available == 64 and not inner.has_work


@AHEAD
def test_closing_ends_open_requests(runs_ahead: bool) -> None:
    inner, _, scheduler = engine_of(runs_ahead=runs_ahead, num_pages=1 << 18, max_positions=1 << 20)

    async def main() -> None:
        engine = AsyncEngine(inner)
        waiting = engine.generate([1], SamplingParams(max_tokens=None, seed=0))
        await anext(waiting)
        await asyncio.to_thread(engine.close)
        with pytest.raises(ClosedError, match="the engine was closed"):
            async for _ in waiting:
                pass

    asyncio.run(main())
    assert scheduler.pages.num_available == 1 << 18


@AHEAD
def test_an_error_that_is_nobodys_fault_reaches_every_async_caller(runs_ahead: bool) -> None:
    inner, runner, scheduler = engine_of(runs_ahead=runs_ahead)
    have_asked = threading.Event()  # a caller that comes after the error hears of a closed engine
    runner.start = lambda plan: have_asked.wait() and 1 // 0

    async def all_have_asked() -> None:
        have_asked.set()

    async def main() -> None:
        engine = AsyncEngine(inner)
        callers = (collect(engine, [1], GREEDY) for _ in range(3))
        *results, _ = await asyncio.gather(*callers, all_have_asked(), return_exceptions=True)
        assert [type(result) for result in results] == [ZeroDivisionError] * 3
        with pytest.raises(ClosedError, match="the engine is closed"):
            await collect(engine, [1], GREEDY)
        engine.close()

    asyncio.run(main())
    assert scheduler.pages.num_available == 64
