"""How a linear layer and its communication run on Hopper: a measured table, a rule beyond it.

All ranks must choose the same plan, or one waits for a message that never comes. The table is
therefore for even shards, whose sizes are the same on every rank; the rule looks at nothing that
may differ between ranks.
"""

import json
import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import cache, lru_cache
from importlib.resources import files
from typing import Literal

from bytetx.ops import native

TABLE_FILE = "comm_h200.json"
Op = Literal["all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce", "column_gemm"]
Gemm = Literal["fused", "fused_small_m", "linear", "cublas"]
Transport = Literal["collective", "peer_store", "copy_engine", "one_shot", "two_shot"]

_SHARDED_OPS = ("all_gather_gemm", "gemm_reduce_scatter")  # their rows are split over the ranks

_MAX_PLANS = 4096
_NUM_SMS = 132
# gemm_all_reduce, as measured on two and four H200s. Above _FUSED_SENT_BYTES sent by a rank, a
# kernel of its own sends the rows; above _ONE_SHOT_SENT_BYTES, with more than two ranks, two
# exchanges cost less than one.
_FUSED_SENT_BYTES = 8 << 20
_ONE_SHOT_SENT_BYTES = 512 << 10
_FUSED_TWO_SHOT_ROWS = 384  # above, a GEMM that sends its own tiles gains nothing
_SMALL_M_ROWS = 64  # up to which the GEMM is bound by its weights
_ONE_WAVE_COLUMNS = 64 * _NUM_SMS  # above, more than 64 rows take a second wave of CTAs
_SPLIT_FEATURES = 384  # fewest features of k for each CTA of a split-k tile
_MAX_SPLIT_K = 5  # clusters of eight start late: 1024 columns, 2048 features, 6.3 us against 4.8
# Tiles of the ops whose rows are sharded: name -> columns, and the time of a tile of
# all_gather_gemm, relative to its columns (two H200s, bf16, 4096 rows, 12288 features to 6144: 938
# us and 992).
_SHARDED_TILES = {"128x192": (192, 1.0), "128x128": (128, 1.06)}


@dataclass(frozen=True, slots=True)
class CommPlan:
    """How a linear layer and its communication run.

    gemm: "fused", the kernel whose tiles communicate; "fused_small_m", the same for few rows, of
        gemm_all_reduce; "linear", this package's plain GEMM; "cublas".
    transport: "collective", the group's own collective before or after a plain GEMM;
        "peer_store", a fused kernel stores to the memory of other GPUs; "copy_engine", copy
        engines move rows beside cuBLAS.  Of gemm_all_reduce: "one_shot", every rank sends its
        partial sums to every rank; "two_shot", to the owner of the rows, who sends the sum to all.
        column_gemm communicates nothing: its plans say "collective".
    tile: "ROWSxCOLUMNS" of the kernel that is not a plain GEMM; None where there is none.
    split_k: CTAs that share the k of a tile, of "fused_small_m".
    fuse_reduce: of gemm_reduce_scatter, whether the tiles of this rank's rows add the other ranks'
        partial sums, instead of a kernel after the GEMM.
    """

    gemm: Gemm
    transport: Transport = "collective"
    tile: str | None = None
    split_k: int = 1
    fuse_reduce: bool = False

    def __str__(self) -> str:
        """For example "fused_small_m/one_shot/32x64/split_k=2"."""
        parts: list[str] = [self.gemm, self.transport]
        if self.tile is not None:
            parts.append(self.tile)
        if self.split_k > 1:
            parts.append(f"split_k={self.split_k}")
        if self.fuse_reduce:
            parts.append("fuse_reduce")
        return "/".join(parts)

    @property
    def is_fused(self) -> bool:
        return self.gemm in ("fused", "fused_small_m")

    @property
    def without_kernels(self) -> "CommPlan":
        """The plan where the kernels of this one cannot run: a plain GEMM and a collective."""
        return CommPlan("cublas" if self.gemm == "cublas" else "linear")

    def to_json(self) -> dict[str, object]:
        """The fields that are not their defaults."""
        defaults = {field.name: field.default for field in fields(self)}
        return {name: value for name, value in asdict(self).items() if value != defaults[name]}


@dataclass(frozen=True, slots=True)
class Layer:
    """Sizes of a rank's shard of one layer in a group of `tp` ranks: [m, k] x [k, n].

    is_even: whether all ranks have shards of these sizes.
    """

    op: Op
    tp: int
    n: int
    k: int
    is_gated: bool = False
    is_even: bool = True


@lru_cache(_MAX_PLANS)
def plan_comm(layer: Layer, m: int) -> CommPlan:
    """The plan of a layer with m rows (of all ranks together)."""
    if layer in _overrides:
        return _overrides[layer]
    tp = _measured_tp(layer)
    line = _nearest(replace(layer, tp=tp)) if layer.is_even else None
    if line is not None:
        # For another size of group, the plan for as many rows a rank.
        rows = m * tp // layer.tp
        _, plan = line[_bucket(layer.op, rows, [measured for measured, _ in line])]
        if is_built(layer, plan):
            return plan
    return _by_rule(layer, m)


@contextmanager
def override_plans(plans: Mapping[Layer, CommPlan]) -> Iterator[None]:
    """Inside, these layers have these plans, whatever the table says: for measurements."""
    _overrides.update(plans)
    plan_comm.cache_clear()
    try:
        yield
    finally:
        _overrides.clear()
        plan_comm.cache_clear()


_overrides: dict[Layer, CommPlan] = {}


def _bucket(op: Op, m: int, rows: list[int]) -> int:
    """The index in ascending `rows` whose plan m takes.

    Few rows take a tile that holds them all: the next larger count. Many take the nearest one.
    """
    above = bisect_left(rows, m)
    if above == len(rows):
        return above - 1
    if above and op in _SHARDED_OPS and m * m < rows[above - 1] * rows[above]:
        return above - 1
    return above


def fused_plans(layer: Layer) -> list[CommPlan]:
    """The plans of an op's fused kernels that this build has, without split-k and fused reduce.

    column_gemm has none. Of gemm_all_reduce with one exchange: a two-shot plan is another transport
    of the same tile.
    """
    if layer.op == "column_gemm":
        return []
    if layer.op == "gemm_all_reduce":
        return [
            CommPlan("fused_small_m" if is_small_m else "fused", "one_shot", tile)
            for tile, _, _, is_small_m in native.gemm_all_reduce_tilings()
        ]
    return [CommPlan("fused", "peer_store", tile) for tile in _SHARDED_TILES]


def is_built(layer: Layer, plan: CommPlan) -> bool:
    """Whether this build has the plan's tile: a table of another version may name other ones."""
    if plan.tile is None:
        return True
    return any((p.gemm, p.tile) == (plan.gemm, plan.tile) for p in fused_plans(layer))


@cache
def tile_index(op: Op, gemm: Gemm, tile: str) -> int:
    """The index of a tile in the kernel's own list."""
    tilings = native.gemm_all_reduce_tilings if op == "gemm_all_reduce" else native.linear_tilings
    is_small_m = gemm == "fused_small_m"
    for index, (name, _, _, is_for_small_m) in enumerate(tilings()):
        if (name, is_for_small_m) == (tile, is_small_m):
            return index
    raise ValueError(f"{op} has no tile {tile} of the GEMM {gemm}")


def _by_rule(layer: Layer, m: int) -> CommPlan:
    if layer.op == "column_gemm":
        return CommPlan("linear")
    if layer.op == "gemm_all_reduce":
        sent = (layer.tp - 1) * m * layer.n * 2
        if layer.tp > 2 and sent > _ONE_SHOT_SENT_BYTES:
            return _two_shot_by_rule(m, layer.n, layer.k)
        if sent > _FUSED_SENT_BYTES or (m > _SMALL_M_ROWS and layer.n > _ONE_WAVE_COLUMNS):
            return CommPlan("cublas", "one_shot")
        return _small_m_by_rule(m, layer.n, layer.k)

    def work(plan: CommPlan) -> float:
        """The work of the busiest SM, in columns of tiles."""
        columns, factor = _SHARDED_TILES[str(plan.tile)]
        tiles = -(-m // 128) * -(-layer.n // columns)
        is_gather = layer.op == "all_gather_gemm"
        return -(-tiles // _NUM_SMS) * columns * (factor if is_gather else 1.0)

    return min(fused_plans(layer), key=work)


def _two_shot_by_rule(m: int, n: int, k: int) -> CommPlan:
    """As measured on four H200s: the GEMM that sends its tiles, up to some hundred rows."""
    if m > _FUSED_TWO_SHOT_ROWS or (m > 2 * _SMALL_M_ROWS and n > _ONE_WAVE_COLUMNS):
        return CommPlan("linear", "two_shot")
    return replace(_small_m_by_rule(m, n, k), transport="two_shot")


def _small_m_by_rule(m: int, n: int, k: int) -> CommPlan:
    """As measured on two H200s: wide layers wait for bytes, narrow ones for clusters to start."""
    is_narrow = n <= 16 * _NUM_SMS
    rows = next((rows for rows in (16, 32, 64) if m <= rows), 64 if is_narrow else 128)
    if not is_narrow and m > 128:
        rows = 256
    if rows <= 32:
        columns = 128 if n <= _ONE_WAVE_COLUMNS else 64
    else:
        columns = 64 if rows == 256 or (is_narrow and m <= rows) else 128
    tiles = -(-m // rows) * -(-n // columns)
    split_k = math.ceil((0.45 if is_narrow else 0.9) * _NUM_SMS / tiles)
    if not is_narrow and rows < 256:
        split_k = max(2, split_k)
    split_k = max(1, min(_MAX_SPLIT_K, split_k, k // _SPLIT_FEATURES))
    return CommPlan("fused_small_m", "one_shot", f"{rows}x{columns}", split_k)


def _measured_tp(layer: Layer) -> int:
    """The group size whose lines a layer takes: its own, or the nearest, if its rows are sharded.

    With four ranks, 83 of 105 plans are those of two ranks, 60 are those of the rule.
    """
    kind = (layer.op, layer.is_gated)
    sizes = {tp for op, tp, _, _, is_gated in _table() if (op, is_gated) == kind}
    if not sizes or layer.op not in _SHARDED_OPS:
        return layer.tp
    return min(sizes, key=lambda tp: abs(math.log(tp / layer.tp)))


def _nearest(layer: Layer) -> list[tuple[int, CommPlan]] | None:
    """The line of the layer, or of the one nearest in size; None where there is none of its op."""
    lines = {
        (n, k): plans
        for (op, tp, n, k, is_gated), plans in _table().items()
        if (op, tp, is_gated) == (layer.op, layer.tp, layer.is_gated)
    }
    if not lines or not layer.n or not layer.k:
        return None

    def distance(sizes: tuple[int, int]) -> float:
        n, k = sizes
        return abs(math.log(n / layer.n)) + abs(math.log(k / layer.k))

    return lines[min(lines, key=distance)]


@cache
def _table() -> dict[tuple[str, int, int, int, bool], list[tuple[int, CommPlan]]]:
    """(op, tp, n, k, is_gated) -> (most rows, plan) by ascending rows."""
    text = (files("bytetx.ops") / TABLE_FILE).read_text(encoding="utf-8")
    return {
        (line["op"], line["tp"], line["n"], line["k"], line["is_gated"]): [
            (rows, CommPlan(**plan)) for rows, plan in line["plans"]
        ]
        for line in json.loads(text)["lines"]
    }
