"""The fused ops' kernels: random shapes and shares against float64, thousands of calls, graphs."""

import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from bytetx.ops import native
from bytetx.ops.comm_gemm import (
    NUM_FLAGS,
    Peers,
    RowNorm,
    all_gather_gemm,
    gemm_all_reduce,
    gemm_reduce_scatter,
    make_workspace,
)
from bytetx.ops.comm_plan import CommPlan
from bytetx.ops.gated import prepare_gated
from bytetx.ops.linear import prepare_linear
from bytetx.parallel.layout import deal

SIZES = (1, 2, 4, 8)
BUFFER_BYTES = 256 << 20
EPS = 1e-5
DTYPES = [torch.float16, torch.bfloat16]
LATE_CYCLES = 300_000  # about 150 microseconds


pytestmark = pytest.mark.gpu


@dataclass
class Group:
    """All ranks in this process, one GPU each; kernels run side by side, launched in turn."""

    peers: list[Peers]
    buffers: list[Tensor]

    @property
    def size(self) -> int:
        return len(self.peers)

    def poison(self) -> None:
        for buffer in self.buffers:
            buffer.fill_(float("nan"))

    def wait(self) -> None:
        for rank in range(self.size):
            torch.cuda.synchronize(rank)


def make_group(size: int) -> Group:
    reach_one_another(size)
    fill_caches(size)
    options = [{"device": torch.device("cuda", rank)} for rank in range(size)]
    buffers = [torch.zeros(BUFFER_BYTES // 2, dtype=torch.float16, **o) for o in options]
    flags = [torch.zeros(NUM_FLAGS, dtype=torch.int32, **o) for o in options]
    addresses = [[t.data_ptr() for t in tensors] for tensors in (buffers, flags)]
    peers = [
        Peers(
            rank,
            size,
            None,
            make_workspace(*addresses, buffer_bytes=BUFFER_BYTES, rank=rank, owner=flags, **o),
        )
        for rank, o in enumerate(options)
    ]
    group = Group(peers, buffers)
    group.wait()
    return group


def reach_one_another(size: int) -> None:
    """A copy between two GPUs makes torch enable their access to each other's memory."""
    for here in range(size):
        for there in range(size):
            torch.zeros(1, device=f"cuda:{here}").to(f"cuda:{there}")


def fill_caches(size: int) -> None:
    """All that the tests need is torch's before kernels wait for one another: memory that is new to
    a GPU is mapped on those that reach it, too, which may wait for their kernels."""
    for rank in range(size):
        held = [torch.empty(1 << 19, dtype=torch.uint8, device=f"cuda:{rank}") for _ in range(128)]
        held.append(torch.empty(1 << 30, dtype=torch.uint8, device=f"cuda:{rank}"))
        del held


@pytest.fixture(scope="module", params=SIZES)
def group(request: pytest.FixtureRequest) -> Group:
    if request.param > torch.cuda.device_count():
        pytest.skip(f"needs {request.param} GPUs")
    reason = native.why_no_kernel("all_gather_gemm", torch.device("cuda", 0))
    if reason is not None:
        pytest.skip(reason)
    return make_group(request.param)


@dataclass
class Layer:
    """One call on every rank: call(rank) gives results, expected(rank, dtype) the right ones."""

    name: str
    call: Callable[[int], tuple[Tensor, ...]]
    expected: Callable[[int, torch.dtype], tuple[Tensor, ...]]


def random_offsets(total: int, size: int) -> tuple[int, ...]:
    kind = random.randrange(3)
    if kind == 0:
        return deal(total, size, step=random.choice([16, 128, 256]))
    return 0, *sorted(random.randint(0, total) for _ in range(size - 1)), total


def randn(rank: int, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, device=f"cuda:{rank}", dtype=dtype)


def gather_layer(group: Group, dtype: torch.dtype, *, max_rows: int) -> Layer:
    m, n, k = random.randint(1, max_rows), 64 * random.randint(1, 20), 8 * random.randint(1, 200)
    offsets = random_offsets(m, group.size)
    activation = random.choice(["none", "gelu", "relu", "silu", "gated"])
    ranks = range(group.size)
    own = [offsets[r + 1] - offsets[r] for r in ranks]
    xs = [randn(r, own[r], k, dtype=dtype) for r in ranks]
    weights = [randn(r, n, k, dtype=dtype) / k**0.5 for r in ranks]
    biases = [randn(r, n, dtype=dtype) for r in ranks]
    if activation == "gated":
        ws = [
            prepare_gated(
                w[: n // 2], w[n // 2 :], gate_bias=b[: n // 2], up_bias=b[n // 2 :], prepack=False
            )
            for w, b in zip(weights, biases, strict=True)
        ]
    else:
        ws = [prepare_linear(w, b, prepack=False) for w, b in zip(weights, biases, strict=True)]
    name = "silu" if activation == "gated" else activation

    def call(rank: int) -> tuple[Tensor, ...]:
        options = {"peers": group.peers[rank], "row_offsets": offsets, "activation": name}
        return (all_gather_gemm(xs[rank], ws[rank], **options),)

    def expected(rank: int, to: torch.dtype) -> tuple[Tensor, ...]:
        rows = torch.cat([x.to(f"cuda:{rank}") for x in xs])
        y = F.linear(rows.to(to), weights[rank].to(to), biases[rank].to(to))
        if activation == "gated":
            return (F.silu(y[:, : n // 2]) * y[:, n // 2 :],)
        functions = {"gelu": F.gelu, "relu": F.relu, "silu": F.silu}
        return (functions[name](y) if name in functions else y,)

    return Layer(f"gather {m} {n} {k} {activation} {offsets}", call, expected)


def rms(h: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(h, weight.shape, weight, EPS)


def sum_layer(
    group: Group,
    dtype: torch.dtype,
    *,
    max_rows: int,
    is_dealt: bool,
    plan: CommPlan | None = None,
) -> Layer:
    m, n, k = random.randint(1, max_rows), 32 * random.randint(1, 80), 8 * random.randint(1, 200)
    ranks = range(group.size)
    offsets = random_offsets(m, group.size)
    own = [slice(offsets[r], offsets[r + 1]) if is_dealt else slice(0, m) for r in ranks]
    xs = [randn(r, m, k, dtype=dtype) for r in ranks]
    weights = [randn(r, n, k, dtype=dtype) / (k * group.size) ** 0.5 for r in ranks]
    has_partial, has_bias = random.random() < 0.5, random.random() < 0.5
    partials = [randn(r, m, n, dtype=dtype) if has_partial else None for r in ranks]
    residual, vectors = randn(0, m, n, dtype=dtype), randn(0, 3, n, dtype=dtype)
    is_rms = random.random() < 0.5
    residuals = [residual[own[r]].to(f"cuda:{r}") for r in ranks]
    on_rank = [vectors.to(f"cuda:{r}") for r in ranks]
    ws = [prepare_linear(w, prepack=False) for w in weights]

    def call(rank: int) -> tuple[Tensor, ...]:
        weight, shift, bias = on_rank[rank]
        kind = "rms_norm" if is_rms else "layer_norm"
        options = {
            "peers": group.peers[rank],
            "residual": residuals[rank],
            "bias": bias if has_bias else None,
            "partial": partials[rank],
            "norm": RowNorm(weight, None if is_rms else shift, EPS, kind),
            "plan": plan,
        }
        if is_dealt:
            return gemm_reduce_scatter(xs[rank], ws[rank], row_offsets=offsets, **options)
        return gemm_all_reduce(xs[rank], ws[rank], **options)

    def expected(rank: int, to: torch.dtype) -> tuple[Tensor, ...]:
        h, (weight, shift, bias) = residual.to(f"cuda:{rank}", to), on_rank[rank].to(to)
        for x, w, partial in zip(xs, weights, partials, strict=True):
            h = h + F.linear(x.to(h), w.to(h)) + (0 if partial is None else partial.to(h))
        h = h + bias if has_bias else h
        normed = rms(h, weight) if is_rms else F.layer_norm(h, (n,), weight, shift, EPS)
        return normed[own[rank]], h[own[rank]]

    return Layer(f"sum {m} {n} {k} dealt {is_dealt} {offsets}", call, expected)


def random_layer(group: Group, dtype: torch.dtype, *, max_rows: int) -> Layer:
    kind = random.randrange(3)
    if kind == 0:
        return gather_layer(group, dtype, max_rows=max_rows)
    is_dealt = kind == 1
    rows = max_rows if is_dealt else min(max_rows, 300)
    return sum_layer(group, dtype, max_rows=rows, is_dealt=is_dealt)


def assert_right(found: Tensor, exact: Tensor, plain: Tensor, name: str) -> None:
    assert found.shape == exact.shape, name
    if not exact.numel():
        return
    noise = 2 * torch.finfo(found.dtype).eps * exact.abs().max()
    error = (found.double() - exact).abs().max()
    assert error <= 2 * (plain.double() - exact).abs().max() + noise, name


def check_layer(group: Group, layer: Layer, dtype: torch.dtype) -> None:
    group.poison()
    group.wait()
    results = [layer.call(rank) for rank in range(group.size)]
    group.wait()
    for rank, found in enumerate(results):
        pairs = zip(found, layer.expected(rank, torch.float64), strict=True)
        plain = layer.expected(rank, dtype)
        for which, (ours, exact) in enumerate(pairs):
            assert_right(ours, exact, plain[which], layer.name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_against_float64(group: Group, dtype: torch.dtype) -> None:
    for number in range(90):
        layer = random_layer(group, dtype, max_rows=6 if number % 3 == 0 else 1500)
        check_layer(group, layer, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_tiling_of_the_all_reduce(group: Group, dtype: torch.dtype) -> None:
    for name, rows, *_ in native.push_tilings():
        for splits in (1, 2, 3, 5, 8):
            options = {"is_dealt": False, "plan": CommPlan(name, splits)}
            layer = sum_layer(group, dtype, max_rows=2 * rows + 3, **options)
            check_layer(group, layer, dtype)


def test_all_reduce_gives_every_rank_the_same_bits(group: Group) -> None:
    for _ in range(20):
        layer = sum_layer(group, torch.bfloat16, max_rows=300, is_dealt=False)
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
    return layers


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


def test_kernels_end_when_the_host_gives_up(group: Group) -> None:
    """A rank that is gone leaves the others' devices usable."""
    if group.size == 1:
        pytest.skip("one rank waits for nobody")
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
from test_cuda_comm import make_group, sum_layer
group = make_group(2)
layer = sum_layer(group, torch.float16, max_rows=300, is_dealt=False)
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
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", IN_VAIN],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert "rank 0 waited in vain for rank 1: flag" in done.stdout, done.stderr
