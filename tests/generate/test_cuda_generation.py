"""Generation on a GPU: the CPU's tokens in f32, graphs and eager alike, and every page free."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import save_causal
from draft_oracle import MAX_DRAFT, Oracle, oracle  # noqa: F401  (oracle: a fixture)
from generation_soak import VOCAB_SIZE, num_free_pages, random_requests, soak
from tiny_decoders import DECODERS, tiny_decoder

import bytetx
from bytetx.generate.model_runner import ModelRunner
from bytetx.hf import wrap
from bytetx.model import Model
from bytetx.sampling_params import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda_backend")]

FAMILIES = [
    *("gpt2", "gptj", "gpt_neo", "gpt_neox", "opt", "qwen3-window"),
    *("olmo2", "granite", "falcon-groups", "falcon-alibi", "bloom", "gpt_bigcode"),
    *("mixtral", "qwen3_moe", "gemma2", "gemma3", "lfm2", "lfm2-biases", "qwen3_5"),
]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def random_prompts(count: int, *, longest: int = 40, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(5, VOCAB_SIZE, rng.integers(1, longest)).tolist() for _ in range(count)]


def token_ids(model: Model, prompts: list[list[int]], params: SamplingParams, **sizes) -> list:
    return [list(answer.token_ids) for answer in model.generate(prompts, params, **sizes)]


@pytest.mark.parametrize("name", FAMILIES)
def test_f32_gives_the_tokens_of_the_cpu(tmp_path: Path, name: str) -> None:
    assert name in DECODERS
    folder, prompts = save_causal(tmp_path, name), random_prompts(6)
    on_cpu = bytetx.load(folder, device="cpu", dtype="float32")
    on_gpu = bytetx.load(folder, device="cuda", dtype="float32")
    wanted = token_ids(on_cpu, prompts, GREEDY)
    assert token_ids(on_gpu, prompts, GREEDY) == wanted
    small = Model(on_gpu.checkpoint, token_budget=16)  # prompts in pieces, pages that run out
    assert token_ids(small, prompts, GREEDY, max_num_seqs=4, kv_cache_tokens=100) == wanted


@pytest.mark.parametrize("name", ["lfm2", "qwen3_5"])
def test_steps_of_layers_with_states_are_graphs(tmp_path: Path, name: str) -> None:
    # 4 heads of 16 features: attention by native kernels has plans for multiples of 8.
    folder = save_causal(tmp_path, name, hidden_size=64)
    prompts = random_prompts(6, longest=90)
    captured = bytetx.load(folder, device="cuda", dtype="bfloat16")
    eager = bytetx.load(folder, device="cuda", dtype="bfloat16", cuda_graphs=False)
    assert captured.transformer.is_capturable
    for _ in range(3):
        assert token_ids(captured, prompts, GREEDY) == token_ids(eager, prompts, GREEDY)
    assert captured.engines.idle[0].engine._runner.num_graphs > 0
    assert eager.engines.idle[0].engine._runner.num_graphs == 0


@pytest.fixture(scope="module")
def pair(cuda_backend: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Model]:
    """One f32 checkpoint on the CPU and on the GPU."""
    folder = save_causal(tmp_path_factory.mktemp("pair"), "qwen3")
    on_cpu = bytetx.load(folder, device="cpu", dtype="float32")
    return on_cpu, bytetx.load(folder, device="cuda", dtype="float32")


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(seed=1, max_tokens=10),
        SamplingParams(seed=2, max_tokens=10, top_k=7, temperature=1.5),
        SamplingParams(seed=3, max_tokens=10, top_p=0.8, min_p=0.02),
        SamplingParams(seed=4, max_tokens=10, repetition_penalty=1.4, presence_penalty=0.3),
        SamplingParams(temperature=0, max_tokens=10, frequency_penalty=0.7, logit_bias={9: 2.0}),
        SamplingParams(temperature=0, max_tokens=10, min_tokens=5, stop_token_ids=[*range(5, 40)]),
        SamplingParams(seed=5, max_tokens=9, logits_processors=[lambda ids, x: x * (len(ids) % 2)]),
        SamplingParams(seed=6, max_tokens=15, stop=("th", "e ", "a")),
    ],
)
def test_sampling_draws_what_the_cpu_draws(
    pair: tuple[Model, Model], params: SamplingParams
) -> None:
    on_cpu, on_gpu = pair
    prompts = random_prompts(5)
    assert token_ids(on_gpu, prompts, params) == token_ids(on_cpu, prompts, params)


def test_logprobs_are_those_of_the_cpu(pair: tuple[Model, Model]) -> None:
    prompts = random_prompts(5, longest=20)
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=3, prompt_logprobs=2)
    for ours, theirs in zip(*(model.generate(prompts, params) for model in pair), strict=True):
        for one, other in (
            (ours.outputs[0].logprobs, theirs.outputs[0].logprobs),
            (ours.prompt_logprobs, theirs.prompt_logprobs),
        ):
            assert [e.token_id for e in one] == [e.token_id for e in other]
            assert [e.rank for e in one] == [e.rank for e in other]
            np.testing.assert_allclose(
                [e.logprob for e in one], [e.logprob for e in other], atol=1e-4
            )


@pytest.mark.parametrize(
    "params", [GREEDY, SamplingParams(seed=2, max_tokens=12, top_k=7, temperature=1.5)]
)
def test_drafts_give_the_tokens_of_the_cpu(
    pair: tuple[Model, Model],
    params: SamplingParams,
    oracle: type[Oracle],  # noqa: F811
) -> None:
    on_cpu, on_gpu = pair
    prompts = random_prompts(12)
    wanted = token_ids(on_cpu, prompts, params)
    oracle.answers = [prompt + ids for prompt, ids in zip(prompts, wanted, strict=True)]
    for _ in range(3):  # the later ones from graphs, where the device captures them
        found = token_ids(on_gpu, prompts, params, num_speculative_tokens=MAX_DRAFT)
        assert found == wanted
    engine = on_gpu.engines.idle[0].engine
    assert engine.draft_counts[1] > 50
    assert num_free_pages(engine) == engine._scheduler.pages.num_pages


@pytest.fixture(scope="module", params=["float16", "bfloat16"])
def half(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of sizes that the kernels take, with 300 positions."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    folder = save_causal(
        tmp_path_factory.mktemp("half"), "qwen3", max_position_embeddings=300, **sizes
    )
    return folder, request.param


def test_graphs_and_eager_give_the_same_tokens(half: tuple[Path, str]) -> None:
    """Steps have the same rows: the second time both know the prompts' pages, and GEMMs of fewer
    rows may sum in other parts.
    """
    folder, dtype = half
    captured = bytetx.load(folder, device="cuda", dtype=dtype)
    eager = bytetx.load(folder, device="cuda", dtype=dtype, cuda_graphs=False)
    prompts = random_prompts(24, longest=200)
    for params in (GREEDY, SamplingParams(seed=3, max_tokens=30, top_k=20, ignore_eos=True)):
        for _ in range(2):
            wanted = token_ids(eager, prompts, params, max_num_seqs=16)
            assert token_ids(captured, prompts, params, max_num_seqs=16) == wanted
    engine, plain = captured.engines.idle[0].engine, eager.engines.idle[0].engine
    assert plain.num_graphs == 0
    if engine._runner.is_capturable:
        assert engine.num_graphs > 0


def test_steps_in_flight_change_no_bit(half: tuple[Path, str], monkeypatch) -> None:
    """Steps are the same: no answer ends by what it says, and no engine knows a prefix."""
    folder, dtype = half
    model = bytetx.load(folder, device="cuda", dtype=dtype)
    prompts = random_prompts(30, longest=100, seed=2)
    params = [SamplingParams(seed=i, max_tokens=10 + i, ignore_eos=True) for i in range(30)]
    wanted = token_ids(model, prompts, params)
    model.engines.idle.clear()
    monkeypatch.setattr(ModelRunner, "runs_ahead", False)
    assert token_ids(model, prompts, params) == wanted


def test_steps_in_flight_change_no_token(pair: tuple[Model, Model], monkeypatch) -> None:
    """In f32, where other steps give almost the same logits: answers that stop, known prefixes."""
    _, model = pair
    prompts = random_prompts(30, longest=60, seed=2)
    params = SamplingParams(seed=3, max_tokens=30, stop_token_ids=[7, 8, 9, 10])
    wanted = token_ids(model, prompts, params)
    monkeypatch.setattr(ModelRunner, "runs_ahead", False)
    assert token_ids(model, prompts, params) == wanted


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(seed=1, max_tokens=12, top_p=0.9, top_k=30, min_p=0.01),
        SamplingParams(seed=2, max_tokens=12, top_p=0.9, presence_penalty=0.5, logprobs=2),
    ],
)
def test_no_step_waits_for_the_gpu(half: tuple[Path, str], params: SamplingParams) -> None:
    """But for the event behind a step's results, and that only after the next step's start."""
    folder, dtype = half
    model = bytetx.load(folder, device="cuda", dtype=dtype)
    engine = model.engine(max_num_seqs=8)
    if not engine._runner.is_capturable:
        pytest.skip("this GPU runs paged attention in plain torch")
    for warm in (True, False):
        for prompt in random_prompts(10):
            engine.add_request(prompt, params)
        torch.cuda.set_sync_debug_mode("default" if warm else "error")
        try:
            while engine.has_work:
                engine.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_soak_on_the_gpu(half: tuple[Path, str]) -> None:
    """Hundreds of requests that come, stop, are preempted and given up; every page free."""
    folder, dtype = half
    model = bytetx.load(folder, device="cuda", dtype=dtype, token_budget=48)
    soak(model.engine(kv_cache_tokens=112, max_num_seqs=12), random_requests(120))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_wrapped_model_keeps_its_graphs_and_follows_its_parameters(dtype: str) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    plain = tiny_decoder("qwen3", max_position_embeddings=300, **sizes)
    wrapped = wrap(plain.to("cuda", getattr(torch, dtype)))
    ids = torch.randint(5, plain.config.vocab_size, (6, 50), device="cuda")
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    answers = [wrapped.generate(ids, **options) for _ in range(3)]
    assert answers[0].equal(answers[1]) and answers[0].equal(answers[2])
    (idle,) = wrapped.base_model.forward.engines._idle
    assert not idle.engine._runner.is_capturable or idle.engine.num_graphs > 0
    for parameter in wrapped.parameters():
        parameter.data += torch.randn_like(parameter) * 0.1  # on the caller's stream
    changed = wrapped.generate(ids, **options)
    assert wrapped.base_model.forward.engines._idle[0] is idle
    assert changed.equal(wrap(copy.deepcopy(wrapped)).generate(ids, **options))
    assert not changed.equal(answers[0])


def test_nan_weights_end_requests_with_an_error(tmp_path: Path) -> None:
    model = bytetx.load(save_causal(tmp_path, "llama"), device="cuda", dtype="float32")
    prompts = random_prompts(3)
    wanted = token_ids(model, prompts, GREEDY)
    engine = model.engines.idle[0].engine
    weight = model.transformer.layers.final_norm.weight
    kept = weight.clone()
    weight.fill_(torch.nan)
    torch.cuda.synchronize()  # the engine has a stream of its own
    failed = model.generate(prompts, GREEDY, on_error="return")
    assert failed.stats.num_errors == 3 and "the logits are NaN" in str(failed[0])
    weight.copy_(kept)
    torch.cuda.synchronize()
    assert token_ids(model, prompts, GREEDY) == wanted
    assert num_free_pages(engine) == engine._scheduler.pages.num_pages
