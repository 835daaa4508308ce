"""The README's sentence: on a CPU a result is the same, bit for bit, alone or in any batch.

Without any option, for float32, bfloat16 and int8, with 1 and 2 threads; encoders and causal models
of odd sizes, and of sizes at which a GEMM without a fixed order of sums would split or block k.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import save_causal, save_checkpoint

import bytetx
from bytetx.model import Model
from bytetx.ops.int8_linear import why_no_int8_linear
from bytetx.ops.linear import has_cpu_bf16, has_fixed_bf16
from bytetx.sampling_params import SamplingParams

LONGEST = 150  # tokens of a text: several tiles of attention and blocks of GEMMs
BF16 = pytest.param(
    "bfloat16",
    marks=pytest.mark.skipif(
        not has_fixed_bf16(), reason="bf16 needs AVX2; with AMX it takes batch_invariant=True"
    ),
)
INT8 = pytest.param(
    "int8",
    marks=pytest.mark.skipif(
        why_no_int8_linear() is not None or (has_cpu_bf16() and not has_fixed_bf16()),
        reason="int8 does not run here, or its heads run in bf16 with AMX",
    ),
)
# k of 768 and more is where oneDNN blocks it, 3072 where it splits it among threads.
WIDE = {"hidden_size": 192, "intermediate_size": 1536}


@pytest.fixture(autouse=True)
def own_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def token_ids(count: int, *, longest: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    lengths = [2, longest, *rng.integers(2, longest, count - 2)]
    return [rng.integers(5, 90, length).tolist() for length in lengths]


Run = Callable[[Sequence[list[int]]], list[np.ndarray]]


def check(run: Run, texts: list[list[int]], *, small: Run) -> None:
    """small: the same model with steps of few tokens."""
    wanted: list[np.ndarray] | None = None
    order = np.random.default_rng(1).permutation(len(texts)).tolist()
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        found = run(texts)
        wanted = wanted or found
        moved = run([texts[i] for i in order])
        one_by_one = [run([text])[0] for text in texts[::3]]
        doubled = run([texts[4]] * 9)  # every place of a batch of one text
        steps = small(texts)
        for i, bits in enumerate(wanted):
            assert np.array_equal(found[i], bits), (i, num_threads)
            assert np.array_equal(moved[order.index(i)], bits), (i, num_threads)
            assert np.array_equal(steps[i], bits), (i, num_threads)
        for i, bits in enumerate(one_by_one):
            assert np.array_equal(bits, wanted[3 * i]), (i, num_threads)
        for bits in doubled:
            assert np.array_equal(bits, wanted[4]), num_threads


def embed(model: Model) -> Run:
    return lambda texts: list(np.asarray(model.embed(texts)))


def score(model: Model) -> Run:
    return lambda texts: [one.token_log_likelihoods for one in model.score(texts)]


@pytest.mark.parametrize("dtype", ["float32", BF16, INT8])
@pytest.mark.parametrize(
    ("family", "sizes"), [("bert", WIDE), ("mpnet", {}), ("modernbert", {})], ids=lambda x: str(x)
)
def test_vectors(tmp_path: Path, family: str, dtype: str, sizes: dict[str, int]) -> None:
    folder = save_checkpoint(tmp_path, family, max_position_embeddings=LONGEST + 2, **sizes)
    model = bytetx.load(folder, device="cpu", dtype=dtype)
    small = bytetx.load(folder, device="cpu", dtype=dtype, token_budget=LONGEST)
    texts = token_ids(10, longest=min(LONGEST, model.spec.max_positions))
    check(embed(model), texts, small=embed(small))


@pytest.mark.parametrize("dtype", ["float32", BF16])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_log_likelihoods(tmp_path: Path, family: str, dtype: str) -> None:
    folder = save_causal(tmp_path, family)
    model = bytetx.load(folder, device="cpu", dtype=dtype)
    small = bytetx.load(folder, device="cpu", dtype=dtype, token_budget=64)
    texts = token_ids(10, longest=min(64, model.spec.max_positions))
    check(score(model), texts, small=score(small))


@pytest.mark.parametrize("dtype", ["float32", BF16])
def test_log_probabilities_of_generated_tokens(tmp_path: Path, dtype: str) -> None:
    """Prompts that fit a step; what pieces and found prefixes need is batch_invariant=True."""
    model = bytetx.load(save_causal(tmp_path, "llama"), device="cpu", dtype=dtype)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3)

    def generate(texts: Sequence[list[int]]) -> list[tuple]:
        return [(one.token_ids, one.logprobs) for one in model.generate(texts, params)]

    texts = token_ids(8, longest=40)
    wanted = generate(texts)
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        for found in (generate(texts), generate(texts[::-1])[::-1]):
            assert found == wanted, num_threads
        for i in (0, 3, 7):
            assert generate([texts[i]]) == [wanted[i]], (i, num_threads)
