"""Measures this machine for the planner: rates, links and the host, as a TOML file.

All ranks run one program in lockstep; rank 0 writes what the slowest of them took, and then times
a small model as users load it, for what a pass takes around its layers.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from bytetx.cli.calibrate_links import Link, SumOfY, measure_copies, measure_link, measure_sums
from bytetx.cli.calibrate_passes import measure_around
from bytetx.errors import InputError
from bytetx.executor.launch import connect_to_leader, rendezvous_store, spawn
from bytetx.ops.attention import varlen_attention
from bytetx.ops.attention_plan import plan_attention
from bytetx.ops.comm_workspace import workspace_bytes
from bytetx.ops.linear import linear, prepare_linear
from bytetx.parallel.grid import Grid, divisors
from bytetx.parallel.planner.machine import Around, load_machine
from bytetx.parallel.tp import GroupCollectives, Store, TpGroup, gpu_of, join_group, prefix_store
from bytetx.runtime.cuda_graphs import capture

_ROUNDS = 7  # the median of them
_LAUNCHES = 100
# Of calls in a graph; of those before the timed ones, and of the timed ones. A GPU at its power
# limit takes a while to find the clock that it keeps, as in passes one after another: after 25 ms,
# large GEMMs that run at equal rates in passes differed by a fifth (two H100s, 2026-11-26).
_GRAPH_US, _HOT_US, _TIMED_US = 2_000.0, 100_000.0, 40_000.0
_KERNELS = 200  # in the graph that tells the time between two


@dataclass(frozen=True, slots=True)
class CalibrationSizes:
    """Sizes of what is measured: GEMMs by rows and features, the root of inputs x outputs;
    attention over `tokens` in texts of `lengths`; bytes that are copied, payloads of collectives,
    and of z's copies."""

    gemm_rows: tuple[int, ...]
    features: tuple[int, ...]
    tokens: int
    lengths: tuple[int, ...]
    head_dims: tuple[int, ...]
    num_heads: int
    copy_bytes: int
    payloads: tuple[int, ...]
    sum_rows: tuple[int, ...]
    sum_features: int


_CUDA = CalibrationSizes(
    gemm_rows=(128, 512, 1024, 2048, 4096, 8192, 16384, 32768),
    features=(1024, 2048, 4096, 8192, 16384),
    tokens=16384,
    lengths=(64, 128, 256, 512, 1024, 2048, 4096),
    head_dims=(64, 128),
    num_heads=16,
    copy_bytes=1 << 30,
    payloads=tuple(1 << i for i in (16, 18, 20, 23, 26, 28)),
    sum_rows=(1024, 4096, 16384),
    sum_features=2048,
)
_CPU = CalibrationSizes(
    gemm_rows=(16, 128, 1024),
    features=(768,),
    tokens=256,
    lengths=(64, 256),
    head_dims=(64,),
    num_heads=4,
    copy_bytes=1 << 26,
    payloads=tuple(1 << i for i in (12, 16, 18, 20, 22)),
    sum_rows=(),
    sum_features=0,
)
# Longer GEMMs tell nothing new and take long.
_MOST_FLOP = 1e13

Timer = Callable[[Callable[[], object]], float]


@dataclass
class Found:
    """Measurements of the ranks. gemms, attention: points of RateTable, the latter by causality."""

    gemms: list[tuple[int, int, float]] = field(default_factory=list)
    attention: dict[bool, list[tuple[int, int, float]]] = field(default_factory=dict)
    hbm_gbps: float = 0.0
    launch_us: float = 5.0
    links: list[Link] = field(default_factory=list)
    copies_gbps: float = 0.0
    sum_of_y: SumOfY | None = None
    host_us: tuple[float, float] = (0.0, 0.0)
    around: dict[str, Around] = field(default_factory=dict)


def calibrate_to_file(path: Path, *, ranks: int | None = None) -> str:
    """Measures and writes the machine file `path`; returns a line that says what to do with it.

    ranks: processes; None: one a GPU, on a machine without two.  Raises InputError where there are
    fewer GPUs than ranks, or the file cannot be written.
    """
    num_gpus = torch.cuda.device_count()
    size = ranks or max(num_gpus, 1 if num_gpus else 2)
    if num_gpus and size > num_gpus:
        raise InputError(f"--ranks {size} needs {size} GPUs, torch sees {num_gpus}")
    if not path.parent.is_dir() or path.is_dir():
        wrong = f"{path} is a folder" if path.is_dir() else f"{path.parent} is no folder"
        raise InputError(f"{wrong}; give --calibrate another file")
    try:  # measuring takes a while: what cannot be written is said before
        folder = tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from error
    with folder:
        measured = Path(folder.name) / path.name
        measured.write_text(_measured_text(size, has_gpus=num_gpus > 0), encoding="utf-8")
        load_machine(measured)  # what was written can be read
        measured.replace(path)
    return f"wrote {path}; use it with: bytetx plan --machine {path} --model ..."


def _measured_text(size: int, *, has_gpus: bool) -> str:
    """Return the text of the machine file, from processes that this one starts."""
    workers, store = spawn(size, module="bytetx.cli.calibrate", num_threads=torch.get_num_threads())
    try:
        found = measure(store, rank=0, size=size)
        workers.wait_for_replies()
    finally:
        workers.close()
    if has_gpus:
        found.around = measure_around(size)
    return machine_text(found, size=size)


def main(arguments: Sequence[str]) -> None:
    """A rank that calibrate_to_file started."""
    rank, size, fd, folder, num_threads = arguments
    leader = connect_to_leader(fd, folder)
    torch.set_num_threads(int(num_threads))
    measure(rendezvous_store(Path(folder), int(size)), rank=int(rank), size=int(size))
    leader.reply()
    leader.receive(lambda: None)  # until rank 0 closes


@torch.inference_mode()
def measure(store: Store, *, rank: int, size: int) -> Found:
    """Measure as every rank does; the numbers are the same on all."""
    is_cuda = torch.cuda.is_available()
    device = gpu_of(rank) if is_cuda else torch.device("cpu")
    sizes, dtype = (_CUDA, torch.bfloat16) if is_cuda else (_CPU, torch.float32)
    shared = 0
    if is_cuda and size > 1:
        largest = {"max_tokens": max(sizes.sum_rows), "hidden_size": sizes.sum_features}
        shared = workspace_bytes(**largest, size=size, itemsize=2)
    all_ranks = prefix_store("all", store)
    group = join_group(all_ranks, rank=rank, size=size, device=device, workspace_bytes=shared)
    timer = partial(slowest_us, group)
    found = Found()
    for m in sizes.gemm_rows:
        for features in sizes.features:
            if 2 * m * features**2 <= _MOST_FLOP:
                found.gemms.append((m, features, _gemm_tflops(m, features, dtype, device, timer)))
    _fill(found.gemms)
    for causal in (False, True):
        found.attention[causal] = [
            (length, head_dim, _attention_tflops(length, head_dim, causal, sizes, device, timer))
            for length in sizes.lengths
            for head_dim in sizes.head_dims
        ]
    source = torch.ones(sizes.copy_bytes // 4, device=device)
    target = torch.empty_like(source)
    found.hbm_gbps = 2 * sizes.copy_bytes / timer(partial(torch.neg, source, out=target)) / 1e3
    if is_cuda:
        small = torch.zeros(1024, device=device)
        found.launch_us = timer(lambda: [small.add_(1) for _ in range(_KERNELS)]) / _KERNELS
        found.host_us = host_us(group.collectives, dtype, device)
    eager = partial(slowest_us, group, captures=False)
    for inner, length in groups_of(size):
        grid = Grid(data=size // (inner * length), z=length, y=inner)
        joined = prefix_store(f"{inner}-{length}", store)
        axes = join_group(joined, rank=rank, size=size, device=device, grid=grid).axes
        assert axes is not None  # z has more than one rank
        for kind in ("all_gather", "all_reduce"):
            link = measure_link(axes.z, inner, kind, sizes.payloads, device=device, timer=timer)
            found.links.append(link)
        if inner == 1 and length == size:
            found.copies_gbps = measure_copies(axes.z, num_bytes=max(sizes.payloads), timer=eager)
    if shared and group.workspace is not None and group.workspace.memory is not None:
        found.sum_of_y = measure_sums(
            group, rows=sizes.sum_rows, features=sizes.sum_features, timer=timer
        )
    return found


def slowest_us(group: TpGroup, run: Callable[[], object], *, captures: bool = True) -> float:
    """Microseconds of a call on the slowest rank; all ranks begin together.

    On GPUs calls are in a CUDA graph and come until the clock is that of a long pass, unless
    captures is False: then each is launched by itself and waited for.
    """
    device, collectives = group.device, group.collectives
    if device.type == "cuda" and captures:
        took = _hot_us(run, collectives)
    else:
        times = []
        for _ in range(_ROUNDS + 2):
            collectives.barrier()
            _wait(device)
            started = time.perf_counter()
            run()
            _wait(device)
            times.append((time.perf_counter() - started) * 1e6)
        took = sorted(times[2:])[_ROUNDS // 2]
    each = torch.zeros(collectives.size, device=device)
    each[collectives.rank] = took
    return float(collectives.all_reduce(each).max())


def _hot_us(run: Callable[[], object], collectives: GroupCollectives) -> float:
    """Return the time of a call in a graph. Every rank replays as often, for calls may wait for one
    another."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def timed_us(call: Callable[[], object], count: int) -> float:
        first.record()
        for _ in range(count):
            call()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) * 1e3 / count

    def agreed(number: float) -> int:
        least = torch.tensor([number], device="cuda", dtype=torch.float64)
        return max(1, round(float(collectives.all_reduce(least)) / collectives.size))

    run()
    calls = agreed(min(50.0, _GRAPH_US / timed_us(run, 3)))
    graph = capture(lambda: [run() for _ in range(calls)])
    collectives.barrier()
    graph.replay()
    replay_us = timed_us(graph.replay, 1)
    timed_us(graph.replay, agreed(_HOT_US / replay_us))
    return timed_us(graph.replay, agreed(_TIMED_US / replay_us)) / calls


def groups_of(size: int) -> list[tuple[int, int]]:
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


def _fill(points: list[tuple[int, int, float]]) -> None:
    """GEMMs that were left out get the rate of the most rows that were measured."""
    known = {(m, features): rate for m, features, rate in points}
    rows, columns = sorted({m for m, _ in known}), sorted({features for _, features in known})
    for features in columns:
        most = max(m for m in rows if (m, features) in known)
        points += [(m, features, known[most, features]) for m in rows if m > most]


def _gemm_tflops(
    m: int, features: int, dtype: torch.dtype, device: torch.device, timer: Timer
) -> float:
    """Return the rate of three products of equal work: square, wide and deep."""
    randn = partial(torch.randn, device=device, dtype=dtype)
    took = 0.0
    wide, narrow = 2 * features, features // 2
    for n, k in ((features, features), (wide, narrow), (narrow, wide)):
        x, weight = randn(m, k), randn(n, k) * k**-0.5
        w = prepare_linear(weight, randn(n), prepack=False)
        took += timer(partial(linear, x, w))
    return 3 * 2 * m * features**2 / took / 1e6


def _attention_tflops(
    length: int,
    head_dim: int,
    causal: bool,
    sizes: CalibrationSizes,
    device: torch.device,
    timer: Timer,
) -> float:
    tokens, heads = sizes.tokens, sizes.num_heads
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    qkv = torch.randn(tokens, 3 * heads, head_dim, device=device, dtype=dtype)
    starts = torch.arange(0, tokens + 1, length, dtype=torch.int32, device=device)
    plan = plan_attention(starts, total_tokens=tokens, head_dim=head_dim, causal=causal)
    q, k, v = qkv.split(heads, 1)

    def attend() -> None:
        varlen_attention(
            q,
            k,
            v,
            starts,
            max_seqlen=length,
            softmax_scale=head_dim**-0.5,
            causal=causal,
            plan=plan,
        )

    flop = 4 * tokens * length * heads * head_dim / (2 if causal else 1)
    return flop / timer(attend) / 1e6


def host_us(
    collectives: GroupCollectives, dtype: torch.dtype, device: torch.device
) -> tuple[float, float]:
    """Return the time that rank 0 needs to launch a small linear layer, and a small gather; the GPU
    keeps up."""
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
    return op_us, launched_us(lambda: collectives.start_all_gather(received, sent).wait())


def machine_text(found: Found, *, size: int) -> str:
    """Write the results as a TOML file."""
    is_cuda = torch.cuda.is_available()
    name, memory, sms = "CPU processes of one machine, gloo", 8.0, torch.get_num_threads()
    if is_cuda:
        gpu = torch.cuda.get_device_properties(0)
        name, memory, sms = gpu.name, 0.93 * gpu.total_memory / 2**30, gpu.multi_processor_count
    gathers = [link for link in found.links if link.kind == "all_gather"]
    sums = [link for link in found.links if link.kind == "all_reduce"]
    best = max(rate for _, _, rate in found.gemms)
    table = ", ".join(f"[{link.inner}, {link.size}, {link.gbps:.4f}]" for link in gathers)
    alpha = max((link.alpha_us for link in gathers), default=0.0)
    small = min((link.small_us for link in found.links), default=0.0)
    attention = max(rate for points in found.attention.values() for _, _, rate in points)
    lines = [
        "# Written by `bytetx plan --calibrate`: what the slowest rank took.",
        f'description = "{size} x {name}"',
        f'source = "measured on this machine, torch {torch.__version__}"',
        f"gpus_per_node = {size}",
        "",
        "[gpu]",
        f"memory_gib = {memory:.2f}",
        f"gemm_tflops = {best:.5g}",
        f"gemm_table = {_points(found.gemms)}  # rows, features, TFLOP/s",
        f"attention_tflops = {attention:.5g}",
        f"attention_table = {_points(found.attention[False])}  # tokens of a text, of a head",
        f"causal_attention_table = {_points(found.attention[True])}",
        f"hbm_gbps = {found.hbm_gbps:.2f}",
        f"peak_tflops = {best:.5g}  # no specification is known here",
        f"num_sms = {sms}",
        f"launch_us = {found.launch_us:.3f}",
        f"graph_tokens = {32768 if is_cuda else 0}",
        "",
        "[intra]",
        f"alpha_us = {alpha:.2f}",
        f"small_alpha_us = {min(small, alpha):.2f}",
        "small_bytes = 262144",
        f"table_gbps = [{table}]  # ranks inside, ranks, rate of all-gathers",
        f"gbps = {min((link.gbps for link in gathers), default=1.0):.4f}",
        f"all_reduce_gbps = {min((link.gbps for link in sums), default=1.0):.4f}",
    ]
    if found.copies_gbps:
        lines.append(f"copies_gbps = {found.copies_gbps:.4f}  # of z's gathers, by copy engines")
    lines += [
        "",
        "[host]  # of launching without a CUDA graph; 0 on CPUs, which compute meanwhile",
        f"op_us = {found.host_us[0]:.2f}",
        f"collective_us = {found.host_us[1]:.2f}",
        "",
        "[host.around]  # of a pass besides its layers: us, and us a token",
        *(f"{kind} = [{a.us:.1f}, {a.us_per_token:.5f}]" for kind, a in found.around.items()),
    ]
    if found.sum_of_y is not None:
        lines += [
            "",
            "[overlap]  # what a sum of y takes that its GEMMs do not hide",
            f"sum_us = {found.sum_of_y.us:.2f}",
            f"sum_gbps = {found.sum_of_y.gbps:.2f}",
        ]
    lines += [
        "",
        "[inter]  # other nodes were not measured: 100 Gb/s is an assumption",
        "alpha_us_per_gpu = 10.0",
        "gbps = 12.0",
    ]
    return "\n".join(lines) + "\n"


def _points(points: Sequence[tuple[int, int, float]]) -> str:
    return "[" + ", ".join(f"[{a}, {b}, {rate:.5g}]" for a, b, rate in points) + "]"
