"""Experts in int8 and int4 on a CPU, which their routers are not."""

from pathlib import Path

import pytest
import tiny
from test_grouped_weights import NEAR, batch_of, folder_of
from tiny_decoders import tiny_decoder

import bytetx
from bytetx.nn.layer import ExpertFeedForward
from bytetx.nn.loading import load_checkpoint
from bytetx.ops.gated import GatedWeight
from bytetx.ops.grouped_linear import GroupedWeight
from bytetx.ops.linear import LinearWeight


@pytest.mark.feature("Arithmetic", "int8 and int4 of experts on CPUs")
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "qwen3_5_moe"])
@pytest.mark.parametrize("dtype", NEAR)
def test_experts_take_few_bits(name: str, dtype: str, tmp_path: Path) -> None:
    folder = folder_of(name, tmp_path)
    loaded = load_checkpoint(folder, device="cpu", dtype=dtype)
    exact = load_checkpoint(folder, device="cpu", dtype="float32")
    mixtures = 0
    for layer in loaded.transformer.layers.weights:
        if isinstance(half := layer.feed_forward, ExpertFeedForward):
            mixtures += 1
            weights = [*half.experts.first, *half.experts.out]
            matrices = [w.fused if isinstance(w, GatedWeight) else w for w in weights]
            assert all(isinstance(w, GroupedWeight) for w in matrices)
            assert isinstance(half.experts.router, LinearWeight)
    assert mixtures
    batch = batch_of(folder)
    got, wanted = (one.transformer.forward(batch).float() for one in (loaded, exact))
    # In the median: a row whose experts are almost tied may take another one. As many products as
    # there, and routers.
    error = (got - wanted).norm(dim=1) / wanted.norm(dim=1)
    assert error.median() < 1.5 * NEAR[dtype]


@pytest.mark.parametrize("dtype", NEAR)
def test_batch_mates_change_no_token(dtype: str, tmp_path: Path) -> None:
    model = bytetx.load(folder_of("mixtral", tmp_path), device="cpu", dtype=dtype)
    params = bytetx.SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    prompts = tiny.random_ids([3, 9, 1, 20])
    together = [list(one.token_ids) for one in model.generate(prompts, params)]
    alone = [list(model.generate([one], params)[0].token_ids) for one in prompts]
    assert together == alone


def test_memory_is_that_of_codes(tmp_path: Path) -> None:
    """And info says so."""
    sizes = {"hidden_size": 128, "intermediate_size": 256}
    folder = tiny.save(tiny_decoder("mixtral", **sizes), tmp_path)
    infos = [bytetx.load(folder, device="cpu", dtype=d).info() for d in ("int4", "float32")]
    coded, plain = (info["held_bytes"] for info in infos)
    assert coded < 0.3 * plain
