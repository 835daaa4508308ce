"""Suites `ag_gemm`, `gemm_rs`, `gemm_ar`: GEMMs that carry their communication, on several GPUs.

Every rank is a process and runs the same cases; times are the slowest rank's.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu import DTYPES, Gpu, gpu_suite, num_rotated, sample_us_of
from benchmarks.ranks import Ranks, join_ranks, overlap_measurement, ranks_us
from benchmarks.suite import Measurement, Suite
from bytetx.ops.comm_gemm import all_gather_gemm, gemm_all_reduce, gemm_reduce_scatter
from bytetx.ops.comm_workspace import workspace_bytes
from bytetx.ops.linear import LinearWeight, prepare_linear
from bytetx.ops.norm import LayerNorm, layer_norm
from bytetx.parallel.layout import shard_offsets

# Of a suite: (model, layer) -> outputs and inputs of all ranks.
_GATHER_LAYERS = {
    ("gpt3", "ffn1"): (49152, 12288),
    ("gpt3", "qkv"): (36864, 12288),
    ("llama-70b", "ffn"): (28672, 8192),
    ("bert-large", "ffn1"): (4096, 1024),
    ("gpt2-xl", "ffn1"): (6400, 1600),
}
_SUM_LAYERS = {
    ("gpt3", "ffn2"): (12288, 49152),
    ("gpt3", "o"): (12288, 12288),
    ("llama-70b", "down"): (8192, 28672),
    ("llama-70b", "o"): (8192, 8192),
    ("bert-large", "ffn2"): (1024, 4096),
    ("gpt2-xl", "ffn2"): (1600, 6400),
}
LAYERS = {"ag_gemm": _GATHER_LAYERS, "gemm_rs": _SUM_LAYERS, "gemm_ar": _SUM_LAYERS}
# 16384 is a prefill of 8 x 2048.
_MANY_TOKENS = (512, 1024, 2048, 4096, 8192, 16384)
_FEW_TOKENS = (16, 64, 256, 512)
_FEWEST_CALLS = 4  # in one graph, so that its start is no part of the time
_LONG_US, _FLOP_PER_US = 1_000, 6e8  # the least time of a long call; a GPU's rate

Call = Callable[[LinearWeight], object]


@dataclass(frozen=True, slots=True)
class Shape:
    """One case: m rows; n outputs and k inputs of all ranks together."""

    name: str
    m: int
    n: int
    k: int
    dtype: str = "bf16"


def suite(*, op: str, patterns: list[str]) -> Suite:
    """Make the suite in a process that torchrun started.  op: "ag_gemm", "gemm_rs" or "gemm_ar"."""
    ranks = join()
    run = partial(_MEASURES[op], ranks=ranks)
    return gpu_suite(op, shapes(op, ranks.size), run, patterns=patterns, unit="us")


def shapes(op: str, size: int) -> list[Shape]:
    """Every layer at every number of rows, for a group of `size` ranks."""
    return [
        Shape(f"tp{size}-{model}-{layer}-{m}", m, n, k)
        for (model, layer), (n, k) in LAYERS[op].items()
        for m in (_FEW_TOKENS if op == "gemm_ar" else _MANY_TOKENS)
    ]


def measure_gather(shape: Shape, gpu: Gpu, *, ranks: Ranks) -> Measurement:
    """Ours; cuBLAS after NCCL; torch's fused op. All without bias, as that op is."""
    m, n, k = shape.m, shape.n // ranks.size, shape.k
    offsets = shard_offsets(m, ranks.size, step=_row_step(m, ranks.size))
    weights = _weights(n, k, shape.dtype)
    dtype = DTYPES[shape.dtype]
    own = offsets[ranks.group.rank + 1] - offsets[ranks.group.rank]
    shard, even = _randn(own, k, dtype=dtype), _randn(-(-m // ranks.size), k, dtype=dtype)
    rows = _empty(len(even) * ranks.size, k, dtype=dtype)

    def ours(w: LinearWeight) -> None:
        all_gather_gemm(shard, w, peers=ranks.peers, row_offsets=offsets)

    def gemm(w: LinearWeight) -> None:
        F.linear(rows, w.weight)

    def collective(_: LinearWeight) -> None:
        dist.all_gather_into_tensor(rows, even)

    def nccl(w: LinearWeight) -> None:
        collective(w)
        gemm(w)

    def symmetric(w: LinearWeight) -> None:
        torch.ops.symm_mem.fused_all_gather_matmul(even, [w.weight.t()], 0, ranks.name)

    runs = {"ours": ours, "gemm": gemm, "nccl": collective, "cublas-nccl": nccl}
    return _measure(shape, ranks, weights, runs | {"torch-symm-mem": symmetric})


def measure_scatter(shape: Shape, gpu: Gpu, *, ranks: Ranks) -> Measurement:
    """Ours with bias, residual and norm; cuBLAS and NCCL, torch's op: without and with a norm."""
    m, n, k = shape.m, shape.n, shape.k // ranks.size
    offsets = shard_offsets(m, ranks.size, step=_row_step(m, ranks.size))
    dtype = DTYPES[shape.dtype]
    weights = _weights(n, k, shape.dtype)
    own = offsets[ranks.group.rank + 1] - offsets[ranks.group.rank]
    even = -(-m // ranks.size)
    x = _randn(even * ranks.size, k, dtype=dtype)
    product = _empty(len(x), n, dtype=dtype)
    part = _empty(even, n, dtype=dtype)
    residual, rest = _randn(own, n, dtype=dtype), _randn(even, n, dtype=dtype)
    vector = _randn(n, dtype=dtype)
    norm = LayerNorm(vector, vector, 1e-5)

    def ours(w: LinearWeight) -> None:
        gemm_reduce_scatter(
            x[:m],
            w,
            peers=ranks.peers,
            row_offsets=offsets,
            residual=residual,
            bias=vector,
            norm=norm,
        )

    def gemm(w: LinearWeight) -> None:
        torch.mm(x, w.weight.t(), out=product)

    def collective(_: LinearWeight) -> None:
        dist.reduce_scatter_tensor(part, product)

    def nccl(w: LinearWeight) -> Tensor:
        gemm(w)
        collective(w)
        return part

    def symmetric(w: LinearWeight) -> Tensor:
        fused = torch.ops.symm_mem.fused_matmul_reduce_scatter
        scattered: Tensor = fused(x, w.weight.t(), "sum", 0, ranks.name)
        return scattered

    runs = {"ours": ours, "gemm": gemm, "nccl": collective, "cublas-nccl": nccl}
    then_norm = partial(_then_norm, residual=rest, norm=norm)
    rivals = {"cublas-nccl-norm": then_norm(nccl), "torch-symm-mem": symmetric}
    rivals |= {"torch-symm-mem-norm": then_norm(symmetric)}
    return _measure(shape, ranks, weights, runs | rivals, notes=(_SUM_NOTE,))


def measure_reduce(shape: Shape, gpu: Gpu, *, ranks: Ranks) -> Measurement:
    """Ours with bias, residual and norm; cuBLAS, then NCCL's or torch's all-reduce, then a norm."""
    m, n, k = shape.m, shape.n, shape.k // ranks.size
    dtype = DTYPES[shape.dtype]
    weights = _weights(n, k, shape.dtype)
    x, residual = _randn(m, k, dtype=dtype), _randn(m, n, dtype=dtype)
    vector = _randn(n, dtype=dtype)
    norm = LayerNorm(vector, vector, 1e-5)
    product = symm_mem.empty(m, n, dtype=dtype, device=torch.device("cuda"))
    world = dist.group.WORLD
    assert world is not None  # join() has made it
    symm_mem.rendezvous(product, world)

    def ours(w: LinearWeight) -> None:
        gemm_all_reduce(x, w, peers=ranks.peers, residual=residual, bias=vector, norm=norm)

    def gemm(w: LinearWeight) -> None:
        torch.mm(x, w.weight.t(), out=product)

    def collective(_: LinearWeight) -> None:
        dist.all_reduce(product)

    def nccl(w: LinearWeight) -> Tensor:
        gemm(w)
        collective(w)
        return product

    def two_shot(w: LinearWeight) -> Tensor:
        gemm(w)
        reduced: Tensor = torch.ops.symm_mem.two_shot_all_reduce_(product, "sum", ranks.name)
        return reduced

    def one_shot(w: LinearWeight) -> None:
        gemm(w)
        torch.ops.symm_mem.one_shot_all_reduce(product, "sum", ranks.name)

    runs = {"ours": ours, "gemm": gemm, "nccl": collective, "cublas-nccl": nccl}
    then_norm = partial(_then_norm, residual=residual, norm=norm)
    rivals = {"cublas-nccl-norm": then_norm(nccl), "cublas-two-shot": two_shot}
    rivals |= {"cublas-two-shot-norm": then_norm(two_shot), "cublas-one-shot": one_shot}
    return _measure(shape, ranks, weights, runs | rivals, notes=(_SUM_NOTE,))


_MEASURES = {"ag_gemm": measure_gather, "gemm_rs": measure_scatter, "gemm_ar": measure_reduce}


def join() -> Ranks:
    """Join the ranks, with memory for all cases."""
    num_bytes = workspace_bytes(
        max_tokens=max(_MANY_TOKENS), hidden_size=12288, size=dist.get_world_size(), itemsize=2
    )
    return join_ranks(workspace_bytes=num_bytes)


def is_long(flop: float) -> bool:
    """Return whether a GEMM is measured alone: it takes so long that no call before matters."""
    return flop / _FLOP_PER_US > _LONG_US


def calls_of_graph(flop: float, num_weights: int) -> int:
    """The number of calls of so many FLOP in one graph; they cycle through the weights."""
    return 1 if is_long(flop) else max(num_weights, _FEWEST_CALLS)


def _row_step(m: int, size: int) -> int:
    """Rows are sharded in steps of this many: whole tiles where a shard has many of them."""
    return next(step for step in (256, 128, 64, 16) if m >= 8 * step * size or step == 16)


def _randn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def _empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, device="cuda", dtype=dtype)


def _weights(n: int, k: int, dtype: str) -> list[LinearWeight]:
    """Without bias; as many as keep each call from finding its weight in L2."""
    count = num_rotated(n * k * DTYPES[dtype].itemsize)
    return [prepare_linear(_randn(n, k, dtype=DTYPES[dtype]), prepack=False) for _ in range(count)]


def _then_norm(
    call: Callable[[LinearWeight], Tensor], *, residual: Tensor, norm: LayerNorm
) -> Call:
    """call, then what ours does with its sums, but for the bias: norm(sums + residual), and h."""

    def run(w: LinearWeight) -> Tensor:
        sums = call(w)
        return layer_norm(
            sums, norm.weight, norm.bias, eps=norm.eps, residual=residual, sum_out=sums
        )

    return run


def _measure(
    shape: Shape,
    ranks: Ranks,
    weights: list[LinearWeight],
    calls: Mapping[str, Call],
    *,
    notes: tuple[str, ...] = (),
) -> Measurement:
    flop = 2.0 * shape.m * shape.n * shape.k / ranks.size
    count = calls_of_graph(flop, len(weights))

    def run_all(call: Call) -> None:
        for i in range(count):
            call(weights[i % len(weights)])

    left_out: list[str] = []
    runs = {name: partial(run_all, call) for name, call in calls.items()}
    found = ranks_us(runs, left_out, sample_us=sample_us_of(flop))
    sizes = {"m": shape.m, "n": shape.n, "k": shape.k, "tp": ranks.size}
    per_call = {name: us / count for name, us in found.items()}
    return overlap_measurement(per_call, shape=sizes, notes=(*left_out, *notes))


_SUM_NOTE = (
    "gemm_rs and gemm_ar: ours adds bias and residual to the sum and norms it; rivals in -norm add "
    "the residual and norm, the others leave the bare sum"
)
