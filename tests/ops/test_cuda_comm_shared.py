"""The fused ops' kernels in groups of more ranks than this host has GPUs.

Ranks are processes; those of one GPU take turns on it.
"""

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from paths import TESTS

from bytetx.ops import native

pytestmark = pytest.mark.gpu

SECONDS = 120.0


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
