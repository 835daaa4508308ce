"""A year of mixed traffic on a fleet of GPUs: which grid serves each kind of text, and how many."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bytetx.arguments import check_positive
from bytetx.errors import InputError, OptionError
from bytetx.parallel.planner.machine import Machine, load_machine
from bytetx.parallel.planner.plan import PlannedGrid, plan
from bytetx.parallel.planner.shapes import ModelShape, shape_of

HOURS = 365 * 24
_SECONDS = 3600


@dataclass(frozen=True, slots=True)
class TrafficClass:
    """One kind of requests.  share: of all requests.  batch: requests that run together.

    lengths, output_tokens: as of plan.  limit_s: the longest latency of a batch.  peak_hour: of
    the day, UTC; weekend: its rate over that of a weekday.  swing: of the day, 0 is none and 1 is
    nothing at night.
    """

    name: str
    lengths: str
    output_tokens: int
    share: float
    batch: int
    limit_s: float
    peak_hour: float
    weekend: float
    swing: float


# Shares and days are assumptions, stated so that a result can be judged; give your own.
MIXED = (
    TrafficClass("search queries", "query", 0, 0.60, 512, 0.25, 14.0, 0.9, 0.5),
    TrafficClass("passages to index", "passage", 0, 0.25, 1024, 2.0, 3.0, 1.1, 0.2),
    TrafficClass("chat", "chat", 256, 0.12, 64, 15.0, 18.0, 0.8, 0.6),
    TrafficClass("long documents", "longdoc", 128, 0.03, 32, 30.0, 10.0, 0.3, 0.7),
)


@dataclass(frozen=True, slots=True)
class ServedClass:
    """A class with the grid chosen for it.  texts: of the year.  peak_gpus, gpu_hours: it needs."""

    traffic: TrafficClass
    planned: PlannedGrid
    texts: float
    peak_gpus: int
    gpu_hours: float


@dataclass(frozen=True, slots=True)
class Year:
    """texts: that the fleet serves in the year, the busiest hour filling it.

    peak_gpus, mean_gpus: in use.  gpu_hours: in use.  same_grid_gpu_hours: what the same texts
    would take on one grid for all classes (same_grid), None where no grid serves them all.
    """

    fleet: int
    classes: tuple[ServedClass, ...]
    texts: float
    tokens: float
    peak_gpus: int
    mean_gpus: float
    gpu_hours: float
    same_grid: str | None
    same_grid_gpu_hours: float | None


def simulate_year(
    model: ModelShape | str | Path,
    *,
    machine: Machine | str | Path = "h200-nvlink",
    gpus: int = 10_000,
    classes: Sequence[TrafficClass] = MIXED,
    seed: int = 0,
    families: str | Path | None = None,
) -> Year:
    """The most texts of these classes that a fleet serves in a year, hour by hour.

    Each class runs on instances of the grid, of at most two nodes, that needs the fewest GPUs
    within the latency limit; instances are added and removed every hour. Rates follow a day, a
    week and noise of 5 %. Raises InputError where no grid meets a limit.
    """
    check_positive("gpus", gpus)
    if not classes or not math.isclose(sum(c.share for c in classes), 1.0, abs_tol=1e-6):
        raise OptionError("the shares of the classes of traffic must sum to 1")
    shape, described = shape_of(model, families=families), load_machine(machine)
    options = [_options(shape, described, traffic, gpus) for traffic in classes]
    chosen = [min(grids, key=_gpus_a_text) for grids in options]
    rates = _hourly_rates(classes, seed)  # texts a second of each class, 1 in total on average
    scale = _fill(gpus, chosen, rates)
    needed = [_needed(planned, hours, scale) for planned, hours in zip(chosen, rates, strict=True)]
    totals = [sum(hour) for hour in zip(*needed, strict=True)]
    texts = [scale * _SECONDS * sum(hours) for hours in rates]
    served = tuple(
        ServedClass(traffic, planned, count, max(hours), float(sum(hours)))
        for traffic, planned, count, hours in zip(classes, chosen, texts, needed, strict=True)
    )
    same_grid, same_hours = _best_shared(options, rates, scale)
    tokens = (
        count * planned.num_tokens / planned.num_texts
        for count, planned in zip(texts, chosen, strict=True)
    )
    return Year(
        fleet=gpus,
        classes=served,
        texts=sum(texts),
        tokens=sum(tokens),
        peak_gpus=max(totals),
        mean_gpus=sum(totals) / len(totals),
        gpu_hours=float(sum(totals)),
        same_grid=same_grid,
        same_grid_gpu_hours=same_hours,
    )


def _options(
    shape: ModelShape, machine: Machine, traffic: TrafficClass, gpus: int
) -> list[PlannedGrid]:
    """Grids of up to two nodes that meet the class's limit."""
    found: list[PlannedGrid] = []
    size = 1
    while size <= min(gpus, 2 * machine.gpus_per_node):
        try:
            planned = plan(
                shape,
                machine=machine,
                gpus=size,
                lengths=traffic.lengths,
                batch=traffic.batch,
                output_tokens=traffic.output_tokens if shape.has_lm_head else 0,
            )
            found += [one for one in planned.grids if one.latency_s <= traffic.limit_s]
        except InputError:
            pass  # it does not fit so few GPUs
        size *= 2
    if not found:
        raise InputError(
            f"no grid of up to {2 * machine.gpus_per_node} GPUs serves {traffic.name!r} within "
            f"{traffic.limit_s} s; raise its limit or lower its batch"
        )
    return found


def _gpus_a_text(planned: PlannedGrid) -> float:
    """GPU seconds that a text takes."""
    return planned.grid.size / planned.texts_per_s


def _hourly_rates(classes: Sequence[TrafficClass], seed: int) -> list[list[float]]:
    draw = random.Random(seed)
    found = []
    for traffic in classes:
        hours = []
        for hour in range(HOURS):
            angle = 2 * math.pi * (hour % 24 - traffic.peak_hour) / 24
            day = 1 + traffic.swing * math.cos(angle)
            week = traffic.weekend if hour // 24 % 7 >= 5 else 1.0
            hours.append(traffic.share * day * week * max(0.0, draw.gauss(1.0, 0.05)))
        found.append(hours)
    return found


def _needed(planned: PlannedGrid, rates: Sequence[float], scale: float) -> list[int]:
    """GPUs of each hour, in whole instances."""
    capacity, size = planned.texts_per_s, planned.grid.size
    return [math.ceil(scale * rate / capacity) * size for rate in rates]


def _fill(gpus: int, chosen: Sequence[PlannedGrid], rates: Sequence[Sequence[float]]) -> float:
    """Texts a second at which the busiest hour needs all GPUs and no more."""
    costs = [_gpus_a_text(planned) for planned in chosen]
    busiest: float = max(
        sum(rate * cost for rate, cost in zip(hour, costs, strict=True))
        for hour in zip(*rates, strict=True)
    )
    slack = sum(planned.grid.size for planned in chosen)  # instances are whole
    if gpus <= slack:
        raise InputError(
            f"{gpus} GPUs are too few for {len(chosen)} classes; give at least {2 * slack}"
        )
    return (gpus - slack) / busiest


def _best_shared(
    options: Sequence[Sequence[PlannedGrid]], rates: Sequence[Sequence[float]], scale: float
) -> tuple[str | None, float | None]:
    """The one grid that serves all classes in the fewest GPU hours."""
    by_grid = [{str(planned.grid): planned for planned in grids} for grids in options]
    common = set.intersection(*(set(grids) for grids in by_grid))
    if not common:
        return None, None

    def hours(grid: str) -> float:
        return sum(
            scale * sum(rate) * _gpus_a_text(grids[grid])
            for grids, rate in zip(by_grid, rates, strict=True)
        )

    best = min(common, key=lambda grid: (hours(grid), grid))
    whole = (_needed(grids[best], rate, scale) for grids, rate in zip(by_grid, rates, strict=True))
    return best, float(sum(map(sum, whole)))
