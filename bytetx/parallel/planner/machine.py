"""Machine: what a GPU and its links do, from TOML: measured tables, or latency and bandwidth."""

import math
import tomllib
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from bytetx.errors import OptionError

Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "broadcast"]
GIB = 2**30


@dataclass(frozen=True, slots=True)
class RateTable:
    """TFLOP/s over two sizes, linear between the points in the sizes' logarithms; outside of them
    the nearest point's.

    rates: of every pair of the ascending sizes a and b, [len(a)][len(b)].
    """

    a: tuple[int, ...]
    b: tuple[int, ...]
    rates: tuple[tuple[float, ...], ...]

    @classmethod
    def of(cls, points: Iterable[Sequence[float]]) -> "RateTable":
        """points: (a, b, TFLOP/s).  Raises ValueError where a pair of sizes has none."""
        known = {(int(a), int(b)): float(rate) for a, b, rate in points}
        first, second = ({pair[i] for pair in known} for i in range(2))
        missing = [(a, b) for a in first for b in second if (a, b) not in known]
        if missing:
            raise ValueError(f"a table of rates has none for {missing[0]}")
        rows, columns = sorted(first), sorted(second)
        rates = tuple(tuple(known[a, b] for b in columns) for a in rows)
        return cls(tuple(rows), tuple(columns), rates)

    def __bool__(self) -> bool:
        return bool(self.rates)

    def at(self, a: float, b: float) -> float:
        (i, of_a), (j, of_b) = _between(self.a, a), _between(self.b, b)

        def along(row: Sequence[float]) -> float:
            return row[j] + of_b * (row[min(j + 1, len(row) - 1)] - row[j])

        low, high = along(self.rates[i]), along(self.rates[min(i + 1, len(self.a) - 1)])
        return low + of_a * (high - low)


def _between(sizes: Sequence[int], size: float) -> tuple[int, float]:
    """(index of the size below, how far from there to the next one, 0 to 1)"""
    i = bisect_right(sizes, size) - 1
    if i < 0:
        return 0, 0.0
    if i + 1 == len(sizes):
        return i, 0.0
    return i, math.log(size / sizes[i]) / math.log(sizes[i + 1] / sizes[i])


@dataclass(frozen=True, slots=True)
class Around:
    """The time of a pass before and behind its layers: us + us_per_token * tokens.

    Ids go to the ranks, results come back; tokens: all of the pass.
    """

    us: float = 0.0
    us_per_token: float = 0.0

    def of(self, tokens: int) -> float:
        return self.us + self.us_per_token * tokens


@dataclass(frozen=True, slots=True)
class Machine:
    """A cluster of equal nodes.  Rates: tflops in 1e12/s, gbps in 1e9 bytes/s, alpha_us a call.

    table: (ranks inside, ranks) -> gbps of groups within a node, where it was measured so.
    all_reduce_gbps: of all-reduces within a node, 0 where they have the rate of the others.
    inter_gbps: of a node's links, which the groups of its GPUs share.  fused_y: the share of the
    hideable part of tensor parallelism's communication that kernels hide behind their GEMMs.
    gemm_table: of GEMMs by rows and features, the root of outputs x inputs; empty where one rate
    serves all.  attention_tables: by tokens of a text and features of a head, {causal: table}.
    host_op_us, host_collective_us: what the host needs to launch one without a CUDA graph; 0 where
    that was not measured.  around: of a pass of "one" GPU, of "ranks" that have the same texts,
    and of "slots".  copies_gbps: of z's gathers within a node whose GPUs read one another's memory,
    which are copies that wait for no other rank; 0 where they are collectives.  sum_us, sum_gbps:
    what a fused sum of y takes beyond its GEMMs, measured; without them fused_y says it.
    graph_tokens: of the longest pass that a CUDA graph replays, padded to the rows of a bucket; 0
    where there are none.
    """

    name: str
    description: str
    source: str
    gpus_per_node: int
    memory_gib: float
    gemm_tflops: float
    attention_tflops: float
    hbm_gbps: float
    peak_tflops: float
    num_sms: int
    launch_us: float
    alpha_us: float
    small_alpha_us: float
    small_bytes: int
    intra_gbps: float
    all_reduce_gbps: float
    table: Mapping[tuple[int, int], float]
    inter_alpha_us_per_gpu: float
    inter_gbps: float
    fused_y: float
    gemm_table: RateTable = field(default_factory=lambda: RateTable((), (), ()))
    attention_tables: Mapping[bool, RateTable] = field(default_factory=dict)
    host_op_us: float = 0.0
    host_collective_us: float = 0.0
    around: Mapping[str, Around] = field(default_factory=dict)
    copies_gbps: float = 0.0
    sum_us: float = 0.0
    sum_gbps: float = 0.0
    graph_tokens: int = 32768

    def inside_gbps(self, inner: int, size: int, *, is_all_reduce: bool = False) -> float:
        """The bandwidth of a rank in a group within a node; inner: ranks closer together than its
        neighbours."""
        if is_all_reduce and self.all_reduce_gbps:
            return self.all_reduce_gbps
        return self.table.get((inner, size)) or self.intra_gbps or min(self.table.values())

    def between_gbps(self, inner: int) -> float:
        """The same of a group across nodes: min(gpus_per_node, inner) of them share its links."""
        return self.inter_gbps / min(self.gpus_per_node, inner)

    def is_inside(self, inner: int, size: int, *, ranks: int) -> bool:
        """Whether every group of `size` ranks of a grid of `ranks` lies within a node.

        Groups fill blocks of inner * size ranks, one after another.
        """
        block = inner * size
        fills_nodes = self.gpus_per_node % block == 0 or ranks <= self.gpus_per_node
        return block <= self.gpus_per_node and fills_nodes

    def collective_us(
        self, kind: Kind, payload_bytes: float, *, inner: int, size: int, ranks: int
    ) -> float:
        """A collective over `size` of a grid's `ranks`; payload_bytes: of all that is gathered, or
        is summed."""
        if size == 1 or not payload_bytes:
            return 0.0
        inside_gbps = self.inside_gbps(inner, size, is_all_reduce=kind == "all_reduce")
        if self.is_inside(inner, size, ranks=ranks):
            is_small = payload_bytes < self.small_bytes
            latency, gbps = self.small_alpha_us if is_small else self.alpha_us, inside_gbps
        else:
            latency, gbps = self.inter_alpha_us_per_gpu * size, self.between_gbps(inner)
            if inner < self.gpus_per_node:  # neighbours in one node, too: the slowest link counts
                gbps = min(gbps, inside_gbps)
        return latency + wire_bytes(kind, payload_bytes, size) / gbps / 1e3

    def gemm_us(self, m: int, n: int, k: int, *, itemsize: int) -> float:
        """[m, k] x [k, n]: its FLOP, or the bytes that it moves, whichever take longer.

        Without a table of rates the FLOP come in waves of 128 x 128 tiles over the SMs.
        """
        if not m:
            return 0.0
        if self.gemm_table:
            flop_us = 2 * m * n * k / self.gemm_table.at(m, math.sqrt(n * k)) / 1e6
        else:
            tiles = -(-m // 128) * -(-n // 128)
            waves = max(tiles / self.num_sms, 1.0)
            flop_us = waves * 2 * 128 * 128 * k * self.num_sms / self.gemm_tflops / 1e6
        moved = itemsize * (m * k + k * n + m * n)
        return self.launch_us + max(flop_us, moved / self.hbm_gbps / 1e3)

    def attention_us(self, flop: float, *, length: float, head_dim: int, causal: bool) -> float:
        """Attention's time for texts of `length` tokens each; flop: of the pairs that are seen."""
        table = self.attention_tables.get(causal)
        rate = table.at(length, head_dim) if table else self.attention_tflops
        return flop / rate / 1e6


def wire_bytes(kind: Kind, payload_bytes: float, size: int) -> float:
    """Bytes that a rank sends by the ring algorithm."""
    if kind == "broadcast":
        return payload_bytes if size > 1 else 0.0
    rounds = 2 if kind == "all_reduce" else 1
    return rounds * (size - 1) / size * payload_bytes


def machine_names() -> list[str]:
    folder = files("bytetx.parallel.planner").joinpath("machines")
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir())


def load_machine(machine: "Machine | str | Path") -> Machine:
    """A machine by its name, or from a TOML file like those in machines/.

    Raises OptionError where there is none or a value is missing.
    """
    if isinstance(machine, Machine):
        return machine
    path = Path(machine)
    if str(machine) in machine_names():
        folder = files("bytetx.parallel.planner").joinpath("machines")
        text, name = folder.joinpath(f"{machine}.toml").read_bytes(), str(machine)
    elif path.is_file():
        text, name = path.read_bytes(), path.stem
    else:
        raise OptionError(
            f"machine must be one of {', '.join(machine_names())} or the path of a TOML "
            f"file like theirs, got {str(machine)!r}"
        )
    try:
        found = _from_table(name, tomllib.loads(text.decode()))
        _check_numbers(found)
        return found
    except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
        raise OptionError(
            f"the machine file {str(machine)!r} cannot be read ({error}); compare it with those in "
            "bytetx/parallel/planner/machines"
        ) from error


def _check_numbers(machine: Machine) -> None:
    """Raises ValueError for a number that no machine has."""
    rates = "memory_gib gemm_tflops attention_tflops hbm_gbps peak_tflops num_sms inter_gbps"
    for name in ("gpus_per_node", *rates.split()):
        _require(name, getattr(machine, name), above=True)
    others = (
        "launch_us alpha_us small_alpha_us small_bytes intra_gbps all_reduce_gbps "
        "inter_alpha_us_per_gpu fused_y host_op_us host_collective_us copies_gbps sum_us sum_gbps "
        "graph_tokens"
    )
    for name in others.split():
        _require(name, getattr(machine, name), above=False)
    if machine.fused_y > 1:
        raise ValueError(f"fused_y is a share, at most 1, got {machine.fused_y}")
    if not machine.table and not machine.intra_gbps:
        raise ValueError("intra needs gbps or a table")
    for sizes, rate in machine.table.items():
        for number in (*sizes, rate):
            _require("a number of intra's table", number, above=True)
    for table in (machine.gemm_table, *machine.attention_tables.values()):
        for number in (*table.a, *table.b, *(rate for row in table.rates for rate in row)):
            _require("a number of a table of rates", number, above=True)
    for around in machine.around.values():
        for number in (around.us, around.us_per_token):
            _require("a number of host.around", number, above=False)


def _require(name: str, number: float, *, above: bool) -> None:
    if not math.isfinite(number) or number < 0 or (above and number == 0):
        need = "above 0" if above else "0 or more"
        raise ValueError(f"{name} must be {need}, got {number}")


def _from_table(name: str, values: dict[str, Any]) -> Machine:
    gpu, intra, inter = values["gpu"], values["intra"], values["inter"]
    host, overlap = values.get("host", {}), values.get("overlap", {})
    table = {(p, g): float(gibps) * GIB / 1e9 for p, g, gibps in intra.get("table_gibps", ())}
    table |= {(p, g): float(gbps) for p, g, gbps in intra.get("table_gbps", ())}
    flat = float(intra.get("gbps", 0.0))
    seen = {key: gpu.get(f"{key}_table", ()) for key in ("attention", "causal_attention")}
    return Machine(
        name=name,
        description=str(values.get("description", name)),
        source=str(values.get("source", "")),
        gpus_per_node=int(values["gpus_per_node"]),
        **{
            key: float(gpu[key])
            for key in (
                "memory_gib",
                "gemm_tflops",
                "attention_tflops",
                "hbm_gbps",
                "peak_tflops",
                "launch_us",
            )
        },
        num_sms=int(gpu["num_sms"]),
        alpha_us=float(intra["alpha_us"]),
        small_alpha_us=float(intra["small_alpha_us"]),
        small_bytes=int(intra["small_bytes"]),
        intra_gbps=flat,
        all_reduce_gbps=float(intra.get("all_reduce_gbps", 0.0)),
        table=table,
        inter_alpha_us_per_gpu=float(inter["alpha_us_per_gpu"]),
        inter_gbps=float(inter["gibps"]) * GIB / 1e9 if "gibps" in inter else float(inter["gbps"]),
        fused_y=float(overlap.get("fused_y", 0.0)),
        gemm_table=RateTable.of(gpu.get("gemm_table", ())),
        attention_tables={
            key.startswith("causal"): RateTable.of(points) for key, points in seen.items() if points
        },
        host_op_us=float(host.get("op_us", 0.0)),
        host_collective_us=float(host.get("collective_us", 0.0)),
        around={
            kind: Around(*map(float, values)) for kind, values in host.get("around", {}).items()
        },
        copies_gbps=float(intra.get("copies_gbps", 0.0)),
        sum_us=float(overlap.get("sum_us", 0.0)),
        sum_gbps=float(overlap.get("sum_gbps", 0.0)),
        graph_tokens=int(gpu.get("graph_tokens", 32768)),
    )
