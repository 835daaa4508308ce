"""Generation whose logits are NaN or infinite: the request ends with an error, and no other one."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from checkpoints import save_causal
from tiny import one_thread  # noqa: F401  (autouse)

import bytetx
from bytetx import NotFiniteError, SamplingParams
from bytetx.model import Model

BAD = 40  # the token without a finite embedding
PROMPTS = [[5, 6, 7], [8, 9, BAD, 10, 11, 12], [13], [14, 15]]
PLACE = 1
BASE: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True, "logit_bias": {BAD: float("-inf")}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return bytetx.load(save_causal(tmp_path_factory.mktemp("causal")), token_budget=64)


@contextmanager
def poisoned(model: Model, value: float = float("nan")) -> Iterator[None]:
    word = model.checkpoint.transformer.embeddings.word
    kept = word[BAD].clone()
    word[BAD] = value
    try:
        yield
    finally:
        word[BAD] = kept


def zeros(token_ids: tuple[int, ...], logits: torch.Tensor) -> torch.Tensor:
    """A logits processor that shows nothing of the model's logits."""
    chosen = torch.zeros_like(logits)
    chosen[3] = 1
    return chosen


PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 1.0, "seed": 1},
    "limits": {"temperature": 1.0, "top_k": 5, "top_p": 0.9, "min_p": 0.01, "seed": 2},
    "penalties": {"temperature": 0, "repetition_penalty": 1.5, "presence_penalty": 1.0},
    "logprobs": {"temperature": 0, "logprobs": 3},
    "prompt_logprobs": {"temperature": 0, "prompt_logprobs": 2},
    "processors": {"temperature": 0, "logits_processors": [zeros]},
    "several": {"temperature": 1.0, "n": 3, "seed": 3},
}


def content_of(answer: Any) -> list[Any]:
    prompt = [] if answer.prompt_logprobs is None else list(answer.prompt_logprobs)
    return [[(list(one.token_ids), one.text, one.logprobs) for one in answer.outputs], prompt]


@pytest.mark.parametrize("drafts", [0, 4])
@pytest.mark.parametrize("name", PARAMS)
def test_a_prompt_that_is_not_finite_ends_alone(model: Model, name: str, drafts: int) -> None:
    params = SamplingParams(**{**BASE, **PARAMS[name]})
    options: dict[str, Any] = {"num_speculative_tokens": drafts, "on_error": "return"}
    good = [prompt for i, prompt in enumerate(PROMPTS) if i != PLACE]
    wanted = list(map(content_of, model.generate(good, params, **options)))
    for value in (float("nan"), float("inf")):
        with poisoned(model, value):
            got = model.generate(PROMPTS, params, **options)
            with pytest.raises(bytetx.StepError, match=rf"prompts\[{PLACE}\]: .*logits"):
                model.generate(PROMPTS, params)
        assert list(got.errors) == [PLACE] and got.stats.num_errors >= 1
        assert list(map(content_of, (a for i, a in enumerate(got) if i != PLACE))) == wanted
    # Its pages are used again, and nothing of it is found as a prefix.
    assert list(map(content_of, model.generate(good, params, **options))) == wanted
    healthy = model.generate(PROMPTS, params, **options)
    assert not healthy.errors
    alone = model.generate([PROMPTS[PLACE]], params, **options)
    if "seed" not in PARAMS[name] or params.n == 1:
        assert content_of(healthy[PLACE]) == content_of(alone[0])


def test_the_error_says_that_the_logits_are_not_finite(model: Model) -> None:
    with poisoned(model):
        plain = SamplingParams(temperature=0, max_tokens=2)
        (error,) = model.generate([[BAD, 5]], plain, on_error="return")
        assert type(error) is NotFiniteError and "NaN or infinite" in str(error)
        scored = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1)
        (error,) = model.generate(
            [[5, BAD, *range(5, 35), *range(50, 90)]], scored, on_error="return"
        )
        assert type(error) is NotFiniteError and "the prompt's tokens" in str(error)
    # A token that is forbidden is no fault of the model's.
    bias = {token: float("-inf") for token in range(0, 200)}
    params = SamplingParams(temperature=0, max_tokens=3, logit_bias=bias, logprobs=2)
    (answer,) = model.generate([[5, 6]], params)
    assert all(token >= 200 for token in answer.token_ids)


def test_prompts_in_several_steps_and_long_answers(model: Model) -> None:
    """The bad token comes in the second piece of a prompt, beside running answers."""
    long = [*range(5, 35), *range(5, 35), BAD, 5, 6]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, prompt_logprobs=1,
                            logit_bias={BAD: float("-inf")})  # fmt: skip
    others = [[7, 8], [9] * 30, [10]]
    wanted = list(map(content_of, model.generate(others, params)))
    with poisoned(model):
        got = model.generate([*others, long], params, on_error="return")
    assert list(got.errors) == [3]
    assert list(map(content_of, got[:3])) == wanted


def test_an_async_model_goes_on(model: Model) -> None:
    params = SamplingParams(**BASE, temperature=0)
    wanted = {i: model.generate([p], params)[0] for i, p in enumerate(PROMPTS) if i != PLACE}

    async def answer(served: bytetx.AsyncModel, prompt: list[int]) -> tuple[list[int], Any]:
        tokens: list[int] = []
        async for piece in served.generate(prompt, params):
            tokens += piece.token_ids
            if piece.error is not None:
                return tokens, piece.error
        return tokens, None

    async def main() -> list[tuple[list[int], Any]]:
        async with bytetx.AsyncModel(model) as served:
            first = await asyncio.gather(*(answer(served, prompt) for prompt in PROMPTS))
            assert first[PLACE] == (first[PLACE][0], first[PLACE][1])
            again = await asyncio.gather(*(answer(served, prompt) for prompt in PROMPTS))
            assert [tokens for tokens, _ in again] == [tokens for tokens, _ in first]
            return first

    with poisoned(model):
        got = asyncio.run(main())
    assert isinstance(got[PLACE][1], bytetx.StepError)
    for i, answered in wanted.items():
        assert got[i] == (list(answered.token_ids), None)
