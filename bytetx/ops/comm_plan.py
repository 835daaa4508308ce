"""How a layer that carries its communication runs on Hopper: a measured table, a rule beyond it.

All ranks must come to the same answer, or one waits for another in vain. So the table is for even
shares, whose sizes are every rank's; the rule looks at nothing that may differ between ranks.
"""

import json
import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from importlib.resources import files
from typing import Literal

from bytetx.ops import native

TABLE_FILE = "comm_h200.json"
Op = Literal["all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce", "column_gemm"]

_DEALT_OPS = ("all_gather_gemm", "gemm_reduce_scatter")

# Ways without a fused kernel: a collective behind cuBLAS, or behind what `linear` takes; or, of
# gemm_all_reduce, this package's own all-reduce, which adds and norms what the op adds and norms.
CUBLAS, LINEAR = "cublas", "linear"
# All rows to all ranks, or in two exchanges: parts to the owner of a row, its sum to all.
PUSHES = CUBLAS_PUSH, LINEAR_PUSH = "cublas-push", "linear-push"
TWO_SHOTS = CUBLAS_TWO_SHOT, LINEAR_TWO_SHOT = "cublas-two-shot", "linear-two-shot"
# Of the ops that deal rows: cuBLAS beside copy engines that move them.
COPIED = "copied"
# Before the name of a tiling of gemm_reduce_scatter, which adds the other ranks' parts to products
# of this rank's rows: that of the last GEMM beside copies, or of the fused kernel's last tiles.
COPIED_ADDING, ADDING = "copied-", "adding-"
_UNFUSED = (CUBLAS, LINEAR, *PUSHES, *TWO_SHOTS, COPIED)
# Of gemm_all_reduce: tilings of the many-row GEMM, whose tiles go to every rank's slots; tilings
# whose tiles go to the owner of their rows alone, who sums them for all.
MANY, DEALT = "many-", "dealt-"

_MAX_PLANS = 4096
_NUM_SMS = 132
# Of gemm_all_reduce: bytes that a rank sends where every row goes to every other one, beyond which
# a kernel of its own sends them, and beyond which, of more than two ranks, two exchanges cost less;
# rows beyond which a GEMM that sends its tiles gains nothing by it; rows that weights stream past,
# and columns beyond which more rows than these take a second wave of CTAs.
_MOST_SENT_BYTES = 8 << 20
_FEW_SENT_BYTES = 512 << 10
_MOST_DEALT_ROWS = 384
_STREAMED_ROWS = 64
_MOST_COLUMNS = 64 * _NUM_SMS
_SPLIT_FEATURES = 384  # k that one of several CTAs of a tile should have at least
_MAX_SPLIT_K = 5  # clusters of eight start late: 1024 columns, 2048 features, 6.3 us against 4.8
# Tilings of the ops that deal rows: name -> columns, and what a tile of all_gather_gemm takes
# beside its columns' share (two H200s, bf16, 4096 rows, 12288 features to 6144: 938 us and 992).
_MANY_ROWS = {"128x192": (192, 1.0), "128x128": (128, 1.06)}
_GATED_TILING = "128x128"


@dataclass(frozen=True, slots=True)
class CommPlan:
    """way: the name of the fused kernel's tiling, or one without.  split_k: CTAs that share k, of
    gemm_all_reduce."""

    way: str
    split_k: int = 1

    @property
    def is_fused(self) -> bool:
        return self.way not in _UNFUSED and not self.way.startswith(COPIED_ADDING)

    @property
    def is_pushed(self) -> bool:
        """Whether a product goes to the other ranks by a kernel of its own."""
        return self.way in PUSHES or self.way in TWO_SHOTS

    @property
    def is_two_shot(self) -> bool:
        """Whether a gemm_all_reduce has two exchanges: one rank sums a row, and sends it to all."""
        return self.way in TWO_SHOTS or self.way.startswith(DEALT)

    @property
    def uses_slots(self) -> bool:
        """Whether a gemm_all_reduce has its partial sums in slots, not in the staging buffer."""
        return self.way.startswith(MANY)

    @property
    def is_copied(self) -> bool:
        return self.way == COPIED or self.way.startswith(COPIED_ADDING)

    @property
    def adds_parts(self) -> bool:
        """Whether tiles add the other ranks' parts, in place of a kernel that sums all."""
        return self.way.startswith((ADDING, COPIED_ADDING))

    @property
    def tiling(self) -> str:
        return self.way.removeprefix(ADDING).removeprefix(COPIED_ADDING)

    @property
    def is_cublas(self) -> bool:
        return self.way in (CUBLAS, CUBLAS_PUSH, CUBLAS_TWO_SHOT) or self.is_copied


@dataclass(frozen=True, slots=True)
class Layer:
    """Sizes of a rank's share of one layer in a group of `tp` ranks: [m, k] x [k, n].

    is_even: whether all ranks have shares of these sizes.
    """

    op: Op
    tp: int
    n: int
    k: int
    is_gated: bool = False
    is_even: bool = True


@lru_cache(_MAX_PLANS)
def plan_comm(layer: Layer, m: int) -> CommPlan:
    """The plan of a layer whose kernel takes m rows (of all ranks together)."""
    if layer in _planned:
        return _planned[layer]
    tp = _measured_tp(layer)
    line = _nearest(replace(layer, tp=tp)) if layer.is_even else None
    if line is not None:
        # Of another size of group, the plan where a rank has as many rows.
        alike = m * tp // layer.tp
        _, way, split_k = line[_bucket(layer.op, alike, [rows for rows, _, _ in line])]
        # A table of another version may name a tiling that this build does not have.
        plan = CommPlan(way, split_k)
        if way in _UNFUSED or plan.tiling in tilings(layer):
            return plan
    return _by_rule(layer, m)


@contextmanager
def planned(plans: Mapping[Layer, CommPlan]) -> Iterator[None]:
    """Inside, these layers have these plans, whatever the table says: for who measures them."""
    _planned.update(plans)
    plan_comm.cache_clear()
    try:
        yield
    finally:
        _planned.clear()
        plan_comm.cache_clear()


_planned: dict[Layer, CommPlan] = {}


def _bucket(op: Op, m: int, rows: list[int]) -> int:
    """The place in rising `rows`: few take a tile that holds them all, many are nearest to one."""
    above = bisect_left(rows, m)
    if above == len(rows) or (above and op in _DEALT_OPS and m * m < rows[above - 1] * rows[above]):
        return above - 1
    return above


def tilings(layer: Layer) -> list[str]:
    """What the op's kernel can be cut in; column_gemm has none of its own."""
    if layer.op == "column_gemm":
        return []
    if layer.op == "gemm_all_reduce":
        return [name for name, *_ in native.gemm_all_reduce_tilings()]
    return [_GATED_TILING] if layer.is_gated else list(_MANY_ROWS)


@cache
def tiling_index(op: Op, name: str) -> int:
    """As the kernel counts them."""
    own = native.gemm_all_reduce_tilings() if op == "gemm_all_reduce" else native.linear_tilings()
    return next(i for i, tiling in enumerate(own) if tiling[0] == name)


def _by_rule(layer: Layer, m: int) -> CommPlan:
    if layer.op == "column_gemm":
        return CommPlan(LINEAR)
    if layer.op == "gemm_all_reduce":
        sent = (layer.tp - 1) * m * layer.n * 2
        if layer.tp > 2 and sent > _FEW_SENT_BYTES:
            return _two_shot_by_rule(m, layer.n, layer.k)
        if sent > _MOST_SENT_BYTES or (m > _STREAMED_ROWS and layer.n > _MOST_COLUMNS):
            return CommPlan(CUBLAS_PUSH)
        return _push_by_rule(m, layer.n, layer.k)

    def work(name: str) -> float:
        """Of the busiest SM."""
        columns, factor = _MANY_ROWS[name]
        tiles = -(-m // 128) * -(-layer.n // columns)
        is_gather = layer.op == "all_gather_gemm"
        return -(-tiles // _NUM_SMS) * columns * (factor if is_gather else 1.0)

    return CommPlan(min(tilings(layer), key=work))


def _two_shot_by_rule(m: int, n: int, k: int) -> CommPlan:
    """As measured on four H200s: the GEMM that sends its tiles, up to some hundred rows."""
    if m > _MOST_DEALT_ROWS or (m > 2 * _STREAMED_ROWS and n > _MOST_COLUMNS):
        return CommPlan(LINEAR_TWO_SHOT)
    pushed = _push_by_rule(m, n, k)
    return CommPlan(DEALT + pushed.way, pushed.split_k)


def _push_by_rule(m: int, n: int, k: int) -> CommPlan:
    """As measured on two H200s: wide layers wait for bytes, narrow ones for clusters to start."""
    is_narrow = n <= 16 * _NUM_SMS
    rows = next((rows for rows in (16, 32, 64) if m <= rows), 64 if is_narrow else 128)
    if not is_narrow and m > 128:
        rows = 256
    if rows <= 32:
        columns = 128 if n <= _MOST_COLUMNS else 64
    else:
        columns = 64 if rows == 256 or (is_narrow and m <= rows) else 128
    tiles = -(-m // rows) * -(-n // columns)
    split_k = math.ceil((0.45 if is_narrow else 0.9) * _NUM_SMS / tiles)
    if not is_narrow and rows < 256:
        split_k = max(2, split_k)
    return CommPlan(f"{rows}x{columns}", max(1, min(_MAX_SPLIT_K, split_k, k // _SPLIT_FEATURES)))


def _measured_tp(layer: Layer) -> int:
    """The size of group whose lines a layer takes: its own, or the nearest, of ops that deal rows.

    Four ranks do in 83 of 105 plans as two of them say, in 60 as the rule.
    """
    kind = (layer.op, layer.is_gated)
    sizes = {tp for op, tp, _, _, is_gated in _table() if (op, is_gated) == kind}
    if not sizes or layer.op not in _DEALT_OPS:
        return layer.tp
    return min(sizes, key=lambda tp: abs(math.log(tp / layer.tp)))


def _nearest(layer: Layer) -> list[tuple[int, str, int]] | None:
    """The line of the layer, or of the one nearest in size; None without any of its kind."""
    alike = {
        (n, k): plans
        for (op, tp, n, k, is_gated), plans in _table().items()
        if (op, tp, is_gated) == (layer.op, layer.tp, layer.is_gated)
    }
    if not alike or not layer.n or not layer.k:
        return None

    def distance(sizes: tuple[int, int]) -> float:
        n, k = sizes
        return abs(math.log(n / layer.n)) + abs(math.log(k / layer.k))

    return alike[min(alike, key=distance)]


@cache
def _table() -> dict[tuple[str, int, int, int, bool], list[tuple[int, str, int]]]:
    """(op, tp, n, k, is_gated) -> (most rows, way, split_k) by rising rows."""
    text = (files("bytetx.ops") / TABLE_FILE).read_text(encoding="utf-8")
    return {
        (line["op"], line["tp"], line["n"], line["k"], line["is_gated"]): [
            (rows, way, split_k) for rows, way, split_k in line["plans"]
        ]
        for line in json.loads(text)["lines"]
    }
