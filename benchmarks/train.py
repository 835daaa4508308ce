"""Suite `train`: a training step of a small GPT on grids of ranks, against torch's and AxoNN's.

Every rank is a process and runs the same cases; times are the slowest rank's.
"""

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist

from benchmarks import measure, train_rivals
from benchmarks.memory import reset_peak, status_mib
from benchmarks.rivals import versions
from benchmarks.suite import Case, Measurement, Suite, select
from benchmarks.train_axonn import AxonnTrainer, why_no_axonn
from benchmarks.train_rivals import Make, SlotBatch, Trainer, Weights, adamw, relative_error
from bytetx.errors import BytetxError, OptionError
from bytetx.ops.host import release_heap
from bytetx.parallel.autograd import join_training_groups
from bytetx.parallel.grid import Grid, assign_sequences, grids_of, parse_grid
from bytetx.parallel.planner.machine import Kind, wire_bytes
from bytetx.parallel.tp import prefix_store
from bytetx.parallel.training import (
    GptConfig,
    GridGpt,
    compute_gradients,
    initial_weights,
    train_step,
)

# GPT-2's and GPT-3's sizes: layers, hidden features, heads.
SHAPES = {
    "gpt2-tiny": (2, 128, 4),
    "gpt2-small": (12, 768, 12),
    "gpt2-medium": (24, 1024, 16),
    "gpt2-xl": (48, 1600, 25),
    "gpt3-6.7b": (32, 4096, 32),
}
_VOCAB = 50304  # GPT-2's 50257, padded to a multiple of 128
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Of |gradient - wanted| / |wanted| of any tensor, and of the loss: sums in another order. bf16 has
# 8 bits, and a backward pass rounds at every layer.
TOLERANCES = {"fp32": 1e-4, "bf16": 5e-2}
_NUM_CHECKED_STEPS = 3
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of `python -m benchmarks train`. None: the shape's own.

    tokens: of a batch, all ranks together.  grids: empty is every grid without x.
    """

    device: str = "cpu"
    dtype: str = "fp32"
    shape: str = "gpt2-small"
    layers: int | None = None
    hidden: int | None = None
    vocab: int = _VOCAB
    tokens: int = 1024
    seqlen: int = 256
    grids: tuple[str, ...] = ()
    overlaps: bool = True
    max_rounds: int = 9
    seconds: float = 60.0

    def check(self) -> None:
        """Raises OptionError for what no number of ranks can run."""
        self.config()
        if self.dtype not in DTYPES:
            raise OptionError(f"--dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        for text in self.grids:
            parse_grid(text)

    def config(self) -> GptConfig:
        """Raises OptionError for an unknown shape, or hidden features of no whole heads."""
        if self.shape not in SHAPES:
            raise OptionError(f"--shape must be one of {', '.join(SHAPES)}, got {self.shape!r}")
        layers, hidden, heads = SHAPES[self.shape]
        hidden = self.hidden or hidden
        if self.hidden is not None:
            heads = hidden // 64
            if hidden % 64:
                raise OptionError(f"--hidden must be a multiple of 64, got {hidden}")
        return GptConfig(
            vocab_size=self.vocab,
            hidden_size=hidden,
            num_layers=self.layers or layers,
            num_heads=heads,
            intermediate_size=4 * hidden,
            max_positions=self.seqlen,
        )


@dataclass(frozen=True, slots=True)
class Contestant:
    """One that trains.  memory_mib: the growth of this rank's memory by it, at the peak of a step.

    On a CPU that is resident memory, which the heap rounds.
    """

    trainer: Trainer
    memory_mib: float


def check(*, grid: list[str] | None, no_overlap: bool, **given: Any) -> Settings:
    """The settings of the command line's options.  Raises OptionError for what cannot run."""
    settings = Settings(**given, grids=tuple(grid or ()), overlaps=not no_overlap)
    settings.check()
    return settings


def suite(*, patterns: list[str], **given: Any) -> Suite:
    """Make the suite in a process that torchrun started.  given: as of check()."""
    settings = check(**given)
    config, size = settings.config(), dist.get_world_size()
    name = f"{settings.shape}-l{config.num_layers}-h{config.hidden_size}-t{settings.tokens}"
    grids = [parse_grid(text) for text in settings.grids]
    grids = grids or [grid for grid in grids_of(size) if grid.x == 1]
    for grid in grids:
        _check_grid(grid, settings, size=size)
    chosen = select(grids, patterns, name=lambda grid: f"{name}-{grid}")

    def cases() -> Iterator[Case]:
        for grid in chosen:
            run = partial(measure_grid, grid, settings, config)
            yield Case(f"{name}-{grid}", "ms", settings.dtype, run)

    return Suite("train", _device_name(settings.device), versions(("axonn",)), cases())


def _check_grid(grid: Grid, settings: Settings, *, size: int) -> None:
    if grid.size != size:
        raise OptionError(f"--grid {grid} has {grid.size} ranks, and {size} run")
    num_sequences, rest = divmod(settings.tokens, settings.seqlen)
    if rest or num_sequences % grid.num_slots:
        raise OptionError(
            f"--tokens must be whole sequences of --seqlen {settings.seqlen}, equally many for "
            f"each of the {grid.num_slots} slots of {grid}, got {settings.tokens}"
        )


def _device_name(device: str) -> str:
    """The device, and how many ranks have one."""
    ranks = dist.get_world_size()
    if device == "cpu":
        return f"{measure.device_name()} a rank"
    return f"{ranks} x {torch.cuda.get_device_name()}"


def random_sequences(settings: Settings) -> list[list[int]]:
    """Token ids of the whole batch, one more than seqlen each; the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    count = settings.tokens // settings.seqlen
    shape = (count, settings.seqlen + 1)
    found: list[list[int]] = torch.randint(settings.vocab, shape, generator=generator).tolist()
    return found


def slot_batch(sequences: list[list[int]], grid: Grid, *, hidden: int, slot: int) -> SlotBatch:
    """The sequences that ours computes in this slot."""
    seqlens = [len(ids) - 1 for ids in sequences]
    own = assign_sequences(seqlens, grid.num_slots, hidden_size=hidden)[slot]
    ids = torch.tensor([sequences[i] for i in own])
    return SlotBatch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), sum(seqlens))


class GridTrainer:
    """Ours: GridGpt on a grid."""

    def __init__(
        self,
        config: GptConfig,
        weights: Weights,
        sequences: list[list[int]],
        grid: Grid,
        device: torch.device,
        *,
        name: str,
        overlaps: bool,
    ):
        """name: of the rendezvous of its groups, another one for each trainer."""
        store = prefix_store(name, dist.distributed_c10d._get_default_store())
        self._groups = join_training_groups(store, grid, rank=dist.get_rank(), device=device)
        self._model = GridGpt(config, weights, groups=self._groups, overlaps=overlaps)
        self._config = config
        self._batch = self._model.pack(sequences)
        self._optimizer = adamw(self._model.parameters())

    def backward(self) -> float:
        return float(compute_gradients(self._model, self._batch))

    def step(self) -> float:
        return train_step(self._model, self._optimizer, self._batch)

    def gradient_error(self, wanted: Weights) -> float:
        """Return the largest error of this rank's parts, over the norm of each part."""
        parts = GridGpt(self._config, wanted, groups=self._groups)
        pairs = zip(self._model.parameters(), parts.parameters(), strict=True)
        found = [relative_error(p.grad, part.detach()) for p, part in pairs if p.grad is not None]
        return max(found)

    def step_bytes(self) -> float:
        """Bytes that this rank sends in a step, by the ring algorithm, from the groups' ledgers."""
        before = self._sent_bytes()
        self.step()
        return self._sent_bytes() - before

    def _sent_bytes(self) -> float:
        groups = self._groups
        sent = 0.0
        for group in (groups.data, groups.z, groups.y, groups.x, groups.slots):
            for (kind, num_bytes), count in group.counts.items():
                sent += count * wire_bytes(cast(Kind, kind), num_bytes, group.size)
        return sent


def rivals_of(grid: Grid, device: torch.device) -> dict[str, Make]:
    """Return the trainers of the same model on the same ranks: torch's, and axonn where it runs."""
    found: dict[str, Make] = {}
    if grid.y * grid.x == 1:
        found["fsdp2"] = train_rivals.mesh_trainer
        if grid.z == 1:
            found["ddp"] = train_rivals.ddp_trainer
    else:
        name = "dtensor-tp" if grid.num_slots == 1 else "fsdp2-dtensor-tp"
        found[name] = train_rivals.mesh_trainer
        found[f"{name}-sp"] = partial(train_rivals.mesh_trainer, divides_rows=True)
    if grid.x == 1 and why_no_axonn(device) is None:
        found["axonn"] = AxonnTrainer
    return found


def measure_grid(grid: Grid, settings: Settings, config: GptConfig) -> Measurement:
    """Checks gradients and a few steps of all, then times their steps in turn."""
    rank = dist.get_rank()
    device = torch.device("cpu") if settings.device == "cpu" else torch.device("cuda", rank)
    weights = initial_weights(config, seed=0, dtype=DTYPES[settings.dtype])
    sequences = random_sequences(settings)
    own = _on(slot_batch(sequences, grid, hidden=config.hidden_size, slot=grid.slot(rank)), device)
    every = _on(slot_batch(sequences, Grid(), hidden=config.hidden_size, slot=0), device)
    wanted = train_rivals.whole_gradients(config, weights, every)

    def ours(overlaps: bool) -> GridTrainer:
        name = f"train-{grid}-{overlaps}"
        return GridTrainer(config, weights, sequences, grid, device, name=name, overlaps=overlaps)

    makes: dict[str, Callable[[], Trainer]] = {"ours": lambda: ours(settings.overlaps)}
    if settings.overlaps:
        makes["bytetx-no-overlap"] = lambda: ours(False)
    for name, make in rivals_of(grid, device).items():
        makes[name] = partial(make, config, weights, own, grid, device)
    notes = [f"axonn is left out: {why}"] if (why := why_no_axonn(device)) else []
    found: dict[str, Contestant] = {}
    for name, start in makes.items():
        try:
            found[name] = _contestant(start, device, wanted, settings.dtype)
        except Exception as error:  # a rival may raise anything, and costs no other number
            if name == "ours":
                raise
            notes.append(f"{name} is left out: {type(error).__name__}: {str(error)[:200]}")
    trainer = found["ours"].trainer
    assert isinstance(trainer, GridTrainer)
    sent_bytes = trainer.step_bytes()
    for one in (one for name, one in found.items() if name != "ours"):
        one.trainer.step()  # as many steps as ours
    times, rounds = _times_ms(found, device, settings)
    ours_ms = times.pop("ours")
    strongest = min(
        (t for name, t in times.items() if name != "bytetx-no-overlap"), default=ours_ms
    )
    shape: dict[str, int | float | str] = {
        "layers": config.num_layers,
        "hidden": config.hidden_size,
        "heads": config.num_heads,
        "vocab": config.vocab_size,
        "tokens": settings.tokens,
        "seqlen": settings.seqlen,
        "grid": str(grid),
        "ranks": grid.size,
        "threads": torch.get_num_threads(),
        "overlap": int(settings.overlaps),
        "rounds": rounds,
        "tokens_per_s": round(settings.tokens / ours_ms * 1e3, 1),
        "over_strongest": round(strongest / ours_ms, 3),
        "sent_mib": round(sent_bytes / _MIB, 1),
        **{f"{name}_mib": round(one.memory_mib) for name, one in found.items()},
    }
    return Measurement(ours_ms, times, None, shape, (*notes, _report(shape, found), _NOTE))


_NOTE = (
    "a step is forward, backward, sums of gradients and AdamW (torch's fused one), of all "
    f"contestants on the same weights and batch; losses of {_NUM_CHECKED_STEPS} steps and all "
    f"gradients agree with plain torch on one device: |difference| / |gradient| below "
    f"{TOLERANCES['fp32']:g} in fp32, {TOLERANCES['bf16']:g} in bf16"
)


def _report(shape: dict[str, int | float | str], found: dict[str, Contestant]) -> str:
    memory = ", ".join(f"{name} {one.memory_mib:,.0f}" for name, one in found.items())
    return (
        f"{shape['grid']}: {shape['tokens_per_s']:,} tokens/s, {shape['over_strongest']}x the "
        f"strongest rival; a rank of ours sends {shape['sent_mib']:,} MiB a step; peak MiB a rank: "
        f"{memory}"
    )


def _contestant(
    start: Callable[[], Trainer],
    device: torch.device,
    wanted: tuple[float, Weights],
    dtype: str,
) -> Contestant:
    """Raises BytetxError where its losses or gradients are not those of one device."""
    tolerance = TOLERANCES[dtype]
    before = _resting_mib(device)
    trainer = start()
    loss = trainer.backward()
    if abs(loss - wanted[0]) > tolerance * abs(wanted[0]):
        raise BytetxError(f"its loss is {loss:.6g}, one device's {wanted[0]:.6g}")
    error = _slowest(trainer.gradient_error(wanted[1]), device)
    if not error < tolerance:
        raise BytetxError(f"its gradients differ by {error:.2g} of their norms from one device's")
    losses = [trainer.step() for _ in range(_NUM_CHECKED_STEPS)]
    if not losses[-1] < losses[0]:
        raise BytetxError(
            f"{_NUM_CHECKED_STEPS} steps on one batch do not lower its loss: {losses}"
        )
    memory = _peak_mib(trainer.step, device) - before
    return Contestant(trainer, _slowest(memory, device))


def _times_ms(
    found: dict[str, Contestant], device: torch.device, settings: Settings
) -> tuple[dict[str, float], int]:
    """(milliseconds of a step of each, medians over rounds; rounds): in turn, in random orders."""
    times: dict[str, list[float]] = {name: [] for name in found}
    draw, names, spent, rounds = random.Random(0), list(found), 0.0, 0
    while rounds < 3 or (rounds < settings.max_rounds and spent < settings.seconds):
        draw.shuffle(names)
        gc.collect()
        for name in names:
            dist.barrier()
            _synchronize(device)
            began = time.perf_counter()
            found[name].trainer.step()
            _synchronize(device)
            times[name].append(_slowest(time.perf_counter() - began, device))
        spent, rounds = spent + sum(own[-1] for own in times.values()), rounds + 1
    return {name: statistics.median(own) * 1e3 for name, own in times.items()}, rounds


def _slowest(value: float, device: torch.device) -> float:
    """The largest of all ranks."""
    found = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def _resting_mib(device: torch.device) -> float:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return torch.cuda.memory_allocated(device) / _MIB
    release_heap()
    return status_mib("VmRSS")


def _peak_mib(step: Callable[[], object], device: torch.device) -> float:
    """Memory at the peak of a step, of all that the process has."""
    _resting_mib(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) / _MIB
    reset_peak()
    step()
    return status_mib("VmHWM")


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _on(batch: SlotBatch, device: torch.device) -> SlotBatch:
    ids, targets = batch.input_ids.to(device), batch.targets.to(device)
    return replace(batch, input_ids=ids, targets=targets)
