"""How a GEMM on a Hopper GPU is cut: a measured table, and a rule where the table has no line."""

import json
from bisect import bisect_left
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files

from bytetx.ops import native

CUBLAS = "cublas"
TABLE_FILE = "linear_h200.json"

# What a table's line is measured with; an activation takes the line of the one it costs like.
EPILOGUES = {
    "none": "bias",
    "relu": "bias",
    "gelu": "gelu",
    "gelu_tanh": "gelu",
    "silu": "gelu",
    "tanh": "gelu",
}
RESIDUAL = "residual"

_MAX_PLANS = 4096  # kept; batches come in few sizes
_NUM_SMS = 132  # of an H200, on which the table was measured
_FEW_ROWS = 384  # above, tiles of many rows win (H200; without a table's line)
_GATED_COLUMNS = (64, 128)  # of tiles that can gate
_SPLIT_FEATURES = 512  # k that one of several CTAs of a tile should have at least


@dataclass(frozen=True, slots=True)
class LinearPlan:
    """tiling: the kernel's index of it, or None for cuBLAS.  splits: CTAs that share k."""

    tiling: int | None
    splits: int = 1


@dataclass(frozen=True, slots=True)
class Tiling:
    """One way to cut the product, as the kernel names it: tiles of rows x columns."""

    index: int
    name: str
    rows: int
    columns: int
    is_for_few_rows: bool


@lru_cache(_MAX_PLANS)
def plan_linear(m: int, n: int, k: int, *, dtype: str, epilogue: str) -> LinearPlan:
    """The plan of the product [m, k] x [k, n].

    dtype: "fp16" or "bf16".  epilogue: "bias", "gelu" or "residual".
    Rows fall into the table's buckets, so that a row's bits change with m at few places.
    """
    lines = _table().get((n, k, dtype, epilogue)) or _table().get((n, k, dtype, "bias"))
    if not lines:
        return _by_rule(m, n, k)
    place = bisect_left([rows for rows, _, _ in lines], m)
    _, name, splits = lines[min(place, len(lines) - 1)]
    if name == CUBLAS:
        return LinearPlan(None)
    by_name = {tiling.name: tiling.index for tiling in tilings()}
    # A table of another version may name a tiling that this build does not have.
    return LinearPlan(by_name[name], splits) if name in by_name else _by_rule(m, n, k)


@lru_cache(_MAX_PLANS)
def plan_gated(m: int, n: int, k: int, *, dtype: str) -> LinearPlan:
    """The plan of a gated product of n columns, gates and values; `dtype` as plan_linear's."""
    able = [tiling for tiling in tilings() if tiling.columns in _GATED_COLUMNS]
    plan = plan_linear(m, n, k, dtype=dtype, epilogue="gelu")
    if any(tiling.index == plan.tiling for tiling in able):
        return plan
    few = [tiling for tiling in able if tiling.is_for_few_rows == (m <= _FEW_ROWS)]
    if not few:
        return LinearPlan(None)
    return LinearPlan(min(few, key=lambda tiling: _waves(tiling, m, n)).index)


@cache
def tilings() -> tuple[Tiling, ...]:
    """What the kernel can do; empty where there is none."""
    return tuple(Tiling(i, *row) for i, row in enumerate(native.linear_tilings()))


@cache
def _table() -> dict[tuple[int, int, str, str], list[tuple[int, str, int]]]:
    """(n, k, dtype, epilogue) -> (most rows, tiling, splits), by rising rows."""
    text = (files("bytetx.ops") / TABLE_FILE).read_text(encoding="utf-8")
    return {
        (line["n"], line["k"], line["dtype"], line["epilogue"]): [
            (rows, name, splits) for rows, name, splits in line["plans"]
        ]
        for line in json.loads(text)["lines"]
    }


def _by_rule(m: int, n: int, k: int) -> LinearPlan:
    """The tiling whose tiles fill the SMs with the least work that is thrown away."""
    if not tilings():
        return LinearPlan(None)
    if m <= _FEW_ROWS:
        return _few_rows_by_rule(m, n, k)
    many = [tiling for tiling in tilings() if not tiling.is_for_few_rows]
    return LinearPlan(min(many, key=lambda tiling: _waves(tiling, m, n)).index)


def _waves(tiling: Tiling, m: int, n: int) -> int:
    """Sums that the busiest SM computes: whole tiles, the spare rows and columns included."""
    num_tiles = -(-m // tiling.rows) * -(-n // tiling.columns)
    return -(-num_tiles // _NUM_SMS) * tiling.rows * tiling.columns


def _few_rows_by_rule(m: int, n: int, k: int) -> LinearPlan:
    few = [tiling for tiling in tilings() if tiling.is_for_few_rows]

    def num_tiles(tiling: Tiling) -> int:
        return -(-m // tiling.rows) * -(-n // tiling.columns)

    # The largest tiles that still give half the SMs one: large tiles read operands less often.
    filling = [tiling for tiling in few if num_tiles(tiling) >= _NUM_SMS // 2]
    if filling:
        best = max(filling, key=lambda tiling: tiling.rows * tiling.columns)
        return LinearPlan(best.index)
    smallest = min(few, key=lambda tiling: tiling.rows * tiling.columns)
    room = _NUM_SMS // max(1, num_tiles(smallest))
    return LinearPlan(smallest.index, max(1, min(8, room, k // _SPLIT_FEATURES)))
