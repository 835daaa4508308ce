"""How a GEMM on a Hopper GPU is cut: a measured table, and a rule where the table has no line."""

import json
import math
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

# A line holds for so many times the most rows that it was measured with; then the rule does.
_BEYOND = 2
_MAX_PLANS = 4096  # kept; batches come in few sizes
_NUM_SMS = 132  # an H200's, on which the table was measured
_USED_SMS = {3: 117, 4: 120, 6: 114, 8: 120}  # CTAs per cluster -> SMs that such clusters fill
# Few rows of logits of a large vocabulary are cuBLAS's: 151936 x 1024, bf16, takes it 88 us for 8
# rows and 123 for 256, small-m tiles 117 to 194, those for many 120 from 256 rows on (H200).
_WORDS, _WORDS_ROWS = 1 << 16, 256
# What linear_rotary has. From so many rows on one of them takes less than few- tilings and a kernel
# for the rotation: 1024 x 2304 x 768, f16, H200: 10.0 us against 11.1; 512 rows 7.7 against 7.2.
_ROTARY_TILINGS, _ROTARY_ROWS = ("128x192", "192x128", "128x128"), 1024
_GATED_COLUMNS = 64  # tiles that can gate have a multiple of them
_SPLIT_KS = (1, 2, 3, 4, 6, 8)
_SPLIT_FEATURES = 128  # k that each of several CTAs of a tile has at least
# Rows for which a tiling that serves all numbers of rows is chosen.
_INVARIANT_ROWS = (32, 128, 512, 2048, 8192, 32768)

# Constants of the prediction: microseconds per launch, and per block of a tile's features, which
# takes as long as its products or as its operands' way from L2. Time per product: of one SM at full
# clock, and where all SMs together draw all power that the GPU may; SMs that are idle in the last
# wave draw none.
_BLOCK_FEATURES = 64
_START_US = 1.33
_CLOCK_SUM_US = 2.35e-5
_SUM_US = 2.55e-5
_ROW_US = 1.34e-3
# Where L2 does not hold the weights, and rows are more than a band has, tiles of 128 x 192 draw the
# least power: in samples of 20 to 90 ms others take 1 to 19 % longer. Shorter ones, taken in turn,
# do not show it.
_FRUGAL = "128x192"
_OTHERS = 1.04
_BAND_ROWS = 2048
_L2_BYTES = 24 << 20
# Small-m tiles take turns on an SM with few stages each, and share nothing that they read:
# with such weights they lose that much and more from 256 rows on (1.3 to 1.7, 4096 to 49152 columns
# and features).
_TURNS_FROM_ROWS = 129
_TURNS = 1.4
_PUSH_US = 2.34e-4  # per sum that several CTAs share
_ROUND_US = 0.66  # per wave of CTAs that begin when others have ended
_PAIR_US = 0.05  # per round of tiles in pairs: faster for some sizes, which the table names


@dataclass(frozen=True, slots=True)
class LinearPlan:
    """tiling: the kernel's index of it, or None for cuBLAS.  split_k: CTAs that share k."""

    tiling: int | None
    split_k: int = 1


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the table.

    plans: (most rows, tiling, split_k) by rising rows.  residual_in_norm: those of the rows for
    which a residual costs less where the norm behind the product reads it.  normalized: those for
    which the product, a residual and a layer norm are fastest as one kernel.
    """

    plans: tuple[tuple[int, str, int], ...]
    residual_in_norm: frozenset[int] = frozenset()
    normalized: frozenset[int] = frozenset()
    parts: tuple[tuple[int, str | None, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Tiling:
    """One way to cut the product, as the kernel names it: tiles of rows x columns."""

    index: int
    name: str
    rows: int
    columns: int
    is_small_m: bool

    @property
    def comes_in_pairs(self) -> bool:
        """Whether a cluster works on two tiles, one below the other."""
        return self.name.endswith("pair") if self.is_small_m else not self.name.endswith("single")

    @property
    def split_ks(self) -> Sequence[int]:
        """How many CTAs may share k."""
        return _SPLIT_KS if self.is_small_m and not self.comes_in_pairs else (1,)

    def num_tiles(self, m: int, n: int) -> int:
        """Tiles that cover [m, n]."""
        pair = 2 if self.comes_in_pairs else 1
        return -(-m // (pair * self.rows)) * pair * -(-n // self.columns)


@lru_cache(_MAX_PLANS)
def plan_linear(m: int, n: int, k: int, *, dtype: str, epilogue: str) -> LinearPlan:
    """The plan of the product [m, k] x [k, n].

    dtype: "fp16" or "bf16".  epilogue: "bias", "gelu", "residual" or "gated".
    Rows fall into the table's buckets, so that a row's bits change at few values of m.
    """
    line = _line_or_stand_in(n, k, dtype, epilogue)
    if line is None and n >= _WORDS and m <= _WORDS_ROWS:
        return LinearPlan(None)
    if line is None:
        return _by_rule(tilings(), m, n, k)
    most_rows = line.plans[-1][0]
    if m > _BEYOND * most_rows:
        return _by_rule(tilings(), m, n, k)
    _, name, split_k = line.plans[_bucket(m, [rows for rows, _, _ in line.plans])]
    if name == CUBLAS:
        return LinearPlan(None)
    by_name = {tiling.name: tiling.index for tiling in tilings()}
    # A table of another version may name a tiling that this build does not have.
    return LinearPlan(by_name[name], split_k) if name in by_name else _by_rule(tilings(), m, n, k)


@lru_cache(_MAX_PLANS)
def leaves_residual(m: int, n: int, k: int, *, dtype: str) -> bool:
    """Whether a residual should be added by the norm that follows, not by the product."""
    line = _line(n, k, dtype, RESIDUAL)
    if line is None:
        return not tilings()
    rows = [most for most, _, _ in line.plans]
    return rows[_bucket(m, rows)] in line.residual_in_norm


@lru_cache(_MAX_PLANS)
def norms_rows(m: int, n: int, k: int, *, dtype: str) -> bool:
    """Whether a product should add a residual and norm its rows itself, where a kernel can."""
    line = _line(n, k, dtype, RESIDUAL)
    if line is None:
        return False
    rows = [most for most, _, _ in line.plans]
    return rows[_bucket(m, rows)] in line.normalized


@lru_cache(_MAX_PLANS)
def plan_parts(m: int, n: int, k: int, *, dtype: str) -> LinearPlan | None:
    """The plan of a product whose shares of k the norm behind it adds up; None: it should not."""
    parts = parts_in_table(n, k, dtype)
    if not parts or not 0 < m <= parts[-1][0]:
        return None
    _, name, split_k = parts[_bucket(m, [rows for rows, _, _ in parts])]
    found = (tiling.index for tiling in tilings() if tiling.name == name)
    return next((LinearPlan(index, split_k) for index in found), None)


def parts_in_table(n: int, k: int, dtype: str) -> tuple[tuple[int, str | None, int], ...]:
    """Line.parts of such a product with a residual; empty where there is no line."""
    line = _line(n, k, dtype, RESIDUAL)
    return () if line is None else line.parts


@lru_cache(_MAX_PLANS)
def plan_gated(m: int, n: int, k: int, *, dtype: str) -> LinearPlan:
    """The plan of a gated product of n columns, gates and values; `dtype` as plan_linear's."""
    able = gating_tilings()
    plan = plan_linear(m, n, k, dtype=dtype, epilogue=GATED)
    if any(tiling.index == plan.tiling for tiling in able):
        return plan
    return _by_rule(able, m, n, k)


@lru_cache(_MAX_PLANS)
def plan_rotary(m: int, n: int, k: int, *, dtype: str, batch_invariant: bool) -> LinearPlan:
    """The plan of a product whose heads of 64 features are rotated by its epilogue.

    tiling: None where few rows are faster in tilings that cannot, with a kernel for the rotation.
    """
    if batch_invariant:
        plan = plan_invariant(n, k)
    else:
        plan = plan_linear(m, n, k, dtype=dtype, epilogue="bias")
    able = [tiling for tiling in tilings() if tiling.name in _ROTARY_TILINGS]
    if any(tiling.index == plan.tiling for tiling in able):
        return plan
    takes_few = batch_invariant or m < _ROTARY_ROWS or not able
    return LinearPlan(None) if takes_few else _by_rule(able, m, n, k)


@lru_cache(_MAX_PLANS)
def plan_invariant(n: int, k: int, *, is_gated: bool = False) -> LinearPlan:
    """The plan of a product of n columns and k features that holds for every number of rows.

    One tiling and one CTA for all of k: a row's sums are taken in one order, whatever m is. Of the
    tilings the one whose predicted time, over that of the fastest plan, has the least geometric
    mean for numbers of rows between 32 and 32768.
    """
    able = gating_tilings() if is_gated else list(tilings())
    if not able:
        return LinearPlan(None)
    fastest = {m: ranked_plans(able, m, n, k)[0][0] for m in _INVARIANT_ROWS}

    def loss(tiling: Tiling) -> float:
        return sum(math.log(_predicted_us(tiling, 1, m, n, k) / fastest[m]) for m in fastest)

    return LinearPlan(min(able, key=loss).index)


def fastest_whole(able: Sequence[Tiling], m: int, n: int, k: int) -> Tiling:
    """The tiling of the least predicted time where one CTA has all of k.

    k: of 16-bit features, two of 8 bits as one: they take as many bytes and as long to multiply.
    """
    return min(able, key=lambda tiling: _predicted_us(tiling, 1, m, n, k))


def gating_tilings() -> list[Tiling]:
    """Those whose tiles hold a block of gates and the values beside it."""
    return [tiling for tiling in tilings() if tiling.columns % _GATED_COLUMNS == 0]


@cache
def tilings() -> tuple[Tiling, ...]:
    """The tilings that the kernel was built with; empty where there is no kernel."""
    return tuple(Tiling(i, *row) for i, row in enumerate(native.linear_tilings()))


def _line(n: int, k: int, dtype: str, epilogue: str) -> Line | None:
    """The line measured in this dtype, or in f16: bf16 differs in time only by its power."""
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
    """The index of the first of the rising `rows` that holds m, or the last index."""
    return min(bisect_left(rows, m), len(rows) - 1)


@cache
def _table() -> dict[tuple[int, int, str, str], Line]:
    """(n, k, dtype, epilogue) -> what was measured for it."""
    text = (files("bytetx.ops") / TABLE_FILE).read_text(encoding="utf-8")
    return {
        (line["n"], line["k"], line["dtype"], line["epilogue"]): Line(
            plans=tuple((rows, name, split_k) for rows, name, split_k in line["plans"]),
            residual_in_norm=frozenset(line.get("residual_in_norm", ())),
            normalized=frozenset(line.get("normalized", ())),
            parts=tuple((rows, name, split_k) for rows, name, split_k in line.get("parts", ())),
        )
        for line in json.loads(text)["lines"]
    }


def ranked_plans(able: Sequence[Tiling], m: int, n: int, k: int) -> list[tuple[float, Tiling, int]]:
    """(predicted microseconds, tiling, split_k) of every way to cut a product, by rising time."""
    return sorted(
        (
            (_predicted_us(tiling, split_k, m, n, k), tiling, split_k)
            for tiling in able
            for split_k in tiling.split_ks
            if split_k == 1 or k >= split_k * _SPLIT_FEATURES
        ),
        key=lambda plan: round(plan[0], 3),  # equal ones in the order of `able`
    )


def _predicted_us(tiling: Tiling, split_k: int, m: int, n: int, k: int) -> float:
    """Predicted time on an H200: whole tiles, spare rows and columns included, in whole waves.

    Fitted to the times of plans for 220 products of BERT's sizes, and for 125 of Llama's and
    GPT-3's: the chosen plan takes 3 % more than the fastest in the mean and at most 28 %; for the
    large products 1.3 % and 11 %.
    """
    if not tiling.is_small_m:
        return _predicted_many_us(tiling, m, n, k)
    waves = -(-tiling.num_tiles(m, n) * split_k // _USED_SMS.get(split_k, _NUM_SMS))
    blocks = -(-k // (_BLOCK_FEATURES * split_k))
    sums = tiling.rows * tiling.columns
    fetched_rows = min(tiling.rows, m)
    block_us = max(sums * _SUM_US, (fetched_rows + tiling.columns) * _ROW_US)
    if waves > 1 and m >= _TURNS_FROM_ROWS and 2 * n * k > _L2_BYTES:
        block_us *= _TURNS
    joining_us = 0.0 if split_k == 1 else sums * _PUSH_US
    if tiling.comes_in_pairs:
        joining_us = _PAIR_US
    return _START_US + waves * (blocks * block_us + joining_us) + (waves - 1) * _ROUND_US


def _predicted_many_us(tiling: Tiling, m: int, n: int, k: int) -> float:
    """Whole waves at full clock, or all tiles at the clock that the GPU's power allows."""
    num_tiles = tiling.num_tiles(m, n)
    sums = tiling.rows * tiling.columns
    block_us = max(sums * _CLOCK_SUM_US, (tiling.rows + tiling.columns) * _ROW_US)
    powered_us = sums * _SUM_US
    if tiling.name != _FRUGAL and m > _BAND_ROWS and 2 * n * k > _L2_BYTES:
        powered_us *= _OTHERS
    us = max(-(-num_tiles // _NUM_SMS) * block_us, num_tiles / _NUM_SMS * powered_us)
    return _START_US + -(-k // _BLOCK_FEATURES) * us


def _by_rule(able: Sequence[Tiling], m: int, n: int, k: int) -> LinearPlan:
    ranked = ranked_plans(able, m, n, k)
    return LinearPlan(ranked[0][1].index, ranked[0][2]) if ranked else LinearPlan(None)
