"""Suite `grids`: whole models on every grid of all GPUs, beside what the planner says of them.

One process that loads each model once a grid, as a user does, and times passes from token ids to
vectors on the host. A case's own time is that of the grid which the planner puts first. Where z
copies weights from other GPUs, a profiler's timeline says how much of that time kernels cover.
"""

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.causal import save_random_model
from benchmarks.gpu import DTYPES
from benchmarks.rivals import versions
from benchmarks.suite import Case, Measurement, Suite, select
from bytetx.errors import BytetxError
from bytetx.model import Model, load
from bytetx.parallel.grid import Grid, grids_of
from bytetx.parallel.planner.machine import Machine, load_machine
from bytetx.parallel.planner.plan import plan
from bytetx.parallel.planner.shapes import ModelShape, shape_of

_WARM_UP = 3  # an eager pass, a captured one, a replayed one
_ROUNDS = 5
_HOT_S = 0.06  # of passes before those that are timed: a grid's own load sets the GPUs' clocks
_TIMED_S = 0.06  # of timed passes of a round, or one pass
_NUM_SIZES = 5  # of batches, each half of the one before


@dataclass(frozen=True, slots=True)
class Family:
    """A model of random weights.  stem: transformers' name of its class.  dtype: a key of DTYPES.

    longest: tokens of the longest texts that are timed.  most_tokens: of a batch; a half of it, a
    quarter and so on are timed, too.
    """

    stem: str
    config: dict[str, Any]
    dtype: str
    longest: int
    most_tokens: int = 32768

    @property
    def tokens(self) -> list[int]:
        """The most first: the memory of their graphs serves the smaller ones, too."""
        return [self.most_tokens >> i for i in range(_NUM_SIZES)]


FAMILIES = {
    "bert-large": Family(
        "Bert",
        {
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
        },
        "fp16",
        512,
    ),
    "gpt3-xl": Family(
        "GPT2", {"n_embd": 2048, "n_layer": 24, "n_head": 16, "n_positions": 2048}, "bf16", 1024
    ),
    # Four layers, of which five models and their graphs fit a GPU of 80 GB.
    "llama-70b-4": Family(
        "Llama",
        {
            "vocab_size": 32768,
            "hidden_size": 8192,
            "num_hidden_layers": 4,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "intermediate_size": 28672,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
        },
        "bf16",
        512,
        16384,
    ),
}


@dataclass(frozen=True, slots=True)
class Shape:
    """One case: a batch of texts of so many tokens each through a model."""

    name: str
    family: str
    lengths: tuple[int, ...]


def shapes() -> list[Shape]:
    """Batches of five sizes for each family, of equally long texts and of texts of all lengths."""
    return [
        Shape(f"{name}-{kind}-{tokens}", name, lengths)
        for name, family in FAMILIES.items()
        for tokens in family.tokens
        for kind, lengths in (
            ("equal", (family.longest,) * (tokens // family.longest)),
            ("ragged", _ragged(family.longest, tokens)),
        )
    ]


def suite(*, patterns: list[str], machine: Machine | str | Path) -> Suite:
    """The selected cases on all GPUs.

    patterns: parts or globs of case names.  machine: as of bytetx.plan, best a file that
    `bytetx plan --calibrate` has just written.  Raises BytetxError where there are not two GPUs.
    """
    chosen = select(shapes(), patterns, name=lambda shape: shape.name)
    described, size = load_machine(machine), torch.cuda.device_count()
    if size < 2:
        raise BytetxError(f"the grids suite needs two GPUs or more, and torch finds {size}")

    def cases() -> Iterator[Case]:
        for name, family in FAMILIES.items():
            own = [shape for shape in chosen if shape.family == name]
            if own:
                with _loaded(family, size) as models:
                    for shape in own:
                        run = partial(measure, shape, models, described)
                        yield Case(shape.name, "ms", family.dtype, run)

    device = f"{size} x {torch.cuda.get_device_name()}"
    return Suite("grids", device, versions(("transformers",)), cases())


@dataclass(frozen=True, slots=True)
class Models:
    """A model on one GPU and on each grid of all of them, and its shape."""

    shape: ModelShape
    dtype: str
    on_grid: dict[Grid, Model]


def measure(shape: Shape, models: Models, machine: Machine) -> Measurement:
    """Medians of passes in turn; `ours` is the grid that the planner chooses, `rivals` the rest.

    What the planner says of each grid is in the record's shape, as milliseconds too. beaten_by: the
    fastest grid where it was faster than the chosen one in every round, so that the difference is
    no noise; else empty.
    """
    rng = np.random.default_rng(0)
    texts = [rng.integers(1, models.shape.vocab_size, n).tolist() for n in shape.lengths]
    rounds = _rounds_ms(models, texts)
    found = {grid: statistics.median(each) for grid, each in rounds.items()}
    plans = {
        size: plan(
            models.shape,
            machine=machine,
            gpus=size,
            lengths=shape.lengths,
            goal="latency",
            dtype=models.dtype,
        )
        for size in {grid.size for grid in found}
    }
    planned = {one.grid: one for each in plans.values() for one in each.grids}
    chosen = plans[max(plans)].best.grid
    hidden = {
        f"hidden_{_name(grid)}": share
        for grid in found
        if grid.z > 1 and (share := hidden_share(partial(_embed, models, grid, texts))) is not None
    }
    said = {grid: planned[grid].latency_s * 1e3 for grid in found}
    errors = {grid: said[grid] / ms - 1 for grid, ms in found.items()}
    fastest = min((g for g in found if g.size > 1), key=lambda grid: found[grid])
    return Measurement(
        ours=found[chosen],
        rivals={_name(grid): ms for grid, ms in found.items() if grid != chosen},
        floor=None,
        shape={
            "tokens": sum(shape.lengths),
            "texts": len(shape.lengths),
            "chosen": _name(chosen),
            "fastest": _name(fastest),
            "beaten_by": _name(fastest) if is_faster(rounds[fastest], rounds[chosen]) else "",
            "mean_error": round(statistics.mean(map(abs, errors.values())), 3),
            **{f"planned_{_name(grid)}_ms": round(ms, 3) for grid, ms in said.items()},
            **hidden,
        },
        notes=(
            "ours: the grid that the planner puts first; rivals: the other grids of all GPUs, and "
            "one GPU",
            "hidden: the share of the time of this GPU's copies of weights in which kernels run",
        ),
    )


def _rounds_ms(models: Models, texts: Sequence[list[int]]) -> dict[Grid, list[float]]:
    """The median pass of each round, in which all grids have their turn."""
    runs = {
        grid: partial(_embed, models, grid, texts)
        for grid in models.on_grid
        if grid.num_slots <= len(texts)
    }
    times: dict[Grid, list[float]] = {grid: [] for grid in runs}
    for run in runs.values():
        for _ in range(_WARM_UP):
            run()
    order = list(runs)
    for _ in range(_ROUNDS):
        random.shuffle(order)
        for grid in order:
            _passes_ms(runs[grid], _HOT_S)
            times[grid].append(statistics.median(_passes_ms(runs[grid], _TIMED_S)))
    return times


def is_faster(times: Sequence[float], others: Sequence[float]) -> bool:
    """Return whether all rounds say so: of five rounds, 1 of 32 pairs of equals would."""
    return all(time < other for time, other in zip(times, others, strict=True))


def _passes_ms(run: Callable[[], object], least_s: float) -> list[float]:
    """The times of so many passes that they take this long together; of one at least."""
    times: list[float] = []
    while not times or sum(times) < 1e3 * least_s:
        started = time.perf_counter()
        run()
        times.append((time.perf_counter() - started) * 1e3)
    return times


def _embed(models: Models, grid: Grid, texts: Sequence[list[int]]) -> None:
    models.on_grid[grid].embed(texts, pooling="mean")


def hidden_share(run: Callable[[], object]) -> float | None:
    """Return the share of the time of this GPU's copies from others, as `run` does them, in which a
    kernel runs; None where there are none, or no GPU."""
    if not torch.cuda.is_available():
        return None
    with profile(activities=[ProfilerActivity.CUDA]) as timeline:
        run()
        torch.cuda.synchronize()
    copies, kernels = [], []
    for event in timeline.events() or ():
        interval = (event.time_range.start, event.time_range.end)
        if "PtoP" in event.name:
            copies.append(interval)
        elif not event.name.startswith("Mem"):
            kernels.append(interval)
    return covered_share(copies, kernels)


def covered_share(
    intervals: Sequence[tuple[float, float]], covers: Sequence[tuple[float, float]]
) -> float | None:
    """The share of the intervals' time that lies in one of the covers; None of no time."""
    total = sum(end - start for start, end in intervals)
    if not total:
        return None
    united: list[tuple[float, float]] = []
    for start, end in sorted(covers):
        if united and start <= united[-1][1]:
            united[-1] = (united[-1][0], max(end, united[-1][1]))
        else:
            united.append((start, end))
    covered = sum(
        max(0.0, min(end, last) - max(start, first))
        for start, end in intervals
        for first, last in united
    )
    return round(covered / total, 3)


@contextmanager
def _loaded(family: Family, size: int) -> Iterator[Models]:
    with TemporaryDirectory(prefix="bytetx-bench-") as folder, ExitStack() as stack:
        dtype = DTYPES[family.dtype]
        save_random_model(Path(folder), family.stem, "Model", family.config, dtype=dtype)
        options: dict[str, Any] = {"device": "cuda", "dtype": dtype}
        options["token_budget"] = 2 * family.most_tokens  # one pass a batch
        on_grid = {Grid(): load(folder, **options)}
        for grid in grids_of(size):
            on_grid[grid] = stack.enter_context(load(folder, grid=grid, **options))
        yield Models(shape_of(folder), family.dtype, on_grid)
        on_grid.clear()
    torch.cuda.empty_cache()


def _ragged(longest: int, tokens: int) -> tuple[int, ...]:
    """Lengths from a tenth of `longest` to all of it, in no order, `tokens` in total."""
    count = round(tokens / (0.55 * longest))
    lengths = np.linspace(0.1 * longest, longest, count)
    whole = np.maximum(1, (lengths * tokens / lengths.sum()).astype(np.int64).clip(max=longest))
    rest = tokens - int(whole.sum())
    while rest:  # rounding, and what the longest had to leave
        for i in np.flatnonzero(whole < longest)[: abs(rest)]:
            whole[i] += np.sign(rest)
        rest = tokens - int(whole.sum())
    return tuple(np.random.default_rng(0).permutation(whole).tolist())


def _name(grid: Grid) -> str:
    return "one" if grid.size == 1 else str(grid)
