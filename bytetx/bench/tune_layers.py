"""`bytetx bench tp_layer --tune-ways FILE`: how GEMMs of a group run, chosen in whole layers.

Layers of large models hold GPUs at their power limit, and bytes that a way moves more than another
show in the clock, some tens of milliseconds later: of ways that take as long alone, some slow down
what comes after them. In decode steps some get in the way of the GEMMs around them, whose weights
are on their way early. So here prefills are timed with every way of gathering beside every way of
scattering, and decode steps with every way of one sum, then of the other; those near the best are
timed again with more samples.  bytetx/ops/comm_plan.py reads the table.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import torch

from bytetx.bench.gpu import DTYPES, Run
from bytetx.bench.lengths import dense
from bytetx.bench.ranks import Ranks, RanksClock
from bytetx.bench.suite import select
from bytetx.bench.tp_models import (
    decode_batch,
    layers_run,
    prefill_batch,
    shared_layers,
    spec_of,
)
from bytetx.bench.tune_comm import candidates as every_way
from bytetx.bench.tune_comm import lines_of, near_best, preferred, write_plans
from bytetx.ops.comm_plan import (
    ADDING,
    COPIED,
    COPIED_ADDING,
    CUBLAS,
    CommPlan,
    Layer,
    plan_comm,
    planned,
    tilings,
)
from bytetx.parallel.row_scheme import row_scheme

_MODELS = ("gpt3", "llama-70b")
_ROWS = (8192, 16384)  # of prefills
_SEQUENCE = 2048  # tokens
_STEPS = (16, 64, 256)  # sequences that decode
_KEYS = 128  # of each
_LAYERS = 2
_SAMPLE_US, _STEP_SAMPLE_US = 80_000, 20_000
# Samples of the first round and of the second, to which come those within _NEAR of the best.
_SAMPLES, _MORE_SAMPLES, _NEAR = 3, 9, 1.03
# Times that are no worse than the best.  A decode step is so much longer than one of its sums that
# what the sum's own times say, which have made the table, is left for a clear gain alone.
_ALIKE, _STEP_ALIKE = 1.003, 1.01
_FUSED = "fused"
# The preferred ones first.
_GATHERS = (_FUSED, COPIED, CUBLAS)
_SCATTERS = (_FUSED, ADDING, COPIED, COPIED_ADDING, CUBLAS)

Plans = Mapping[Layer, CommPlan]
Round = Callable[[Plans], dict[str, Plans]]


def tune_layers(path: Path, ranks: Ranks, *, patterns: list[str]) -> Iterator[str]:
    """Measures, writes (on rank 0) and yields a text for each model and number of rows.

    All ranks call it.  patterns: parts or globs of names like gpt3-8192 (a prefill) and gpt3-64 (a
    decode step); empty means all.  Raises BytetxError where none fits.
    """
    names = [(model, m) for model in _MODELS for m in (*_STEPS, *_ROWS)]
    words = {"what": "nothing", "them": "the layers"}
    for model, m in select(names, patterns, name=lambda pair: f"{pair[0]}-{pair[1]}", **words):
        plans: Plans = {}
        for candidates in rounds(model, m, ranks.size):
            tried = candidates(plans)
            times = _measure(model, m, ranks, tried)
            best = choose(times, m)
            plans = tried[best]
            found = ", ".join(f"{name}: {us:.0f}" for name, us in times.items())
            yield f"{model}, {m} rows; us a layer: {found}; chosen: {best}"
        if ranks.group.rank == 0:
            for layer, plan in plans.items():
                write_plans(path, layer, {m: plan}, device=torch.cuda.get_device_name())


def rounds(model: str, m: int, tp: int) -> list[Round]:
    """What is tried one behind the other; each is given what the ones before have chosen."""
    if m in _ROWS:
        return [lambda _: prefill_candidates(model, m, tp)]
    names = {f"{model}-{name}" for name in ("o", "ffn2", "down")}
    sums = [line.layer for line in lines_of("gemm_ar", tp) if line.name in names]
    return [partial(step_candidates, layer, m) for layer in sums]


def step_candidates(layer: Layer, m: int, plans: Plans) -> dict[str, Plans]:
    """Every way of a sum of m rows beside these plans of others, by name; the table's first."""
    ways = [plan_comm(layer, m), *every_way(layer, m)]
    return {f"{plan.way}/{plan.split_k}": {**plans, layer: plan} for plan in ways}


def prefill_candidates(model: str, m: int, tp: int) -> dict[str, Plans]:
    """Every way of gathering with every way of scattering, the preferred ones first, by name."""
    of_model = {f"{model}-{name}" for name in ("qkv", "ffn1", "gates", "o", "ffn2", "down")}
    gathers, scatters = (
        [line.layer for line in lines_of(suite, tp) if line.name in of_model]
        for suite in ("ag_gemm", "gemm_rs")
    )
    return {
        f"{gather}+{scatter}": _plans(gathers, gather, m) | _plans(scatters, scatter, m)
        for gather, scatter in product(_GATHERS, _SCATTERS)
    }


def choose(times: Mapping[str, float], m: int) -> str:
    """The first of those that are as good as the best for m rows."""
    return preferred(times, _ALIKE if m in _ROWS else _STEP_ALIKE)


def _plans(layers: list[Layer], way: str, m: int) -> dict[Layer, CommPlan]:
    if way in (COPIED, CUBLAS):
        return {layer: CommPlan(way) for layer in layers}
    head = "" if way == _FUSED else way
    return {layer: CommPlan(head + _tiling(layer, m)) for layer in layers}


def _tiling(layer: Layer, m: int) -> str:
    """The table's where it has one."""
    name, names = plan_comm(layer, m).tiling, tilings(layer)
    return name if name in names else names[0]


def _measure(model: str, m: int, ranks: Ranks, candidates: Mapping[str, Plans]) -> dict[str, float]:
    torch.manual_seed(0)
    spec = spec_of(model)
    group = replace(ranks.group, rows=row_scheme("cuda", ranks.size, spec.hidden_size))
    share = shared_layers(spec, group, count=_LAYERS, dtype=DTYPES["bf16"])
    if m in _ROWS:
        batch, cache = prefill_batch(share, dense(_SEQUENCE, m // _SEQUENCE)), None
    else:
        batch, cache = decode_batch(share, num_seqs=m, num_keys=_KEYS)
    run = layers_run(share, batch, cache)

    def with_plans(plans: Plans) -> Run:
        def planned_run() -> None:
            with planned(plans):
                run()

        return planned_run

    runs = {name: with_plans(plans) for name, plans in candidates.items()}
    clock = RanksClock(runs, [], required=runs)
    sample_us = _SAMPLE_US if m in _ROWS else _STEP_SAMPLE_US
    found = clock.us(runs, samples=_SAMPLES, sample_us=sample_us)
    found |= clock.us(near_best(found, _NEAR), samples=_MORE_SAMPLES, sample_us=sample_us)
    return {name: us / _LAYERS for name, us in found.items()}
