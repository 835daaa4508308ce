"""The processes of a group on one machine: started by rank 0.  Where they meet, see meeting_store.

Rank 0 talks to each of them over a socketpair, which no other process can reach.
"""

import json
import shutil
import socket
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from bytetx.executor.channel import Channel
from bytetx.executor.control import Follower, Followers
from bytetx.executor.heartbeat import DEFAULT_LIMIT_S

# Ranks meet within the seconds that their imports take, on a machine that is busy too.
MEETING_TIME = timedelta(seconds=120)
_FOLLOW = "import json, sys; sys.path[:0] = json.loads(sys.argv[1]); from {module} import main; "


def spawn(
    size: int, *, module: str, num_threads: int, limit_s: float = DEFAULT_LIMIT_S
) -> tuple[Followers, dist.Store]:
    """Starts ranks 1 to size - 1 on this machine: each runs `main` of a module.

    num_threads: of torch, in each of them.  limit_s: see bytetx.executor.heartbeat.
    They end with this process, whatever ends it.
    """
    folder = new_meeting_folder()
    channels, processes = [], []
    path = [str(Path(__file__).parents[2]), *sys.path]
    code = _FOLLOW.format(module=module) + "main(sys.argv[2:])"
    try:
        for rank in range(1, size):
            ours, theirs = socket.socketpair()
            channels.append(Channel(ours))
            arguments = [rank, size, theirs.fileno(), folder, num_threads]
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, "-c", code, json.dumps(path), *map(str, arguments)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,  # rank 0's may be the output of a job
                    pass_fds=[theirs.fileno()],
                    process_group=0,  # a terminal's Ctrl-C is rank 0's to deal with
                )
            processes.append(process)
        store = meeting_store(folder, size)
    except BaseException:
        for channel in channels:
            channel.close()  # which ends the processes behind them
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return Followers(channels, processes, folder=folder, limit_s=limit_s), store


def follower_of(fd: str, folder: str) -> Follower:
    """The side of a process that spawn started with this file descriptor."""
    return Follower(Channel(socket.socket(fileno=int(fd))), folder=Path(folder))


def new_meeting_folder() -> Path:
    """A folder that other users can neither read nor write (mode 0700)."""
    return Path(tempfile.mkdtemp(prefix="bytetx-"))


def meeting_store(folder: Path, size: int) -> dist.Store:
    """Where the ranks of a group find one another: a file, for a TCPStore listens to anybody."""
    store = dist.FileStore(str(folder / "store"), size)
    store.set_timeout(MEETING_TIME)
    return store
