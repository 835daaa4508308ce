"""The processes of a group on one machine, started by torchrun.

Only torchrun's environment is used: its store listens on every interface, and anybody who can
connect may write to it. The rendezvous is a unix socket, where each side asks the kernel for the
user of the other process: the same user is trusted, all others are refused.
"""

import hashlib
import json
import os
import select
import selectors
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from bytetx.errors import GroupError, InputError
from bytetx.executor.channel import Channel, peer_pid
from bytetx.executor.control import UNKNOWN_CODE, LeaderConnection, Workers
from bytetx.executor.heartbeat import DEFAULT_LIMIT_S
from bytetx.executor.launch import RENDEZVOUS_TIMEOUT, new_rendezvous_folder, rendezvous_store

# Frames before messages: a worker sends its rank, rank 0 the folder of the rendezvous.
_HELLO, _START = 0, 1
_RANK = struct.Struct("<I")
_MAX_PAYLOAD_BYTES = 4096
# Connections that have not yet sent their rank.
_MAX_PENDING = 64
# Between attempts to reach rank 0, which may come later.
_RETRY_SECONDS = 0.05
# For workers that connect late, where rank 0 loads no model over the group.
_LATE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class TorchrunRank:
    """This process among those that torchrun started on this machine.

    name: of the job, the same on all ranks; no secret.
    """

    rank: int
    size: int
    name: str

    @property
    def address(self) -> str:
        """The address of rank 0's socket, in Linux' abstract namespace: no file is left behind."""
        return f"\0bytetx-{os.getuid()}-{self.name}"

    def connect(self) -> tuple[LeaderConnection, dist.Store] | None:
        """A worker's side; waits for rank 0.  None where rank 0 loads no model over the group.

        Raises GroupError where rank 0 does not connect, or the socket is another user's.
        """
        channel = Channel(self._connect())
        try:
            channel.send(_HELLO, _RANK.pack(self.rank))
            frames: list[tuple[int, bytes]] = []
            while not frames:
                frames = channel.read()
        except (EOFError, OSError):
            return None
        (kind, payload) = frames[0]
        if kind != _START or len(frames) > 1:
            raise GroupError(f"rank 0 sent a frame of kind {kind} before its first message")
        folder = Path(json.loads(payload))
        return LeaderConnection(channel, folder=folder), rendezvous_store(folder, self.size)

    def _connect(self) -> socket.socket:
        end = time.monotonic() + RENDEZVOUS_TIMEOUT.total_seconds()
        while True:
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(self.address)
            except (ConnectionError, FileNotFoundError):
                connection.close()
                if time.monotonic() > end:
                    waited = f"{RENDEZVOUS_TIMEOUT.total_seconds():g} s"
                    raise GroupError(
                        f"rank {self.rank} waited {waited} for rank 0: "
                        "start it on the same machine, by the same user and torchrun"
                    ) from None
                time.sleep(_RETRY_SECONDS)
                continue
            if peer_pid(connection) is None:
                connection.close()
                raise GroupError(
                    "another user's process holds the socket of torchrun's ranks: "
                    "start torchrun again, with another --rdzv-id or --master-port"
                )
            return connection


class TorchrunLeader:
    """Rank 0's side under torchrun: the other ranks wait for one group to be built."""

    def __init__(self, torchrun: TorchrunRank):
        """Raises InputError where another process holds the job's socket."""
        self.size = torchrun.size
        self._found: dict[int, tuple[Channel, int]] = {}  # rank -> its channel and process id
        self._all_found, self._stop = threading.Event(), threading.Event()
        self._listener = socket.socket(socket.AF_UNIX)
        try:
            self._listener.bind(torchrun.address)
        except OSError as error:
            self._listener.close()
            raise InputError(
                "another process holds the socket of torchrun's ranks "
                f"({error.strerror}): start torchrun again, with another --rdzv-id or "
                "--master-port"
            ) from error
        self._listener.listen(_MAX_PENDING)
        self._listener.setblocking(False)
        self._thread = threading.Thread(target=self._accept, name="bytetx-torchrun", daemon=True)
        self._thread.start()

    def workers(self, limit_s: float = DEFAULT_LIMIT_S) -> tuple[Workers, dist.Store]:
        """Connections to all workers; waits for them.  GroupError where one does not connect."""
        is_complete = self._all_found.wait(RENDEZVOUS_TIMEOUT.total_seconds())
        self._end_rendezvous()
        missing = [str(rank) for rank in range(1, self.size) if rank not in self._found]
        if not is_complete:
            self.close()
            raise GroupError(
                f"{len(missing)} of torchrun's {self.size} ranks did not connect within "
                f"{RENDEZVOUS_TIMEOUT.total_seconds():g} s: {', '.join(missing)}"
            )
        folder = new_rendezvous_folder()
        store = rendezvous_store(folder, self.size)
        found = [self._found[rank] for rank in range(1, self.size)]
        self._found.clear()
        for channel, _ in found:
            with suppress(OSError):  # Workers reports a rank that has ended
                channel.send(_START, json.dumps(str(folder)).encode())
        channels = [channel for channel, _ in found]
        processes = [_TorchrunProcess(pid) for _, pid in found]
        # torchrun ends this process as soon as another rank has ended.
        workers = Workers(channels, processes, folder=folder, limit_s=limit_s, logs_failure=True)
        return workers, store

    def close(self) -> None:
        """Ends ranks that still wait for a group; a second call does nothing."""
        if not self._stop.is_set():
            self._all_found.wait(_LATE_SECONDS)
        self._end_rendezvous()
        for channel, _ in self._found.values():
            channel.close()
        self._found.clear()

    def _end_rendezvous(self) -> None:
        self._stop.set()
        self._thread.join()

    def _accept(self) -> None:
        """Until all ranks are there: accepts connections and their first frames, in any order."""
        pending: dict[Channel, int] = {}  # channel -> process id
        with self._listener, selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while not self._stop.is_set() and not self._all_found.is_set():
                for key, _ in selector.select(_RETRY_SECONDS):
                    channel = key.fileobj
                    if isinstance(channel, Channel):
                        selector.unregister(channel)
                        if not self._add_rank(channel, pending.pop(channel)):
                            channel.close()
                    elif (accepted := self._accept_one(pending)) is not None:
                        selector.register(accepted, selectors.EVENT_READ)
                if len(self._found) == self.size - 1:
                    self._all_found.set()
        for channel in pending:
            channel.close()

    def _accept_one(self, pending: dict[Channel, int]) -> Channel | None:
        with suppress(OSError):
            connection, _ = self._listener.accept()
            pid = peer_pid(connection)
            if pid is not None and len(pending) < _MAX_PENDING:
                connection.setblocking(True)
                channel = Channel(connection, max_payload_bytes=_MAX_PAYLOAD_BYTES)
                pending[channel] = pid
                return channel
            connection.close()
        return None

    def _add_rank(self, channel: Channel, pid: int) -> bool:
        """Whether its first frame, which the socket delivers whole, names a missing rank."""
        try:
            ((kind, payload),) = channel.read()
            (rank,) = _RANK.unpack(payload)
        except (EOFError, OSError, ValueError, struct.error):
            return False
        if kind != _HELLO or not 0 < rank < self.size or rank in self._found:
            return False
        self._found[rank] = channel, pid
        return True


class _TorchrunProcess:
    """A rank that torchrun started; see control.Process. Only torchrun gets its exit code."""

    def __init__(self, pid: int):
        self.pid = pid
        try:
            # The id alone may be reused by another process.
            self._fd: int | None = os.pidfd_open(pid)
        except OSError:
            self._fd = None

    def __del__(self) -> None:
        if self._fd is not None:
            os.close(self._fd)

    def poll(self) -> int | None:
        return UNKNOWN_CODE if self._has_ended(0) else None

    def wait(self, timeout: float | None = None) -> int:
        if not self._has_ended(timeout):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        return UNKNOWN_CODE

    def kill(self) -> None:
        if self._fd is not None:
            with suppress(OSError):
                signal.pidfd_send_signal(self._fd, signal.SIGKILL)

    def _has_ended(self, timeout: float | None) -> bool:
        """True where nothing is known of it."""
        return self._fd is None or bool(select.select([self._fd], [], [], timeout)[0])


def torchrun_rank(environment: Mapping[str, str]) -> TorchrunRank | None:
    """Read torchrun's variables; None where it did not start this process.

    Raises InputError where ranks are on several machines, or the system is not Linux.
    """
    if "TORCHELASTIC_RUN_ID" not in environment or environment.get("WORLD_SIZE", "1") == "1":
        return None
    rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    if int(environment["LOCAL_WORLD_SIZE"]) != size:
        raise InputError(
            f"torchrun started {size} ranks, {environment['LOCAL_WORLD_SIZE']} of them on this "
            "machine; all ranks of a model must be on one (--nnodes 1)"
        )
    if not hasattr(socket, "SO_PEERCRED"):
        raise InputError("ranks started by torchrun need Linux; use --tp instead")
    # Concurrent jobs differ in run id or port; attempts of one job in the count.
    names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    job = json.dumps([environment.get(name, "") for name in names])
    return TorchrunRank(rank, size, hashlib.sha256(job.encode()).hexdigest()[:32])
