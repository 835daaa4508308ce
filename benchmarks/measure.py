"""Clocks: ours and its rivals in turn, and the GEMM rate that a CPU floor stands on."""

import gc
import platform
import re
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from bytetx.checkpoint.spec import ModelSpec
from bytetx.ops.disentangled import log_buckets
from bytetx.ops.int8_linear import prepare_int8_linear
from bytetx.ops.linear import prepare_linear
from bytetx.ops.weight import Weight

# Rows of the GEMMs that the rate is taken from: the best of a small and a large packed batch.
_RATE_ROWS = (1024, 4096)
_SQUARE = 2048  # rows and columns of matmul_flops' operands


@dataclass(frozen=True, slots=True)
class Timing:
    """Median seconds of ours and of each rival, over the rounds that were run."""

    ours: float
    rivals: dict[str, float]
    rounds: int

    @property
    def found(self) -> dict[str, float]:
        return {"ours": self.ours, **self.rivals}


def alternate(
    ours: Callable[[], object],
    rivals: Mapping[str, Callable[[], object]],
    *,
    min_rounds: int,
    max_rounds: int,
    seconds: float,
) -> Timing:
    """Times ours before each rival (ours, rival, ours, rival, ...), so that drift hits all alike.

    Runs `min_rounds` rounds, then more, up to `max_rounds`, while less than `seconds` have passed.
    """
    own: list[float] = []
    theirs: dict[str, list[float]] = {name: [] for name in rivals}
    began = time.perf_counter()
    rounds = 0
    gc.collect()
    while rounds < min_rounds or (
        rounds < max_rounds and time.perf_counter() - began < seconds * rounds / (rounds + 1)
    ):
        for name, run in rivals.items():
            own.append(_seconds(ours))
            theirs[name].append(_seconds(run))
        if not rivals:
            own.append(_seconds(ours))
        rounds += 1
    medians = {name: statistics.median(times) for name, times in theirs.items()}
    return Timing(statistics.median(own), medians, rounds)


def encoder_flop(spec: ModelSpec, seqlens: list[int]) -> float:
    """FLOP of the GEMMs and of attention's two products over real tokens, all layers.

    A token of a windowed layer is counted with as many keys as its window has, or the sequence;
    one of disentangled attention once more with each bucket that its distances fall into, for each
    term.
    """
    num_ffn = 3 if spec.is_gated else 2
    gemm = 2 * spec.hidden_size * (4 * spec.hidden_size + num_ffn * spec.intermediate_size)
    flop = float(spec.num_layers * gemm * sum(seqlens))
    for layer in range(spec.num_layers):
        window = spec.layer_spec.window_of(layer)
        span = 2 * window - 1 if window else max(seqlens, default=0)
        flop += 4.0 * spec.hidden_size * sum(n * min(n, span) for n in seqlens)
    return flop + 2.0 * spec.hidden_size * spec.num_layers * _compared_positions(spec, seqlens)


def _compared_positions(spec: ModelSpec, seqlens: list[int]) -> int:
    """Products of a token with a relative position, of one layer's disentangled attention."""
    relative, longest = spec.layer_spec.disentangled, max(seqlens, default=0)
    if relative is None or longest == 0:
        return 0
    # Consecutive distances fall into the same bucket or into the next.
    buckets = log_buckets(relative.log_buckets, relative.max_distance, longest).long()
    nearest, total = longest - 1, 0
    for length in seqlens:
        past = buckets[nearest : nearest + length]  # of a token's distance to the first key
        ahead = buckets[nearest - length + 1 : nearest + 1]  # and to the last
        total += int((past - ahead + 1).sum())
    return total * len(relative.terms)


def gemm_flops(spec: ModelSpec, dtype: torch.dtype, *, is_int8: bool = False) -> float:
    """FLOP/s of one layer's four GEMMs with oneDNN's prepacked weights, the best this machine gave.

    is_int8: with weights of 8-bit integers, and rows of dtype.

    Takes the fastest of several passes over each of _RATE_ROWS: a floor must not be beatable.
    """
    hidden, inner = spec.hidden_size, spec.intermediate_size
    shapes = [(3 * hidden, hidden), (hidden, hidden), (inner, hidden), (hidden, inner)]
    plain = (torch.randn(n, k).to(dtype) for n, k in shapes)
    dense = [prepare_linear(weight, prepack=not is_int8) for weight in plain]
    weights: list[Weight] = [prepare_int8_linear(w) if is_int8 else w for w in dense]
    best = 0.0
    for rows in _RATE_ROWS:
        inputs = [torch.randn(rows, k).to(dtype) for _, k in shapes]

        def layer(inputs: list[torch.Tensor] = inputs) -> None:
            for x, weight in zip(inputs, weights, strict=True):
                weight.matmul(x)

        layer()
        flop = sum(2 * rows * n * k for n, k in shapes)
        best = max(best, flop / _fastest(layer, seconds=0.5))
    return best


def matmul_flops(dtype: torch.dtype) -> float:
    """FLOP/s of a square product, the best of several passes."""
    a, b = (torch.randn(_SQUARE, _SQUARE).to(dtype) for _ in range(2))
    return 2 * _SQUARE**3 / _fastest(lambda: torch.mm(a, b), seconds=0.5)


def cosine_distance(ours: np.ndarray, theirs: np.ndarray) -> float:
    """The largest 1 - cosine over rows; infinite where a row is not finite."""
    norms = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
    distance = 1 - (ours.astype(np.float64) * theirs).sum(axis=1) / norms
    return float(distance.max()) if np.isfinite(distance).all() else float("inf")


def device_name() -> str:
    """The CPU as a record names it: model, threads used, and torch's instruction set for it.

    "AMD EPYC family 26 model 2 stepping 1, 2 threads, AVX512 bf16".
    """
    instructions = torch.backends.cpu.get_cpu_capability()
    if torch.cpu._is_avx512_bf16_supported():
        instructions += " bf16"
    return f"{_cpu_model()}, {torch.get_num_threads()} threads, {instructions}"


def _seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _fastest(run: Callable[[], object], *, seconds: float) -> float:
    """The shortest of at least five runs, repeated for about `seconds`."""
    times: list[float] = []
    while len(times) < 5 or sum(times) < seconds:
        times.append(_seconds(run))
    return min(times)


def _cpu_model() -> str:
    path = Path("/proc/cpuinfo")
    if path.is_file():
        name = cpu_model(path.read_text(encoding="utf-8"))
        if name:
            return name
    return platform.processor() or platform.machine()


def cpu_model(cpuinfo: str) -> str:
    """The first processor of /proc/cpuinfo, told apart from others; "" where it says nothing.

    Virtual machines hide the model behind a name of the whole line ("AMD EPYC"): family, model and
    stepping, as lscpu shows them, say it then. A name with a number of three digits is a model's.
    """
    pairs = [line.partition(":") for line in cpuinfo.partition("\n\n")[0].splitlines()]
    found = {name.strip(): value.strip() for name, _, value in pairs}
    name = found.get("model name", "")
    if re.search(r"\d{3}", name):
        return name
    parts = {"family": "cpu family", "model": "model", "stepping": "stepping"}
    if not name:  # Arm
        name, parts = platform.machine(), {"implementer": "CPU implementer", "part": "CPU part"}
    words = [f"{word} {found[key]}" for word, key in parts.items() if key in found]
    return " ".join([name, *words]) if words or "model name" in found else ""
