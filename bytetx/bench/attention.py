"""Suite `attention`: packed attention on a GPU, ours and FlashAttention-2 as torch ships it."""

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from bytetx.bench.suite import Case, Measurement, Suite, is_selected
from bytetx.errors import BytetxError
from bytetx.ops.attention import varlen_attention
from bytetx.ops.attention_plan import plan_attention

_SEED = 0
_NUM_LAYERS = (
    12  # calls that share one plan, as in an encoder; times are of one call, plan included
)
_NUM_BUFFERS = 4  # operands taken in turn, so that no call finds its own in the cache
_REPLAYS = 7
_COPY_BYTES = 1 << 31
_GEMM_SIZE = 8192
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Shape:
    """One case: the lengths in tokens, and the model's heads."""

    name: str
    lengths: np.ndarray  # int64 [batch_size]
    num_heads: int = 12
    head_dim: int = 64
    dtype: str = "fp16"
    causal: bool = False


@dataclass(frozen=True, slots=True)
class Rates:
    """What this GPU reached a moment ago; the floor stands on it."""

    copy_bytes_per_second: float
    gemm_flops: float


def attention_suite(*, patterns: list[str]) -> Suite:
    """The suite's selected cases.  patterns: parts or globs of case names; empty means all.

    Raises BytetxError where there is no GPU, or no case fits.
    """
    if not torch.cuda.is_available():
        raise BytetxError("the attention suite needs a CUDA GPU, and torch finds none")
    shapes = [shape for shape in _shapes() if is_selected(shape.name, patterns)]
    if not shapes:
        known = ", ".join(shape.name for shape in _shapes())
        raise BytetxError(f"no case fits {', '.join(patterns)}; the cases are: {known}")
    return Suite(
        name="attention",
        device=torch.cuda.get_device_name(),
        versions={"torch": torch.__version__},
        cases=_cases(shapes),
    )


def _cases(shapes: list[Shape]) -> Iterator[Case]:
    rates = _measure_rates()
    for shape in shapes:
        yield Case(shape.name, "us", shape.dtype, partial(_measure, shape, rates))


def _shapes() -> list[Shape]:
    """The length profiles that the project's targets are stated for."""
    rng = np.random.default_rng(_SEED)

    def lognormal(mean: float, sigma: float, count: int, low: int, high: int) -> np.ndarray:
        draws = rng.lognormal(math.log(mean) - sigma**2 / 2, sigma, count)
        return np.clip(np.round(draws), low, high).astype(np.int64)

    def uniform(longest: int, count: int) -> np.ndarray:
        return rng.integers(math.ceil(0.2 * longest), longest + 1, count)

    def dense(length: int, count: int) -> np.ndarray:
        return np.full(count, length)

    generative = {"num_heads": 16, "head_dim": 128, "dtype": "bf16", "causal": True}
    return [
        Shape("mean-9", lognormal(9, 0.8, 2048, 1, 512)),
        Shape("mean-20", lognormal(20, 0.8, 2048, 1, 512)),
        Shape("a06-64", uniform(64, 1024)),
        Shape("mean-78", lognormal(78, 0.8, 512, 1, 512)),
        Shape("ln128", lognormal(128, 0.8, 256, 4, 512)),
        Shape("a06-256", uniform(256, 256)),
        Shape("a06-512", uniform(512, 128)),
        Shape("dense-512", dense(512, 128)),
        Shape("a06-1024", uniform(1024, 64)),
        Shape("dense-4096", dense(4096, 16)),
        Shape("longdoc", lognormal(300 * math.exp(1.1**2 / 2), 1.1, 64, 1, 8192)),
        Shape("causal-dense-2048", dense(2048, 16), **generative),
        Shape("causal-sharegpt", lognormal(161, 1.35, 128, 4, 1024), **generative),
        Shape("one-128", dense(128, 1)),
        Shape("one-512", dense(512, 1)),
    ]


def _measure(shape: Shape, rates: Rates) -> Measurement:
    total, longest = int(shape.lengths.sum()), int(shape.lengths.max())
    cu_seqlens = torch.zeros(len(shape.lengths) + 1, dtype=torch.int32, device="cuda")
    cu_seqlens[1:] = torch.from_numpy(shape.lengths).cumsum(0)
    torch.manual_seed(_SEED)
    size = (total, 3, shape.num_heads, shape.head_dim)
    buffers = [
        torch.randn(size, device="cuda", dtype=DTYPES[shape.dtype]) for _ in range(_NUM_BUFFERS)
    ]
    layers = [buffers[i % _NUM_BUFFERS].unbind(1) for i in range(_NUM_LAYERS)]
    scale = 1.0 / math.sqrt(shape.head_dim)

    def ours() -> None:
        plan = plan_attention(
            cu_seqlens, total_tokens=total, head_dim=shape.head_dim, causal=shape.causal
        )
        for q, k, v in layers:
            varlen_attention(
                q, k, v, cu_seqlens, max_seqlen=longest, causal=shape.causal, plan=plan
            )

    def flash() -> None:
        for q, k, v in layers:
            torch.ops.aten._flash_attention_forward(
                *(q, k, v, cu_seqlens, cu_seqlens, longest, longest, 0.0, shape.causal, False),
                scale=scale,
            )

    return Measurement(
        ours=_microseconds(ours, calls=_NUM_LAYERS),
        rivals={"flash-attention-2": _microseconds(flash, calls=_NUM_LAYERS)},
        floor=_floor_us(shape, rates),
        shape={
            "batch_size": len(shape.lengths),
            "total_tokens": total,
            "max_seqlen": longest,
            "num_heads": shape.num_heads,
            "head_dim": shape.head_dim,
            "causal": int(shape.causal),
        },
    )


def _floor_us(shape: Shape, rates: Rates) -> float:
    """Every operand moved once, or the scores' and values' products: the longer of the two."""
    features = shape.num_heads * shape.head_dim
    num_bytes = 4 * int(shape.lengths.sum()) * features * DTYPES[shape.dtype].itemsize
    flop = 4 * float((shape.lengths**2).sum()) * features / (2 if shape.causal else 1)
    return max(num_bytes / rates.copy_bytes_per_second, flop / rates.gemm_flops) * 1e6


def _microseconds(run: Callable[[], None], *, calls: int) -> float:
    """Median over replays of one captured graph, divided by `calls`."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    times = []
    graph.replay()
    for _ in range(_REPLAYS):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        graph.replay()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last) * 1e3)
    return statistics.median(times) / calls


def _measure_rates() -> Rates:
    source = torch.randn(_COPY_BYTES // 4, device="cuda")
    target = torch.empty_like(source)
    a, b = torch.randn(2, _GEMM_SIZE, _GEMM_SIZE, device="cuda", dtype=torch.float16)
    # A kernel that reads and writes once: a copy in a graph may run on a copy engine, and slower.
    copy = _microseconds(lambda: torch.neg(source, out=target), calls=1)
    gemm = _microseconds(lambda: torch.mm(a, b), calls=1)
    return Rates(2 * _COPY_BYTES / copy * 1e6, 2 * _GEMM_SIZE**3 / gemm * 1e6)
