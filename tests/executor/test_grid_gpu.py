"""Models on grids of two GPUs, over NCCL, against the same checkpoints on one GPU."""

from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import save_checkpoint
from tiny import random_ids, save
from tiny_decoders import tiny_decoder

from bytetx import Model, SamplingParams, load

pytestmark = pytest.mark.gpus(2)

GRIDS = ["data2", "z2", "y2", "x2"]
# Of vectors of unit length, and of log-likelihoods of some hundreds.
TOLERANCES = {torch.float32: (1e-5, 1e-3), torch.float16: (1e-2, 1e-1)}
PROMPTS = [5, 13, 40, 2, 30, 1, 37]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SIZES = {"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 512}
DECODERS = {"gpt2": {"n_embd": 256, "n_head": 4}, "llama": SIZES | {"num_key_value_heads": 2}}


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("bert"), "bert", **SIZES)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("grid", GRIDS)
def test_an_encoder(bert: Path, grid: str, dtype: torch.dtype) -> None:
    """The second batch has fewer texts than slots."""
    one = load(bert, device="cuda", dtype=dtype)
    with load(bert, device="cuda", dtype=dtype, grid=grid) as model:
        for texts in (random_ids(PROMPTS), random_ids([40])):
            found, wanted = (m.embed(texts, normalize=True).vectors for m in (model, one))
            np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCES[dtype][0])


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("family", DECODERS)
def test_a_decoder(family: str, grid: str, dtype: torch.dtype, tmp_path: Path) -> None:
    path, prompts = save(tiny_decoder(family, **DECODERS[family]), tmp_path), random_ids(PROMPTS)

    def scores(model: Model) -> list[float]:
        return [one.log_likelihood for one in model.score(prompts)]

    one = load(path, device="cuda", dtype=dtype)
    with load(path, device="cuda", dtype=dtype, grid=grid) as model:
        found, wanted = scores(model), scores(one)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCES[dtype][1])
        if grid != "x2" and dtype == torch.float32:
            answers = [m.generate(prompts, GREEDY) for m in (model, one)]
            tokens, expected = ([a.token_ids for a in found] for found in answers)
            assert tokens == expected
