"""Connections between rank 0 and its workers, and how each side detects the end of the other."""

import logging
import os
import selectors
import shutil
import signal
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Protocol

from bytetx.errors import ForkError, GroupError
from bytetx.executor.channel import Channel
from bytetx.executor.heartbeat import DEFAULT_LIMIT_S, Heartbeats, Progress

logger = logging.getLogger("bytetx")

# Kinds of frames. Rank 0 sends the first three, a worker the others.
MESSAGE, PING, CLOSE, DONE, FAILED, PONG = range(6)
_PROGRESS = struct.Struct("<QQQ")

# A worker that was told to close has nothing to finish but its last collective.
_CLOSE_SECONDS = 5.0
# For the end of a rank to show, after a collective failed on another one.
_BLAME_SECONDS = 0.3
# Between checks of the device of a rank that waits for a message.
_CHECK_SECONDS = 0.5
# Between the end of a connection and the end of the process behind it.
_EXIT_SECONDS = 2.0
# A worker's error is a line; what is longer is cut.
_MAX_ERROR_BYTES = 1 << 14
UNKNOWN_CODE = 256  # exit code of a process that is not this one's child


class Process(Protocol):
    """A worker's process: subprocess.Popen, or one that torchrun started.

    poll: None while it runs.  poll, wait: the exit code, minus the signal that killed it, or
    UNKNOWN_CODE.
    """

    pid: int

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def kill(self) -> None: ...


class Workers:
    """Rank 0's side: a connection to each worker, and a thread that monitors them.

    Where one ends, stops or hangs, the others are ended, on_end is called once, and every call
    from then on raises a GroupError that says which rank it was and why.
    """

    def __init__(
        self,
        channels: Sequence[Channel],
        processes: Sequence[Process],
        *,
        folder: Path | None = None,
        limit_s: float = DEFAULT_LIMIT_S,
        logs_failure: bool = False,
    ):
        """channels, processes: of ranks 1, 2, ...  folder: of the rendezvous; removed at the end.

        limit_s: see bytetx.executor.heartbeat.  logs_failure: before any process is ended,
        because this one may be ended before it can raise the error.
        """
        self._channels, self._processes, self._folder = list(channels), list(processes), folder
        pids = [process.pid for process in processes] or [0] * len(self._channels)
        self._heartbeats = Heartbeats(pids, limit_s=limit_s)
        self._replies: list[SimpleQueue[None]] = [SimpleQueue() for _ in channels]
        self._num_sent, self._logs_failure = 0, logs_failure
        self._failure: str | None = None
        self._has_failed, self._has_ended = threading.Event(), threading.Event()
        self._lock = threading.RLock()  # a garbage collection inside may close, too
        self._is_closing = False
        self._pid = os.getpid()  # a forked child has the channels, and must not close the ranks
        self.on_end: Callable[[], None] | None = None
        self.num_collectives: Callable[[], int] = lambda: 0  # that rank 0 has begun
        self._watcher = threading.Thread(target=self._watch, name="bytetx-workers", daemon=True)
        self._watcher.start()

    @property
    def is_of_this_process(self) -> bool:
        """False in a process that was forked from the leader."""
        return os.getpid() == self._pid

    def send(self, message: bytes) -> None:
        """The same message to every worker. Raises GroupError where one is gone."""
        self.check()
        self._num_sent += 1
        for channel in self._channels:
            try:
                channel.send(MESSAGE, message)
            except OSError:
                self.raise_failure()

    def wait_for_replies(self) -> None:
        """Waits for one reply of every worker. Raises GroupError where one fails."""
        for queue in self._replies:
            while True:
                with suppress(Empty):
                    queue.get(timeout=0.2)
                    break
                self.check()

    def check(self) -> None:
        """Raises GroupError where a worker is gone, ForkError in a forked child."""
        if not self.is_of_this_process:
            raise ForkError(
                "a model loaded with tp belongs to the process that this one was forked from; "
                "load it in this process"
            )
        if self._failure is not None:
            raise GroupError(self._failure)
        if self._is_closing:
            raise GroupError("the model is closed")

    def raise_failure(self, error: BaseException | None = None, *, reason: str = "") -> None:
        """Raises the GroupError of a step that failed on this rank, too.

        error, reason: what failed here; the cause, unless a worker ended before.
        """
        if self._has_failed.wait(_EXIT_SECONDS):
            raise GroupError(self._failure) from error
        if not reason:
            reason = "a connection ended" if error is None else f"{type(error).__name__}: {error}"
        self._fail(f"rank 0 failed, and the tensor-parallel group with it: {reason}")
        raise GroupError(self._failure) from error

    def remove_folder(self) -> None:
        """Remove the rendezvous' folder; NCCL reads it as long as the ranks run, gloo does not."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def close(self) -> None:
        """Ends every worker; a second call, or one in a forked child, does nothing."""
        if not self.is_of_this_process:
            return
        with self._lock:
            if self._is_closing:
                return
            self._is_closing = True
        end = time.monotonic() + _CLOSE_SECONDS
        for channel in self._channels:
            with suppress(OSError):
                while not channel.try_send(CLOSE) and time.monotonic() < end:
                    time.sleep(0.01)
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
        self._end_all()
        if threading.current_thread() is not self._watcher:
            self._watcher.join(_EXIT_SECONDS)

    def _watch(self) -> None:
        """Reads the workers' frames and pings them, until all are gone."""
        with selectors.DefaultSelector() as selector:
            for rank, channel in enumerate(self._channels, start=1):
                selector.register(channel, selectors.EVENT_READ, rank)
            pinged: set[int] = set()
            while selector.get_map() and not self._has_ended.is_set():
                for key, _ in selector.select(self._heartbeats.tick_s):
                    if not self._read(key.data, pinged):
                        selector.unregister(key.fileobj)
                if self._failure is None and not self._is_closing:
                    self._check_heartbeats(pinged)
        for channel in self._channels:
            channel.shutdown()
            channel.close()

    def _check_heartbeats(self, pinged: set[int]) -> None:
        """pinged: ranks that have not answered the last ping; they get no other one until then."""
        for rank, channel in enumerate(self._channels, start=1):
            if rank not in pinged:
                with suppress(OSError):
                    pinged.update([rank] if channel.try_send(PING) else [])
        reason = self._heartbeats.check(
            time.monotonic(), num_sent=self._num_sent, num_collectives=self.num_collectives()
        )
        if reason is not None:
            self._fail(reason)

    def _read(self, rank: int, pinged: set[int]) -> bool:
        """Handles the frames of a worker; False where its connection has ended."""
        try:
            frames = self._channels[rank - 1].read()
            for kind, payload in frames:
                self._handle(rank, kind, payload, pinged)
        except (EOFError, OSError):
            if not self._is_closing:
                self._fail(f"rank {rank} {self._end_of(rank)}")
            return False
        except (ValueError, struct.error) as error:
            self._fail(f"rank {rank} sent an invalid reply ({error})")
            return False
        return True

    def _handle(self, rank: int, kind: int, payload: bytes, pinged: set[int]) -> None:
        if kind == PONG:
            self._heartbeats.hear(rank, Progress(*_PROGRESS.unpack(payload)))
            pinged.discard(rank)
            return
        self._heartbeats.hear(rank)
        if kind == DONE:
            self._replies[rank - 1].put(None)
        elif kind == FAILED:
            others = self._silent_end_of_another(rank)
            text = payload.decode(errors="replace")
            self._fail(others or f"rank {rank} failed: {text}")
        else:
            raise ValueError(f"a frame of kind {kind}")

    def _silent_end_of_another(self, rank: int) -> str | None:
        """The end of another rank, of which the failure of this one may be the consequence."""
        end = time.monotonic() + _BLAME_SECONDS
        others = [i for i in range(1, len(self._processes) + 1) if i != rank]
        while time.monotonic() < end:
            for other in others:
                code = self._processes[other - 1].poll()
                if code is not None and (code < 0 or code == UNKNOWN_CODE):
                    return f"rank {other} {self._end_of(other)}"
            time.sleep(0.02)
        return None

    def _end_of(self, rank: int) -> str:
        """How a worker's process ended."""
        if len(self._processes) < rank:
            return "ended"
        try:
            code = self._processes[rank - 1].wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        if code == UNKNOWN_CODE:
            return "ended"
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
        if self._logs_failure:
            logger.error("%s", self._failure)
        self._has_failed.set()
        self._end_all()

    def _end_all(self) -> None:
        """Kills the processes that still run, waits for them, and frees what was held for them."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
        end = time.monotonic() + _EXIT_SECONDS
        for process in self._processes:
            # A process that waits for a device or a disk cannot be killed before that answers.
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
        on_end, self.on_end = self.on_end, None
        try:
            if on_end is not None:
                on_end()
        finally:
            self.remove_folder()
            self._has_ended.set()


class LeaderConnection:
    """A worker's side: messages in the order they were sent; the process ends with rank 0.

    A thread reads them, so that the end of rank 0 is detected while a collective waits for it. It
    answers the pings of rank 0, too.
    """

    def __init__(self, channel: Channel, *, folder: Path | None = None):
        """folder: of the rendezvous, removed where rank 0 ends without closing."""
        self._channel, self._folder = channel, folder
        self._messages: SimpleQueue[bytes | None] = SimpleQueue()
        self.num_done = self.num_steps = 0  # see Progress; the rank's main thread counts them
        self.num_collectives: Callable[[], int] = lambda: 0
        threading.Thread(target=self._read, name="bytetx-rank-0", daemon=True).start()

    def receive(self, check: Callable[[], None]) -> bytes | None:
        """The next message; None at the end.  check: called regularly while there is none."""
        while True:
            try:
                return self._messages.get(timeout=_CHECK_SECONDS)
            except Empty:
                check()

    def reply(self) -> None:
        """Tells rank 0 that its request is done."""
        self._channel.send(DONE)

    def fail(self, error: str) -> None:
        """Tells rank 0 why this rank ends."""
        with suppress(OSError):
            self._channel.send(FAILED, error.encode(errors="replace")[:_MAX_ERROR_BYTES])

    def step(self) -> None:
        """Called within a message that takes long: this rank makes progress."""
        self.num_steps += 1

    def _read(self) -> None:
        try:
            while True:
                for kind, payload in self._channel.read():
                    if kind == MESSAGE:
                        self._messages.put(payload)
                    elif kind == PING:
                        progress = (self.num_done, self.num_steps, self.num_collectives())
                        self._channel.send(PONG, _PROGRESS.pack(*progress))
                    elif kind == CLOSE:
                        self._messages.put(None)
                        return
                    else:
                        raise ValueError(f"a frame of kind {kind}")
        except (EOFError, OSError, ValueError):
            # Rank 0 is gone, and this rank may hang in a collective with it.
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
            os._exit(1)
