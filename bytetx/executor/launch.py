"""The processes of a group on one machine, started by rank 0, and their rendezvous.

Rank 0 talks to each of them over a socketpair, which no other process can reach.
"""

import json
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from bytetx.executor.channel import Channel
from bytetx.executor.control import LeaderConnection, Workers
from bytetx.executor.heartbeat import DEFAULT_LIMIT_S

# Ranks arrive within the seconds that their imports take, on a busy machine as well.
RENDEZVOUS_TIMEOUT = timedelta(seconds=120)
_WORKER_CODE = (
    "import json, sys; sys.path[:0] = json.loads(sys.argv[1]); {early}"
    "from {module} import main; main(sys.argv[2:])"
)
# Before torch is imported, so that both take the time of the longer one.
_EARLY_CODE = "from bytetx.executor.early_context import begin_context; begin_context({gpu}); "


def spawn(
    size: int,
    *,
    module: str,
    num_threads: int,
    limit_s: float = DEFAULT_LIMIT_S,
    gpus: Sequence[int] | None = None,
) -> tuple[Workers, dist.Store]:
    """Starts ranks 1 to size - 1 on this machine: each runs `main` of a module.

    num_threads: of torch, in each of them.  limit_s: see bytetx.executor.heartbeat.  gpus: of each
    rank, by index; None where they compute on CPUs.
    They end with this process, however it ends.
    """
    folder = new_rendezvous_folder()
    channels, processes = [], []
    path = [str(Path(__file__).parents[2]), *sys.path]
    try:
        for rank in range(1, size):
            ours, theirs = socket.socketpair()
            channels.append(Channel(ours))
            early = "" if gpus is None else _EARLY_CODE.format(gpu=gpus[rank])
            code = _WORKER_CODE.format(module=module, early=early)
            arguments = [rank, size, theirs.fileno(), folder, num_threads]
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, "-c", code, json.dumps(path), *map(str, arguments)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,  # rank 0's may be the output of a job
                    pass_fds=[theirs.fileno()],
                    process_group=0,  # rank 0 handles Ctrl-C of a terminal
                )
            processes.append(process)
        store = rendezvous_store(folder, size)
    except BaseException:
        for channel in channels:
            channel.close()  # ends the process behind it
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return Workers(channels, processes, folder=folder, limit_s=limit_s), store


def connect_to_leader(fd: str, folder: str) -> LeaderConnection:
    """The side of a process that spawn started with this file descriptor."""
    return LeaderConnection(Channel(socket.socket(fileno=int(fd))), folder=Path(folder))


def new_rendezvous_folder() -> Path:
    """A folder that other users can neither read nor write (mode 0700)."""
    return Path(tempfile.mkdtemp(prefix="bytetx-"))


def rendezvous_store(folder: Path, size: int) -> dist.Store:
    """The rendezvous of a group's ranks: a file, because a TCPStore listens to anybody."""
    store = dist.FileStore(str(folder / "store"), size)
    store.set_timeout(RENDEZVOUS_TIMEOUT)
    return store
