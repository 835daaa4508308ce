"""Which rank heartbeats name and when, by a simulated clock; frames and messages between ranks."""

import pickle
import socket
import struct
from pathlib import Path

import pytest
import torch
from other_processes import Bomb

from bytetx.executor import heartbeat
from bytetx.executor.channel import Channel
from bytetx.executor.heartbeat import Heartbeats, Progress
from bytetx.executor.messages import (
    Decode,
    DropCache,
    Forward,
    Join,
    Load,
    Logits,
    Message,
    NewCache,
    decode,
    encode,
)
from bytetx.parallel.row_scheme import RowScheme

LIMIT_S = 8.0
MESSAGES = [
    Join("cpu", 0, None),
    Join("cuda", 1 << 40, RowScheme(24, ((64, 32), (0, 16)))),
    Load(Path("/models/größe \udcff"), torch.bfloat16),
    Load(Path("/models/a"), torch.float32, Path("/families/größe \udcff")),
    NewCache(3, 1 << 33, 16, True),
    DropCache(1 << 40),
    Logits("masked_lm", 7),
    Decode(2, 256, 1 << 20, True, False),
    Forward(5, struct.pack("<2i", 2, 3), 3, True, False, None, False, True),
    Forward(9, struct.pack("<i", 9), 9, False, True, (1, 2, 16, 31), True, False),
    Forward(2, struct.pack("<i", 2), 2, False, False, None, False, False, False, b"x" * 4 * 6),
]


class Group:
    """Heartbeats whose clock advances when a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, size: int = 3):
        self.stopped: set[int] = set()
        monkeypatch.setattr(heartbeat, "is_stopped", lambda pid: pid - 100 in self.stopped)
        self.beats, self.now_s = Heartbeats(range(101, 100 + size), limit_s=LIMIT_S), 0.0
        self.progress = {rank: Progress(1) for rank in range(1, size)}

    def run(self, seconds: float, *, silent: tuple[int, ...] = (), **counts: int) -> str | None:
        """The first reason to end within so many seconds."""
        end = self.now_s + seconds
        while self.now_s < end:
            self.now_s += 0.9 * self.beats.tick_s
            for rank, progress in self.progress.items():
                if rank not in silent:
                    self.beats.hear(rank, progress)
            counts = {"num_sent": 0, "num_collectives": 0} | counts
            reason = self.beats.check(self.now_s, **counts)
            if reason is not None:
                return reason
        return None


@pytest.mark.feature("Several devices", "ranks that stop or hang are named")
def test_a_stopped_rank_is_named_after_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(monkeypatch)
    assert group.run(100) is None
    group.stopped = {2}
    assert group.run(LIMIT_S - 3, silent=(2,)) is None
    reason = group.run(5, silent=(2,))
    assert reason.startswith("rank 2 (process 102) is stopped")
    assert "8 s, which is group_timeout" in reason


def test_a_rank_that_runs_but_is_silent_has_ten_times_as_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python's lock may be held by a call that takes long."""
    group = Group(monkeypatch)
    group.run(1)
    assert group.run(10 * LIMIT_S - 3, silent=(1,)) is None
    assert "rank 1 (process 101) runs, but has not answered for 80 s" in group.run(5, silent=(1,))


def test_time_in_which_rank_0_did_not_look_counts_for_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was stopped itself, or the machine was suspended."""
    group = Group(monkeypatch)
    group.run(1)
    group.stopped = {1, 2}
    group.now_s += 1e6
    assert group.run(LIMIT_S - 3, silent=(1, 2)) is None
    group.stopped = set()
    assert group.run(100) is None


def test_work_without_progress_names_the_rank_that_others_wait_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = Group(monkeypatch)
    group.progress = {1: Progress(4, 0, 10), 2: Progress(4, 0, 9)}
    counts = {"num_sent": 5, "num_collectives": 10}
    assert group.run(10 * LIMIT_S - 3, **counts) is None
    reason = group.run(5, **counts)
    assert reason.startswith("rank 2 (process 102) made no progress for 8")


def test_long_work_with_progress_and_no_work_are_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(monkeypatch)
    for num_steps in range(40):  # tensors of a checkpoint that takes an hour
        group.progress = {1: Progress(0, num_steps, 1), 2: Progress(0, num_steps, 1)}
        assert group.run(9 * LIMIT_S, num_sent=1, num_collectives=1) is None
    group.progress = {1: Progress(1, 40, 1), 2: Progress(1, 40, 1)}
    assert group.run(100 * LIMIT_S, num_sent=1, num_collectives=1) is None


def test_ranks_that_wait_for_rank_0_do_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """A debugger may hold rank 0's main thread before its part of a collective."""
    group = Group(monkeypatch)
    group.progress = {1: Progress(4, 0, 10), 2: Progress(4, 0, 10)}
    assert group.run(100 * LIMIT_S, num_sent=5, num_collectives=9) is None


def test_a_process_that_imports_torch_has_two_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(monkeypatch)
    group.beats = Heartbeats([101, 102], limit_s=1.0)
    assert group.run(110, silent=(1, 2)) is None
    assert "runs, but has not answered for 120 s" in group.run(100, silent=(1, 2))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_come_as_they_were_sent(message: Message) -> None:
    data = encode(message)
    assert decode(data) == message
    if not isinstance(message, Forward):  # whose last field takes any number of integers
        for damaged in (data[:-1], data + b"\0"):
            with pytest.raises(ValueError, match="no message"):
                decode(damaged)


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    paths = [tmp_path / ("written" + "n" * more) for more in range(4)]
    bombs = [pickle.dumps(Bomb(path)) for path in paths]  # of every length modulo 4
    for bomb in bombs:
        for data in (bomb, b"", b"\xff", *(bytes([tag]) + bomb for tag in range(7))):
            with pytest.raises(ValueError, match="no message"):
                decode(data)
    with pytest.raises(TypeError, match="a message must be one of Join, .* got a Bomb"):
        encode(Bomb(tmp_path / "written"))
    assert not any(path.exists() for path in paths)


def test_frames_come_whole_however_they_are_cut() -> None:
    ours, theirs = socket.socketpair()
    channel, sent = Channel(theirs), Channel(ours)
    payloads = [b"", b"a", bytes(range(256)) * 200]
    for kind, payload in enumerate(payloads):
        sent.send(kind, payload)
    found = []
    while len(found) < len(payloads):
        found += channel.read()
    assert found == list(enumerate(payloads))
    for byte in struct.pack("<BI", 7, 2) + b"xy":
        assert not found[len(payloads) :]
        ours.send(bytes([byte]))
        found += channel.read()
    assert found[-1] == (7, b"xy")
    ours.send(struct.pack("<BI", 1, 1 << 31))
    with pytest.raises(ValueError, match="a frame of 2147483648 bytes, at most 67108864"):
        channel.read()
    ours.close()
    with pytest.raises(EOFError):
        channel.read()
    channel.close()


def test_a_socket_that_nobody_reads_takes_no_ping() -> None:
    ours, theirs = map(Channel, socket.socketpair())
    while ours.try_send(0, bytes(1000)):
        pass
    assert not ours.try_send(0)
    theirs.read()
    ours.close()
    with pytest.raises(OSError):
        ours.try_send(0)
    theirs.close()
