"""How a GEMM on a Hopper GPU is cut: a measured table, and a rule where the table has no line."""

import json
from bisect import bisect_left
from collections.abc import Sequence
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
GATED = "gated"

_MAX_PLANS = 4096  # kept; batches come in few sizes
_NUM_SMS = 132  # of an H200, on which the table was measured
_FEW_ROWS = 384  # above, tiles of many rows win (H200; without a table's line)
# Few rows of logits of a large vocabulary are cuBLAS's: 151936 x 1024, bf16, takes it 88 us for 8
# rows and 123 for 256, tiles for few rows 117 to 194, those for many 120 from 256 rows on (H200).
_WORDS, _WORDS_ROWS = 1 << 16, 256
_GATED_COLUMNS = (64, 128)  # of tiles that can gate
_SPLIT_FEATURES = 512  # k that one of several CTAs of a tile should have at least


@dataclass(frozen=True, slots=True)
class LinearPlan:
    """tiling: the kernel's index of it, or None for cuBLAS.  splits: CTAs that share k."""

    tiling: int | None
    splits: int = 1


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the table.

    plans: (most rows, tiling, splits) by rising rows.  left_to_norm: those of the rows for which
    a residual costs less where the norm behind the product reads it.  normed: those for which the
    product, a residual and a layer norm are fastest as one kernel.
    """

    plans: tuple[tuple[int, str, int], ...]
    left_to_norm: frozenset[int] = frozenset()
    normed: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Tiling:
    """One way to cut the product, as the kernel names it: tiles of rows x columns."""

    index: int
    name: str
    rows: int
    columns: int
    is_for_few_rows: bool

    def num_tiles(self, m: int, n: int) -> int:
        """Tiles that cover [m, n]."""
        return -(-m // self.rows) * -(-n // self.columns)


@lru_cache(_MAX_PLANS)
def plan_linear(m: int, n: int, k: int, *, dtype: str, epilogue: str) -> LinearPlan:
    """The plan of the product [m, k] x [k, n].

    dtype: "fp16" or "bf16".  epilogue: "bias", "gelu", "residual" or "gated".
    Rows fall into the table's buckets, so that a row's bits change with m at few places.
    """
    line = _line_or_stand_in(n, k, dtype, epilogue)
    if line is None and n >= _WORDS and m <= _WORDS_ROWS:
        return LinearPlan(None)
    if line is None:
        return _by_rule(m, n, k)
    _, name, splits = line.plans[_bucket(m, [rows for rows, _, _ in line.plans])]
    if name == CUBLAS:
        return LinearPlan(None)
    by_name = {tiling.name: tiling.index for tiling in tilings()}
    # A table of another version may name a tiling that this build does not have.
    return LinearPlan(by_name[name], splits) if name in by_name else _by_rule(m, n, k)


@lru_cache(_MAX_PLANS)
def leaves_residual(m: int, n: int, k: int, *, dtype: str) -> bool:
    """Whether a residual should be added by the norm that follows, not by the product."""
    line = _line(n, k, dtype, RESIDUAL)
    if line is None:
        return not tilings()
    rows = [most for most, _, _ in line.plans]
    return rows[_bucket(m, rows)] in line.left_to_norm


@lru_cache(_MAX_PLANS)
def norms_rows(m: int, n: int, k: int, *, dtype: str) -> bool:
    """Whether a product should add a residual and norm its rows itself, where a kernel can."""
    line = _line(n, k, dtype, RESIDUAL)
    if line is None:
        return False
    rows = [most for most, _, _ in line.plans]
    return rows[_bucket(m, rows)] in line.normed


@lru_cache(_MAX_PLANS)
def plan_gated(m: int, n: int, k: int, *, dtype: str) -> LinearPlan:
    """The plan of a gated product of n columns, gates and values; `dtype` as plan_linear's."""
    able = gating_tilings()
    plan = plan_linear(m, n, k, dtype=dtype, epilogue=GATED)
    if any(tiling.index == plan.tiling for tiling in able):
        return plan
    few = [tiling for tiling in able if tiling.is_for_few_rows == (m <= _FEW_ROWS)]
    if not few:
        return LinearPlan(None)
    return LinearPlan(min(few, key=lambda tiling: _waves(tiling, m, n)).index)


def gating_tilings() -> list[Tiling]:
    """Those whose tiles hold a block of gates and the values beside it."""
    return [tiling for tiling in tilings() if tiling.columns in _GATED_COLUMNS]


@cache
def tilings() -> tuple[Tiling, ...]:
    """What the kernel can do; empty where there is none."""
    return tuple(Tiling(i, *row) for i, row in enumerate(native.linear_tilings()))


def _line(n: int, k: int, dtype: str, epilogue: str) -> Line | None:
    """What was measured in this dtype, or in f16: bf16 takes the same time but for its power."""
    return _table().get((n, k, dtype, epilogue)) or _table().get((n, k, "fp16", epilogue))


def _line_or_stand_in(n: int, k: int, dtype: str, epilogue: str) -> Line | None:
    """The line of the epilogue, or of one that costs like it.

    A residual's before the bias's for an activation: the latter names cuBLAS where that is a little
    faster, and then the activation is a pass of its own (65536 x 1024 x 4096, f16, H200: 879 us
    with cuBLAS and GELU, 807 with a fused residual).
    """
    stand_ins = (RESIDUAL, "bias") if epilogue == "gelu" else ("bias",)
    lines = (_line(n, k, dtype, name) for name in (epilogue, *stand_ins))
    return next((line for line in lines if line is not None), None)


def _bucket(m: int, rows: Sequence[int]) -> int:
    """The place of the first of the rising `rows` that holds m, or the last place."""
    return min(bisect_left(rows, m), len(rows) - 1)


@cache
def _table() -> dict[tuple[int, int, str, str], Line]:
    """(n, k, dtype, epilogue) -> what was measured for it."""
    text = (files("bytetx.ops") / TABLE_FILE).read_text(encoding="utf-8")
    return {
        (line["n"], line["k"], line["dtype"], line["epilogue"]): Line(
            plans=tuple((rows, name, splits) for rows, name, splits in line["plans"]),
            left_to_norm=frozenset(line.get("left_to_norm", ())),
            normed=frozenset(line.get("normed", ())),
        )
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
    return -(-tiling.num_tiles(m, n) // _NUM_SMS) * tiling.rows * tiling.columns


def _few_rows_by_rule(m: int, n: int, k: int) -> LinearPlan:
    few = [tiling for tiling in tilings() if tiling.is_for_few_rows]
    # The largest tiles that still give half the SMs one: large tiles read operands less often.
    filling = [tiling for tiling in few if tiling.num_tiles(m, n) >= _NUM_SMS // 2]
    if filling:
        best = max(filling, key=lambda tiling: tiling.rows * tiling.columns)
        return LinearPlan(best.index)
    smallest = min(few, key=lambda tiling: tiling.rows * tiling.columns)
    room = _NUM_SMS // max(1, smallest.num_tiles(m, n))
    return LinearPlan(smallest.index, max(1, min(8, room, k // _SPLIT_FEATURES)))
