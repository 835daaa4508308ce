"""Models on grids of two GPUs, over NCCL, against the same checkpoints on one GPU."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import save_checkpoint
from tiny import random_ids, save
from tiny_decoders import tiny_decoder

from bytetx import Model, SamplingParams, load
from bytetx.ops.native import why_no_kernel
from bytetx.parallel.grid import Grid, assign_sequences
from bytetx.parallel.planner.ledger import count_transfers, local_sizes, pass_transfers
from bytetx.parallel.planner.shapes import shape_of

pytestmark = pytest.mark.gpus(2)

GRIDS = ["data2", "z2", "y2", "x2"]
# Of vectors of unit length, and of log-likelihoods of some hundreds.
TOLERANCES = {torch.float32: (1e-5, 1e-3), torch.float16: (1e-2, 1e-1)}
# Of sums of log-likelihoods: x rounds partial sums to the half type before it adds them up.
SUM_RTOL = {torch.float32: 0, torch.float16: 1e-3}
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


@pytest.mark.parametrize("grid", GRIDS)
def test_replayed_passes(bert: Path, grid: str) -> None:
    """Batches of one bucket and of several, again and again: eager, captured, replayed; slots have
    different buckets, and one of them none of the texts at times."""
    one = load(bert, device="cuda", dtype=torch.float16)
    batches = [random_ids(lengths) for lengths in ([40, 3], [39, 5], [40], [40] * 6 + [9], [7])]
    with load(bert, device="cuda", dtype=torch.float16, grid=grid) as model:
        for texts in batches * 4:
            found, wanted = (m.embed(texts, normalize=True).vectors for m in (model, one))
            np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCES[torch.float16][0])
        local = model.transformer.placement.whole  # of rank 0
        if local.graphs is None:
            pytest.skip(why_no_kernel("varlen_attention", torch.device("cuda", 0)) or "no graphs")
        assert local.graphs.num_graphs > 0
        assert not local.graphs._graphs._refused


@pytest.mark.parametrize("grid", ["z2", "y2"])
def test_graphs_give_the_bits_of_eager_passes(bert: Path, grid: str) -> None:
    texts = random_ids([40, 3, 17])
    with load(bert, device="cuda", dtype=torch.float16, grid=grid) as model:
        eager = Model(model.checkpoint, cuda_graphs=False)
        wanted = eager.embed(texts).vectors
        for _ in range(4):
            np.testing.assert_array_equal(model.embed(texts).vectors, wanted)


def test_the_ledger_of_replayed_gathers(bert: Path) -> None:
    """z's gathers are copies, as many and as large as the planner says."""
    shape, texts = shape_of(bert), random_ids([40, 13, 25, 30])
    with load(bert, device="cuda", dtype=torch.float16, grid="z2") as model:
        gather = model.transformer.blocks.weight_gather
        if gather._copies is None:
            pytest.skip("these GPUs do not read one another's memory")
        group = model.checkpoint.executor.group
        slots = assign_sequences([40, 13, 25, 30], 2, hidden_size=shape.hidden_size)
        transfers = pass_transfers(
            shape,
            Grid(z=2),
            local_sizes(shape, Grid(z=2), rank=0),
            num_rows=sum(len(texts[i]) for i in slots[0]),
            total_rows=108,
            itemsize=2,
            row_scheme=None,
        )
        for _ in range(5):
            before, begun = group.axes.counts(), group.axes.z.num_begun
            model.embed(texts)
            assert group.axes.counts() - before == count_transfers(transfers)
            assert group.axes.z.num_begun == begun
        assert model.transformer.placement.whole.graphs.num_graphs == 1


def test_two_threads_share_the_graphs(bert: Path) -> None:
    """Each with a stream of its own."""
    batches = [random_ids([40, 13 + i]) for i in range(2)]
    one = load(bert, device="cuda", dtype=torch.float16)
    wanted = [one.embed(texts, normalize=True).vectors for texts in batches]
    with load(bert, device="cuda", dtype=torch.float16, grid="z2") as model:

        def run(i: int) -> None:
            own = Model(model.checkpoint)
            for _ in range(20):
                found = own.embed(batches[i], normalize=True).vectors
                np.testing.assert_allclose(found, wanted[i], rtol=0, atol=1e-2)

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(run, range(2)))


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("family", DECODERS)
def test_a_decoder(family: str, grid: str, dtype: torch.dtype, tmp_path: Path) -> None:
    path, prompts = save(tiny_decoder(family, **DECODERS[family]), tmp_path), random_ids(PROMPTS)

    def scores(model: Model) -> list[float]:
        return [one.log_likelihood for one in model.score(prompts)]

    one = load(path, device="cuda", dtype=dtype)
    with load(path, device="cuda", dtype=dtype, grid=grid) as model:
        wanted = scores(one)
        for _ in range(3):  # eager, captured, replayed
            tolerances = {"rtol": SUM_RTOL[dtype], "atol": TOLERANCES[dtype][1]}
            np.testing.assert_allclose(scores(model), wanted, **tolerances)
        if grid != "x2" and dtype == torch.float32:
            answers = [m.generate(prompts, GREEDY) for m in (model, one)]
            tokens, expected = ([a.token_ids for a in found] for found in answers)
            assert tokens == expected
