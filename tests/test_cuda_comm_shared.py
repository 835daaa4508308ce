"""Groups of more ranks than this host has GPUs: kernels at 2, 4 and 8 ranks, models at 4.

Ranks are processes; those of one GPU take turns on it.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from checkpoints import save_checkpoint
from test_tp_gpu import GREEDY, ROWS, assert_as_good_as_one_gpu
from tiny import random_ids, save
from tiny_decoders import tiny_decoder

import bytetx
from bytetx.leading import load_led, start_ranks
from bytetx.model import Model
from bytetx.ops import native
from bytetx.parallel.control import Followers
from bytetx.parallel.tp import TpGroup

pytestmark = pytest.mark.gpu

TESTS = Path(__file__).parent
SECONDS = 120.0
SHARED_BYTES = 64 << 20
WIDE = {"hidden_size": 256, "num_attention_heads": 8, "intermediate_size": 1024}

Ranks = tuple[TpGroup, Followers]


@pytest.fixture(autouse=True)
def kernels() -> None:
    reason = native.why_no_kernel("all_gather_gemm", torch.device("cuda", 0))
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_kernels_against_float64(size: int) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    paths = os.pathsep.join([str(TESTS), *sys.path])
    ranks = [
        subprocess.Popen(
            [sys.executable, str(TESTS / "comm_rank.py"), str(rank), str(size), str(store.port)],
            env=os.environ | {"PYTHONPATH": paths},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        for rank, process in enumerate(ranks):
            out, errors = process.communicate(timeout=SECONDS)
            assert f"rank {rank} of {size} is right" in out, errors
            print(out)
    finally:
        for process in ranks:
            process.kill()
            process.wait()


@pytest.fixture(scope="module", params=[4])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    device = torch.device("cuda", 0)
    followers, group = start_ranks(request.param, device, shared_bytes=SHARED_BYTES, rows=ROWS)
    yield group, followers
    followers.close()


def test_bert(ranks: Ranks, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "bert", head="ForMaskedLM", **WIDE)
    assert_as_good_as_one_gpu(folder, torch.bfloat16, ranks)


def test_llama(ranks: Ranks, tmp_path: Path) -> None:
    """Also with fewer heads of keys than ranks, and the same greedy tokens in f32."""
    folder = save(tiny_decoder("llama", num_key_value_heads=2, **WIDE), tmp_path)
    assert_as_good_as_one_gpu(folder, torch.float16, ranks)
    shared = Model(load_led(folder, *ranks, dtype=torch.float32), cuda_graphs=False)
    whole = bytetx.load(folder, device="cuda", dtype="float32")
    prompts = random_ids([1, 13, 37, 2])
    found, wanted = (model.generate(prompts, GREEDY) for model in (shared, whole))
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in wanted]
