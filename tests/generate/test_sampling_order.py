"""The order in which SamplingParams change logits: vLLM's, against its definition in float64."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from generation_engines import VOCAB_SIZE, engine_of, run, whole
from hypothesis import given
from hypothesis import strategies as st
from sampled_rows import splitmix

from bytetx.sampling_params import SamplingParams

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
EOS = (90, 91)
NUM_PAGES = 256
# Of a sum of probabilities: logits of up to 100 in f32 (6e-8 of them), divided by 0.1.
ROUNDING = 1e-4


def probabilities(
    logits: torch.Tensor, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> np.ndarray:
    """f64 [vocab_size]: vLLM 0.33's definition (model runner V2), one row, step by step."""
    x = logits.double().numpy().copy()
    for token, bias in (params.logit_bias or {}).items():
        x[token] += np.float32(bias)
    if len(output) < params.min_tokens:
        x[[*params.stop_token_ids, *EOS]] = -np.inf
    repetition = float(np.float32(params.repetition_penalty))
    for token in {*prompt, *output}:
        x[token] = x[token] / repetition if x[token] > 0 else x[token] * repetition
    for token, count in Counter(output).items():
        x[token] -= np.float32(params.frequency_penalty) * count
        x[token] -= np.float32(params.presence_penalty)
    for processor in params.logits_processors:
        x = processor((*prompt, *output), torch.from_numpy(x)).numpy()
    if params.temperature == 0:
        return np.eye(len(x))[x.argmax()]
    p = np.exp((x - x.max()) / np.float64(np.float32(params.temperature)))
    p[p < params.min_p * p.max()] = 0
    if 0 < params.top_k < len(p):
        p[p < np.sort(p)[-params.top_k]] = 0
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    before = np.append(0.0, p[order].cumsum()[:-1])
    p[order[(before >= params.top_p) & (before > 0)]] = 0
    return p / p.sum()


def near(params: SamplingParams) -> Iterator[SamplingParams]:
    """The same limits, and those within rounding: a token that lies on one may be in or out."""
    for share, floor in product((0, -1, 1), (0, -1, 1)):
        top_p = params.top_p if params.top_p == 1 else params.top_p * (1 + share * 1e-5)
        min_p = params.min_p * (1 + floor * 1e-5)
        yield replace(params, top_p=min(top_p, 1.0), min_p=min(min_p, 1.0))


def is_drawn(
    token: int, logits: torch.Tensor, params: SamplingParams, prompt: list[int], output: list[int]
) -> bool:
    """Whether the request's random number for this place lies in the token's probability."""
    number = splitmix(params.seed % 2**64, len(output))
    for nearby in near(params):
        p = probabilities(logits, nearby, prompt, output)
        end = p[: token + 1].sum()
        if p[token] > 0 and end - p[token] - ROUNDING <= number <= end + ROUNDING:
            return True
        if params.temperature == 0 and p[token] == 1:
            return True
    return False


def leaning(token_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    """Halves all logits, which shows whether it runs before or after what is added to them."""
    return 0.5 * logits + torch.arange(len(logits), device=logits.device) % (len(token_ids) % 3 + 1)


tokens = st.integers(0, VOCAB_SIZE - 1)
biases = st.dictionaries(tokens, st.sampled_from([-math.inf, -7.5, -1.0, 2.0, 30.0]), max_size=6)
some_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.1, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([-1, 0, 1, 3, 20, 500]),
    top_p=st.sampled_from([1e-6, 0.3, 0.6, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 0.6, 1.7]),
    presence_penalty=st.sampled_from([0.0, -2.0, 0.7, 2.0]),
    frequency_penalty=st.sampled_from([0.0, -0.4, 1.1]),
    logit_bias=st.none() | biases,
    min_tokens=st.sampled_from([0, 0, 3, 8]),
    max_tokens=st.just(8),
    stop_token_ids=st.lists(tokens, max_size=20, unique=True),
    ignore_eos=st.booleans(),
    logits_processors=st.sampled_from([(), (leaning,)]),
    seed=st.integers(-(2**63), 2**64 - 1).filter(lambda seed: seed != -1),
)
prompts = st.lists(tokens, min_size=1, max_size=12)


@pytest.mark.feature("Generation", "sampling options in vLLM's order")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("runs_ahead", [False, True], ids=["waits", "ahead"])
@given(st.lists(st.tuples(prompts, some_params), min_size=1, max_size=4))
def test_every_draw_is_the_one_of_vllm_s_order(
    runs_ahead: bool, device: str, requests: list[tuple[list[int], SamplingParams]]
) -> None:
    sizes = {"num_pages": NUM_PAGES, "eos_token_ids": EOS, "new_detokenizer": None}
    engine, runner, _ = engine_of(**sizes, runs_ahead=runs_ahead, device=device)
    for prompt, params in requests:
        engine.add_request(prompt, params)
    pieces = run(engine)
    for number, (prompt, params) in enumerate(requests):
        _, answer, reason, _ = whole(pieces[number, 0])
        assert answer and reason in ("stop", "length")
        for place, token in enumerate(answer):
            logits, output = runner.logits(prompt + answer[:place]), answer[:place]
            assert is_drawn(token, logits, params, prompt, output), (params, place)
            if place < params.min_tokens:
                assert token not in (*EOS, *params.stop_token_ids)


def token_of(logits: list[float], prompt: list[int], params: SamplingParams, device: str) -> int:
    """The first token of an answer to these logits."""
    engine, runner, _ = engine_of(new_detokenizer=None, device=device)
    row = torch.full((VOCAB_SIZE,), -50.0)
    row[: len(logits)] = torch.tensor(logits)
    runner.logits = lambda prefix: row
    engine.add_request(prompt, replace(params, max_tokens=1))
    return whole(run(engine)[0, 0])[1][0]


@pytest.mark.parametrize("device", DEVICES)
def test_a_repetition_penalty_multiplies_the_biased_logit(device: str) -> None:
    """Token 0 has (2 + 1) / 2 = 1.5; a bias behind the penalty would make it 2 / 2 + 1 = 2."""
    params = SamplingParams(temperature=0, repetition_penalty=2.0, logit_bias={0: 1.0})
    assert token_of([2.0, 1.7], [0], params, device) == 1
    assert token_of([2.0, 1.4], [0], params, device) == 0


@pytest.mark.parametrize("device", DEVICES)
def test_processors_see_biased_and_penalized_logits(device: str) -> None:
    seen = []

    def look(token_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append(logits[:3].tolist())
        return logits

    params = SamplingParams(
        temperature=0.5, repetition_penalty=2.0, logit_bias={0: 1.0}, logits_processors=[look]
    )
    token_of([2.0, -1.0, 3.0], [0, 1], params, device)
    assert seen == [[1.5, -2.0, 3.0]]  # before the temperature


@pytest.mark.parametrize("limits", [{"top_p": 0.7}, {"min_p": 0.2}, {"top_p": 0.8, "min_p": 0.25}])
def test_transformers_has_this_order_but_for_min_p_behind_top_p(limits: dict[str, float]) -> None:
    """The claims of SamplingParams' docstring about transformers, from the scores of generate."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB_SIZE, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32}
    config = transformers.GPT2Config(
        **sizes, initializer_range=0.5, bos_token_id=0, eos_token_id=90, pad_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    prompt, shared = [3, 1, 4, 1, 5], {"temperature": 1.7, "repetition_penalty": 1.6, "top_k": 30}
    bias = {1: 4.0, 4: -3.0, 17: 2.5}
    out = model.generate(
        torch.tensor([prompt]),
        do_sample=True,
        max_new_tokens=1,
        sequence_bias=[[[token], value] for token, value in bias.items()],
        output_scores=True,
        output_logits=True,
        return_dict_in_generate=True,
        **shared,
        **limits,
    )
    theirs = out.scores[0][0].double().softmax(0).numpy()
    params = SamplingParams(logit_bias=bias, **shared, **limits)
    ours = probabilities(out.logits[0][0], params, prompt, [])
    if len(limits) == 1:
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    else:
        assert (ours > 0).sum() < (theirs > 0).sum()
