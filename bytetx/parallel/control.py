"""What rank 0 tells the other ranks, and how each side notices that the other one is gone."""

import os
import pickle
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from queue import Empty, SimpleQueue
from typing import Any

from bytetx.errors import GroupError

# A follower that was told to close has nothing to finish but its last collective.
_CLOSE_SECONDS = 5.0
# In which the death of a rank shows, after another one met a collective that broke.
_BLAME_SECONDS = 0.3
# Between looks at the device of a rank that waits for a message.
_CHECK_SECONDS = 0.5
# Between the end of a connection and the end of the process behind it.
_EXIT_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What a follower says: a value, or the error that ended it."""

    value: Any = None
    error: str | None = None


class Followers:
    """Rank 0's side: a connection to each other rank, and a thread that watches them.

    Where one ends, however that happens, on_failure is called once, the others are ended, and
    everything that is asked from then on raises a GroupError that says which rank ended and why.
    """

    def __init__(self, connections: list[Connection], processes: list[subprocess.Popen[bytes]]):
        """connections: to ranks 1, 2, ...  processes: the same ranks', where we started them."""
        self._connections, self._processes = connections, processes
        self._ranks = {connection: i for i, connection in enumerate(connections, start=1)}
        self._answers: list[SimpleQueue[Any]] = [SimpleQueue() for _ in connections]
        self._failure: str | None = None
        self._has_failed, self._lock = threading.Event(), threading.Lock()
        self._is_closing = False
        self.on_failure: Callable[[], None] | None = None
        self._watcher = threading.Thread(target=self._watch, name="bytetx-followers", daemon=True)
        self._watcher.start()

    def send(self, message: object) -> None:
        """The same message to every follower. Raises GroupError where one is gone."""
        self.check()
        packed = pickle.dumps(message)
        for connection in self._connections:
            try:
                connection.send_bytes(packed)
            except OSError:
                self.raise_failure()

    def answers(self) -> list[Any]:
        """One answer of every follower, in the order of ranks; waits for them."""
        return [self._answer(queue) for queue in self._answers]

    def check(self) -> None:
        """Raises GroupError where a follower is gone."""
        if self._failure is not None:
            raise GroupError(self._failure)
        if self._is_closing:
            raise GroupError("the model is closed")

    def raise_failure(self, error: BaseException | None = None, *, reason: str = "") -> None:
        """Raises the GroupError of a step that failed on this rank, too.

        error, reason: what this rank met; the cause, unless a follower ended before.
        """
        if self._has_failed.wait(_EXIT_SECONDS):
            raise GroupError(self._failure) from error
        if not reason:
            reason = "a connection ended" if error is None else f"{type(error).__name__}: {error}"
        self._fail(f"rank 0 failed, and the tensor-parallel group with it: {reason}")
        raise GroupError(self._failure) from error

    def close(self) -> None:
        """Ends every follower; a second call does nothing."""
        if self._is_closing:
            return
        self._is_closing = True
        for connection in self._connections:
            with suppress(OSError):
                connection.send(None)
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_CLOSE_SECONDS)
        self._end_all()

    def _answer(self, queue: "SimpleQueue[Any]") -> Any:
        while True:
            try:
                return queue.get(timeout=0.2)
            except Empty:
                self.check()

    def _watch(self) -> None:
        open_ones = list(self._connections)
        while open_ones and not self._is_closing:
            for connection in wait(open_ones, timeout=1.0):
                rank = self._ranks[connection]
                try:
                    answer = connection.recv()
                except (EOFError, OSError):
                    open_ones.remove(connection)
                    if not self._is_closing:
                        self._fail(f"rank {rank} {self._end_of(rank)}")
                    continue
                if answer.error is not None:
                    others = self._ended_without_a_word(rank)
                    self._fail(others or f"rank {rank} failed: {answer.error}")
                    continue
                self._answers[rank - 1].put(answer.value)

    def _ended_without_a_word(self, rank: int) -> str | None:
        """The end of another rank, which a failure of this one may only follow from."""
        end = time.monotonic() + _BLAME_SECONDS
        others = [i for i in range(1, len(self._processes) + 1) if i != rank]
        while time.monotonic() < end:
            for other in others:
                code = self._processes[other - 1].poll()
                if code is not None and code < 0:
                    return f"rank {other} {self._end_of(other)}"
            time.sleep(0.02)
        return None

    def _end_of(self, rank: int) -> str:
        """How a follower's process ended."""
        if len(self._processes) < rank:
            return "ended"
        try:
            code = self._processes[rank - 1].wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"

    def _fail(self, reason: str) -> None:
        with self._lock:
            if self._failure is not None:
                return
            self._failure = (
                f"{reason}; the other ranks of the tensor-parallel group were ended: load the "
                "model again"
            )
        self._has_failed.set()
        self._end_all()
        if self.on_failure is not None:
            self.on_failure()

    def _end_all(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
        for process in self._processes:
            process.wait()


class Follower:
    """A follower's side: messages in the order they were sent; the process ends with rank 0.

    A thread reads them, for only it notices the end of rank 0 while a collective waits for it.
    """

    def __init__(self, connection: Connection):
        self._connection = connection
        self._messages: SimpleQueue[Any] = SimpleQueue()
        threading.Thread(target=self._read, name="bytetx-rank-0", daemon=True).start()

    def receive(self, check: Callable[[], None]) -> Any:
        """The next message; None at the end.  check: called now and then while there is none."""
        while True:
            try:
                return self._messages.get(timeout=_CHECK_SECONDS)
            except Empty:
                check()

    def answer(self, value: object = None) -> None:
        self._connection.send(Answer(value))

    def fail(self, error: str) -> None:
        """Tells rank 0 why this rank ends."""
        with suppress(OSError):
            self._connection.send(Answer(error=error))

    def _read(self) -> None:
        while True:
            try:
                message = self._connection.recv()
            except (EOFError, OSError):
                os._exit(1)  # rank 0 is gone, and this rank may hang in a collective with it
            self._messages.put(message)
            if message is None:
                return
