"""Suite `maxsim`: ColBERT's scores of packed queries and documents, on a GPU or a CPU."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import bytetx
from benchmarks import measure as clocks
from benchmarks.gpu import DTYPES, Gpu, Work, cpu_suite, gpu_suite, wall_us_in_turn
from benchmarks.lengths import Lengths, dense, prefix_sums
from benchmarks.right_runs import right_runs
from benchmarks.suite import Measurement, Suite, measured

_DIM = 128  # of ColBERT's projection
_QUERY_TOKENS = 32
_ROUNDS, _WARM_UP = 40, 2
_PACKAGES = ("sentence-transformers",)

Run = Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class Shape:
    """One case: each query's and each document's tokens."""

    name: str
    query_seqlens: np.ndarray  # int64 [num_queries]
    seqlens: np.ndarray  # int64 [num_documents]
    dtype: str = "fp16"

    @property
    def num_pairs(self) -> int:
        """Products of a query's token with a document's."""
        return int(self.query_seqlens.sum()) * int(self.seqlens.sum())


def suite(*, patterns: list[str], device: str = "cuda") -> Suite:
    """device: cuda; or cpu, in fp32 and smaller."""
    options: dict[str, Any] = {"patterns": patterns, "unit": "us", "packages": _PACKAGES}
    if device == "cpu":
        return cpu_suite("maxsim", cpu_shapes(), measure_cpu, **options)
    return gpu_suite("maxsim", shapes(), measure, **options)


def shapes() -> list[Shape]:
    """Many queries at once, and one query over what a first stage found."""
    draw = Lengths()
    many, few = (draw.lognormal(128, 0.8, count, 4, 512) for count in (4096, 1000))
    return [
        Shape("32-queries-4096-ln128", dense(_QUERY_TOKENS, 32), many),
        Shape("one-query-1000-ln128", dense(_QUERY_TOKENS, 1), few),
    ]


def cpu_shapes() -> list[Shape]:
    draw = Lengths()
    many, few = (draw.lognormal(128, 0.8, count, 4, 512) for count in (512, 1000))
    return [
        Shape("32-queries-512-ln128", dense(_QUERY_TOKENS, 32), many, "fp32"),
        Shape("one-query-1000-ln128", dense(_QUERY_TOKENS, 1), few, "fp32"),
    ]


def measure(shape: Shape, gpu: Gpu) -> Measurement:
    """Measure by the host's clock, from vectors on the GPU to scores there."""
    notes: list[str] = []
    runs = right_runs(make_runs(shape, "cuda"), None, notes)
    for run in runs.values():
        for _ in range(_WARM_UP):
            run()
    found = wall_us_in_turn(runs, rounds=_ROUNDS)
    floor = gpu.rates.floor_us(work_of(shape))
    return _measurement(shape, found, floor, notes)


def measure_cpu(shape: Shape) -> Measurement:
    """Ours and the rivals in turn."""
    notes: list[str] = []
    runs = right_runs(make_runs(shape, "cpu"), None, notes)
    ours = runs.pop("ours")
    timing = clocks.alternate(ours, runs, min_rounds=2, max_rounds=5, seconds=30.0)
    found = {name: seconds * 1e6 for name, seconds in timing.found.items()}
    return _measurement(shape, found, work_of(shape).flop / _gemm_flops() * 1e6, notes)


@cache
def _gemm_flops() -> float:
    return clocks.matmul_flops(torch.float32)


def work_of(shape: Shape) -> Work:
    """The products of all tokens; vectors read once, scores written once."""
    itemsize = 4 if shape.dtype == "fp32" else DTYPES[shape.dtype].itemsize
    num_vectors = int(shape.query_seqlens.sum()) + int(shape.seqlens.sum())
    num_scores = len(shape.query_seqlens) * len(shape.seqlens)
    return Work(num_vectors * _DIM * itemsize + 4 * num_scores, 2.0 * shape.num_pairs * _DIM)


@torch.inference_mode()
def make_runs(shape: Shape, device: str) -> dict[str, Run]:
    """Each engine's scores f32 [num_queries, num_documents] of the same unit vectors.

    sentence-transformers gets padded tensors with masks, made before the clock starts, and lists,
    which it pads itself; packed-torch has one GEMM and torch's segment_reduce over its result.
    """
    torch.manual_seed(0)
    queries, documents = (
        _Side(seqlens, shape.dtype, device) for seqlens in (shape.query_seqlens, shape.seqlens)
    )

    def ours() -> Tensor:
        return bytetx.maxsim((queries.x, queries.cu_seqlens), (documents.x, documents.cu_seqlens))

    def theirs_padded() -> Tensor:
        from sentence_transformers.util import maxsim

        return maxsim(queries.padded, documents.padded, queries.mask, documents.mask)

    def theirs_lists() -> Tensor:
        from sentence_transformers.util import maxsim

        return maxsim(queries.matrices, documents.matrices)

    def packed_torch() -> Tensor:
        if device == "cpu":
            products = documents.x @ queries.x.T
        else:
            products = torch.mm(documents.x, queries.x.T, out_dtype=torch.float32)
        best = torch.segment_reduce(products, "max", lengths=documents.seqlens, unsafe=True)
        best = best.T.contiguous()
        return torch.segment_reduce(best, "sum", lengths=queries.seqlens, unsafe=True)

    return {
        "ours": ours,
        "sentence-transformers-padded": theirs_padded,
        "sentence-transformers-lists": theirs_lists,
        "packed-torch": packed_torch,
    }


class _Side:
    """Unit vectors of all tokens of the queries or of the documents, as each engine takes them."""

    def __init__(self, seqlens: np.ndarray, dtype: str, device: str):
        x = F.normalize(torch.randn(int(seqlens.sum()), _DIM, device=device), dim=1)
        self.x = x.to(torch.float32 if dtype == "fp32" else DTYPES[dtype])
        self.cu_seqlens = prefix_sums(seqlens, "cpu")
        self.seqlens = torch.from_numpy(seqlens).to(device)
        self.matrices: list[Tensor] = list(self.x.split(seqlens.tolist()))
        self.padded = torch.nn.utils.rnn.pad_sequence(self.matrices, batch_first=True)
        self.mask = torch.arange(self.padded.shape[1], device=device) < self.seqlens[:, None]


def _measurement(
    shape: Shape, found: dict[str, float], floor: float, notes: list[str]
) -> Measurement:
    """found: microseconds of ours and of the rivals; floor: microseconds."""
    sizes = {
        "queries": len(shape.query_seqlens),
        "query_tokens": int(shape.query_seqlens.sum()),
        "documents": len(shape.seqlens),
        "document_tokens": int(shape.seqlens.sum()),
        "max_seqlen": int(shape.seqlens.max()),
        "dim": _DIM,
        "flop": work_of(shape).flop,
        "times_floor": round(found["ours"] / floor, 2),
    }
    return measured(found, floor, sizes, notes)
