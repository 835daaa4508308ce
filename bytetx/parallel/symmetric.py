"""Memory that the GPUs of a host share: the only file that uses torch's symmetric memory."""

import logging
import os
import re
from collections.abc import Sequence
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


def symmetric_workspace(
    store: dist.Store, backend: Backend, *, device: torch.device, buffer_bytes: int
) -> Workspace | None:
    """A workspace on every rank, zeroed; None where the GPUs cannot access one another's memory.

    backend: the group's.  All ranks call it with the same buffer_bytes.  It lives as long as the
    process: peers may read it as long as they run.
    """
    rank, size = backend.rank(), backend.size()
    has_access = _accesses_all(device, size)
    if not _all_agree(store, "access", rank=rank, size=size, answer=has_access):
        return None
    buffer_bytes = -(-buffer_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    workspace = None
    try:
        workspace = _shared(store, backend, device=device, buffer_bytes=buffer_bytes)
    except RuntimeError as error:
        logger.warning("ranks share no memory, NCCL is used instead: %s", error)
    has_memory = workspace is not None
    has_all = _all_agree(store, "has", rank=rank, size=size, answer=has_memory)
    return workspace if has_all else None


def disable_multicast() -> None:
    """For NCCL and torch's symmetric memory, in this process: not every host's NVLink has it, and
    where it fails, it fails after minutes.
    """
    os.putenv("NCCL_NVLS_ENABLE", "0")
    os.putenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")


def _shared(
    store: dist.Store, backend: Backend, *, device: torch.device, buffer_bytes: int
) -> Workspace:
    if backend.size() > torch.cuda.device_count():
        os.putenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
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
        return self._store.get(self._numbered(key))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        numbered = [self._numbered(key) for key in keys]
        if timeout is None:
            self._store.wait(numbered)
        else:
            self._store.wait(numbered, timeout)

    def _numbered(self, key: str) -> str:
        """The key, with the number of the exchange within this group in place of torch's."""
        found = re.fullmatch(r"(.*)/(\d+)/(\d+)", key)
        if found is None:
            return key
        kind, number, rank = found.groups()
        if (kind, number) not in self._numbers:
            self._numbers[kind, number] = self._counts.get(kind, 0)
            self._counts[kind] = self._numbers[kind, number] + 1
        return f"{kind}/{self._numbers[kind, number]}/{rank}"


def _accesses_all(device: torch.device, size: int) -> bool:
    """Rank i has GPU i, or shares one: the launcher guarantees it."""
    count = min(size, torch.cuda.device_count())
    others = [i for i in range(count) if i != device.index]
    return all(torch.cuda.can_device_access_peer(device.index, i) for i in others)


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
