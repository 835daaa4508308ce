"""Clocks of the GPU suites, the rates of this GPU, and the floor that they stand for."""

import random
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Protocol, TypeVar

import torch

from benchmarks.measure import device_name
from benchmarks.rivals import versions
from benchmarks.suite import Case, Measurement, Suite, is_selected, select
from bytetx.errors import BytetxError
from bytetx.ops import native
from bytetx.runtime.cuda_graphs import capture

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
FP8 = "fp8"
Run = Callable[[], object]

SAMPLES = 5
# Of one sample, and of the same work before it: a GPU at its power limit lowers its clock after
# some milliseconds, and a GEMM that follows a pass over memory starts with a higher one.
SAMPLE_US = 4_000
# Of calls of so many FLOP, which bring a GPU to its power limit and its clock down tens of
# milliseconds later: behind 4 ms of cooler work a call looks up to 6 % faster than it stays.
_HOT_SAMPLE_US, _HOT_FLOP = 30_000, 1e11
_COPY_BYTES = 1 << 31
_GEMM_SIZE = 8192
# Cycles that the GPU is kept busy with while the host queues what is timed: about 100 us.
_HEAD_START = 200_000
# Operands taken in turn are together larger than two L2 caches of an H200 (60 MB each).
_ROTATED_BYTES = 160 << 20
_MAX_ROTATED = 48


class Shape(Protocol):
    """Attributes that a suite's description of a case has at least."""

    @property
    def name(self) -> str: ...

    @property
    def dtype(self) -> str: ...


S = TypeVar("S", bound=Shape)
T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Work:
    """Work that a case cannot avoid: bytes through device memory once, and FLOP."""

    num_bytes: float
    flop: float = 0.0


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates that this GPU reached a moment ago; the floor stands on them."""

    copy_bytes_per_second: float
    gemm_flops: float

    def floor_us(self, work: Work) -> float:
        """Microseconds of the bytes or of the FLOP, whichever take longer."""
        return 1e6 * max(work.num_bytes / self.copy_bytes_per_second, work.flop / self.gemm_flops)


class Gpu:
    """The GPU that a suite runs on; its rates are measured when they are first asked for."""

    @cached_property
    def rates(self) -> Rates:
        source = torch.randn(_COPY_BYTES // 4, device="cuda")
        target = torch.empty_like(source)
        a, b = torch.randn(2, _GEMM_SIZE, _GEMM_SIZE, device="cuda", dtype=torch.float16)
        # A kernel that reads and writes once: a copy in a graph may run on a copy engine, slower.
        runs = {"copy": partial(torch.neg, source, out=target), "gemm": partial(torch.mm, a, b)}
        found = graph_us(runs)
        return Rates(2 * _COPY_BYTES / found["copy"] * 1e6, 2 * _GEMM_SIZE**3 / found["gemm"] * 1e6)

    @cached_property
    def fp8_flops(self) -> float:
        """FLOP/s of cuBLAS on E4M3 operands of the rates' GEMM, one scale each."""
        a, b = (
            torch.randn(_GEMM_SIZE, _GEMM_SIZE, device="cuda").to(torch.float8_e4m3fn)
            for _ in range(2)
        )
        one = torch.ones((), device="cuda")
        run = partial(
            torch._scaled_mm,
            a,
            b.t(),
            scale_a=one,
            scale_b=one,
            use_fast_accum=True,
            out_dtype=torch.float16,
        )
        return 2 * _GEMM_SIZE**3 / graph_us({"gemm": run})["gemm"] * 1e6


def without_fp8(shapes: Sequence[S], patterns: list[str], notes: list[str]) -> Sequence[S]:
    """The shapes that this GPU runs; `notes` gets a line for FP8 ones that are left out.

    Raises BytetxError where the patterns select no other.
    """
    reason = native.why_no_kernel("fp8_linear", torch.device("cuda"))
    chosen = [shape for shape in shapes if is_selected(shape.name, patterns)]
    names = [shape.name for shape in chosen if shape.dtype == FP8]
    if reason is None or not names or not torch.cuda.is_available():
        return shapes
    line = f"{', '.join(names)}: dtype fp8 cannot run here: {reason}"
    if len(names) == len(chosen):
        raise BytetxError(line)
    notes.append(f"left out: {line}")
    return [shape for shape in shapes if shape.dtype != FP8]


def gpu_suite(
    name: str,
    shapes: Sequence[S],
    measure: Callable[[S, Gpu], Measurement],
    *,
    patterns: list[str],
    unit: str,
    packages: Sequence[str] = (),
) -> Suite:
    """A suite of one measurement a shape, those whose names fit.

    patterns: parts or globs of case names; empty means all.  packages: whose versions are recorded
    beside bytetx's and torch's.
    Raises BytetxError where there is no GPU, or no case fits.
    """
    chosen = select(shapes, patterns, name=lambda shape: shape.name)
    if not torch.cuda.is_available():
        raise BytetxError(f"the {name} suite needs a CUDA GPU, and torch finds none")

    def cases() -> Iterator[Case]:
        gpu = Gpu()
        for shape in chosen:
            yield Case(shape.name, unit, shape.dtype, partial(measure, shape, gpu))

    return Suite(
        name=name,
        device=torch.cuda.get_device_name(),
        versions=versions(packages),
        cases=cases(),
    )


def cpu_suite(
    name: str,
    shapes: Sequence[S],
    measure: Callable[[S], Measurement],
    *,
    patterns: list[str],
    unit: str,
    packages: Sequence[str] = (),
) -> Suite:
    """The same on this machine's CPU."""
    chosen = select(shapes, patterns, name=lambda shape: shape.name)
    cases = (Case(shape.name, unit, shape.dtype, partial(measure, shape)) for shape in chosen)
    return Suite(name, device_name(), versions(packages), cases)


def num_rotated(bytes_per_call: int) -> int:
    """Return how many sets of operands calls take in turn for none to find its own in L2."""
    return min(max(-(-_ROTATED_BYTES // max(bytes_per_call, 1)), 2), _MAX_ROTATED)


def is_hot(flop: float) -> bool:
    """Return whether calls of so many FLOP each bring a GPU to its power limit."""
    return flop >= _HOT_FLOP


def sample_us_of(flop: float, *, cool_us: float = SAMPLE_US) -> float:
    """Return the length of samples of calls with so many FLOP each; cool_us: with few."""
    return _HOT_SAMPLE_US if is_hot(flop) else cool_us


def orders(names: Iterable[K], count: int) -> Iterator[list[K]]:
    """The names in `count` random orders, which every process finds alike.

    Rotated, each would have the same one before it in all of them but one.
    """
    found, chance = list(names), random.Random(0)
    for _ in range(count):
        chance.shuffle(found)
        yield list(found)


@torch.inference_mode()
def graph_us(
    runs: Mapping[K, Run],
    *,
    calls: int = 1,
    samples: int = SAMPLES,
    sample_us: float = SAMPLE_US,
) -> dict[K, float]:
    """Microseconds of device time of each run, as medians over samples of its captured graph.

    A sample is as many replays as take sample_us, after as many that are not timed, and these are
    behind as long a piece of the first run, so that nobody's come behind cooler work than others'.
    The samples are taken in turn, each time in another order.
    calls: how many calls a run makes; its time is divided by them.
    """
    graphs = {name: capture(run) for name, run in runs.items()}
    replays: dict[K, int] = {}
    times: dict[K, list[float]] = {name: [] for name in runs}
    for name, graph in graphs.items():
        replay_us(graph, 1)
        replays[name] = max(1, round(sample_us / replay_us(graph, 1)))
    first = next(iter(graphs))
    for order in orders(graphs, samples):
        for name in order:
            for before in (first, name):
                replay_us(graphs[before], replays[before])
            times[name].append(replay_us(graphs[name], replays[name]))
    return {name: statistics.median(found) / calls for name, found in times.items()}


@torch.inference_mode()
def wall_us(run: Run, *, rounds: int = 3) -> float:
    """Median microseconds of an eager run, from its first launch to the end of its last kernel.

    Where Python cannot launch as fast as the GPU computes, this is Python's time.
    """
    run()
    return statistics.median(_wall_us(run) for _ in range(rounds))


def wall_us_in_turn(runs: Mapping[K, Run], *, rounds: int) -> dict[K, float]:
    """The same of each run, one round of all after the other, each time in another order.

    A host's speed can double within a second, which then concerns all alike.
    """
    times: dict[K, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for order in orders(runs, rounds):
        for name in order:
            times[name].append(_wall_us(runs[name]))
    return {name: statistics.median(found) for name, found in times.items()}


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _wall_us(run: Run) -> float:
    _synchronize()
    began = time.perf_counter()
    run()
    _synchronize()
    return (time.perf_counter() - began) * 1e6


@torch.inference_mode()
def compile_rival(
    name: str, function: Callable[..., T], arguments: tuple[object, ...], notes: list[str]
) -> dict[str, Callable[..., T]]:
    """{name: function as torch.compile makes it}, compiled for arguments of these very shapes.

    Empty where it does not compile, which a line in `notes` then says.
    """
    compiled = torch.compile(function, dynamic=False)
    try:
        compiled(*arguments)
    except Exception as error:  # a compiler may raise anything, and costs no other number
        notes.append(left_out(name, error))
        return {}
    return {name: compiled}


def left_out(name: str, error: Exception) -> str:
    """The line of a rival that raised."""
    summary = str(error).partition("\n")[0]
    return f"{name} left out: {type(error).__name__}: {summary}"


def replay_us(graph: torch.cuda.CUDAGraph, count: int) -> float:
    """Microseconds of one of `count` replays, one behind the other."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_HEAD_START)
    first.record()
    for _ in range(count):
        graph.replay()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) * 1e3 / count
