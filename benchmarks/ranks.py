"""Clocks of suites on several GPUs: one process per GPU, and times of the slowest of them."""

import os
import statistics
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from benchmarks.gpu import SAMPLE_US, SAMPLES, Run, capture, left_out, orders, replay_us
from benchmarks.suite import Measurement
from bytetx.errors import BytetxError
from bytetx.ops.comm_gemm import Peers
from bytetx.parallel.symmetric import disable_multicast
from bytetx.parallel.tp import TpGroup, join_group

NOTES = (
    "floor: the longer of computing alone and communicating alone, which is all that overlap can "
    "reach; ceiling: how much faster than both behind one another that is",
    "e_overlap: 1 - (ours - computing) / (behind one another - computing); 1 hides all of it",
)


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among the ranks. name: of torch's own group of them."""

    group: TpGroup
    name: str

    @property
    def peers(self) -> Peers:
        return self.group.peers

    @property
    def size(self) -> int:
        return self.group.size


def start_ranks(arguments: list[str], *, on_cpu: int | None = None) -> None:
    """Runs `python -m benchmarks *arguments` in one process a GPU, in this one's place.

    on_cpu: so many processes instead.
    """
    size = torch.cuda.device_count() if on_cpu is None else on_cpu
    if on_cpu is None and size < 2:
        raise BytetxError(f"{arguments[0]} takes 2 GPUs or more, torch finds {size}")
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    os.execv(sys.executable, [sys.executable, *launcher, "-m", "benchmarks", *arguments])


def this_rank(device: str = "cuda") -> int | None:
    """This process's rank, when the ranks have met; None where torchrun did not start it.

    device: cuda, or cpu, whose cores the ranks share.
    """
    if not dist.is_torchelastic_launched():
        return None
    if device == "cpu":
        dist.init_process_group("gloo")
        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(max(1, cores // dist.get_world_size()))
        return dist.get_rank()
    disable_multicast()  # before NCCL and symmetric memory look for it
    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank())
    return dist.get_rank()


def join_ranks(*, workspace_bytes: int) -> Ranks:
    """workspace_bytes: as of join_group.  Raises BytetxError where no fused op has a kernel."""
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    device = torch.device("cuda", rank)
    group = join_group(store, rank=rank, size=size, device=device, workspace_bytes=workspace_bytes)
    if group.workspace is None or group.workspace.memory is None:
        raise BytetxError(
            "the fused ops have no kernels here, and NCCL would be measured against itself: they "
            "need Hopper GPUs that are NVLink peers, and bytetx._cuda (`bytetx info` says more)"
        )
    world = dist.group.WORLD
    assert world is not None  # start_ranks has made it
    return Ranks(group, world.group_name)


def overlap_measurement(
    found: dict[str, float],
    *,
    shape: Mapping[str, int | float | str],
    notes: Iterable[str] = (),
    serial: str = "cublas-nccl",
) -> Measurement:
    """Measure overlap by the times of ours, of gemm and nccl alone, and of rivals.

    serial: the rival that does one behind the other.
    """
    rivals = dict(found)
    ours, gemm, nccl = (rivals.pop(name) for name in ("ours", "gemm", "nccl"))
    behind, floor = rivals[serial], max(gemm, nccl)
    numbers = {
        "gemm_us": round(gemm, 1),
        "collective_us": round(nccl, 1),
        "e_overlap": round(1 - (ours - gemm) / (behind - gemm), 3),
        "of_floor": round(floor / ours, 3),
        "ceiling": round(behind / floor, 3),
    }
    return Measurement(ours, rivals, floor, {**shape, **numbers}, (*NOTES, *notes))


def ranks_us(
    runs: Mapping[str, Run],
    notes: list[str],
    *,
    required: Iterable[str] = ("ours", "gemm", "nccl", "cublas-nccl"),
    samples: int = SAMPLES,
    sample_us: float = SAMPLE_US,
) -> dict[str, float]:
    """Microseconds of each run's graph on the slowest rank, medians; every rank calls it.

    A run that cannot be captured is left out, which a line of `notes` says, unless it is required.
    """
    clock = RanksClock(runs, notes, required=required)
    return clock.us(clock.names, samples=samples, sample_us=sample_us)


class RanksClock:
    """Graphs of runs that every rank has, which all ranks time at the same moment."""

    @torch.inference_mode()
    def __init__(self, runs: Mapping[str, Run], notes: list[str], *, required: Iterable[str]):
        """Captures the runs; notes, required: as of ranks_us."""
        self._graphs: dict[str, torch.cuda.CUDAGraph] = {}
        for name, run in runs.items():
            try:
                self._graphs[name] = capture(run)
            except Exception as error:  # a rival may raise anything, and costs no other number
                if name in required:
                    raise
                notes.append(left_out(name, error))
        self._replay_us: dict[str, float] = {}
        for name, graph in self._graphs.items():
            replay_us(graph, 1)
            self._replay_us[name] = slowest(replay_us(graph, 1))

    @property
    def names(self) -> list[str]:
        return list(self._graphs)

    def us(self, names: Iterable[str], *, samples: int, sample_us: float) -> dict[str, float]:
        """Microseconds of each graph on the slowest rank, medians of samples: as of graph_us."""
        times: dict[str, list[float]] = {name: [] for name in names}
        first = next(iter(self._graphs))
        for order in orders(times, samples):
            for name in order:
                dist.barrier()
                for before in (first, name):
                    self._sample(before, sample_us)
                times[name].append(slowest(self._sample(name, sample_us)))
        return {name: statistics.median(found) for name, found in times.items()}

    def _sample(self, name: str, sample_us: float) -> float:
        """Microseconds of a replay, of as many as take sample_us."""
        return replay_us(self._graphs[name], max(1, round(sample_us / self._replay_us[name])))


def slowest(us: float) -> float:
    """The longest of all ranks' times."""
    found = torch.tensor(us, device="cuda")
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)
