"""Models that GPUs share, against the same checkpoints on one GPU."""

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import save_checkpoint
from checkpoints import texts as random_texts
from tiny import random_ids, save
from tiny_decoders import tiny_decoder

import bytetx
from bytetx.errors import GroupError
from bytetx.executor.control import Workers
from bytetx.executor.leader import load_on_ranks, start_ranks
from bytetx.model import Model
from bytetx.ops import native
from bytetx.packed import pack
from bytetx.parallel.row_scheme import RowScheme
from bytetx.parallel.tp import TpGroup
from bytetx.sampling_params import SamplingParams

pytestmark = pytest.mark.gpus(2)

ROWS = RowScheme(64, ((256, 64), (0, 16)))
GROUPS = [("nccl", 2), ("symmetric memory", 2), ("symmetric memory", 4)]
BATCHES = [[1], [3, 0, 5], [64], [60, 40, 17], [90, 1, 0, 80, 95, 77]]
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
BERT = {"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024}
LLAMA = BERT | {"num_key_value_heads": 2}
SECONDS = 30.0

# Eight heads for up to eight ranks on one or two GPUs; keys and values of two heads.
MANY_RANKS = (4, 8)
MANY_RANKS_BERT = {"hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 1024}
MANY_RANKS_DECODERS = {
    "gpt2": {"n_embd": 512, "n_head": 8},
    "llama": MANY_RANKS_BERT | {"num_key_value_heads": 2},
}

Ranks = tuple[TpGroup, Workers]


@pytest.fixture(scope="module", params=GROUPS, ids=str)
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """One GPU per rank."""
    communication, size = request.param
    if size > torch.cuda.device_count():
        pytest.skip(f"needs {size} GPUs")
    device = torch.device("cuda", 0)
    shared_bytes = 64 << 20 if communication == "symmetric memory" else 0
    if shared_bytes:
        require_kernels()
    workers, group = start_ranks(size, device, shared_bytes=shared_bytes, rows=ROWS)
    assert (group.workspace is not None) == (shared_bytes > 0)
    yield group, workers
    workers.close()


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("bert"), "bert", head="ForMaskedLM", **BERT)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny_decoder("llama", **LLAMA), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module", params=MANY_RANKS)
def many_ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """More ranks than GPUs: processes share them, with gloo beside symmetric memory."""
    require_kernels()
    device = torch.device("cuda", 0)
    workers, group = start_ranks(request.param, device, shared_bytes=64 << 20, rows=ROWS)
    yield group, workers
    workers.close()


def require_kernels() -> None:
    reason = native.why_no_kernel("all_gather_gemm", torch.device("cuda", 0))
    if reason is not None:
        pytest.skip(reason)


def last_states(model: Model, seqlens: list[int]) -> torch.Tensor:
    spec, ids = model.spec, random_ids(seqlens)
    batch = pack(ids, has_token_types=spec.num_token_types > 0, device="cuda")
    return model.transformer.forward(batch).float()


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_float32(kind: str, ranks: Ranks, request: pytest.FixtureRequest) -> None:
    assert_same_as_one_gpu(request.getfixturevalue(kind), ranks)


def assert_same_as_one_gpu(folder: Path, ranks: Ranks, *, cuda_graphs: bool = True) -> None:
    """The same states, embeddings and greedy tokens in float32."""
    shared = Model(load_on_ranks(folder, *ranks, dtype=torch.float32), cuda_graphs=cuda_graphs)
    local = bytetx.load(folder, device="cuda", dtype="float32")
    for seqlens in BATCHES:
        seqlens = [min(n, shared.spec.max_positions) for n in seqlens]
        found, wanted = last_states(shared, seqlens), last_states(local, seqlens)
        assert (found - wanted).abs().max() < 1e-3  # cuBLAS sums in other orders
    if not shared.spec.is_causal:
        texts = random_texts(40, max_words=5)
        assert np.allclose(shared.embed(texts), local.embed(texts), atol=1e-3)
        return
    prompts = random_ids([1, 13, 37, 2, 30, 64])
    found, wanted = (model.generate(prompts, GREEDY) for model in (shared, local))
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in wanted]


@pytest.mark.parametrize("kind", ["bert", "llama"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_within_twice_the_error_of_one_gpu(
    kind: str, dtype: torch.dtype, ranks: Ranks, request: pytest.FixtureRequest
) -> None:
    assert_as_good_as_one_gpu(request.getfixturevalue(kind), dtype, ranks)


def test_shares_that_differ(ranks: Ranks, tmp_path: Path) -> None:
    """Fifteen heads: one rank's GEMM splits its features over CTAs, the other's does not."""
    sizes = {"hidden_size": 1920, "num_attention_heads": 15, "num_hidden_layers": 1}
    folder = save_checkpoint(tmp_path, "bert", intermediate_size=2048, **sizes)
    assert_as_good_as_one_gpu(folder, torch.bfloat16, ranks)


def assert_as_good_as_one_gpu(folder: Path, dtype: torch.dtype, ranks: Ranks) -> None:
    exact = bytetx.load(folder, device="cuda", dtype="float32")
    local = bytetx.load(folder, device="cuda", dtype=dtype)
    shared = Model(load_on_ranks(folder, *ranks, dtype=dtype))
    has_workspace = shared.transformer.blocks.peers.workspace is not None
    assert has_workspace == (ranks[0].workspace is not None)
    for seqlens in BATCHES:
        seqlens = [min(n, shared.spec.max_positions) for n in seqlens]
        wanted = last_states(exact, seqlens)
        errors = [(last_states(m, seqlens) - wanted).norm() for m in (shared, local)]
        noise = torch.finfo(dtype).eps * wanted.norm()
        assert errors[0] <= 2 * errors[1] + noise


@pytest.mark.gpus(1)
@pytest.mark.parametrize("kind", ["bert", *MANY_RANKS_DECODERS])
def test_more_ranks_than_gpus(kind: str, many_ranks: Ranks, tmp_path: Path) -> None:
    """Four and eight ranks compute the same, on whatever GPUs there are."""
    if kind == "bert":
        folder = save_checkpoint(tmp_path, "bert", head="ForMaskedLM", **MANY_RANKS_BERT)
    else:
        folder = save(tiny_decoder(kind, **MANY_RANKS_DECODERS[kind]), tmp_path)
    assert_same_as_one_gpu(folder, many_ranks, cuda_graphs=False)  # gloo has no graphs
    assert_as_good_as_one_gpu(folder, torch.bfloat16, many_ranks)


def test_captured_steps_are_eager_ones_bit_for_bit(ranks: Ranks, llama: Path) -> None:
    prompts, checkpoint = (
        random_ids([1, 13, 37, 2, 30, 64]),
        load_on_ranks(llama, *ranks, dtype=torch.bfloat16),
    )
    captured, eager = (Model(checkpoint, cuda_graphs=has_graphs) for has_graphs in (True, False))
    found, wanted = (model.generate(prompts, GREEDY) for model in (captured, eager))
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in wanted]
    # Both know the prompts' pages now: steps of fewer rows, whose GEMMs may sum in other parts.
    found, wanted = (model.generate(prompts[::-1], GREEDY) for model in (captured, eager))
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in wanted]
    assert captured.engines.idle[0].engine._runner.num_graphs
    assert not eager.engines.idle[0].engine._runner.num_graphs
    sampled = SamplingParams(temperature=0.9, seed=3, max_tokens=12, ignore_eos=True)
    found, wanted = (model.generate(prompts, sampled) for model in (captured, eager))
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in wanted]


def test_a_killed_rank_ends_the_group(llama: Path) -> None:
    """While rank 0 waits for NCCL; within seconds, and with the reason."""
    model = bytetx.load(llama, device="cuda", dtype="bfloat16", tp=2)
    process = model.checkpoint.executor.workers._processes[0]
    prompts = random_ids([30, 60, 9] * 8)
    model.generate(prompts, GREEDY)
    threading.Timer(0.3, lambda: process.send_signal(signal.SIGKILL)).start()
    start = time.monotonic()
    with pytest.raises(GroupError, match="rank 1 was killed by SIGKILL"):
        while time.monotonic() < start + SECONDS:
            model.generate(prompts, GREEDY)
    assert time.monotonic() < start + SECONDS
    model.close()
    wanted = bytetx.load(llama, device="cuda", dtype="float32").generate(prompts, GREEDY)
    with bytetx.load(llama, device="cuda", dtype="float32", tp=2) as again:
        found = again.generate(prompts, GREEDY)  # the device has survived
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in wanted]
