"""Batch-invariant mode: the bits of a sequence alone, in batches, permuted, cached, in pieces."""

import asyncio
import pickle
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import save_causal, save_checkpoint, save_sentence_model
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling

import bytetx
from bytetx.errors import OptionError
from bytetx.model import Model
from bytetx.nn import batch_invariance
from bytetx.nn import sentence_modules as modules
from bytetx.nn.batch_invariance import invariant_modules
from bytetx.ops import linear, native
from bytetx.ops.int8_linear import why_no_int8_linear
from bytetx.ops.linear import has_invariant_bf16, prepare_linear
from bytetx.ops.linear_plan import gating_tilings, plan_invariant, tilings
from bytetx.ops.paged import paged_attention
from bytetx.ops.panel_linear import why_no_panels
from bytetx.sampling_params import SamplingParams

LONGEST = 300  # tokens of a text: several tiles of attention and of GEMMs
NO_CPU_BF16 = pytest.mark.skipif(not has_invariant_bf16(), reason="bf16 needs AVX2")
CPU_DTYPES = ["float32", pytest.param("bfloat16", marks=NO_CPU_BF16)]
GPU_DTYPES = ["float16", "bfloat16"]
# Sizes that the tensor-core kernels take; the vocabulary of 269 words is not among them.
WIDE = {"hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 256}
WIDE_CAUSAL = {
    "qwen3": {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32},
    "qwen3-window": {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64},
    "gpt2": {"n_embd": 128, "n_head": 4, "n_inner": 256},
}


def load(folder: Path, device: str, dtype: str, **options: object) -> Model:
    return bytetx.load(folder, device=device, dtype=dtype, batch_invariant=True, **options)


def permutation(count: int) -> list[int]:
    return np.random.default_rng(1).permutation(count).tolist()


def random_ids(count: int, *, longest: int) -> list[list[int]]:
    """Token ids of lengths 2 to longest, both among them."""
    rng = np.random.default_rng(0)
    lengths = [2, longest, *rng.integers(2, longest, count - 2)]
    return [rng.integers(5, 90, length).tolist() for length in lengths]


def check_embed(model: Model, folder: Path, device: str, dtype: str) -> None:
    inputs = random_ids(30, longest=min(LONGEST, model.spec.max_positions))
    wanted = np.asarray(model.embed(inputs))
    permuted = permutation(len(inputs))
    assert np.array_equal(np.asarray(model.embed([inputs[i] for i in permuted])), wanted[permuted])
    for i in (0, 7, len(inputs) - 1):
        assert np.array_equal(np.asarray(model.embed([inputs[i]]))[0], wanted[i])
    small = load(folder, device, dtype, token_budget=LONGEST)  # other steps and other buckets
    assert np.array_equal(np.asarray(small.embed(inputs)), wanted)


@pytest.mark.feature("Arithmetic", "batch invariance of vectors")
@pytest.mark.parametrize("dtype", CPU_DTYPES)
@pytest.mark.parametrize("family", ["bert", "modernbert", "deberta-v2", "mpnet"])
def test_embed_alone_in_a_batch_and_in_small_steps(tmp_path: Path, family: str, dtype: str) -> None:
    folder = save_checkpoint(tmp_path, family, max_position_embeddings=LONGEST + 2)
    check_embed(load(folder, "cpu", dtype), folder, "cpu", dtype)


@pytest.mark.skipif(why_no_int8_linear() is not None, reason="int8 does not run on this CPU")
def test_embed_in_8_bits(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, max_position_embeddings=LONGEST + 2)
    check_embed(load(folder, "cpu", "int8"), folder, "cpu", "int8")


@pytest.mark.parametrize("dtype", CPU_DTYPES)
def test_awaited_one_by_one(tmp_path: Path, dtype: str) -> None:
    """Calls of others share the steps of AsyncModel."""
    model = load(save_checkpoint(tmp_path), "cpu", dtype)
    inputs = random_ids(20, longest=model.spec.max_positions)

    async def embed_all() -> list[np.ndarray]:
        queue = bytetx.AsyncModel(model)
        found = await asyncio.gather(*(queue.embed([text]) for text in inputs))
        await queue.aclose()
        return [np.asarray(vectors)[0] for vectors in found]

    assert np.array_equal(np.stack(asyncio.run(embed_all())), np.asarray(model.embed(inputs)))


def test_embed_through_sentence_modules(tmp_path: Path) -> None:
    parts = [Pooling(48, "mean"), Dense(48, 20), Normalize()]
    folder = save_sentence_model(tmp_path, parts)
    check_embed(load(folder, "cpu", "float32"), folder, "cpu", "float32")


def check_scores(model: Model, folder: Path, device: str, dtype: str) -> None:
    inputs = random_ids(24, longest=min(LONGEST, model.spec.max_positions))
    wanted = [score.token_log_likelihoods for score in model.score(inputs)]
    permuted = permutation(len(inputs))
    for i, score in zip(permuted, model.score([inputs[i] for i in permuted]), strict=True):
        assert np.array_equal(score.token_log_likelihoods, wanted[i])
    for i in (0, 3, len(inputs) - 1):
        (score,) = model.score([inputs[i]])
        assert np.array_equal(score.token_log_likelihoods, wanted[i])
    small = load(folder, device, dtype, token_budget=LONGEST)
    for score, bits in zip(small.score(inputs), wanted, strict=True):
        assert np.array_equal(score.token_log_likelihoods, bits)


@pytest.mark.parametrize("dtype", CPU_DTYPES)
def test_score_alone_in_a_batch_and_in_small_steps(tmp_path: Path, dtype: str) -> None:
    folder = save_causal(tmp_path, max_position_embeddings=LONGEST)
    check_scores(load(folder, "cpu", dtype), folder, "cpu", dtype)


def logprobs_of(model: Model, prompts: list[list[int]], **sizes: object) -> list[tuple]:
    """(tokens, log probabilities of them and of the runners-up) of each prompt."""
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=3)
    found = []
    for output in model.generate(prompts, params, **sizes):
        assert output.logprobs is not None
        found.append((list(output.token_ids), list(output.logprobs)))
    return found


def check_generation(model: Model, *, vocab_size: int = 90) -> None:
    """Log probabilities, for tokens alone would hide a different last bit."""
    rng = np.random.default_rng(0)
    shared = rng.integers(5, vocab_size, 48).tolist()  # three pages
    prompts = [shared + rng.integers(5, vocab_size, n).tolist() for n in (1, 5, 16, 17)]
    prompts += [shared[:33], rng.integers(5, vocab_size, 3).tolist(), shared, shared]
    alone = [logprobs_of(model, [prompt], kv_cache_tokens=512)[0] for prompt in prompts]
    assert logprobs_of(model, prompts, kv_cache_tokens=2048) == alone
    backwards = logprobs_of(model, prompts[::-1], kv_cache_tokens=2048)
    assert backwards[::-1] == alone
    # Prompts in pieces of 1 to 7 tokens, running beside decode rows, and found prefixes.
    pieces = Model(model.checkpoint, token_budget=7)
    assert logprobs_of(pieces, prompts, max_num_seqs=3, kv_cache_tokens=512) == alone
    # Pages run out: sequences are preempted, and what they generated is prefilled again.
    tight = Model(model.checkpoint, token_budget=16)
    assert logprobs_of(tight, prompts, max_num_seqs=4, kv_cache_tokens=112) == alone
    # A second turn finds the pages of what was generated.
    turns = [prompt + tokens + [7, 8] for prompt, (tokens, _) in zip(prompts, alone, strict=True)]
    first_time = [logprobs_of(Model(model.checkpoint), [turn])[0] for turn in turns[:2]]
    engine = Model(model.checkpoint)
    logprobs_of(engine, prompts[:2], kv_cache_tokens=2048)
    assert logprobs_of(engine, turns[:2], kv_cache_tokens=2048) == first_time


@pytest.mark.feature("Arithmetic", "batch invariance of generation")
@pytest.mark.parametrize("dtype", CPU_DTYPES)
@pytest.mark.parametrize("family", ["qwen3", "bloom", "qwen3-window", "gpt2", "mixtral"])
def test_generate_with_prefixes_pieces_and_preemption(
    tmp_path: Path, family: str, dtype: str
) -> None:
    check_generation(load(save_causal(tmp_path, family), "cpu", dtype))


def test_a_row_alone_has_the_bits_of_a_row_in_a_piece() -> None:
    torch.manual_seed(0)
    length, page_size = 150, 16
    for dtype in (torch.float32, torch.bfloat16):
        k, v = (torch.randn(10, page_size, 2, 64).to(dtype) for _ in range(2))
        q = torch.randn(length, 8, 64).to(dtype)
        for slopes in (None, torch.rand(8)):
            attend = partial(attend_piece, q, k, v, slopes)
            wanted = attend(0, length)
            cuts = [0, 1, 40, 41, 42, 149, 150]
            pieces = [attend(*pair) for pair in pairwise(cuts)]
            assert torch.equal(torch.cat(pieces), wanted)


def attend_piece(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slopes: torch.Tensor | None,
    begin: int,
    end: int,
) -> torch.Tensor:
    """Rows begin to end of one sequence, whose keys lie in the first pages."""
    return paged_attention(
        q[begin:end],
        k,
        v,
        cu_seqlens=torch.tensor([0, end - begin], dtype=torch.int32),
        page_table=torch.arange(len(k), dtype=torch.int32)[None],
        kv_seqlens=torch.tensor([end], dtype=torch.int32),
        max_seqlen=end - begin,
        max_kv_seqlen=end,
        alibi_slopes=slopes,
        batch_invariant=True,
    )


def test_one_plan_serves_every_number_of_rows() -> None:
    if not tilings():
        pytest.skip("the _cuda module is not built")
    for n, k in ((768, 768), (3072, 768), (768, 3072), (6144, 1024), (4096, 14336)):
        assert plan_invariant(n, k).split_k == 1
        gated = plan_invariant(n, k, is_gated=True)
        assert gated.split_k == 1
        assert gated.tiling in [tiling.index for tiling in gating_tilings()]


@pytest.mark.parametrize("has_bf16", [False, True])
def test_half_types_of_a_cpu_that_cannot_promise_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_bf16: bool
) -> None:
    monkeypatch.setattr(batch_invariance, "has_invariant_bf16", lambda: has_bf16)
    folder = save_checkpoint(tmp_path)
    served = "float32 or bfloat16," if has_bf16 else "float32,"
    with pytest.raises(OptionError, match=f"is not for dtype float16 on a CPU.*; use {served}"):
        load(folder, "cpu", "float16")
    if not has_bf16:
        with pytest.raises(OptionError, match="on a CPU without AVX2 or NEON; use float32,"):
            load(folder, "cpu", "bfloat16")


@pytest.fixture
def choosing_onednn(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Has products of float32 choose by rows, as on ARM; there nothing changes."""
    monkeypatch.setattr(linear, "_is_arm", lambda: True)
    native.forget_lookups()
    yield
    monkeypatch.undo()
    native.forget_lookups()


@pytest.mark.usefixtures("choosing_onednn")
@pytest.mark.skipif(why_no_panels() is not None, reason=f"{why_no_panels()}")
def test_float32_by_our_kernel_where_products_of_onednn_choose_by_rows(tmp_path: Path) -> None:
    parts = [Pooling(48, "mean"), Dense(48, 20), Normalize()]
    folder = save_sentence_model(tmp_path / "sentence", parts)
    check_embed(load(folder, "cpu", "float32"), folder, "cpu", "float32")
    for family in ("qwen3", "gpt2"):  # with a gate, and without
        folder = save_causal(tmp_path / family, family, max_position_embeddings=LONGEST)
        model = load(folder, "cpu", "float32")
        check_scores(model, folder, "cpu", "float32")
        check_generation(model)
        kernels = {w.dense.weight.dtype for w in model.transformer.layers.weights[0].linears}
        assert kernels == {torch.int32}


@pytest.mark.usefixtures("choosing_onednn")
def test_float32_is_refused_where_its_products_choose_by_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "why_no_panels", lambda: "it needs a CPU with AVX2 or NEON")
    monkeypatch.setattr(batch_invariance, "has_invariant_bf16", lambda: True)
    native.forget_lookups()
    folder = save_checkpoint(tmp_path)
    with pytest.raises(OptionError, match="float32 on an ARM CPU.*; use bfloat16,"):
        load(folder, "cpu", "float32")
    with pytest.raises(OptionError, match="float16 on a CPU.*; use bfloat16,"):
        load(folder, "cpu", "float16")


def test_what_cannot_promise_it_is_refused(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "bert")
    with pytest.raises(OptionError, match="one process.*this asks for tp=2"):
        load(folder, "cpu", "float32", tp=2)
    with pytest.raises(OptionError, match="this asks for grid data2"):
        load(folder, "cpu", "float32", grid="data2")


def test_a_pickled_model_stays_batch_invariant(tmp_path: Path) -> None:
    model = load(save_checkpoint(tmp_path), "cpu", "float32")
    again = pickle.loads(pickle.dumps(model))
    assert again.checkpoint.batch_invariant
    assert again.transformer.layers.batch_invariant


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", GPU_DTYPES)
@pytest.mark.parametrize("family", ["bert", "modernbert", "deberta-v2", "mpnet"])
def test_gpu_embed(tmp_path: Path, family: str, dtype: str) -> None:
    folder = save_checkpoint(tmp_path, family, max_position_embeddings=LONGEST + 2, **WIDE)
    check_embed(load(folder, "cuda", dtype), folder, "cuda", dtype)


@pytest.mark.gpu
def test_gpu_sentence_modules() -> None:
    """In f32, and of sizes for which no tensor-core kernel is."""
    torch.manual_seed(0)
    weight, bias = torch.randn(20, 48, device="cuda"), torch.randn(20, device="cuda")
    dense = modules.Dense(prepare_linear(weight, bias, prepack=False), torch.tanh, False, None)
    chain = (*invariant_modules([dense]), modules.Normalize())
    x = torch.randn(700, 48, device="cuda")

    def run(rows: torch.Tensor) -> torch.Tensor:
        for module in chain:
            rows = module(rows)
        return rows

    wanted = run(x)
    exact = torch.tanh(x.double() @ weight.double().T + bias.double())
    exact /= exact.norm(dim=1, keepdim=True)
    assert (wanted.double() - exact).abs().max() < 1e-5  # f32, sums of 48 products of about 1
    for first, last in ((0, 1), (3, 70), (100, 700)):
        assert torch.equal(run(x[first:last].clone()), wanted[first:last])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", GPU_DTYPES)
def test_gpu_score(tmp_path: Path, dtype: str) -> None:
    folder = save_causal(tmp_path, max_position_embeddings=LONGEST, **WIDE_CAUSAL["qwen3"])
    check_scores(load(folder, "cuda", dtype), folder, "cuda", dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", GPU_DTYPES)
@pytest.mark.parametrize("family", WIDE_CAUSAL)
def test_gpu_generate(tmp_path: Path, family: str, dtype: str) -> None:
    check_generation(load(save_causal(tmp_path, family, **WIDE_CAUSAL[family]), "cuda", dtype))


@pytest.mark.gpu
def test_gpu_refuses_what_cannot_promise_it(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="dtype float32 on a GPU; use float16 or bfloat16"):
        load(save_checkpoint(tmp_path / "bert"), "cuda", "float32")
    model = load(save_causal(tmp_path / "bloom", "bloom", hidden_size=64), "cuda", "float16")
    with pytest.raises(OptionError, match="bloom cannot generate on cuda:0: .* ALiBi"):
        model.generate([[5, 6]], SamplingParams(max_tokens=1))
