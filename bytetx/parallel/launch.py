"""The processes of a group: started by rank 0, or by torchrun beforehand."""

import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

import torch.distributed as dist

from bytetx.errors import InputError
from bytetx.parallel.control import Follower, Followers

# Ranks meet within the seconds that their imports take, on a machine that is busy too.
_MEETING_TIME = timedelta(seconds=120)
_FOLLOW = "import json, sys; sys.path[:0] = json.loads(sys.argv[1]); from {module} import main; "


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the ranks that spawn started find one another."""

    port: int

    def store(self) -> dist.Store:
        return dist.TCPStore("127.0.0.1", self.port, is_master=False, timeout=_MEETING_TIME)


def spawn(size: int, *, module: str, num_threads: int) -> tuple[Followers, dist.Store, Meeting]:
    """Starts ranks 1 to size - 1 on this machine: each runs `main` of a module.

    num_threads: of torch, in each of them.  They end with this process, whatever ends it.
    """
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_MEETING_TIME
    )
    connections, processes = [], []
    path = [str(Path(__file__).parents[2]), *sys.path]
    code = _FOLLOW.format(module=module) + "main(sys.argv[2:])"
    for rank in range(1, size):
        ours, theirs = socket.socketpair()
        arguments = [json.dumps(path), str(rank), str(size), str(theirs.fileno())]
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", code, *arguments, str(num_threads)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # rank 0's may be the output of a job
                pass_fds=[theirs.fileno()],
                process_group=0,  # a terminal's Ctrl-C is rank 0's to deal with
            )
        processes.append(process)
        connections.append(Connection(ours.detach()))
    return Followers(connections, processes), store, Meeting(store.port)


def follower_of(fd: str) -> Follower:
    """The side of a process that spawn started with this file descriptor."""
    return Follower(Connection(int(fd)))


@dataclass(frozen=True, slots=True)
class TorchrunRank:
    """This process among those that torchrun started on this machine."""

    rank: int
    size: int
    torchrun_store: dist.Store

    def store(self) -> dist.Store:
        return self.torchrun_store

    def follow(self) -> Follower:
        """A follower's side; waits for rank 0 to lead."""
        address, key = json.loads(self.torchrun_store.get("control"))
        connection = Client(address, authkey=bytes.fromhex(key))
        connection.send(self.rank)
        return Follower(connection)


class TorchrunLead:
    """Rank 0's side under torchrun: the other ranks wait to be led, once."""

    def __init__(self, own: TorchrunRank):
        self.size, self.store = own.size, own.torchrun_store
        self._folder = tempfile.TemporaryDirectory(prefix="bytetx-")
        key = secrets.token_hex(32)
        address = os.path.join(self._folder.name, "control")
        self._listener = Listener(address, backlog=own.size, authkey=bytes.fromhex(key))
        self.store.set("control", json.dumps([address, key]))

    def followers(self) -> Followers:
        """Connections to all other ranks; waits for them."""
        found: dict[int, Connection] = {}
        while len(found) < self.size - 1:
            connection = self._listener.accept()
            found[connection.recv()] = connection
        self.close()
        return Followers([found[rank] for rank in range(1, self.size)], [])

    def close(self) -> None:
        """Ranks that wait and were never led end."""
        self._listener.close()
        self._folder.cleanup()


def torchrun_rank(environment: Mapping[str, str]) -> TorchrunRank | None:
    """What torchrun's variables say; None where it did not start this process.

    Raises InputError where ranks are on several machines.
    """
    if "TORCHELASTIC_RUN_ID" not in environment or environment.get("WORLD_SIZE", "1") == "1":
        return None
    rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    if int(environment["LOCAL_WORLD_SIZE"]) != size:
        raise InputError(
            f"torchrun started {size} ranks, {environment['LOCAL_WORLD_SIZE']} of them on this "
            "machine; all ranks of a model must be on one (--nnodes 1)"
        )
    is_agents = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(
        environment["MASTER_ADDR"],
        int(environment["MASTER_PORT"]),
        is_master=rank == 0 and not is_agents,
        timeout=_MEETING_TIME,
    )
    attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    return TorchrunRank(rank, size, dist.PrefixStore(f"bytetx-{attempt}", store))
