"""`bytetx bench tp_layer --tune-ways FILE`: how GEMMs of many rows run, chosen in whole layers.

Layers of large models hold GPUs at their power limit, and bytes that a way moves more than another
show in the clock, some tens of milliseconds later: of ways that take as long alone, some slow down
what comes after them. So here every way of gathering is timed with every way of scattering, in
whole layers. bytetx/ops/comm_plan.py reads the table.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch

from bytetx.bench.gpu import DTYPES, Run
from bytetx.bench.lengths import dense
from bytetx.bench.ranks import Ranks, RanksClock
from bytetx.bench.suite import select
from bytetx.bench.tp_models import layers_run, prefill_batch, shared_layers, spec_of
from bytetx.bench.tune_comm import lines_of, preferred, write_plans
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
_ROWS = (8192, 16384)
_SEQUENCE = 2048  # tokens
_LAYERS = 2
_SAMPLES, _SAMPLE_US = 3, 80_000
_ALIKE = 1.003  # times that are no worse than the best
_FUSED = "fused"
# The preferred ones first.
_GATHERS = (_FUSED, COPIED, CUBLAS)
_SCATTERS = (_FUSED, ADDING, COPIED, COPIED_ADDING, CUBLAS)

Plans = Mapping[Layer, CommPlan]


def tune_layers(path: Path, ranks: Ranks, *, patterns: list[str]) -> Iterator[str]:
    """Measures, writes (on rank 0) and yields a text for each model and number of rows.

    All ranks call it.  patterns: parts or globs of names like gpt3-8192; empty means all.
    Raises BytetxError where none fits.
    """
    names = [(model, m) for model in _MODELS for m in _ROWS]
    words = {"what": "nothing", "them": "the layers"}
    for model, m in select(names, patterns, name=lambda pair: f"{pair[0]}-{pair[1]}", **words):
        plans = candidates(model, m, ranks.size)
        times = _measure(model, m, ranks, plans)
        best = choose(times)
        if ranks.group.rank == 0:
            for layer, plan in plans[best].items():
                write_plans(path, layer, {m: plan}, device=torch.cuda.get_device_name())
        found = ", ".join(f"{name}: {us:.0f}" for name, us in times.items())
        yield f"{model}, {m} rows; us a layer: {found}; chosen: {best}"


def candidates(model: str, m: int, tp: int) -> dict[str, Plans]:
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


def choose(times: Mapping[str, float]) -> str:
    """The first of those that are as good as the best."""
    return preferred(times, _ALIKE)


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
    batch = prefill_batch(share, dense(_SEQUENCE, m // _SEQUENCE))
    run = layers_run(share, batch, None)

    def with_plans(plans: Plans) -> Run:
        def planned_run() -> None:
            with planned(plans):
                run()

        return planned_run

    runs = {name: with_plans(plans) for name, plans in candidates.items()}
    clock = RanksClock(runs, [], required=runs)
    found = clock.us(runs, samples=_SAMPLES, sample_us=_SAMPLE_US)
    return {name: us / _LAYERS for name, us in found.items()}
