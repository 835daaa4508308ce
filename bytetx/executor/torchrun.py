"""The processes of a group on one machine: started by torchrun.

Of torchrun only the environment is taken: its store listens on every interface, and whoever reaches
it may write there. Ranks meet at a unix socket, where each side asks the kernel whose process the
other one is: those of the same user are trusted, all others are refused.
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
from bytetx.executor.control import UNKNOWN_CODE, Follower, Followers
from bytetx.executor.heartbeat import DEFAULT_LIMIT_S
from bytetx.executor.launch import MEETING_TIME, meeting_store, new_meeting_folder

# Frames before a rank is led: the worker says its rank, rank 0 where to meet.
_HELLO, _START = 0, 1
_RANK = struct.Struct("<I")
_MAX_PAYLOAD_BYTES = 4096
# Processes that connect and do not say which rank they are.
_MAX_STRANGERS = 64
# Between attempts to reach rank 0, which may come later.
_RETRY_SECONDS = 0.05
# For workers that come late, where rank 0 has no use for them.
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
        """Of rank 0's socket: in Linux' own namespace of names, so that no file stays behind."""
        return f"\0bytetx-{os.getuid()}-{self.name}"

    def follow(self) -> tuple[Follower, dist.Store] | None:
        """A follower's side; waits for rank 0 to lead.  None where rank 0 has no use for it.

        Raises GroupError where rank 0 does not come, or the socket is another user's.
        """
        channel = Channel(self._connect())
        try:
            channel.send(_HELLO, _RANK.pack(self.rank))
            frames = []
            while not frames:
                frames = channel.read()
        except (EOFError, OSError):
            return None
        (kind, payload) = frames[0]
        if kind != _START or len(frames) > 1:
            raise GroupError(f"rank 0 sent a frame of kind {kind} before rank {self.rank} is led")
        folder = Path(json.loads(payload))
        return Follower(channel, folder=folder), meeting_store(folder, self.size)

    def _connect(self) -> socket.socket:
        end = time.monotonic() + MEETING_TIME.total_seconds()
        while True:
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(self.address)
            except (ConnectionError, FileNotFoundError):
                connection.close()
                if time.monotonic() > end:
                    raise GroupError(
                        f"rank {self.rank} waited {MEETING_TIME.total_seconds():g} s for rank 0: "
                        "start it on the same machine, by the same user and torchrun"
                    ) from None
                time.sleep(_RETRY_SECONDS)
                continue
            if peer_pid(connection) is None:
                connection.close()
                raise GroupError(
                    "another user's process holds the socket at which torchrun's ranks meet: "
                    "start torchrun again, with another --rdzv-id or --master-port"
                )
            return connection


class TorchrunLead:
    """Rank 0's side under torchrun: the other ranks wait to be led, once."""

    def __init__(self, own: TorchrunRank):
        """Raises InputError where another process holds the job's socket."""
        self.size = own.size
        self._found: dict[int, tuple[Channel, int]] = {}  # with their processes
        self._all_found, self._stop = threading.Event(), threading.Event()
        self._listener = socket.socket(socket.AF_UNIX)
        try:
            self._listener.bind(own.address)
        except OSError as error:
            self._listener.close()
            raise InputError(
                "another process holds the socket at which torchrun's ranks meet "
                f"({error.strerror}): start torchrun again, with another --rdzv-id or "
                "--master-port"
            ) from error
        self._listener.listen(_MAX_STRANGERS)
        self._listener.setblocking(False)
        self._thread = threading.Thread(target=self._accept, name="bytetx-torchrun", daemon=True)
        self._thread.start()

    def followers(self, limit_s: float = DEFAULT_LIMIT_S) -> tuple[Followers, dist.Store]:
        """Connections to all other ranks; waits for them.  GroupError where one does not come."""
        is_complete = self._all_found.wait(MEETING_TIME.total_seconds())
        self._end_meeting()
        missing = [str(rank) for rank in range(1, self.size) if rank not in self._found]
        if not is_complete:
            self.close()
            raise GroupError(
                f"{len(missing)} of torchrun's {self.size} ranks did not come within "
                f"{MEETING_TIME.total_seconds():g} s: {', '.join(missing)}"
            )
        folder = new_meeting_folder()
        store = meeting_store(folder, self.size)
        found = [self._found[rank] for rank in range(1, self.size)]
        self._found.clear()
        for channel, _ in found:
            with suppress(OSError):  # a rank that has ended is told of at once
                channel.send(_START, json.dumps(str(folder)).encode())
        channels = [channel for channel, _ in found]
        processes = [_Process(pid) for _, pid in found]
        # torchrun ends this process as soon as another rank has ended.
        options = {"folder": folder, "limit_s": limit_s, "logs_failure": True}
        return Followers(channels, processes, **options), store

    def close(self) -> None:
        """Ranks that wait and were never led end; a second call does nothing."""
        if not self._stop.is_set():
            self._all_found.wait(_LATE_SECONDS)
        self._end_meeting()
        for channel, _ in self._found.values():
            channel.close()
        self._found.clear()

    def _end_meeting(self) -> None:
        self._stop.set()
        self._thread.join()

    def _accept(self) -> None:
        """Until all ranks are there: takes connections, and what they say first, in any order."""
        strangers: dict[Channel, int] = {}
        with self._listener, selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while not self._stop.is_set() and not self._all_found.is_set():
                for key, _ in selector.select(_RETRY_SECONDS):
                    if key.fileobj is not self._listener:
                        selector.unregister(key.fileobj)
                        pid = strangers.pop(key.fileobj)
                        if not self._has_said_who(key.fileobj, pid):
                            key.fileobj.close()
                    elif (channel := self._new_stranger(strangers)) is not None:
                        selector.register(channel, selectors.EVENT_READ)
                if len(self._found) == self.size - 1:
                    self._all_found.set()
        for channel in strangers:
            channel.close()

    def _new_stranger(self, strangers: dict[Channel, int]) -> Channel | None:
        with suppress(OSError):
            connection, _ = self._listener.accept()
            pid = peer_pid(connection)
            if pid is not None and len(strangers) < _MAX_STRANGERS:
                connection.setblocking(True)
                channel = Channel(connection, max_payload_bytes=_MAX_PAYLOAD_BYTES)
                strangers[channel] = pid
                return channel
            connection.close()
        return None

    def _has_said_who(self, channel: Channel, pid: int) -> bool:
        """Whether it is a rank, which says so in one piece, for a unix socket keeps it together."""
        try:
            ((kind, payload),) = channel.read()
            (rank,) = _RANK.unpack(payload)
        except (EOFError, OSError, ValueError, struct.error):
            return False
        if kind != _HELLO or not 0 < rank < self.size or rank in self._found:
            return False
        self._found[rank] = channel, pid
        return True


class _Process:
    """A rank that torchrun started; see control.Process. Its exit code is torchrun's to know."""

    def __init__(self, pid: int):
        self.pid = pid
        try:
            self._fd = os.pidfd_open(pid)  # the number alone may become another process's
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
        """True where nothing can be said of it."""
        return self._fd is None or bool(select.select([self._fd], [], [], timeout)[0])


def torchrun_rank(environment: Mapping[str, str]) -> TorchrunRank | None:
    """What torchrun's variables say; None where it did not start this process.

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
        raise InputError("ranks that torchrun started meet on Linux alone; use --tp instead")
    # Of two jobs at the same time, run id or port differ; of one job's attempts, the count.
    own = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    job = json.dumps([environment.get(name, "") for name in own])
    return TorchrunRank(rank, size, hashlib.sha256(job.encode()).hexdigest()[:32])
