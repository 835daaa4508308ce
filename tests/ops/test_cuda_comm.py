"""The fused ops' kernels: random shapes and shares against float64, thousands of calls, graphs."""

import os
import random
import subprocess
import sys
from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from comm_group import make_group
from comm_layers import Group, Layer, check_layer, gather_layer, random_layer, sum_layer
from paths import TESTS
from torch import Tensor

from bytetx.ops import comm_plan, native
from bytetx.ops.comm_plan import CommPlan, Transport, fused_plans

SIZES = (1, 2, 4, 8)
DTYPES = [torch.float16, torch.bfloat16]
PLAIN_GEMM_PLANS = [
    CommPlan("cublas", "one_shot"),
    CommPlan("linear", "one_shot"),
    CommPlan("cublas", "two_shot"),
    CommPlan("linear", "two_shot"),
]
FUSED_PLANS = [
    CommPlan("fused_small_m", "one_shot", "16x64"),
    CommPlan("fused_small_m", "two_shot", "16x64"),
    CommPlan("fused", "one_shot", "128x128"),
]
LATE_CYCLES = 300_000  # about 150 microseconds


pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=SIZES)
def group(request: pytest.FixtureRequest) -> Group:
    if request.param > torch.cuda.device_count():
        pytest.skip(f"needs {request.param} GPUs")
    reason = native.why_no_kernel("all_gather_gemm", torch.device("cuda", 0))
    if reason is not None:
        pytest.skip(reason)
    return make_group(request.param)


@pytest.mark.parametrize("dtype", DTYPES)
def test_against_float64(group: Group, dtype: torch.dtype) -> None:
    for number in range(90):
        layer = random_layer(group, dtype, max_rows=6 if number % 3 == 0 else 1500)
        check_layer(group, layer, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_tiling_of_the_all_reduce(group: Group, dtype: torch.dtype) -> None:
    for fused in fused_plans(comm_plan.Layer("gemm_all_reduce", group.size, 64, 64)):
        is_small_m = fused.gemm == "fused_small_m"
        transports: tuple[Transport, ...] = (
            ("one_shot", "two_shot") if is_small_m else ("one_shot",)
        )
        rows = int(str(fused.tile).split("x")[0])
        for transport, split_k in product(transports, (1, 2, 3, 5, 8)):
            plan = replace(fused, transport=transport, split_k=split_k)
            options = {"is_sharded": False, "plan": plan, "max_rows": 2 * rows + 3}
            check_layer(group, sum_layer(group, dtype, **options), dtype)


# Among ranks, cuBLAS may load kernels while others wait: test_cuda_comm_shared.py has those.
@pytest.mark.parametrize("group", [1], indirect=True)
def test_copies_beside_cublas(group: Group) -> None:
    for number in range(30):
        dtype, rows = DTYPES[number % 2], 6 if number % 5 == 0 else 1500
        options = {"max_rows": rows, "plan": CommPlan("cublas", "copy_engine")}
        check_layer(group, gather_layer(group, dtype, **options), dtype)
        check_layer(group, sum_layer(group, dtype, is_sharded=True, **options), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile", ["128x192", "128x128"])
def test_fused_reduce(group: Group, tile: str, dtype: torch.dtype) -> None:
    for number in range(40):
        rows = 6 if number % 5 == 0 else 900 * group.size
        plan = CommPlan("fused", "peer_store", tile, fuse_reduce=True)
        options = {"max_rows": rows, "plan": plan}
        check_layer(group, sum_layer(group, dtype, is_sharded=True, **options), dtype)


@pytest.mark.parametrize("plan", PLAIN_GEMM_PLANS, ids=str)
def test_all_reduce_after_another_gemm(group: Group, plan: CommPlan) -> None:
    for number in range(20):
        dtype, rows = DTYPES[number % 2], 5 if number % 5 == 0 else 600
        options = {"is_sharded": False, "plan": plan}
        check_layer(group, sum_layer(group, dtype, max_rows=rows, **options), dtype)


def test_an_all_reduce_whose_slots_do_not_fit_takes_the_staging_buffer(group: Group) -> None:
    peers = {
        rank: replace(own, workspace=replace(own.workspace, buffer_bytes=4096))
        for rank, own in group.peers.items()
    }
    small, plan = replace(group, peers=peers), CommPlan("fused", "one_shot", "128x128")
    layer = sum_layer(small, torch.bfloat16, max_rows=300, is_sharded=False, plan=plan)
    check_layer(small, layer, torch.bfloat16)


@pytest.mark.parametrize("plan", [*FUSED_PLANS, *PLAIN_GEMM_PLANS], ids=str)
def test_sums_that_are_zero(group: Group, plan: CommPlan) -> None:
    """A staging buffer takes a word that is not there yet for zero."""
    options = {"is_sharded": False, "plan": plan, "factor": 0.0}
    layer = sum_layer(group, torch.bfloat16, max_rows=40, **options)
    check_layer(group, layer, torch.bfloat16)


def test_two_exchanges_of_wide_rows(group: Group) -> None:
    for n in (4096, 8192, 12288, 16384):
        for dtype, rows in ((torch.bfloat16, 300), (torch.float16, 9)):
            options = {"is_sharded": False, "plan": CommPlan("linear", "two_shot"), "n": n}
            check_layer(group, sum_layer(group, dtype, max_rows=rows, **options), dtype)


def test_all_reduce_gives_every_rank_the_same_bits(group: Group) -> None:
    for number in range(40):
        plan = CommPlan("linear", "two_shot") if number % 4 == 0 else None
        layer = sum_layer(group, torch.bfloat16, max_rows=600, is_sharded=False, plan=plan)
        results = [layer.call(rank) for rank in range(group.size)]
        group.wait()
        for found in results[1:]:
            for ours, first in zip(found, results[0], strict=True):
                assert torch.equal(ours.to(first.device), first)


@dataclass
class Checked:
    """A layer with the results of its first call, and how many elements later ones got wrong."""

    layer: Layer
    first: list[tuple[Tensor, ...]]

    def call(self, rank: int, wrong: list[Tensor]) -> None:
        for found, first in zip(self.layer.call(rank), self.first[rank], strict=True):
            wrong[rank] += (found != first).sum()


def checked_layers(group: Group, count: int) -> list[Checked]:
    layers = []
    for _ in range(count):
        layer = random_layer(group, torch.bfloat16, max_rows=1200)
        group.wait()
        first = [layer.call(rank) for rank in range(group.size)]
        group.wait()
        layers.append(Checked(layer, first))
    load_kernels(layers, group)
    return layers


def load_kernels(layers: list[Checked], group: Group) -> None:
    """Those of the checks, which follow calls: a kernel that is new to a GPU may wait for what it
    has to do, and that for what this thread has yet to call on others."""
    for rank, wrong in enumerate(no_errors(group)):
        with torch.cuda.device(rank):
            torch.cuda._sleep(1)
            for layer in layers:
                for first in layer.first[rank]:
                    wrong += (first != first).sum()
    group.wait()


def no_errors(group: Group) -> list[Tensor]:
    return [torch.zeros((), dtype=torch.int64, device=f"cuda:{r}") for r in range(group.size)]


def test_thousands_of_calls_of_changing_sizes_with_a_late_rank(group: Group) -> None:
    layers, wrong = checked_layers(group, 24), no_errors(group)
    for number in range(2000):
        layer, late = random.choice(layers), random.randrange(12 * group.size)
        for rank in range(group.size):
            with torch.cuda.device(rank):
                if late == rank:
                    torch.cuda._sleep(random.randrange(LATE_CYCLES))
                layer.call(rank, wrong)
        if number % 100 == 99:
            group.wait()
    assert [int(w) for w in wrong] == [0] * group.size


def test_graphs_of_changing_sizes_with_a_late_rank(group: Group) -> None:
    layers, wrong = checked_layers(group, 16), no_errors(group)
    graphs = []
    for rank in range(group.size):
        with torch.cuda.device(rank):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
                for layer in layers:
                    layer.call(rank, wrong)
            graphs.append(graph)
    for number in range(100):
        for rank, graph in enumerate(graphs):
            with torch.cuda.device(rank):
                if number % (3 * group.size) == rank:
                    torch.cuda._sleep(LATE_CYCLES)
                graph.replay()
    group.wait()
    assert [int(w) for w in wrong] == [0] * group.size


@pytest.mark.parametrize("group", SIZES[1:], indirect=True)  # one rank waits for nobody
def test_kernels_end_when_the_host_gives_up(group: Group) -> None:
    """A rank that is gone leaves the others' devices usable."""
    own = make_group(group.size)
    layers = [random_layer(own, torch.float16, max_rows=300) for _ in range(12)]
    own.wait()
    for layer in layers:
        layer.call(0)
    assert not torch.cuda.current_stream(0).query()
    assert own.peers[0].workspace.fault_text() is None
    own.peers[0].workspace.give_up()
    torch.cuda.synchronize(0)
    assert own.peers[0].workspace.fault_text() is None
    assert torch.ones(3, device="cuda:0").sum() == 3


IN_VAIN = """
import torch
from bytetx.ops import comm_kernels
comm_kernels.TIMEOUT_CYCLES = 100_000_000
from comm_layers import sum_layer
from comm_group import make_group
group = make_group(2)
layer = sum_layer(group, torch.float16, max_rows=300, is_sharded=False)
group.wait()
layer.call(0)
try:
    torch.cuda.synchronize(0)
except RuntimeError:
    print(group.peers[0].workspace.fault_text(), flush=True)
import os
os._exit(0)
"""


@pytest.mark.gpus(2)
def test_a_wait_in_vain_says_for_whom() -> None:
    """In a process of its own: its device is lost."""
    paths = os.pathsep.join([str(TESTS), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", IN_VAIN],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert "rank 0 timed out waiting for rank 1: flag" in done.stdout, done.stderr
