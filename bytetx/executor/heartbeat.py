"""Heartbeats: which worker has stopped, hangs, or no longer answers, and for too long."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

# A worker that is stopped answers nothing for this long before its group ends.
DEFAULT_LIMIT_S = 30.0
# A worker that runs gets this many times longer: a call that holds Python's lock, a long kernel or
# a long read must not end a group, and looks like a hang at first.
PATIENCE = 10
# A worker imports torch, finds its GPU and joins the others first, which a cold machine makes slow.
_START_S = 120.0
_CHECKS_PER_LIMIT = 8
_MAX_TICK_S = 1.0


class Progress(NamedTuple):
    """A worker's report of its progress.

    num_done: messages whose work has ended, on the device too.  num_steps: counts up within a
    message that takes long (tensors that were loaded).  num_collectives: that it has begun.
    """

    num_done: int = 0
    num_steps: int = 0
    num_collectives: int = 0


@dataclass(slots=True)
class _WorkerTimes:
    """silent_s: since its last frame.  stuck_s: since its last progress, while it has work."""

    pid: int
    silent_s: float = 0.0
    stuck_s: float = 0.0
    progress: Progress = field(default_factory=Progress)

    def patience_s(self, patience_s: float) -> float:
        """Longer until its first message, which is Join, is done."""
        return patience_s if self.progress.num_done else max(patience_s, _START_S)


class Heartbeats:
    """Times of the workers of a group, as rank 0's thread that pings them sees them.

    Time between two calls of check counts as two ticks at most: while this process is stopped, the
    machine is suspended, or another thread holds Python's lock, no worker is late.
    """

    def __init__(self, pids: Iterable[int], *, limit_s: float):
        """pids: of ranks 1, 2, ...; 0 where a process is not known."""
        self.limit_s, self.patience_s = limit_s, PATIENCE * limit_s
        self.tick_s = min(_MAX_TICK_S, limit_s / _CHECKS_PER_LIMIT)
        self._workers = {rank: _WorkerTimes(pid) for rank, pid in enumerate(pids, start=1)}
        self._last_check: float | None = None

    def hear(self, rank: int, progress: Progress | None = None) -> None:
        """A frame came from a worker; progress: where it was an answer to a ping."""
        worker = self._workers[rank]
        worker.silent_s = 0.0
        if progress is not None and progress != worker.progress:
            worker.progress, worker.stuck_s = progress, 0.0

    def check(self, now_s: float, *, num_sent: int, num_collectives: int) -> str | None:
        """Why the group has to end; None where every worker is healthy.

        now_s: of a monotonic clock.  num_sent: messages that every worker was sent.
        num_collectives: that rank 0 has begun.
        """
        last, self._last_check = self._last_check, now_s
        passed_s = 0.0 if last is None else min(now_s - last, 2 * self.tick_s)
        for worker in self._workers.values():
            worker.silent_s += passed_s
            worker.stuck_s += passed_s
            if worker.progress.num_done >= num_sent:
                worker.stuck_s = 0.0
        for rank, worker in self._workers.items():
            reason = self._silence(rank, worker)
            if reason is not None:
                return reason
        return self._hang(num_collectives)

    def _silence(self, rank: int, worker: _WorkerTimes) -> str | None:
        if worker.silent_s < self.limit_s:
            return None
        who = f"rank {rank} (process {worker.pid})"
        if is_stopped(worker.pid):
            return (
                f"{who} is stopped (by SIGSTOP, or a debugger) and has not answered for "
                f"{self.limit_s:g} s, which is group_timeout"
            )
        patience_s = worker.patience_s(self.patience_s)
        if worker.silent_s < patience_s:
            return None
        return (
            f"{who} runs, but has not answered for {patience_s:g} s (group_timeout is "
            f"{self.limit_s:g} s)"
        )

    def _hang(self, num_collectives: int) -> str | None:
        """The workers that hang and do not wait for another one.

        A worker waits for rank 0 where it has begun a collective that rank 0 has not: that is no
        hang, however long rank 0 takes (a debugger may hold it).
        """
        late = {
            rank: worker
            for rank, worker in self._workers.items()
            if worker.stuck_s >= self.patience_s / 2
            and worker.progress.num_collectives <= num_collectives
        }
        if all(worker.stuck_s < worker.patience_s(self.patience_s) for worker in late.values()):
            return None
        first = min(worker.progress.num_collectives for worker in late.values())
        blamed = {r: w for r, w in late.items() if w.progress.num_collectives == first}
        who = " and ".join(f"rank {r} (process {w.pid})" for r, w in blamed.items())
        stuck_s = max(worker.stuck_s for worker in blamed.values())
        return (
            f"{who} made no progress for {stuck_s:.0f} s (group_timeout is {self.limit_s:g} s): "
            "a kernel, a collective or a read hangs"
        )


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal or a debugger; True where the system cannot say."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return not Path("/proc/self/stat").exists()  # no Linux; else the process has ended
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] in ("T", "t")
