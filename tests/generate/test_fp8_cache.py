"""Generation with keys and values in FP8: tokens, batch mates, memory, and what is refused."""

import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoints import save_causal, save_checkpoint
from decisions import REQUESTS, save_decider
from tiny import one_thread, random_ids, save  # noqa: F401  (one_thread is a fixture)
from tiny_decoders import tiny_decoder
from torch import Tensor

import bytetx
from bytetx.errors import OptionError
from bytetx.model import Model
from bytetx.nn.cpu_steps import CpuSteps, step_weights
from bytetx.ops import native
from bytetx.ops.cpu_decode_step import why_no_cpu_step
from bytetx.ops.kv_codes import MAX_RELATIVE_ERROR, quantize_kv, restore_kv
from bytetx.ops.paged import WRITE_KV, paged_attention, write_kv
from bytetx.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
SEQLENS = [1, 13, 6, 37, 2]
FAMILIES = ["llama", "qwen3", "qwen3-window", "gpt2", "gemma2", "mixtral", "falcon"]


@pytest.fixture
def rounding_writes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cache of the model's dtype holds what the codes of its keys and values stand for."""

    def write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, *_) -> None:
        rows = [restore_kv(*quantize_kv(x)).to(x.dtype) for x in (k, v)]
        plain(*rows, k_cache, v_cache, slots, None, None)

    plain = WRITE_KV.choose(torch.device("cpu"), False).run
    monkeypatch.setattr(CpuSteps, "of", lambda *_: None)
    WRITE_KV.register("rounding", takes=lambda device, has_codes: not has_codes, first=True)(write)
    yield
    WRITE_KV.backends.pop(0)
    native.forget_lookups()


def fp8_model(folder: Path, **options: object) -> Model:
    return bytetx.load(folder, device="cpu", kv_cache_dtype="fp8", **options)


@pytest.mark.feature("Generation", "KV cache in FP8")
@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_are_those_of_rounded_keys_and_values(
    name: str, rounding_writes: None, tmp_path: Path
) -> None:
    folder, prompts = save(tiny_decoder(name), tmp_path), random_ids(SEQLENS)
    exact = bytetx.load(folder, device="cpu")
    wanted = [answer.token_ids for answer in exact.generate(prompts, GREEDY)]
    model = fp8_model(folder)
    assert [answer.token_ids for answer in model.generate(prompts, GREEDY)] == wanted
    again = model.generate(prompts, GREEDY)  # with the pages of the first time
    assert [answer.token_ids for answer in again] == wanted
    scheduler = model.engines.idle[0].engine._scheduler
    assert scheduler.num_cached_tokens == 32
    alone = [fp8_model(folder).generate([prompt], GREEDY)[0].token_ids for prompt in prompts[:3]]
    assert alone == wanted[:3]
    pieces = Model(model.checkpoint, token_budget=7)
    assert [answer.token_ids for answer in pieces.generate(prompts, GREEDY)] == wanted
    tight = Model(model.checkpoint)  # sequences throw each other out
    found = tight.generate(prompts, GREEDY, kv_cache_tokens=80)
    assert [answer.token_ids for answer in found] == wanted
    assert tight.engines.idle[0].engine._scheduler.num_preempted


def test_decisions_and_scores_are_those_of_the_models_dtype(tmp_path: Path) -> None:
    """One pass keeps no page: what its prefix cache keeps has the model's dtype, beside an engine
    whose pages hold codes."""
    folder = save_decider(tmp_path)
    exact, model = bytetx.load(folder, device="cpu"), fp8_model(folder)
    prompts = ["the quick brown fox " * 5 + end for end in ("jumps", "sleeps")]
    for _ in range(2):  # with the prefixes of the first time, and after pages were written
        assert list(model.decide(REQUESTS)) == list(exact.decide(REQUESTS))
        found, wanted = ([s.log_likelihood for s in m.score(prompts)] for m in (model, exact))
        assert found == wanted
        model.generate(prompts, GREEDY)


def test_the_step_of_all_layers_reads_no_codes(tmp_path: Path) -> None:
    """Its kernel would take them for numbers of the model's dtype."""
    folder = save(tiny_decoder("llama"), tmp_path)
    model, plain = fp8_model(folder), bytetx.load(folder, device="cpu")
    runners = [m.engine(kv_cache_tokens=64)._runner for m in (model, plain)]
    found = [
        step_weights(m.transformer, r.cache) for m, r in zip((model, plain), runners, strict=True)
    ]
    assert found[0] is None and (found[1] is None) == (why_no_cpu_step() is not None)


def test_samples_of_a_prompt_share_its_pages(tmp_path: Path) -> None:
    model = fp8_model(save_causal(tmp_path))
    params = SamplingParams(n=3, temperature=0.9, seed=4, max_tokens=12, ignore_eos=True)
    (together,) = model.generate(["the quick brown fox jumps over it"], params)
    (again,) = model.generate(["the quick brown fox jumps over it"], params)
    texts = [output.text for output in together.outputs]
    assert len(set(texts)) > 1 and texts == [output.text for output in again.outputs]


def test_drafts_change_no_token(tmp_path: Path) -> None:
    model = fp8_model(save(tiny_decoder("llama"), tmp_path))
    prompts = [[5, 6, 7, 5, 6, 7, 5, 6] * 4, *random_ids([9, 30])]
    wanted = model.generate(prompts, GREEDY)
    found = model.generate(prompts, GREEDY, num_speculative_tokens=4)
    assert [a.token_ids for a in found] == [a.token_ids for a in wanted]
    assert found.stats.num_draft_tokens


@pytest.mark.parametrize(("dtype", "least"), [("float32", 3.7), ("bfloat16", 1.85)])
def test_memory_of_the_cache_and_its_capacity(dtype: str, least: float, tmp_path: Path) -> None:
    folder = save(tiny_decoder("llama", head_dim=64), tmp_path)
    plain = bytetx.load(folder, device="cpu", dtype=dtype)
    coded = fp8_model(folder, dtype=dtype)
    sizes, smaller = (m.generation_sizes(kv_cache_tokens=4096) for m in (plain, coded))
    assert sizes.cache_bytes / smaller.cache_bytes >= least
    assert sizes.kv_cache_tokens == smaller.kv_cache_tokens
    engine = coded.engine(kv_cache_tokens=4096)
    assert engine._runner.cache.num_bytes == smaller.cache_bytes
    (layer, *_) = engine._runner.cache.layers
    assert layer.k_cache.dtype == layer.v_scales.dtype == torch.uint8


def test_capacity_by_default_is_bounded_by_the_bytes_of_codes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(tiny_decoder("llama", head_dim=64, max_position_embeddings=4096), tmp_path)
    limit = 1 << 20
    monkeypatch.setattr("bytetx.generate.build._cache_limit_bytes", lambda device: limit)
    plain = bytetx.load(folder, device="cpu", dtype="bfloat16").generation_sizes()
    coded = fp8_model(folder, dtype="bfloat16").generation_sizes()
    assert plain.cache_bytes <= limit and coded.cache_bytes <= limit
    assert coded.kv_cache_tokens / plain.kv_cache_tokens > 1.9


def test_info_says_the_dtype_and_its_error(tmp_path: Path) -> None:
    folder = save_causal(tmp_path)
    info = fp8_model(folder).info()
    assert (info["kv_cache_dtype"], info["kv_cache_max_error"]) == ("fp8", MAX_RELATIVE_ERROR)
    info = bytetx.load(folder, device="cpu").info()
    assert (info["kv_cache_dtype"], info["kv_cache_max_error"]) == ("auto", 0.0)


def test_a_model_that_is_pickled_keeps_its_cache_dtype(tmp_path: Path) -> None:
    model = fp8_model(save_causal(tmp_path))
    assert pickle.loads(pickle.dumps(model)).checkpoint.kv_cache_dtype == "fp8"


def test_what_is_refused(tmp_path: Path) -> None:
    folder = save_causal(tmp_path / "causal")
    with pytest.raises(OptionError, match="kv_cache_dtype must be auto, .* got 'int8'"):
        bytetx.load(folder, device="cpu", kv_cache_dtype="int8")
    with pytest.raises(OptionError, match="kv_cache_dtype must be auto, .* got None"):
        bytetx.load(folder, device="cpu", kv_cache_dtype=None)
    with pytest.raises(OptionError, match="kv_cache_dtype fp8 does not go with batch_invariant"):
        fp8_model(folder, batch_invariant=True)
    encoder = save_checkpoint(tmp_path / "encoder")
    with pytest.raises(OptionError, match="is for models that generate, and this bert does not"):
        fp8_model(encoder)


def test_keys_that_are_not_finite_show() -> None:
    """A vector with inf is NaN as a whole, and shows; codes alone would cut it off at 448."""
    k, cache = torch.ones(2, 1, 8), torch.zeros(2, 1, 16, 1, 8, dtype=torch.uint8)
    k[1, 0, 3] = torch.inf
    scales = torch.zeros(2, 1, 1, 16, dtype=torch.uint8)
    lengths = {"cu_seqlens": torch.tensor([0, 1]).int(), "page_table": torch.zeros(1, 1).int()}
    lengths |= {"max_seqlen": 1, "max_kv_seqlen": 2, "k_scales": scales[0], "v_scales": scales[1]}
    write_kv(k, k, *cache, torch.tensor([0, 1]).int(), *scales)
    for num_keys, is_finite in ((1, True), (2, False)):
        out = paged_attention(k[:1], *cache, **lengths, kv_seqlens=torch.tensor([num_keys]).int())
        assert bool(out.isfinite().all()) == is_finite
