"""`bytetx bench ag_gemm | gemm_rs | gemm_ar --tune FILE`: every way to run the layers of a group.

bytetx/ops/comm_plan.py reads the table; lines of other ops and sizes of groups stay in it.
"""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from bytetx.bench.gpu import DTYPES, Run, num_rotated
from bytetx.bench.ranks import Ranks, ranks_us
from bytetx.bench.tp_models import MODELS, spec_of
from bytetx.ops.comm_gemm import (
    RowNorm,
    all_gather_gemm,
    column_gemm,
    gemm_all_reduce,
    gemm_reduce_scatter,
)
from bytetx.ops.comm_plan import (
    COPIED,
    CUBLAS,
    CUBLAS_PUSH,
    LINEAR,
    LINEAR_PUSH,
    CommPlan,
    Layer,
    Op,
    tilings,
)
from bytetx.ops.gated import GatedWeight, prepare_gated
from bytetx.ops.linear import LinearWeight, prepare_linear
from bytetx.parallel.layout import deal, has_even_shares, split_model

OPS: dict[str, Op] = {
    "ag_gemm": "all_gather_gemm",
    "gemm_rs": "gemm_reduce_scatter",
    "gemm_ar": "gemm_all_reduce",
}
# Measured with the op beside which it is needed: for rows that every rank holds.
_COLUMN: Op = "column_gemm"
_FEW_ROWS = (16, 32, 64, 128, 256, 512)
_MANY_ROWS = (256, 512, 1024, 2048, 4096, 8192, 16384)
_COPIED_ROWS = 1024  # below, copies take longer to start than they hide
_DEALT_TILE = 128  # rows; of the scheme that row_schemes.json has for most steps
_SPLITS = (1, 2, 4, 5)
_SMS = 132
_SAMPLES = 3
# Of a sample, from so many rows on; where they keep a GPU at its power limit, longer than it takes
# to get there.
_SAMPLE_US = ((8192, 25_000), (2048, 12_000), (0, 1_000))
_DTYPE = DTYPES["bf16"]

Call = Callable[[LinearWeight | GatedWeight, CommPlan], None]


def tune_comm(suite: str, path: Path, ranks: Ranks) -> Iterator[str]:
    """Measures, writes (on rank 0) and yields a line after the other. All ranks call it."""
    op, lines = OPS[suite], []
    layers = layers_of(op, ranks.size)
    if op == "gemm_all_reduce":
        layers |= layers_of(_COLUMN, ranks.size)
    for layer, activation in layers.items():
        rows = _MANY_ROWS if op in ("all_gather_gemm", "gemm_reduce_scatter") else _FEW_ROWS
        plans = [_best(layer, m, ranks, activation=activation) for m in rows]
        sizes = {
            "op": layer.op,
            "tp": layer.tp,
            "n": layer.n,
            "k": layer.k,
            "is_gated": layer.is_gated,
        }
        lines.append(
            sizes | {"plans": [[m, p.way, p.splits] for m, p in zip(rows, plans, strict=True)]}
        )
        if ranks.group.rank == 0:
            write_lines(path, lines, device=torch.cuda.get_device_name())
        yield json.dumps(lines[-1])


def write_lines(path: Path, lines: list[dict[str, object]], *, device: str) -> None:
    """Puts lines of one op and size of group in the place of those that the table has."""
    kept = json.loads(path.read_text())["lines"] if path.exists() else []
    ours = {(line["op"], line["tp"]) for line in lines}
    kept = [line for line in kept if (line["op"], line["tp"]) not in ours]
    body = ",\n  ".join(json.dumps(line) for line in [*kept, *lines])
    text = f'{{"device": {json.dumps(device)}, "lines": [\n  {body}\n]}}\n'
    path.write_text(text, encoding="utf-8")


def layers_of(op: Op, tp: int) -> dict[Layer, str]:
    """Of all models whose shares are even, each size once, with what follows the product."""
    found: dict[Layer, str] = {}
    for model in MODELS:
        spec = spec_of(model)
        if not has_even_shares(spec, tp):
            continue
        split = split_model(spec, rank=0, size=tp)
        heads, inner, hidden = len(split.heads), len(split.inner), spec.hidden_size
        if op in ("all_gather_gemm", _COLUMN):
            qkv = (heads + 2 * len(split.kv_heads)) * spec.head_dim
            is_gated = "ffn_gate" in spec.layer
            found[Layer(op, tp, qkv, hidden)] = "none"
            found[Layer(op, tp, inner * (1 + is_gated), hidden, is_gated)] = spec.activation
        else:
            found[Layer(op, tp, hidden, heads * spec.head_dim)] = "none"
            found[Layer(op, tp, hidden, inner)] = "none"
    return found


def candidates(layer: Layer, m: int) -> list[CommPlan]:
    """Every way that can be the best."""
    found = [CommPlan(LINEAR), CommPlan(CUBLAS)]
    if layer.op == "gemm_all_reduce":
        found += [CommPlan(LINEAR_PUSH), CommPlan(CUBLAS_PUSH)]
    elif layer.op != _COLUMN and m >= _COPIED_ROWS:
        found.append(CommPlan(COPIED))
    for name in tilings(layer):
        if layer.op != "gemm_all_reduce":
            found.append(CommPlan(name))
            continue
        rows, columns = map(int, name.split("x"))
        if rows > 64 and m <= 64 or rows <= 64 and m > 256:
            continue
        tiles = -(-m // rows) * -(-layer.n // columns)
        found += [CommPlan(name, s) for s in _SPLITS if s == 1 or tiles * s <= 2 * _SMS]
    return found


def _best(layer: Layer, m: int, ranks: Ranks, *, activation: str) -> CommPlan:
    torch.manual_seed(0)
    weights = _weights(layer)
    call = _CALLS[layer.op](layer, m, ranks, activation)
    plans = candidates(layer, m)

    def in_turn(plan: CommPlan) -> None:
        for w in weights:
            call(w, plan)

    runs: dict[str, Run] = {str(i): partial(in_turn, plan) for i, plan in enumerate(plans)}
    sample_us = next(us for rows, us in _SAMPLE_US if m >= rows)
    options = {"required": runs, "samples": _SAMPLES, "sample_us": sample_us}
    found = ranks_us(runs, [], **options)
    return plans[int(min(found, key=found.__getitem__))]


def _weights(layer: Layer) -> list[LinearWeight | GatedWeight]:
    """As many as keep each call from finding its own in L2."""
    n, k = layer.n, layer.k
    count = num_rotated(n * k * _DTYPE.itemsize)
    if layer.is_gated:
        pairs = ((_randn(n // 2, k), _randn(n // 2, k)) for _ in range(count))
        return [prepare_gated(gate, up, prepack=False) for gate, up in pairs]
    bias = _randn(n) if layer.op in ("all_gather_gemm", _COLUMN) else None
    return [prepare_linear(_randn(n, k), bias, prepack=False) for _ in range(count)]


def _gather(layer: Layer, m: int, ranks: Ranks, activation: str) -> Call:
    offsets = deal(m, ranks.size, step=min(_DEALT_TILE, m // ranks.size))
    own = offsets[ranks.group.rank + 1] - offsets[ranks.group.rank]
    x = _randn(own, layer.k)

    def call(w: LinearWeight | GatedWeight, plan: CommPlan) -> None:
        options = {"row_offsets": offsets, "activation": activation}
        all_gather_gemm(x, w, peers=ranks.peers, **options, plan=plan)

    return call


def _scatter(layer: Layer, m: int, ranks: Ranks, activation: str) -> Call:
    offsets = deal(m, ranks.size, step=min(_DEALT_TILE, m // ranks.size))
    own = offsets[ranks.group.rank + 1] - offsets[ranks.group.rank]
    x, options = _randn(m, layer.k), _sum_options(layer, own)

    def call(w: LinearWeight, plan: CommPlan) -> None:
        gemm_reduce_scatter(x, w, peers=ranks.peers, row_offsets=offsets, **options, plan=plan)

    return call


def _column(layer: Layer, m: int, ranks: Ranks, activation: str) -> Call:
    x = _randn(m, layer.k)

    def call(w: LinearWeight | GatedWeight, plan: CommPlan) -> None:
        column_gemm(x, w, peers=ranks.peers, activation=activation, plan=plan)

    return call


def _reduce(layer: Layer, m: int, ranks: Ranks, activation: str) -> Call:
    x, options = _randn(m, layer.k), _sum_options(layer, m)

    def call(w: LinearWeight, plan: CommPlan) -> None:
        gemm_all_reduce(x, w, peers=ranks.peers, **options, plan=plan)

    return call


_CALLS = {
    "all_gather_gemm": _gather,
    "gemm_reduce_scatter": _scatter,
    "gemm_all_reduce": _reduce,
    "column_gemm": _column,
}


def _sum_options(layer: Layer, rows: int) -> dict[str, object]:
    vector = _randn(layer.n)
    norm = RowNorm(vector, vector, 1e-5)
    return {"residual": _randn(rows, layer.n), "bias": vector, "norm": norm}


def _randn(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=_DTYPE)
