"""`python -m benchmarks ag_gemm | gemm_rs | gemm_ar --tune FILE`: measures every plan.

bytetx/ops/comm_plan.py reads the table; lines of other layers, ops and group sizes stay in it.
Two rounds choose a plan: all candidates with few samples, then those near the best with more. If
several plans are equally fast, the preferred one is taken, so that another run chooses the same.
"""

import json
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from benchmarks.comm import LAYERS, calls_of_graph, is_long
from benchmarks.gpu import DTYPES, Run, is_hot, num_rotated, sample_us_of
from benchmarks.ranks import Ranks, RanksClock
from benchmarks.suite import is_selected, none_fits
from benchmarks.tp_models import MODELS, spec_of
from bytetx.ops.comm_gemm import (
    all_gather_gemm,
    column_gemm,
    gemm_all_reduce,
    gemm_reduce_scatter,
)
from bytetx.ops.comm_plan import CommPlan, Layer, Op, Transport, fused_plans
from bytetx.ops.gated import GatedWeight, prepare_gated
from bytetx.ops.linear import LinearWeight, prepare_linear
from bytetx.ops.norm import LayerNorm
from bytetx.parallel.layout import has_even_shards, shard_model, shard_offsets

OPS: dict[str, Op] = {
    "ag_gemm": "all_gather_gemm",
    "gemm_rs": "gemm_reduce_scatter",
    "gemm_ar": "gemm_all_reduce",
}
# Measured with gemm_all_reduce, beside which it is needed: every rank has all rows.
_COLUMN: Op = "column_gemm"
_FEW_ROWS = (16, 32, 64, 128, 192, 256, 384, 512)
_MANY_ROWS = (256, 512, 1024, 2048, 4096, 8192, 16384)
_COPY_ENGINE_ROWS = 256  # below, copies take longer to start than they hide
_TWO_SHOT_ROWS = 64  # below, a second exchange costs more than it saves
_SHARD_STEP = 128  # rows; of the scheme that row_schemes.json has for most steps
_SPLIT_KS = (1, 2, 4, 5)
_SMS = 132
# Samples of the first round, and of the second, which has the plans that take at most _NEAR times
# the best time of the first. The winner is the first candidate within _ALIKE of the best.
_SAMPLES, _MORE_SAMPLES = 3, 7
_NEAR, _ALIKE = 1.08, 1.01
# Length of a sample where calls leave the GPU cool. Other samples are as long as the suites':
# shorter ones do not show what a plan costs in power, and so in clock.
_SAMPLE_US = 1_000
_DTYPE = DTYPES["bf16"]

K = TypeVar("K", bound=Hashable)
Call = Callable[[LinearWeight | GatedWeight, CommPlan], object]
Clock = Callable[[Sequence[int], int], Mapping[int, float]]


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the table. name: the layer's, as in the suites' cases.  rows: to measure."""

    name: str
    layer: Layer
    activation: str
    rows: tuple[int, ...]


def tune_comm(suite: str, path: Path, ranks: Ranks, *, patterns: list[str]) -> Iterator[str]:
    """Measures and writes (on rank 0) one line after the other, and yields a text for each.

    All ranks call it.  patterns: parts or globs of names like gpt3-ffn1-2048, a layer and its rows;
    empty means all, and what they leave out stays as the table has it.
    Raises BytetxError where no name fits.
    """
    lines, began = lines_of(suite, ranks.size, patterns=patterns), time.perf_counter()
    for number, line in enumerate(lines, start=1):
        best = {m: _best(line.layer, m, ranks, activation=line.activation) for m in line.rows}
        if ranks.group.rank == 0:
            plans = {m: plan for m, (plan, _) in best.items()}
            write_plans(path, line.layer, plans, device=torch.cuda.get_device_name())
        spent = time.perf_counter() - began
        left = spent / number * (len(lines) - number)
        chosen = ", ".join(f"{m}: {plan} {us:.4g} us" for m, (plan, us) in best.items())
        yield f"{line.layer.op} {line.name}: {chosen} ({spent:.0f} s, about {left:.0f} s to go)"


def write_plans(path: Path, layer: Layer, plans: Mapping[int, CommPlan], *, device: str) -> None:
    """Replaces the table's plans of a layer for these rows."""
    lines = json.loads(path.read_text())["lines"] if path.exists() else []
    own = {name: getattr(layer, name) for name in ("op", "tp", "n", "k", "is_gated")}
    place = next((i for i, line in enumerate(lines) if own.items() <= line.items()), len(lines))
    old = lines[place]["plans"] if place < len(lines) else []
    found = dict(old) | {m: plan.to_json() for m, plan in plans.items()}
    lines[place:] = [own | {"plans": [[m, found[m]] for m in sorted(found)]}, *lines[place + 1 :]]
    body = ",\n  ".join(json.dumps(line) for line in lines)
    text = f'{{"device": {json.dumps(device)}, "lines": [\n  {body}\n]}}\n'
    path.write_text(text, encoding="utf-8")


def lines_of(suite: str, tp: int, *, patterns: Iterable[str] = ()) -> list[Line]:
    """Lines of a suite's op: of the models whose shares are even, and of the suite's own cases."""
    op, patterns = OPS[suite], list(patterns)
    ops = (op, _COLUMN) if op == "gemm_all_reduce" else (op,)
    rows = _FEW_ROWS if op == "gemm_all_reduce" else _MANY_ROWS
    every = {line.layer: line for own in ops for line in _lines_of_models(own, tp, rows)}
    for (model, name), (n, k) in LAYERS[suite].items():
        share = (n // tp, k) if op == "all_gather_gemm" else (n, k // tp)
        own = Line(f"{model}-{name}", Layer(op, tp, *share), "none", rows)
        every.setdefault(own.layer, own)
    chosen = []
    for line in every.values():
        wanted = tuple(m for m in line.rows if is_selected(f"{line.name}-{m}", patterns))
        chosen += [replace(line, rows=wanted)] * bool(wanted)
    if not chosen:
        names = (line.name for line in every.values())
        raise none_fits(patterns, names, what="nothing to tune", them="the layers")
    return chosen


def _lines_of_models(op: Op, tp: int, rows: tuple[int, ...]) -> Iterator[Line]:
    for model in MODELS:
        spec = spec_of(model)
        if not has_even_shards(spec, tp):
            continue
        split = shard_model(spec, rank=0, size=tp)
        heads, inner, hidden = len(split.heads), len(split.inner), spec.hidden_size
        is_gated = spec.is_gated
        if op in ("all_gather_gemm", _COLUMN):
            qkv = (heads + 2 * len(split.kv_heads)) * spec.head_dim
            ffn = Layer(op, tp, inner * (1 + is_gated), hidden, is_gated)
            yield Line(f"{model}-qkv", Layer(op, tp, qkv, hidden), "none", rows)
            yield Line(f"{model}-{'gates' if is_gated else 'ffn1'}", ffn, spec.activation, rows)
        else:
            own, ffn = (Layer(op, tp, hidden, k) for k in (heads * spec.head_dim, inner))
            yield Line(f"{model}-o", own, "none", rows)
            yield Line(f"{model}-{'down' if is_gated else 'ffn2'}", ffn, "none", rows)


def candidates(layer: Layer, m: int) -> list[CommPlan]:
    """Every plan that can be the best, the preferred ones first.

    Fused plans come first, then copy engines. At the power limit copy engines come first: they
    leave most of the power to the GEMM.
    """
    if layer.op == "gemm_all_reduce":
        found = _fused_all_reduce(layer, m)
        found += [CommPlan("linear", "one_shot"), CommPlan("cublas", "one_shot")]
        if m >= _TWO_SHOT_ROWS:
            found += [CommPlan("linear", "two_shot"), CommPlan("cublas", "two_shot")]
    else:
        found = fused_plans(layer)
        if layer.op == "gemm_reduce_scatter":
            found += [replace(plan, fuse_reduce=True) for plan in found]
        if layer.op != _COLUMN and m >= _COPY_ENGINE_ROWS:
            place = 0 if is_hot(_flop(layer, m)) else len(found)
            found.insert(place, CommPlan("cublas", "copy_engine"))
    return [*found, CommPlan("linear"), CommPlan("cublas")]


def _flop(layer: Layer, m: int) -> float:
    """Return the FLOP of a rank's GEMM."""
    return 2.0 * m * layer.n * layer.k


def _fused_all_reduce(layer: Layer, m: int) -> list[CommPlan]:
    """Fused plans of gemm_all_reduce for m rows with each fitting split_k, small split_k first."""
    found: list[CommPlan] = []
    transports: tuple[Transport, ...] = ("one_shot", "two_shot")
    for transport, plan in product(transports, fused_plans(layer)):
        rows, columns = map(int, str(plan.tile).split("x"))
        if plan.gemm == "fused":
            found += [plan] * (transport == plan.transport and m >= rows)
        elif (rows <= 64 or m > 64) and (rows > 64 or m <= 256):
            tiles = -(-m // rows) * -(-layer.n // columns)
            split_ks = [s for s in _SPLIT_KS if s == 1 or tiles * s <= 2 * _SMS]
            found += [replace(plan, transport=transport, split_k=split_k) for split_k in split_ks]
    return sorted(found, key=lambda plan: plan.split_k)


def choose(plans: Sequence[CommPlan], clock: Clock) -> tuple[CommPlan, float]:
    """The best of plans, the preferred ones first, in two rounds; and its microseconds.

    clock(indices, samples): microseconds of these plans, the same on every rank.
    """
    found = clock(range(len(plans)), _SAMPLES)
    near = near_best(found, _NEAR)
    if len(near) > 1:
        found = clock(near, _MORE_SAMPLES)
    best = preferred({number: found[number] for number in near}, _ALIKE)
    return plans[best], found[best]


def preferred(times: Mapping[K, float], alike: float) -> K:
    """The first of those that take at most `alike` times as long as the best."""
    return near_best(times, alike)[0]


def near_best(times: Mapping[K, float], factor: float) -> list[K]:
    """Return those that take at most `factor` times as long as the best, in their order."""
    most = factor * min(times.values())
    return [name for name, us in times.items() if us <= most]


def _best(layer: Layer, m: int, ranks: Ranks, *, activation: str) -> tuple[CommPlan, float]:
    torch.manual_seed(0)
    flop = _flop(layer, m)
    weights = _weights(layer, count=1 if is_long(flop) else None)
    count = calls_of_graph(flop, len(weights))
    call = _CALLS[layer.op](layer, m, ranks, activation)
    plans = candidates(layer, m)

    def run_all(plan: CommPlan) -> None:
        for i in range(count):
            call(weights[i % len(weights)], plan)

    runs: dict[str, Run] = {str(i): partial(run_all, plan) for i, plan in enumerate(plans)}
    clock = RanksClock(runs, [], required=runs)
    sample_us = sample_us_of(flop, cool_us=_SAMPLE_US)

    def us(numbers: Sequence[int], samples: int) -> dict[int, float]:
        found = clock.us(map(str, numbers), samples=samples, sample_us=sample_us)
        return {int(number): us / count for number, us in found.items()}

    return choose(plans, us)


def _weights(layer: Layer, *, count: int | None = None) -> list[LinearWeight | GatedWeight]:
    """count: None for as many as keep each call from finding its weight in L2."""
    n, k = layer.n, layer.k
    count = count or num_rotated(n * k * _DTYPE.itemsize)
    if layer.is_gated:
        pairs = ((_randn(n // 2, k), _randn(n // 2, k)) for _ in range(count))
        return [prepare_gated(gate, up, prepack=False) for gate, up in pairs]
    bias = _randn(n) if layer.op in ("all_gather_gemm", _COLUMN) else None
    return [prepare_linear(_randn(n, k), bias, prepack=False) for _ in range(count)]


def _gather(layer: Layer, m: int, ranks: Ranks, activation: str) -> Call:
    offsets = shard_offsets(m, ranks.size, step=min(_SHARD_STEP, m // ranks.size))
    own = offsets[ranks.group.rank + 1] - offsets[ranks.group.rank]
    x = _randn(own, layer.k)

    def call(w: LinearWeight | GatedWeight, plan: CommPlan) -> None:
        all_gather_gemm(
            x, w, peers=ranks.peers, row_offsets=offsets, activation=activation, plan=plan
        )

    return call


def _scatter(layer: Layer, m: int, ranks: Ranks, activation: str) -> Call:
    offsets = shard_offsets(m, ranks.size, step=min(_SHARD_STEP, m // ranks.size))
    own = offsets[ranks.group.rank + 1] - offsets[ranks.group.rank]
    x, residual, bias = _randn(m, layer.k), _randn(own, layer.n), _randn(layer.n)
    norm = LayerNorm(bias, bias, 1e-5)

    def call(w: LinearWeight | GatedWeight, plan: CommPlan) -> None:
        assert isinstance(w, LinearWeight)
        gemm_reduce_scatter(
            x,
            w,
            peers=ranks.peers,
            row_offsets=offsets,
            residual=residual,
            bias=bias,
            norm=norm,
            plan=plan,
        )

    return call


def _column(layer: Layer, m: int, ranks: Ranks, activation: str) -> Call:
    x = _randn(m, layer.k)

    def call(w: LinearWeight | GatedWeight, plan: CommPlan) -> None:
        column_gemm(x, w, peers=ranks.peers, activation=activation, plan=plan)

    return call


def _reduce(layer: Layer, m: int, ranks: Ranks, activation: str) -> Call:
    x, residual, bias = _randn(m, layer.k), _randn(m, layer.n), _randn(layer.n)
    norm = LayerNorm(bias, bias, 1e-5)

    def call(w: LinearWeight | GatedWeight, plan: CommPlan) -> None:
        assert isinstance(w, LinearWeight)
        gemm_all_reduce(x, w, peers=ranks.peers, residual=residual, bias=bias, norm=norm, plan=plan)

    return call


_CALLS = {
    "all_gather_gemm": _gather,
    "gemm_reduce_scatter": _scatter,
    "gemm_all_reduce": _reduce,
    "column_gemm": _column,
}


def _randn(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=_DTYPE)
