"""plan: every grid that a machine, a model and its traffic allow, with its cost, best first."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from bytetx.arguments import DTYPE_ALIASES, check_kv_cache_dtype, check_positive
from bytetx.checkpoint.spec import ModelSpec
from bytetx.errors import InputError, OptionError
from bytetx.parallel.grid import Grid, assign_sequences, divisors, grids_of, parse_grid
from bytetx.parallel.planner.cost import (
    Memory,
    PassCost,
    Work,
    memory_of,
    pass_cost,
    work_of_batch,
)
from bytetx.parallel.planner.ledger import local_sizes
from bytetx.parallel.planner.machine import GIB, Machine, load_machine
from bytetx.parallel.planner.shapes import ModelShape, shape_of
from bytetx.parallel.planner.traffic import PROFILES, Traffic, make_traffic

Goal = Literal["latency", "throughput", "memory"]
ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Two plans closer than this differ by less than the model's error.
_SAME = 0.05


@dataclass(frozen=True, slots=True)
class PlannedGrid:
    """One grid.  prefill: the pass over a batch's texts.  decode: a step of generation at half of
    the output, None where nothing is generated.  imbalance: the largest slot's tokens over the
    mean's.  num_instances: such grids that serve the rate, 1 without one."""

    grid: Grid
    prefill: PassCost
    decode: PassCost | None
    memory: Memory
    imbalance: float
    num_texts: int
    num_tokens: int
    output_tokens: int
    num_instances: int = 1

    @property
    def latency_s(self) -> float:
        """From a batch's start to its last result."""
        return self._sum(lambda cost: cost.total_us)

    @property
    def compute_s(self) -> float:
        return self._sum(lambda cost: cost.compute_us)

    @property
    def exposed_s(self) -> float:
        return self._sum(lambda cost: cost.exposed_us)

    @property
    def hidden_s(self) -> float:
        return self._sum(lambda cost: cost.hidden_us)

    @property
    def waiting_s(self) -> float:
        """Seconds that GPUs wait for their hosts to launch."""
        return self._sum(lambda cost: cost.waiting_us)

    @property
    def texts_per_s(self) -> float:
        return self.num_texts / self.latency_s

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Tokens read and generated."""
        return self.num_tokens / self.latency_s / self.grid.size

    @property
    def num_gpus(self) -> int:
        return self.num_instances * self.grid.size

    def _sum(self, of: Any) -> float:
        # The prefill's logits give the first token.
        decoded = 0.0 if self.decode is None else (self.output_tokens - 1) * of(self.decode)
        return float(of(self.prefill) + decoded) / 1e6

    def as_dict(self) -> dict[str, Any]:
        return {
            "grid": str(self.grid),
            "gpus": self.num_gpus,
            "instances": self.num_instances,
            "latency_s": self.latency_s,
            "compute_s": self.compute_s,
            "exposed_communication_s": self.exposed_s,
            "hidden_communication_s": self.hidden_s,
            "waiting_for_the_host_s": self.waiting_s,
            "tokens_per_s_per_gpu": self.tokens_per_s_per_gpu,
            "texts_per_s": self.texts_per_s * self.num_instances,
            "memory_bytes": self.memory.total,
            "weights_bytes": self.memory.weights,
            "kv_cache_bytes": self.memory.kv_cache,
            "imbalance": self.imbalance,
        }


@dataclass(frozen=True, slots=True)
class Plan:
    """grids: those that fit, best first.  refused: (grid, why) of the others."""

    shape: ModelShape
    machine: Machine
    traffic: Traffic
    goal: Goal
    gpus: int
    itemsize: int
    memory_limit: int
    grids: tuple[PlannedGrid, ...]
    refused: tuple[tuple[Grid, str], ...]

    @property
    def best(self) -> PlannedGrid:
        return self.grids[0]

    @property
    def pareto(self) -> tuple[PlannedGrid, ...]:
        """Grids that no other one beats in latency, tokens a second and memory at once."""
        return tuple(
            one for one in self.grids if not any(_dominates(other, one) for other in self.grids)
        )

    @property
    def advice(self) -> str:
        """One or two sentences: what to use, and whether plain replicas are as good."""
        best = self.best
        replicas = next((one for one in self.grids if _are_replicas(one.grid)), None)
        text = f"Use grid {best.grid} on {best.grid.size} GPUs."
        if best.grid.size == 1:
            text = "Use one GPU: no grid of more is better for this goal."
        if _are_replicas(best.grid):
            return (
                f"{text} The model fits one GPU, and plain replicas are the fastest: leave the "
                "grid out and run one process a GPU, or use data alone."
            )
        if replicas is None:
            why = next((why for grid, why in self.refused if _are_replicas(grid)), "")
            if _is_memory(why):
                return f"{text} Plain replicas do not fit the memory of a GPU."
            return f"{text} A batch cannot be divided over plain replicas: {why}."
        gain = _score(replicas, self.goal)[0] / _score(best, self.goal)[0] - 1
        if self.goal == "memory" and replicas.num_gpus == best.num_gpus:
            return (
                f"{text} Plain replicas need as many GPUs, and {replicas.memory.total / GIB:.1f} "
                f"GiB of each instead of {best.memory.total / GIB:.1f}: prefer them, they need no "
                "fast links."
            )
        if self.goal != "memory" and gain < _SAME:
            return (
                f"{text} Plain replicas are within {max(gain, 0.0):.1%}: prefer them, they "
                "need no fast links."
            )
        return f"{text} Plain replicas fit as well, but are {gain:.0%} worse for {self.goal}."

    def find(self, grid: Grid) -> PlannedGrid | None:
        return next((planned for planned in self.grids if planned.grid == grid), None)

    def explain(self, grid: Grid | str) -> PlannedGrid:
        """One grid with its ledger, prefill.transfers. Raises OptionError where it is refused."""
        wanted = parse_grid(grid) if isinstance(grid, str) else grid
        found = self.find(wanted)
        if found is not None:
            return found
        why = next((why for refused, why in self.refused if refused == wanted), None)
        reason = why or f"it has {wanted.size} GPUs and the plan {self.gpus}"
        raise OptionError(f"grid {wanted} is not in the plan: {reason}")

    def as_dict(self) -> dict[str, Any]:
        """For json.dumps."""
        return {
            "model": self.shape.name,
            "machine": self.machine.name,
            "gpus": self.gpus,
            "goal": self.goal,
            "batch": len(self.traffic.seqlens),
            "tokens": self.traffic.total_tokens,
            "output_tokens": self.traffic.output_tokens,
            "advice": self.advice,
            "grids": [planned.as_dict() for planned in self.grids],
            "pareto": [str(planned.grid) for planned in self.pareto],
            "refused": [{"grid": str(grid), "why": why} for grid, why in self.refused],
        }


def plan(
    model: ModelShape | ModelSpec | str | Path,
    *,
    machine: Machine | str | Path = "h200-nvlink",
    gpus: int | None = None,
    lengths: str | int | Sequence[int] = "ln128",
    batch: int = 256,
    output_tokens: int = 0,
    rate: float | None = None,
    memory_gib: float | None = None,
    goal: Goal = "throughput",
    dtype: str = "bfloat16",
    kv_cache_dtype: str = "auto",
    kept_bits: float = 0.0,
    families: str | Path | None = None,
) -> Plan:
    """Costs every grid of the GPUs for a model and its traffic, and ranks those that fit.

    model: a checkpoint's folder, its spec, or a named shape.  machine: a name or a TOML file.
    gpus: of one model instance; None: a node.  With goal "memory", grids of fewer GPUs compete.
    lengths: tokens of texts: a profile's name, whose texts are cut where the model ends, a number,
    or a list of one batch.  batch: texts a step, where lengths is no list.  output_tokens:
    generated for each text.  rate: texts a second; each grid then says how many instances serve it.
    memory_gib: of a GPU; None is the machine's.  goal: latency of a batch, throughput a GPU, or
    memory: the fewest GPUs, then the least memory.
    kv_cache_dtype: as load has it, of models that generate output_tokens.
    kept_bits: of a weight where one GPU holds all and keeps codes; 0: those of the dtype.
    families: as load has it, where model is a checkpoint's folder.
    Runs without torch. Raises OptionError for an option or texts longer than the model takes,
    InputError where no grid fits.
    """
    shape, described = shape_of(model, families=families), load_machine(machine)
    if kept_bits:
        shape = replace(shape, kept_bits=kept_bits)
    gpus = described.gpus_per_node if gpus is None else gpus
    check_positive("gpus", gpus)
    if goal not in get_args(Goal):
        raise OptionError(f"goal must be one of {', '.join(get_args(Goal))}, got {goal!r}")
    itemsize = ITEMSIZES.get(DTYPE_ALIASES.get(dtype, dtype))
    if itemsize is None:
        raise OptionError(f"dtype must be one of {', '.join(ITEMSIZES)}, got {dtype!r}")
    check_kv_cache_dtype(kv_cache_dtype)
    if kv_cache_dtype != "auto":
        if not output_tokens:
            raise OptionError(
                f"kv_cache_dtype {kv_cache_dtype} is of generation; give output_tokens, or leave "
                "it out"
            )
        shape = replace(shape, has_kv_codes=True)
    limit_gib = described.memory_gib if memory_gib is None else memory_gib
    if not (math.isfinite(limit_gib) and limit_gib > 0):
        raise OptionError(f"memory_gib must be above 0 and finite, got {memory_gib}")
    if output_tokens and not shape.has_lm_head:
        raise OptionError(f"{shape.name} generates no tokens; leave output_tokens out")
    traffic = make_traffic(lengths, batch=batch, output_tokens=output_tokens, rate=rate)
    if shape.max_positions:
        is_profile = isinstance(lengths, str) and lengths in PROFILES
        traffic = _fit(traffic, shape, is_profile=is_profile)
    sizes = divisors(gpus) if goal == "memory" else [gpus]
    found, refused = _cost_all(
        (grid for size in sizes for grid in grids_of(size)),
        shape,
        described,
        traffic,
        itemsize=itemsize,
        limit_bytes=int(limit_gib * GIB),
    )
    if not found:
        raise InputError(_nothing_fits(shape, gpus, limit_gib, [why for _, why in refused]))
    ranked = tuple(sorted(found, key=lambda planned: _score(planned, goal)))
    return Plan(
        shape,
        described,
        traffic,
        goal,
        gpus,
        itemsize,
        int(limit_gib * GIB),
        ranked,
        tuple(refused),
    )


def _fit(traffic: Traffic, shape: ModelShape, *, is_profile: bool) -> Traffic:
    """Texts of a profile are cut where the model ends; others must not be longer."""
    most = shape.max_positions - traffic.output_tokens
    if is_profile and most > 0:
        return replace(traffic, seqlens=tuple(min(length, most) for length in traffic.seqlens))
    longest = max(traffic.seqlens)
    if longest > most:
        with_answer = f" and {traffic.output_tokens} of its answer" if traffic.output_tokens else ""
        raise OptionError(
            f"{shape.name} takes {shape.max_positions} tokens, and the longest text has "
            f"{longest}{with_answer}: give shorter lengths"
        )
    return traffic


def _are_replicas(grid: Grid) -> bool:
    return grid == Grid(data=grid.size)


def _is_memory(why: str) -> bool:
    return why.startswith("needs ")


def _nothing_fits(shape: ModelShape, gpus: int, limit_gib: float, refused: Sequence[str]) -> str:
    """The text of an error, with the least that was missing."""
    no_grid = f"no grid of {gpus} GPUs of {limit_gib:g} GiB takes {shape.name}"
    needs = [why for why in refused if _is_memory(why)]
    if needs:
        least = min(needs, key=lambda why: float(why.split()[1]))
        return f"{no_grid}: the smallest one {least}; give more gpus or memory"
    return f"{no_grid}: {refused[0]}; give another number of gpus or a larger batch"


def _cost_all(
    grids: Iterable[Grid],
    shape: ModelShape,
    machine: Machine,
    traffic: Traffic,
    *,
    itemsize: int,
    limit_bytes: int,
) -> tuple[list[PlannedGrid], list[tuple[Grid, str]]]:
    found: list[PlannedGrid] = []
    refused: list[tuple[Grid, str]] = []
    works: dict[int, Work] = {}
    for grid in grids:
        why = why_not(shape, grid)
        if why is None and grid.num_slots > len(traffic.seqlens):
            why = f"{grid.num_slots} slots for {len(traffic.seqlens)} texts a batch"
        if why is not None:
            refused.append((grid, why))
            continue
        if grid.num_slots not in works:
            works[grid.num_slots] = _work(shape, traffic, grid.num_slots)
        planned = _cost(shape, grid, machine, traffic, works[grid.num_slots], itemsize=itemsize)
        if planned.memory.total > limit_bytes:
            needed, limit = planned.memory.total / GIB, limit_bytes / GIB
            refused.append((grid, f"needs {needed:.1f} GiB a GPU of {limit:.1f}"))
        else:
            found.append(planned)
    return found, refused


def why_not(shape: ModelShape, grid: Grid) -> str | None:
    """Why a model cannot be divided so; None where it can."""
    if grid.x > 1 and not shape.can_divide_hidden:
        return f"x={grid.x} does not divide disentangled attention or convolutions"
    if shape.hidden_size % grid.x:
        return f"x={grid.x} does not divide the hidden size {shape.hidden_size}"
    if grid.y > shape.num_heads or grid.y > shape.intermediate_size:
        return f"y={grid.y} is more than the {shape.num_heads} attention heads"
    try:
        local_sizes(shape, grid)
    except InputError as error:
        return str(error).replace("tp must", "y must")
    return None


def _work(shape: ModelShape, traffic: Traffic, num_slots: int) -> Work:
    slots = assign_sequences(traffic.seqlens, num_slots, hidden_size=shape.hidden_size)
    num_logits = len(traffic.seqlens) if traffic.output_tokens and shape.has_lm_head else 0
    return work_of_batch(shape, traffic.seqlens, slots, num_logits=num_logits)


def _cost(
    shape: ModelShape,
    grid: Grid,
    machine: Machine,
    traffic: Traffic,
    work: Work,
    *,
    itemsize: int,
) -> PlannedGrid:
    local, num_texts = local_sizes(shape, grid), len(traffic.seqlens)
    cost = partial(pass_cost, shape, grid, machine, local, itemsize=itemsize)
    # Each rank replays its layers, but those of a generation's prompts, which go over pages.
    prefill = cost(work, is_replayed=grid.size == 1 or not traffic.output_tokens)
    decode, kv_rows, output = None, 0, traffic.output_tokens
    if output:
        rows = -(-num_texts // grid.num_slots)
        kv_rows = work.rows + rows * output
        step = Work(rows, num_texts, 0.0, kv_rows - rows * output // 2, num_texts)
        decode = cost(step, is_replayed=grid.is_y_alone)  # all ranks replay it together
    planned = PlannedGrid(
        grid=grid,
        prefill=prefill,
        decode=decode,
        memory=memory_of(
            shape,
            grid,
            local,
            rows=work.rows,
            total_rows=work.total_rows,
            # Every slot allocates the cache of all sequences; see docs/distributed.md.
            kv_rows=traffic.total_tokens + num_texts * output if output else 0,
            num_logits=work.num_logits,
            itemsize=itemsize,
        ),
        imbalance=work.rows * grid.num_slots / max(traffic.total_tokens, 1),
        num_texts=num_texts,
        num_tokens=traffic.total_tokens + num_texts * output,
        output_tokens=output,
    )
    if traffic.rate is None:
        return planned
    return replace(planned, num_instances=max(1, -int(-traffic.rate // planned.texts_per_s)))


def _score(planned: PlannedGrid, goal: Goal) -> tuple[float, ...]:
    """Smaller is better; a simpler grid wins a draw."""
    grid = planned.grid
    simplicity = (grid.x, grid.z, grid.y)
    if goal == "latency":
        return (planned.latency_s, planned.memory.total, *simplicity)
    if goal == "throughput":
        return (1 / planned.tokens_per_s_per_gpu, planned.latency_s, *simplicity)
    return (planned.num_gpus, planned.memory.total, planned.latency_s, *simplicity)


def _dominates(a: PlannedGrid, b: PlannedGrid) -> bool:
    def values(planned: PlannedGrid) -> tuple[float, float, float]:
        speed = -planned.tokens_per_s_per_gpu
        return planned.latency_s, speed, planned.memory.total

    better, worse = values(a), values(b)
    return better != worse and all(x <= y for x, y in zip(better, worse, strict=True))
