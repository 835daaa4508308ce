"""Memory that the GPUs of a host share: the only file that uses torch's symmetric memory."""

import logging
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from uuid import uuid4

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch._C._distributed_c10d import Backend, _register_process_group, _SymmetricMemory
from torch.distributed.distributed_c10d import GroupName

from bytetx.ops.comm_workspace import NUM_FLAGS, Workspace, make_workspace

logger = logging.getLogger("bytetx")

_ALIGNMENT_BYTES = 1024
_NO_SHARED_MEMORY = "ranks share no memory, NCCL is used instead: %s"
# Ranks that exchange the handles of their memory have met right before.
_EXCHANGE_TIMEOUT = timedelta(minutes=2)


def symmetric_workspace(
    store: dist.Store, backend: Backend, *, device: torch.device, buffer_bytes: int
) -> Workspace | None:
    """A workspace on every rank, zeroed; None where the GPUs cannot access one another's memory.

    backend: the group's.  All ranks call it with the same buffer_bytes.  It lives as long as the
    process: peers may read it as long as they run.
    """
    rank, size = backend.rank(), backend.size()
    has_access = _accesses_all(device, range(min(size, torch.cuda.device_count())))
    if not _all_agree(store, "access", rank=rank, size=size, answer=has_access):
        return None
    buffer_bytes = -(-buffer_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    workspace = None
    try:
        workspace = _shared(store, backend, device=device, buffer_bytes=buffer_bytes)
    except RuntimeError as error:
        logger.warning(_NO_SHARED_MEMORY, error)
    has_memory = workspace is not None
    has_all = _all_agree(store, "has", rank=rank, size=size, answer=has_memory)
    return workspace if has_all else None


class PeerReads:
    """Memory that this rank makes for the others of its group to read, each of them as much."""

    def __init__(self, store: dist.Store, backend: Backend, device: torch.device):
        """Every rank of the group makes one, while it joins."""
        self._rank, self._size, self._device = backend.rank(), backend.size(), device
        self._store = NumberedStore(store)
        self._name, self._group = _register(self._store, backend)
        self._num_connected = 0

    def allocate(self, num_bytes: int) -> torch.Tensor | None:
        """uint8 [num_bytes] on this rank, not initialised; None where there is no such memory.

        Every rank calls it alike.
        """
        try:
            return symm_mem.empty(num_bytes, dtype=torch.uint8, device=self._device)
        except RuntimeError as error:
            logger.warning(_NO_SHARED_MEMORY, error)
            return None

    def connect(self, memory: torch.Tensor | None) -> "PeerViews | None":
        """Views of each rank's allocation, their contents written; None where a rank has none.

        All ranks call it at about the same time.
        """
        torch.cuda.synchronize(self._device)
        views = None
        if self._agree("has", memory is not None):
            assert memory is not None
            try:
                views = self._exchange(memory)
            except RuntimeError as error:
                logger.warning(_NO_SHARED_MEMORY, error)
        has_all = self._agree("reads", views is not None)
        self._num_connected += 1
        return views if has_all else None

    def _exchange(self, memory: torch.Tensor) -> "PeerViews":
        handle = _SymmetricMemory.rendezvous(memory, self._name)
        sizes = (memory.numel(),)
        views = [
            memory if rank == self._rank else handle.get_buffer(rank, sizes, torch.uint8)
            for rank in range(self._size)
        ]
        return PeerViews(views, (handle, memory))

    def _agree(self, what: str, answer: bool) -> bool:
        """Also a barrier: every rank has come here."""
        key = f"{what}-{self._num_connected}"
        return _all_agree(self._store, key, rank=self._rank, size=self._size, answer=answer)


@dataclass(frozen=True, slots=True)
class PeerViews:
    """The memory of every rank as this device reads it, uint8, in the order of ranks.

    owner: keeps it alive.
    """

    views: Sequence[torch.Tensor]
    owner: object


def peer_reads(
    store: dist.Store, backend: Backend, *, device: torch.device, gpus: Iterable[int]
) -> PeerReads | None:
    """Connect the memory of a group's ranks, all of which call this; None where one cannot read
    another's.

    gpus: of the group's ranks.
    """
    rank, size = backend.rank(), backend.size()
    has_access = _accesses_all(device, gpus)
    if not _all_agree(store, "access", rank=rank, size=size, answer=has_access):
        return None
    return PeerReads(store, backend, device)


def disable_multicast() -> None:
    """For NCCL and torch's symmetric memory, in this process: not every host's NVLink has it, and
    where it fails, it fails after minutes.
    """
    os.putenv("NCCL_NVLS_ENABLE", "0")
    os.putenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")


def allow_shared_gpus() -> None:
    """For ranks that share a GPU, in this process."""
    os.putenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")


def _shared(
    store: dist.Store, backend: Backend, *, device: torch.device, buffer_bytes: int
) -> Workspace:
    if backend.size() > torch.cuda.device_count():
        allow_shared_gpus()
    numbered = NumberedStore(store)
    name, group = _register(numbered, backend)
    flag_bytes, copy_bytes = 4 * NUM_FLAGS, buffer_bytes // 4
    shared_bytes = buffer_bytes + flag_bytes + copy_bytes
    memory = symm_mem.empty(shared_bytes, dtype=torch.uint8, device=device)
    memory.zero_()
    torch.cuda.synchronize(device)
    handle = _SymmetricMemory.rendezvous(memory, name)
    handle.barrier(channel=0)  # no rank's flags are written before they are zero
    torch.cuda.synchronize(device)
    buffers = tuple(handle.buffer_ptrs)
    flags = tuple(address + buffer_bytes for address in buffers)
    return make_workspace(
        buffers,
        flags,
        buffer_bytes=buffer_bytes,
        rank=backend.rank(),
        device=device,
        copies=[address + flag_bytes for address in flags],
        own_copies=memory[buffer_bytes + flag_bytes :],
        owner=(memory, handle, group, numbered),
    )


class NumberedStore(dist.Store):
    """A group's store in which torch's exchanges of symmetric memory are numbered from 0.

    torch numbers them over all groups of a process: rank 0, which may lead several groups one
    after another, would wait for keys that a new worker never writes.
    """

    def __init__(self, store: dist.Store):
        super().__init__()
        self._store = store
        self._numbers: dict[tuple[str, str], int] = {}
        self._counts: dict[str, int] = {}

    def set(self, key: str, value: str | bytes) -> None:
        # torch's stub takes str only; its exchanges of memory handles pass bytes.
        self._store.set(self._numbered(key), value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        numbered = self._numbered(key)
        # The store's own time is short once all ranks have joined (bytetx.parallel.tp).
        self._store.wait([numbered], _EXCHANGE_TIMEOUT)
        return self._store.get(numbered)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._store.wait([self._numbered(key) for key in keys], timeout or _EXCHANGE_TIMEOUT)

    def _numbered(self, key: str) -> str:
        """The key, with the number of the exchange within this group instead of torch's."""
        found = re.fullmatch(r"(.*)/(\d+)/(\d+)", key)
        if found is None:
            return key
        kind, number, rank = found.groups()
        if (kind, number) not in self._numbers:
            self._numbers[kind, number] = self._counts.get(kind, 0)
            self._counts[kind] = self._numbers[kind, number] + 1
        return f"{kind}/{self._numbers[kind, number]}/{rank}"


def _accesses_all(device: torch.device, gpus: Iterable[int]) -> bool:
    others = {gpu for gpu in gpus if gpu != device.index}
    return all(torch.cuda.can_device_access_peer(device.index, gpu) for gpu in others)


def _all_agree(store: dist.Store, what: str, *, rank: int, size: int, answer: bool) -> bool:
    store.set(f"{what}-{rank}", str(int(answer)))
    return all(store.get(f"{what}-{i}") == b"1" for i in range(size))


def _register(store: dist.Store, backend: Backend) -> tuple[GroupName, dist.ProcessGroup]:
    """(the group's name in torch, unique among these processes; the group, which torch does not
    keep alive)."""
    if backend.rank() == 0:
        store.set("name", f"bytetx-{uuid4()}")
    name = GroupName(store.get("name").decode())
    group = dist.ProcessGroup(store, backend.rank(), backend.size())
    is_gloo = isinstance(backend, dist.ProcessGroupGloo)
    kind = dist.ProcessGroup.BackendType.GLOO if is_gloo else dist.ProcessGroup.BackendType.NCCL
    group._set_default_backend(kind)
    group._register_backend(torch.device("cuda"), kind, backend)
    group._set_group_name(name)
    _register_process_group(name, group)
    return name, group
