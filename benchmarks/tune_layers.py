"""`python -m benchmarks tp_layer --tune-layers FILE`: chooses communication plans in whole layers.

Layers of large models hold GPUs at their power limit. A plan that moves more bytes lowers the clock
some tens of milliseconds later, so plans that are equally fast alone may slow down what follows. In
decode steps some plans delay the GEMMs around them, which prefetch their weights. So prefills are
timed with every all-gather plan beside every reduce-scatter plan, and decode steps with every plan
of one all-reduce, then of the other; those near the best are timed again with more samples.
bytetx/ops/comm_plan.py reads the table.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import torch

from benchmarks.gpu import DTYPES, Run
from benchmarks.lengths import dense
from benchmarks.ranks import Ranks, RanksClock
from benchmarks.suite import select
from benchmarks.tp_models import (
    decode_batch,
    layers_run,
    prefill_batch,
    shared_layers,
    spec_of,
)
from benchmarks.tune_comm import candidates as all_plans
from benchmarks.tune_comm import lines_of, near_best, preferred, write_plans
from bytetx.ops.comm_plan import CommPlan, Layer, fused_plans, override_plans, plan_comm
from bytetx.parallel.row_scheme import row_scheme

_MODELS = ("gpt3", "llama-70b")
_ROWS = (8192, 16384)  # of prefills
_SEQUENCE = 2048  # tokens
_STEPS = (16, 64, 256)  # sequences that decode
_KEYS = 128  # of each
_LAYERS = 2
_SAMPLE_US, _STEP_SAMPLE_US = 80_000, 20_000
# Samples of the first round, and of the second, which has the plans within _NEAR of the best.
_SAMPLES, _MORE_SAMPLES, _NEAR = 3, 9, 1.03
# Times that count as the best.  A decode step is much longer than one of its all-reduces, so the
# table, which was made from the times of the all-reduce alone, is only left for a clear gain.
_ALIKE, _STEP_ALIKE = 1.003, 1.01
# Plans without their tiles, the preferred ones first.
_FUSED = CommPlan("fused", "peer_store")
_COPY_ENGINE = CommPlan("cublas", "copy_engine")
_CUBLAS = CommPlan("cublas")
_GATHERS = (_FUSED, _COPY_ENGINE, _CUBLAS)
_SCATTERS = (_FUSED, replace(_FUSED, fuse_reduce=True), _COPY_ENGINE, _CUBLAS)

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
    """The rounds of candidates; each is given the plans that the rounds before have chosen."""
    if m in _ROWS:
        return [lambda _: prefill_candidates(model, m, tp)]
    names = {f"{model}-{name}" for name in ("o", "ffn2", "down")}
    sums = [line.layer for line in lines_of("gemm_ar", tp) if line.name in names]
    return [partial(step_candidates, layer, m) for layer in sums]


def step_candidates(layer: Layer, m: int, plans: Plans) -> dict[str, Plans]:
    """Every plan of an all-reduce of m rows beside these plans of others; the table's first."""
    candidates = [plan_comm(layer, m), *all_plans(layer, m)]
    return {str(plan): {**plans, layer: plan} for plan in candidates}


def prefill_candidates(model: str, m: int, tp: int) -> dict[str, Plans]:
    """Every all-gather plan with every reduce-scatter plan, the preferred ones first, by name."""
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


def _plans(layers: list[Layer], plan: CommPlan, m: int) -> dict[Layer, CommPlan]:
    if not plan.is_fused:
        return dict.fromkeys(layers, plan)
    return {layer: replace(plan, tile=_tile(layer, m)) for layer in layers}


def _tile(layer: Layer, m: int) -> str | None:
    """The tile of the table's plan; the first one of the op if that plan has none."""
    tile, tiles = plan_comm(layer, m).tile, [plan.tile for plan in fused_plans(layer)]
    return tile if tile in tiles else tiles[0]


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
            with override_plans(plans):
                run()

        return planned_run

    runs = {name: with_plans(plans) for name, plans in candidates.items()}
    clock = RanksClock(runs, [], required=runs)
    sample_us = _SAMPLE_US if m in _ROWS else _STEP_SAMPLE_US
    found = clock.us(runs, samples=_SAMPLES, sample_us=sample_us)
    found |= clock.us(near_best(found, _NEAR), samples=_MORE_SAMPLES, sample_us=sample_us)
    return {name: us / _LAYERS for name, us in found.items()}
