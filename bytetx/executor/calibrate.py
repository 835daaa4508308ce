"""Measures this machine for the planner: products, memory and collectives, as a TOML file.

All ranks run one program in lockstep; rank 0 writes what the slowest of them took.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from bytetx.errors import InputError
from bytetx.executor.launch import connect_to_leader, rendezvous_store, spawn
from bytetx.ops.linear import linear, prepare_linear
from bytetx.parallel.grid import Grid, divisors
from bytetx.parallel.planner.machine import Kind, load_machine, wire_bytes
from bytetx.parallel.tp import GroupCollectives, Store, gpu_of, join_group, prefix_store

_Timer = Callable[[Callable[[], object]], float]
_ROUNDS = 7  # the median of them
_LAUNCHES = 100


@dataclass(frozen=True, slots=True)
class _Sizes:
    """What is measured: GEMM rows and features, bytes that are copied, payloads of collectives."""

    gemm_rows: tuple[int, ...]
    features: int
    copy_bytes: int
    payloads: tuple[int, ...]


_CUDA = _Sizes((128, 512, 2048, 8192), 4096, 1 << 30, tuple(1 << i for i in (16, 18, 20, 23, 26)))
_CPU = _Sizes((16, 128, 1024), 768, 1 << 26, tuple(1 << i for i in (12, 16, 18, 20, 22)))


@dataclass(frozen=True, slots=True)
class _Link:
    """The fit of a group's collectives: latency + bytes / rate.  inner: as of Machine.link_gbps."""

    inner: int
    size: int
    kind: Kind
    alpha_us: float
    small_us: float
    gbps: float


def calibrate_to_file(path: Path, *, ranks: int | None = None) -> str:
    """Measures and writes the machine file `path`; returns a line that says what to do with it.

    ranks: processes; None: one a GPU, on a machine without two.  Raises InputError where there are
    fewer GPUs than ranks, or the file cannot be written.
    """
    num_gpus = torch.cuda.device_count()
    size = ranks or max(num_gpus, 1 if num_gpus else 2)
    if num_gpus and size > num_gpus:
        raise InputError(f"--ranks {size} needs {size} GPUs, torch sees {num_gpus}")
    if not path.parent.is_dir():
        raise InputError(f"{path.parent} is no folder; give --calibrate another file")
    workers, store = spawn(
        size, module="bytetx.executor.calibrate", num_threads=torch.get_num_threads()
    )
    try:
        text = _measure(store, rank=0, size=size)
        workers.wait_for_replies()
    finally:
        workers.close()
    path.write_text(text, encoding="utf-8")
    load_machine(path)  # what was written can be read
    return f"wrote {path}; use it with: bytetx plan --machine {path} --model ..."


def main(arguments: Sequence[str]) -> None:
    """A rank that calibrate_to_file started."""
    rank, size, fd, folder, num_threads = arguments
    leader = connect_to_leader(fd, folder)
    torch.set_num_threads(int(num_threads))
    _measure(rendezvous_store(Path(folder), int(size)), rank=int(rank), size=int(size))
    leader.reply()
    leader.receive(lambda: None)  # until rank 0 closes


@torch.inference_mode()
def _measure(store: Store, *, rank: int, size: int) -> str:
    is_cuda = torch.cuda.is_available()
    device = gpu_of(rank) if is_cuda else torch.device("cpu")
    sizes, dtype = (_CUDA, torch.bfloat16) if is_cuda else (_CPU, torch.float32)
    group = join_group(prefix_store("all", store), rank=rank, size=size, device=device)

    def slowest_us(run: Callable[[], object]) -> float:
        """Of all ranks, which begin together."""
        times = []
        for _ in range(_ROUNDS + 2):
            group.collectives.barrier()
            _wait(device)
            started = time.perf_counter()
            run()
            _wait(device)
            times.append((time.perf_counter() - started) * 1e6)
        median = sorted(times[2:])[_ROUNDS // 2]
        each = torch.zeros(size, device=device)
        each[rank] = median
        return float(group.collectives.all_reduce(each).max())

    gemms = [(m, _gemm_tflops(m, sizes, dtype, device, slowest_us)) for m in sizes.gemm_rows]
    attention = _attention_tflops(dtype, device, slowest_us)
    host_us = _host_us(group.collectives, dtype, device) if is_cuda else (0.0, 0.0)
    copied = torch.empty(sizes.copy_bytes, dtype=torch.uint8, device=device)
    hbm = 2 * sizes.copy_bytes / slowest_us(copied.clone) / 1e3
    links = []
    for inner, length in _groups(size):
        grid = Grid(data=size // (inner * length), z=length, y=inner)
        joined = prefix_store(f"{inner}-{length}", store)
        axes = join_group(joined, rank=rank, size=size, device=device, grid=grid).axes
        assert axes is not None  # z has more than one rank
        kinds: tuple[Kind, ...] = ("all_gather", "all_reduce")
        links += [_fit(axes.z, inner, kind, sizes.payloads, device, slowest_us) for kind in kinds]
    return _toml(size, device, gemms, attention, hbm, links, host_us)


def _groups(size: int) -> list[tuple[int, int]]:
    """(ranks inside, ranks) of every group that a grid of all ranks has, but one of one rank."""
    return [
        (inner, length)
        for length in divisors(size)
        for inner in divisors(size // length)
        if length > 1
    ]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _gemm_tflops(
    m: int,
    sizes: _Sizes,
    dtype: torch.dtype,
    device: torch.device,
    slowest_us: _Timer,
) -> float:
    x = torch.randn(m, sizes.features, device=device, dtype=dtype)
    weight = torch.randn(sizes.features, sizes.features, device=device, dtype=dtype)
    return 2 * m * sizes.features**2 / slowest_us(lambda: F.linear(x, weight)) / 1e6


def _attention_tflops(dtype: torch.dtype, device: torch.device, slowest_us: _Timer) -> float:
    tokens, heads, head_dim = (2048, 16, 128) if device.type == "cuda" else (256, 4, 64)
    q = torch.randn(1, heads, tokens, head_dim, device=device, dtype=dtype)
    flop = 4 * tokens**2 * heads * head_dim
    return flop / slowest_us(lambda: F.scaled_dot_product_attention(q, q, q)) / 1e6


def _host_us(
    collectives: GroupCollectives, dtype: torch.dtype, device: torch.device
) -> tuple[float, float]:
    """What rank 0 needs to launch a small linear layer, and a small gather; the GPU keeps up."""
    size = collectives.size
    x = torch.zeros(16, 1024, dtype=dtype, device=device)
    weight = prepare_linear(torch.zeros(1024, 1024, dtype=dtype, device=device), prepack=False)
    received = torch.zeros(1024 * size, dtype=torch.uint8, device=device)
    sent = received[:1024].clone()

    def launched_us(run: Callable[[], object]) -> float:
        times = []
        for _ in range(_LAUNCHES):
            started = time.perf_counter()
            run()
            times.append((time.perf_counter() - started) * 1e6)
        _wait(device)
        return sorted(times)[_LAUNCHES // 2]

    op_us = launched_us(lambda: linear(x, weight))
    if size == 1:
        return op_us, 0.0
    return op_us, launched_us(partial(_gather, collectives, received, sent))


def _fit(
    collectives: GroupCollectives,
    inner: int,
    kind: Kind,
    payloads: Sequence[int],
    device: torch.device,
    slowest_us: _Timer,
) -> _Link:
    """Least squares of relative errors: small messages count as much as large ones."""
    size = collectives.size
    points = []
    for payload in payloads:
        if kind == "all_gather":
            sent = torch.zeros(payload // size, dtype=torch.uint8, device=device)
            received = sent.new_empty(sent.numel() * size)
            took = slowest_us(partial(_gather, collectives, received, sent))
        else:
            summed = torch.zeros(payload // 4, device=device)
            took = slowest_us(partial(collectives.all_reduce, summed))
        points.append((wire_bytes(kind, payload, size), took))
    alpha, per_byte = _line(points)
    return _Link(inner, size, kind, alpha, points[0][1], 1 / per_byte / 1e3)


def _gather(collectives: GroupCollectives, received: torch.Tensor, sent: torch.Tensor) -> None:
    collectives.start_all_gather(received, sent).wait()


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(a, b) of us = a + b * bytes, neither below what a point of its own would say."""
    weights = [1 / us**2 for _, us in points]
    total = sum(weights)
    x = sum(w * num for w, (num, _) in zip(weights, points, strict=True)) / total
    y = sum(w * us for w, (_, us) in zip(weights, points, strict=True)) / total
    cross = sum(w * (n - x) * (us - y) for w, (n, us) in zip(weights, points, strict=True))
    square = sum(w * (n - x) ** 2 for w, (n, _) in zip(weights, points, strict=True))
    largest, longest = points[-1]
    slope = max(cross / square, 0.1 * longest / largest)
    return max(y - slope * x, 0.0), slope


def _toml(
    size: int,
    device: torch.device,
    gemms: Sequence[tuple[int, float]],
    attention: float,
    hbm: float,
    links: Sequence[_Link],
    host_us: tuple[float, float],
) -> str:
    name, memory, sms = "CPU processes of one machine, gloo", 8.0, torch.get_num_threads()
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        name, memory, sms = (
            found.name,
            0.93 * found.total_memory / 2**30,
            found.multi_processor_count,
        )
    gathers = [link for link in links if link.kind == "all_gather"]
    sums = [link for link in links if link.kind == "all_reduce"]
    best = max(rate for _, rate in gemms)
    rows = ", ".join(f"[{m if i else 0}, {rate:.4f}]" for i, (m, rate) in enumerate(gemms))
    table = ", ".join(f"[{link.inner}, {link.size}, {link.gbps:.4f}]" for link in gathers)
    alpha = max((link.alpha_us for link in gathers), default=0.0)
    small = min((link.small_us for link in links), default=0.0)
    lines = [
        "# Written by `bytetx plan --calibrate`: the slowest rank's medians of 7.",
        f'description = "{size} x {name}"',
        f'source = "measured on this machine, torch {torch.__version__}"',
        f"gpus_per_node = {size}",
        "",
        "[gpu]",
        f"memory_gib = {memory:.2f}",
        f"gemm_tflops = {best:.4f}",
        f"gemm_table = [{rows}]  # from so many rows on",
        f"attention_tflops = {attention:.4f}",
        f"hbm_gbps = {hbm:.2f}",
        f"peak_tflops = {best:.4f}  # no specification is known here",
        f"num_sms = {sms}",
        f"launch_us = {2.0 if device.type == 'cuda' else 5.0}",
        "",
        "[intra]",
        f"alpha_us = {alpha:.2f}",
        f"small_alpha_us = {min(small, alpha):.2f}",
        "small_bytes = 262144",
        f"table_gbps = [{table}]  # ranks inside, ranks, rate of all-gathers",
        f"gbps = {min((link.gbps for link in gathers), default=1.0):.4f}",
        f"all_reduce_gbps = {min((link.gbps for link in sums), default=1.0):.4f}",
        "",
        "[host]  # of launching without a CUDA graph; 0 on CPUs, which compute meanwhile",
        f"op_us = {host_us[0]:.2f}",
        f"collective_us = {host_us[1]:.2f}",
        "",
        "[inter]  # other nodes were not measured: 100 Gb/s is an assumption",
        "alpha_us_per_gpu = 10.0",
        "gbps = 12.0",
    ]
    return "\n".join(lines) + "\n"
