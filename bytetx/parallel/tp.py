"""TpGroup: the ranks that hold one model's layers together, and their collectives."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from threading import Thread
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Backend

from bytetx.ops.comm_gemm import Peers
from bytetx.ops.comm_workspace import Workspace
from bytetx.parallel.nccl import loopback_sockets
from bytetx.parallel.row_scheme import RowScheme, row_scheme

Store = dist.Store

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
    """

    rank: int
    size: int
    device: torch.device
    collectives: "GroupCollectives"
    workspace: Workspace | None
    rows: RowScheme

    @property
    def peers(self) -> Peers:
        return Peers(self.rank, self.size, self.collectives, self.workspace)

    def fault_text(self) -> str | None:
        """Which wait of a kernel of this rank expired, for which rank; None where none has."""
        return None if self.workspace is None else self.workspace.fault_text()

    def num_collectives(self) -> int:
        """Collectives that this rank has begun; those of replayed graphs do not count."""
        return self.collectives.num_begun

    def abort(self) -> None:
        """Ends what waits for a rank that is gone; the group cannot be used after that."""
        if self.workspace is not None:
            self.workspace.give_up()
        # NCCL tells its kernels to end at once, and then waits until the graphs that hold some of
        # them are destroyed, which a thread that waits for these kernels can do only after that.
        aborting = Thread(target=self.collectives.abort, name="bytetx-abort", daemon=True)
        aborting.start()
        aborting.join(_ABORT_SECONDS)


def join_group(
    store: dist.Store,
    *,
    rank: int,
    size: int,
    device: torch.device,
    workspace_bytes: int = 0,
    rows: RowScheme | None = None,
) -> TpGroup:
    """Joins the group whose rendezvous is `store`; all ranks call it with the same sizes.

    workspace_bytes: of memory that the ranks share, for the fused ops; 0 is none.
    rows: None is the device's own scheme.
    """
    with loopback_sockets() if device.type == "cuda" else nullcontext():
        backend = _backend(dist.PrefixStore("bytetx", store), rank=rank, size=size, device=device)
        collectives = GroupCollectives(backend, rank=rank, size=size)
        collectives.all_reduce(torch.zeros(1, device=device))  # a group that cannot work fails here
    workspace = None
    if workspace_bytes and device.type == "cuda":
        # Imported here: it imports triton, which CPUs do not need.
        from bytetx.parallel.symmetric import symmetric_workspace

        shared = dist.PrefixStore("bytetx-symmetric", store)
        workspace = symmetric_workspace(
            shared, backend, device=device, buffer_bytes=workspace_bytes
        )
    return TpGroup(
        rank, size, device, collectives, workspace, rows or row_scheme(device.type, size)
    )


def end_rendezvous(store: Store) -> None:
    """All ranks have joined: from now on nothing is read from the store."""
    store.set_timeout(_STORE_TIMEOUT)


def gpu_of(rank: int) -> torch.device:
    """Rank i has GPU i. Where there are fewer, as in tests, ranks share them."""
    return torch.device("cuda", rank % torch.cuda.device_count())


def _backend(
    store: dist.Store, *, rank: int, size: int, device: torch.device
) -> "dist.ProcessGroupGloo | dist.ProcessGroupNCCL":
    """A separate backend: torch's default group may be the caller's."""
    if device.type == "cuda":
        from bytetx.parallel.symmetric import disable_multicast

        torch.cuda.set_device(device)
        disable_multicast()
    # NCCL takes one rank per GPU; gloo takes tensors of GPUs, too.
    if device.type == "cuda" and size <= torch.cuda.device_count():
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


class _Collectives(Protocol):
    """What every backend of torch has; torch's stubs lack it."""

    def _allgather_base(self, received: Tensor, sent: Tensor) -> dist.Work: ...
    def _reduce_scatter_base(self, received: Tensor, sent: Tensor) -> dist.Work: ...
    def allreduce(self, tensors: list[Tensor]) -> dist.Work: ...
    def broadcast(self, tensors: list[Tensor], options: dist.BroadcastOptions) -> dist.Work: ...
    def barrier(self) -> dist.Work: ...
    def abort(self) -> None: ...


class GroupCollectives:
    """Collectives on the current stream; see bytetx.ops.comm_gemm.Collectives.

    Half types are summed in f32 on CPUs, which is what the fused ops on GPUs do; NCCL sums them
    as they are.
    """

    def __init__(self, backend: Backend, *, rank: int, size: int):
        self._backend: _Collectives | None = cast(_Collectives, backend)
        self._rank, self._size = rank, size
        self._is_gloo = isinstance(backend, dist.ProcessGroupGloo)
        self._is_aborted = False
        self.num_begun = 0  # collectives; the same on all ranks when they have done the same

    def _begin(self) -> _Collectives:
        assert self._backend is not None  # no rank calls one after abort
        self.num_begun += 1
        return self._backend

    def all_gather(self, shard: Tensor, row_offsets: Sequence[int]) -> Tensor:
        """[local rows, ...] of every rank -> [total rows, ...], in the order of ranks."""
        sizes = [row_offsets[i + 1] - row_offsets[i] for i in range(self._size)]
        largest, tail = max(sizes), shard.shape[1:]
        if not largest:
            return shard.new_empty((0, *tail))
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
        pieces = received.view(self._size, largest, *tail)
        return torch.cat([pieces[i, :rows] for i, rows in enumerate(sizes)])

    def reduce_scatter(self, partial: Tensor, row_offsets: Sequence[int]) -> Tensor:
        """[total rows, n] of every rank -> the sum's local rows; f32 where gloo sums halves."""
        local = slice(row_offsets[self._rank], row_offsets[self._rank + 1])
        if self._is_gloo:
            # Summed as all_reduce does: in the order of gloo's ring, the same on every rank.
            return self.all_reduce(partial)[local].clone()
        sizes = [row_offsets[i + 1] - row_offsets[i] for i in range(self._size)]
        largest = max(sizes)
        if not largest:
            return partial
        if min(sizes) < largest:
            spread = partial.new_zeros((self._size, largest, *partial.shape[1:]))
            for padded, piece in zip(spread, partial.split(sizes), strict=True):
                padded[: len(piece)] = piece
            partial = spread.flatten(0, 1)
        summed = partial.new_empty((largest, *partial.shape[1:]))
        self._begin()._reduce_scatter_base(summed, partial).wait()
        return summed[: sizes[self._rank]]

    def all_reduce(self, partial: Tensor) -> Tensor:
        """[m, n] of every rank -> their sum, which may be in partial's memory; f32 as above."""
        summed = partial.float() if self._is_gloo else partial
        if summed.numel():
            self._begin().allreduce([summed]).wait()
        return summed

    def all_gather_columns(self, x: Tensor, column_offsets: Sequence[int]) -> Tensor:
        """[m, local columns] of every rank -> [m, all columns], in the order of ranks."""
        sizes = [column_offsets[i + 1] - column_offsets[i] for i in range(self._size)]
        rows, largest = len(x), max(sizes)
        sent = x.contiguous()
        if x.shape[1] < largest:
            sent = x.new_empty((rows, largest))
            sent[:, : x.shape[1]] = x
        received = x.new_empty((self._size * rows, largest))
        self._begin()._allgather_base(received, sent).wait()
        pieces = received.view(self._size, rows, largest)
        return torch.cat([pieces[i, :, :columns] for i, columns in enumerate(sizes)], dim=1)

    def broadcast(self, x: Tensor) -> Tensor:
        """What rank 0's x holds, into x on every rank."""
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
        if not self._is_aborted:
            self._is_aborted = True
            assert self._backend is not None  # only abort lets go of it
            self._backend.abort()
            if self._is_gloo:
                self._backend = None  # its sockets and threads end with it
