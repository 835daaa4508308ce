"""Machine: what a GPU and its links do, from TOML: measured tables, or latency and bandwidth."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from bytetx.errors import OptionError

Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "broadcast"]
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Machine:
    """A cluster of equal nodes.  Rates: tflops in 1e12/s, gbps in 1e9 bytes/s, alpha_us a call.

    table: (ranks inside, ranks) -> gbps of groups within a node, where it was measured so.
    inter_gbps: of a node's links, which the groups of its GPUs share.  fused_y: the share of the
    hideable part of tensor parallelism's communication that kernels hide behind their GEMMs.
    gemm_table: (rows, tflops) from measurements, largest first; empty where one rate serves all.
    host_op_us, host_collective_us: what the host needs to launch one without a CUDA graph; 0 where
    that was not measured.
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
    gemm_table: tuple[tuple[int, float], ...] = ()
    host_op_us: float = 0.0
    host_collective_us: float = 0.0

    def link_gbps(self, inner: int, size: int, *, is_all_reduce: bool) -> float:
        """The bandwidth of a rank in a group; inner: ranks closer together than its neighbours.

        Across nodes, the groups of min(gpus_per_node, inner) GPUs share a node's links.
        """
        if self.is_inside(inner, size):
            flat = self.all_reduce_gbps if is_all_reduce else self.intra_gbps
            return self.table.get((inner, size)) or flat or min(self.table.values())
        return self.inter_gbps / min(self.gpus_per_node, inner)

    def is_inside(self, inner: int, size: int) -> bool:
        """Whether a group lies within a node."""
        return inner * size <= self.gpus_per_node

    def collective_us(self, kind: Kind, payload_bytes: float, *, inner: int, size: int) -> float:
        """A collective over `size` ranks; payload_bytes: of all that is gathered, or is summed."""
        if size == 1 or not payload_bytes:
            return 0.0
        if self.is_inside(inner, size):
            is_small = payload_bytes < self.small_bytes
            latency = self.small_alpha_us if is_small else self.alpha_us
        else:
            latency = self.inter_alpha_us_per_gpu * size
        gbps = self.link_gbps(inner, size, is_all_reduce=kind == "all_reduce")
        return latency + wire_bytes(kind, payload_bytes, size) / gbps / 1e3

    def gemm_us(self, m: int, n: int, k: int, *, itemsize: int) -> float:
        """[m, k] x [k, n]: waves of 128 x 128 tiles over the SMs, or the bytes that it moves."""
        if not m:
            return 0.0
        tiles = -(-m // 128) * -(-n // 128)
        waves = max(tiles / self.num_sms, 1.0)
        tile_us = 2 * 128 * 128 * k * self.num_sms / self.rate(m) / 1e6
        moved = itemsize * (m * k + k * n + m * n)
        return self.launch_us + max(waves * tile_us, moved / self.hbm_gbps / 1e3)

    def rate(self, m: int) -> float:
        """TFLOP/s of GEMMs of m rows."""
        return next((rate for rows, rate in self.gemm_table if m >= rows), self.gemm_tflops)


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
        text, name = folder.joinpath(f"{machine}.toml").read_text(encoding="utf-8"), str(machine)
    elif path.is_file():
        text, name = path.read_text(encoding="utf-8"), path.stem
    else:
        raise OptionError(
            f"machine must be one of {', '.join(machine_names())} or the path of a TOML "
            f"file like theirs, got {str(machine)!r}"
        )
    try:
        return _from_table(name, tomllib.loads(text))
    except (tomllib.TOMLDecodeError, KeyError, TypeError, ValueError) as error:
        raise OptionError(
            f"the machine file {str(machine)!r} cannot be read ({error}); compare it with those in "
            "bytetx/parallel/planner/machines"
        ) from error


def _from_table(name: str, values: dict[str, Any]) -> Machine:
    gpu, intra, inter = values["gpu"], values["intra"], values["inter"]
    host = values.get("host", {})
    table = {(p, g): float(gibps) * GIB / 1e9 for p, g, gibps in intra.get("table_gibps", ())}
    table |= {(p, g): float(gbps) for p, g, gbps in intra.get("table_gbps", ())}
    flat = float(intra.get("gbps", 0.0))
    rates = sorted(((int(m), float(rate)) for m, rate in gpu.get("gemm_table", ())), reverse=True)
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
        all_reduce_gbps=float(intra.get("all_reduce_gbps", flat)),
        table=table,
        inter_alpha_us_per_gpu=float(inter["alpha_us_per_gpu"]),
        inter_gbps=float(inter["gibps"]) * GIB / 1e9 if "gibps" in inter else float(inter["gbps"]),
        fused_y=float(values.get("overlap", {}).get("fused_y", 0.0)),
        gemm_table=tuple(rates),
        host_op_us=float(host.get("op_us", 0.0)),
        host_collective_us=float(host.get("collective_us", 0.0)),
    )
