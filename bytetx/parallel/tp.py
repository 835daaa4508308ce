"""TpGroup: the ranks that hold one model's layers together, and their collectives."""

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from threading import Thread
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Backend

from bytetx.ops.comm_gemm import Peers
from bytetx.ops.comm_workspace import Workspace
from bytetx.parallel.grid import Grid
from bytetx.parallel.nccl import loopback_sockets
from bytetx.parallel.row_scheme import RowScheme, row_scheme

if TYPE_CHECKING:  # it imports triton, which CPUs do not need
    from bytetx.parallel.symmetric import PeerReads

Store = dist.Store
Work = dist.Work

# Ranks that have joined wait for one another as long as they run: a user may stop rank 0 at times.
# Heartbeats detect those that end, stop or hang (bytetx.executor.heartbeat).
_TIMEOUT = timedelta(days=1)
_RENDEZVOUS_TIMEOUT = timedelta(minutes=2)
# NCCL polls its store once a second, and must not wait for it when it is gone.
_STORE_TIMEOUT = timedelta(seconds=1)
# By then collectives outside of graphs have ended.
_ABORT_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class TpGroup:
    """This rank among those that share a model.

    collectives: gloo between CPUs, NCCL between GPUs.  workspace: memory that the ranks share,
    None where their GPUs are not NVLink peers.  rows: when and how rows are sharded.
    axes: where the ranks form a grid of more than y, the groups of this rank along its axes.
    """

    rank: int
    size: int
    device: torch.device
    collectives: "GroupCollectives"
    workspace: Workspace | None
    rows: RowScheme
    axes: "AxisGroups | None" = None

    @property
    def peers(self) -> Peers:
        return Peers(self.rank, self.size, self.collectives, self.workspace)

    def fault_text(self) -> str | None:
        """Which wait of a kernel of this rank expired, for which rank; None where none has."""
        return None if self.workspace is None else self.workspace.fault_text()

    def num_collectives(self) -> int:
        """Collectives that this rank has begun; those of replayed decode steps do not count."""
        return sum(collectives.num_begun for collectives in self.all_collectives())

    def all_collectives(self) -> "list[GroupCollectives]":
        """Those of all ranks, and of this rank's axes."""
        axes = self.axes
        own = [] if axes is None else [axes.y.collectives, axes.x, axes.z, axes.slots]
        return [self.collectives, *own]

    def abort(self) -> None:
        """Ends what waits for a rank that is gone; the group cannot be used after that."""
        if self.workspace is not None:
            self.workspace.give_up()
        # NCCL tells its kernels to end at once, and then waits until the graphs that hold some of
        # them are destroyed, which a thread that waits for these kernels can do only after that.
        threads = [
            Thread(target=collectives.abort, name="bytetx-abort", daemon=True)
            for collectives in self.all_collectives()
        ]
        for aborting in threads:
            aborting.start()
        for aborting in threads:
            aborting.join(_ABORT_SECONDS)


@dataclass(frozen=True, slots=True)
class AxisGroups:
    """The groups of one rank of a grid (bytetx.parallel.grid).

    y: its tensor-parallel group, with its own rank in it.  x, z: ranks along these axes.
    slots: one rank of each part of a batch, data and z together.
    """

    grid: Grid
    rank: int
    y: TpGroup
    x: "GroupCollectives"
    z: "GroupCollectives"
    slots: "GroupCollectives"

    def counts(self) -> Counter[tuple[str, str, int]]:
        """(axis, kind, payload bytes) -> collectives so far, as the planner's count_transfers."""
        named = {"y": self.y.collectives, "x": self.x, "z": self.z, "slots": self.slots}
        return Counter(
            {
                (axis, kind, num_bytes): count
                for axis, collectives in named.items()
                for (kind, num_bytes), count in collectives.counts.items()
            }
        )


def join_group(
    store: dist.Store,
    *,
    rank: int,
    size: int,
    device: torch.device,
    workspace_bytes: int = 0,
    rows: RowScheme | None = None,
    grid: Grid | None = None,
) -> TpGroup:
    """Joins the group whose rendezvous is `store`; all ranks call it with the same sizes.

    workspace_bytes: of memory that the ranks share, for the fused ops; 0 is none.
    rows: None is the device's own scheme.  grid: of all ranks; None is y alone.
    """
    with loopback_sockets() if device.type == "cuda" else nullcontext():
        backend = _backend(dist.PrefixStore("bytetx", store), rank=rank, size=size, device=device)
        collectives = GroupCollectives(backend, rank=rank, size=size)
        collectives.all_reduce(torch.zeros(1, device=device))  # a group that cannot work fails here
        axes = None
        if grid is not None and not grid.is_y_alone:
            axes = _join_axes(store, grid, rank=rank, device=device, rows=rows)
    workspace = None
    if workspace_bytes and device.type == "cuda":
        # Imported here: it imports triton, which CPUs do not need.
        from bytetx.parallel.symmetric import symmetric_workspace

        shared = dist.PrefixStore("bytetx-symmetric", store)
        workspace = symmetric_workspace(
            shared, backend, device=device, buffer_bytes=workspace_bytes
        )
    return TpGroup(
        rank, size, device, collectives, workspace, rows or row_scheme(device.type, size), axes
    )


def _join_axes(
    store: dist.Store,
    grid: Grid,
    *,
    rank: int,
    device: torch.device,
    rows: RowScheme | None,
) -> AxisGroups:
    """Every rank joins the groups of its axes in the same order."""

    def join(name: str, members: tuple[int, ...], *, is_read: bool = False) -> GroupCollectives:
        return join_axis(
            store,
            name,
            members,
            rank=rank,
            device=device,
            num_ranks=grid.size,
            reads_peers=is_read,
        )

    y = join("y", grid.group("y", rank))
    scheme = rows or row_scheme(device.type, grid.y)
    groups = AxisGroups(
        grid,
        rank,
        TpGroup(grid.coordinates(rank).y, grid.y, device, y, None, scheme),
        join("x", grid.group("x", rank)),
        join("z", grid.group("z", rank), is_read=True),
        join("slots", grid.slots(rank)),
    )
    for collectives in (y, groups.x, groups.z, groups.slots):
        collectives.counts.clear()
    return groups


def join_axis(
    store: dist.Store,
    name: str,
    members: tuple[int, ...],
    *,
    rank: int,
    device: torch.device,
    num_ranks: int,
    reads_peers: bool = False,
) -> "GroupCollectives":
    """Joins the group of `members`, which all call it; a group of one needs no communication.

    num_ranks: of the whole grid; where there are fewer GPUs, ranks share them.
    reads_peers: where their GPUs can, its ranks read one another's memory.
    """
    own, size = members.index(rank), len(members)
    if size == 1:
        return GroupCollectives(None, rank=0, size=1)
    shared = dist.PrefixStore(f"bytetx-{name}-{members[0]}", store)
    is_shared = num_ranks > torch.cuda.device_count()
    backend = _backend(shared, rank=own, size=size, device=device, shares_gpus=is_shared)
    collectives = GroupCollectives(backend, rank=own, size=size)
    collectives.all_reduce(torch.zeros(1, device=device))
    if reads_peers and device.type == "cuda":
        from bytetx.parallel.symmetric import allow_shared_gpus, peer_reads

        if is_shared:
            allow_shared_gpus()
        gpus = [gpu_of(member).index for member in members]
        memory = dist.PrefixStore("memory", shared)
        collectives.peer_reads = peer_reads(memory, backend, device=device, gpus=gpus)
    return collectives


def prefix_store(name: str, store: Store) -> Store:
    """The rendezvous of one of several groups that meet at a store."""
    return dist.PrefixStore(name, store)


def end_rendezvous(store: Store) -> None:
    """All ranks have joined: from now on nothing is read from the store."""
    store.set_timeout(_STORE_TIMEOUT)


def gpu_of(rank: int) -> torch.device:
    """Rank i has GPU i. Where there are fewer, as in tests, ranks share them."""
    return torch.device("cuda", rank % torch.cuda.device_count())


def _backend(
    store: dist.Store,
    *,
    rank: int,
    size: int,
    device: torch.device,
    shares_gpus: bool | None = None,
) -> "dist.ProcessGroupGloo | dist.ProcessGroupNCCL":
    """A separate backend: torch's default group may be the caller's.

    shares_gpus: whether several ranks have one GPU; None: where there are fewer than `size`.
    """
    if device.type == "cuda":
        from bytetx.parallel.symmetric import disable_multicast

        torch.cuda.set_device(device)
        disable_multicast()
    # NCCL takes one rank per GPU; gloo takes tensors of GPUs, too.
    if shares_gpus is None:
        shares_gpus = size > torch.cuda.device_count()
    if device.type == "cuda" and not shares_gpus:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = _TIMEOUT
        return dist.ProcessGroupNCCL(store, rank, size, options)
    gloo_options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # no stub
    gloo_options._timeout = _RENDEZVOUS_TIMEOUT
    # All ranks are processes of one machine, whose own name may resolve to nothing.
    gloo_options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    backend = dist.ProcessGroupGloo(store, rank, size, gloo_options)
    backend._set_default_timeout(_TIMEOUT)
    return backend


class _TorchBackend(Protocol):
    """Methods that every backend of torch has and torch's stubs lack."""

    def _allgather_base(self, received: Tensor, sent: Tensor) -> dist.Work: ...
    def _reduce_scatter_base(self, received: Tensor, sent: Tensor) -> dist.Work: ...
    def allreduce(self, tensors: list[Tensor]) -> dist.Work: ...
    def broadcast(self, tensors: list[Tensor], options: dist.BroadcastOptions) -> dist.Work: ...
    def barrier(self) -> dist.Work: ...
    def abort(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Tally:
    """Collectives that a group has begun, and their ledger: see GroupCollectives.counts."""

    num_begun: int
    counts: Counter[tuple[str, int]]

    def __sub__(self, earlier: "Tally") -> "Tally":
        return Tally(self.num_begun - earlier.num_begun, self.counts - earlier.counts)


class GroupCollectives:
    """Collectives on the current stream; see bytetx.ops.comm_gemm.Collectives.

    Half types are summed in f32 on CPUs, which is what the fused ops on GPUs do; NCCL sums them
    as they are.
    """

    def __init__(self, backend: Backend | None, *, rank: int, size: int):
        """backend: None of a group of one rank, whose calls return what they are given."""
        self._backend: _TorchBackend | None = cast("_TorchBackend | None", backend)
        self._rank, self._size = rank, size
        self._is_gloo = isinstance(backend, dist.ProcessGroupGloo)
        self._is_aborted = False
        self.num_begun = 0  # collectives; the same on all ranks when they have done the same
        # (kind, bytes of what is gathered or summed) -> how often.
        self.counts: Counter[tuple[str, int]] = Counter()
        # What lets these ranks read one another's memory; None where they cannot.
        self.peer_reads: PeerReads | None = None

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    @property
    def is_capturable(self) -> bool:
        """Whether a CUDA graph can hold these collectives: NCCL's, or none at all."""
        return not self._is_gloo

    def _begin(self) -> _TorchBackend:
        assert self._backend is not None  # no rank calls one after abort
        self.num_begun += 1
        return self._backend

    def _count(self, kind: str, numbers: int, x: Tensor) -> None:
        self.counts[kind, numbers * x.element_size()] += 1

    def tally(self) -> Tally:
        """The counts so far."""
        return Tally(self.num_begun, self.counts.copy())

    def add(self, tally: Tally) -> None:
        """Counts what a replayed graph does."""
        self.num_begun += tally.num_begun
        self.counts.update(tally.counts)

    def restore(self, tally: Tally) -> None:
        """Counts nothing of what came after a tally: it was captured, and will not run."""
        self.num_begun, self.counts = tally.num_begun, tally.counts.copy()

    def all_gather(self, shard: Tensor, row_offsets: Sequence[int]) -> Tensor:
        """[local rows, ...] of every rank -> [total rows, ...], in the order of ranks."""
        sizes = [row_offsets[i + 1] - row_offsets[i] for i in range(self._size)]
        largest, tail = max(sizes), shard.shape[1:]
        if not largest:
            return shard.new_empty((0, *tail))
        if self._size == 1:
            return shard
        self._count("all_gather", row_offsets[-1] * tail.numel(), shard)
        sent = shard.contiguous()
        if sizes[self._rank] < largest:
            sent = shard.new_empty((largest, *tail))
            sent[: sizes[self._rank]] = shard
        received = shard.new_empty((self._size * largest, *tail))
        self._begin()._allgather_base(received, sent).wait()
        if min(sizes) == largest:
            return received
        if all(row_offsets[i] == i * largest for i in range(self._size)):
            return received[: row_offsets[-1]]  # only the last shard is shorter
        shards = received.view(self._size, largest, *tail)
        return torch.cat([shards[i, :rows] for i, rows in enumerate(sizes)])

    def all_gather_padded(self, shard: Tensor, *, num_rows: int) -> Tensor:
        """[rows, ...] of every rank -> [size * rows, ...], in the order of ranks.

        num_rows: those of all ranks that are no padding, for the ledger.
        """
        if self._size == 1 or not shard.numel():
            return shard
        self._count("all_gather", num_rows * shard.shape[1:].numel(), shard)
        received = shard.new_empty((self._size * len(shard), *shard.shape[1:]))
        self._begin()._allgather_base(received, shard).wait()
        return received

    def reduce_scatter(self, partial: Tensor, row_offsets: Sequence[int]) -> Tensor:
        """[total rows, n] of every rank -> the sum's local rows; f32 where gloo sums halves."""
        if self._size == 1:
            return partial
        local = slice(row_offsets[self._rank], row_offsets[self._rank + 1])
        if partial.numel():
            self._count("reduce_scatter", partial.numel(), partial)
        if self._is_gloo:
            # Summed as all_reduce does: in the order of gloo's ring, the same on every rank.
            return self._sum(partial)[local].clone()
        sizes = [row_offsets[i + 1] - row_offsets[i] for i in range(self._size)]
        largest = max(sizes)
        if not largest:
            return partial
        if min(sizes) < largest:
            spread = partial.new_zeros((self._size, largest, *partial.shape[1:]))
            for padded, shard in zip(spread, partial.split(sizes), strict=True):
                padded[: len(shard)] = shard
            partial = spread.flatten(0, 1)
        summed = partial.new_empty((largest, *partial.shape[1:]))
        self._begin()._reduce_scatter_base(summed, partial).wait()
        return summed[: sizes[self._rank]]

    def all_reduce(self, partial: Tensor) -> Tensor:
        """[m, n] of every rank -> their sum, which may be in partial's memory; f32 as above."""
        if self._size > 1 and partial.numel():
            self._count("all_reduce", partial.numel(), partial)
        return self._sum(partial)

    def _sum(self, partial: Tensor) -> Tensor:
        is_half = partial.element_size() < 4
        summed = partial.float() if self._is_gloo and is_half else partial
        if self._size > 1 and summed.numel():
            self._begin().allreduce([summed]).wait()
        return summed

    def start_all_gather(self, received: Tensor, sent: Tensor) -> dist.Work:
        """Begins to gather equal shards into received [size * numbers of sent].

        On GPUs it runs beside what the current stream does next, and after what it did before.
        The Work's wait() comes before received is read.
        """
        self.count_all_gather(received)
        return self._begin()._allgather_base(received, sent)

    def count_all_gather(self, received: Tensor) -> None:
        """Adds a gather to the ledger, which this rank may also do by copies of its own."""
        self._count("all_gather", received.numel(), received)

    def start_all_reduce(self, partial: Tensor) -> dist.Work | None:
        """Begins to sum `partial` of every rank in its own memory, in its own dtype.

        None where there is nothing to wait for: one rank, or no numbers. As of start_all_gather,
        the Work's wait() comes before partial is read, and partial is not written before that.
        """
        if self._size == 1 or not partial.numel():
            return None
        self._count("all_reduce", partial.numel(), partial)
        return self._begin().allreduce([partial])

    def start_reduce_scatter(self, summed: Tensor, partial: Tensor) -> dist.Work:
        """Begins to sum partial [size * numbers of summed]; summed receives this rank's part.

        Both stay as they are until the Work's wait(), in their own dtype.
        """
        self._count("reduce_scatter", partial.numel(), partial)
        return self._begin()._reduce_scatter_base(summed, partial)

    def all_gather_columns(self, x: Tensor, column_offsets: Sequence[int]) -> Tensor:
        """[m, local columns] of every rank -> [m, all columns], in the order of ranks."""
        if self._size == 1 or not len(x):
            return x if self._size == 1 else x.new_empty((0, column_offsets[-1]))
        sizes = [column_offsets[i + 1] - column_offsets[i] for i in range(self._size)]
        rows, largest = len(x), max(sizes)
        self._count("all_gather", rows * column_offsets[-1], x)
        sent = x.contiguous()
        if x.shape[1] < largest:
            sent = x.new_empty((rows, largest))
            sent[:, : x.shape[1]] = x
        received = x.new_empty((self._size * rows, largest))
        self._begin()._allgather_base(received, sent).wait()
        shards = received.view(self._size, rows, largest)
        return torch.cat([shards[i, :, :columns] for i, columns in enumerate(sizes)], dim=1)

    def broadcast(self, x: Tensor) -> Tensor:
        """Copies rank 0's x into x on every rank."""
        if x.numel():
            options = dist.BroadcastOptions()
            options.rootRank = 0
            self._begin().broadcast([x], options).wait()
        return x

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        self._begin().barrier().wait()

    def abort(self) -> None:
        """A second call does nothing."""
        if not self._is_aborted and self._backend is not None:
            self._is_aborted = True
            self._backend.abort()
            if self._is_gloo:
                self._backend = None  # its sockets and threads end with it
