"""RendererProcess: the process that renders a chat template, and the time an answer may take."""

import json
import marshal
import os
import select
import socket
import subprocess
import sys
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from bytetx.errors import InputError

# Kinds of answers: the first byte of each, before text in UTF-8.
TEXT, REFUSED, BROKEN, TOO_MUCH = b"t", b"r", b"b", b"m"
# The longest text that the process gives, 4 bytes a character, and its kind.
_MAX_ANSWER_BYTES = (64 << 20) + 1
# Of requests that the process has not answered; the sockets' buffers hold as much.  More are sent
# where half of them are answered, several at a time.
_BYTES_AHEAD = 1 << 16
_READ_BYTES, _LENGTH_BYTES = 1 << 18, 8
# An interpreter that imports jinja2 takes 0.1 s, and more on a machine that is busy.
_START_SECONDS = 60.0
_RUN = (
    "import json, sys; sys.path += json.loads(sys.argv[1]); "
    "from bytetx.checkpoint.chat_renderer import main; main(sys.argv[2:])"
)


class Messages:
    """Messages over a socket, each after its length; what has come is read at once."""

    def __init__(self, end: socket.socket):
        self._end = end
        self._data, self._start = bytearray(), 0  # that was read, and what of it was taken

    def send(self, messages: Sequence[bytes]) -> None:
        """Sends messages; OSError where the other side is gone."""
        parts = (part for one in messages for part in (len(one).to_bytes(_LENGTH_BYTES), one))
        self._end.sendall(b"".join(parts))

    def take(self, *, max_bytes: int | None = None) -> bytes | None:
        """The next message that has come as a whole; None where there is none yet.

        OSError where it is longer than max_bytes.
        """
        start = self._start + _LENGTH_BYTES
        if len(self._data) < start:
            return None
        size = int.from_bytes(self._data[self._start : start])
        if max_bytes is not None and size > max_bytes:
            raise OSError(f"a message of {size} bytes, at most {max_bytes} are taken")
        if len(self._data) < start + size:
            return None
        message, self._start = bytes(self._data[start : start + size]), start + size
        return message

    def read(self) -> None:
        """Waits for more of what is sent. EOFError where the other side is closed."""
        del self._data[: self._start]
        self._start = 0
        more = self._end.recv(_READ_BYTES)
        if not more:
            raise EOFError
        self._data += more

    def fileno(self) -> int:
        return self._end.fileno()

    def close(self) -> None:
        self._end.close()


class _Sent(NamedTuple):
    """A request, and as it is sent."""

    request: tuple[Any, ...]
    data: bytes


class RendererProcess:
    """bytetx.checkpoint.chat_renderer in a process that ends with this object or with this process.

    It inherits no stdin, no terminal and no module search path but that of jinja2 and bytetx.
    One thread at a time may call `ask`.
    """

    def __init__(self, *, seconds: float):
        """seconds: of an answer, from which the process limits its own processor time."""
        if not sys.executable or getattr(sys, "frozen", False):
            raise InputError(
                "a chat template runs in a separate process, and this Python is part of another "
                "program (sys.executable) that cannot start one; give prompts as text"
            )
        self._seconds = seconds
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * _BYTES_AHEAD)
        with theirs:
            arguments = [json.dumps(_search_path()), str(theirs.fileno()), str(seconds)]
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", _RUN, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    process_group=0,  # Ctrl-C on the terminal reaches the caller only
                )
            except OSError as error:
                ours.close()
                raise InputError(
                    f"a chat template runs in a separate process, and {sys.executable} cannot be "
                    f"started: {error}; give prompts as text"
                ) from error
        self._messages = Messages(ours)
        self._poll = select.poll()
        self._poll.register(ours.fileno(), select.POLLIN)
        self._owner = os.getpid()
        self._end = weakref.finalize(self, _end, self._process, self._messages, self._owner)
        if self._receive(_START_SECONDS)[0] != TEXT:
            raise InputError(
                "the process for chat templates does not start: run "
                f"`{sys.executable} -c 'import bytetx.checkpoint.chat_renderer'` to see why"
            )

    def ask(self, request: tuple[Any, ...]) -> tuple[bytes, str]:
        """(kind, text) of the answer: TEXT with the text, or why there is none.

        request: entries of types that marshal takes.  After TOO_MUCH the process has ended.
        """
        answers, _ = self.ask_all(iter([request]))
        return answers[0]

    def ask_all(
        self, requests: Iterator[tuple[Any, ...]]
    ) -> tuple[list[tuple[bytes, str]], list[tuple[Any, ...]]]:
        """(the answers in order up to the first one that is TOO_MUCH, requests that are in doubt).

        Requests are taken while others are under way.  Where one of several is TOO_MUCH, these are
        in doubt: to be asked again, each alone.
        """
        answers: list[tuple[bytes, str]] = []
        sent = deque[_Sent]()  # that are not answered
        held = deque[_Sent]()  # that were taken, and are to be sent
        waiting = 0  # bytes of those that were sent
        try:
            while True:
                if waiting <= _BYTES_AHEAD // 2:
                    waiting += self._send(requests, sent, held, room=_BYTES_AHEAD - waiting)
                if not sent:
                    return answers, []
                answers.append(self._receive(self._seconds))
                if answers[-1][0] == TOO_MUCH:
                    break
                waiting -= len(sent.popleft().data)
        except OSError:
            answers.append(self._ended())
        except BaseException:
            self._end()  # the answers would come with the next question
            raise
        self._end()
        doubted = [one.request for one in (*sent, *held)]
        return (answers, []) if len(doubted) < 2 else (answers[:-1], doubted)

    def is_alive(self) -> bool:
        """Whether it can be asked: it has not ended, and this process is no fork of its owner."""
        return self._end.alive and self._owner == os.getpid()

    def _send(
        self,
        requests: Iterator[tuple[Any, ...]],
        sent: deque["_Sent"],
        held: deque["_Sent"],
        *,
        room: int,
    ) -> int:
        """Sends the next requests that have room. Returns their bytes.

        One that has none waits in `held` for the next call, unless nothing else was sent.
        """
        size = sum(len(one.data) for one in held)
        while size <= room and (request := next(requests, None)) is not None:
            held.append(_Sent(request, marshal.dumps(request)))
            size += len(held[-1].data)
        last = held.pop() if size > room and (sent or len(held) > 1) else None
        self._messages.send([one.data for one in held])
        sent += held
        size -= 0 if last is None else len(last.data)
        held.clear()
        if last is not None:
            held.append(last)
        return size

    def _receive(self, seconds: float) -> tuple[bytes, str]:
        try:
            while (answer := self._messages.take(max_bytes=_MAX_ANSWER_BYTES)) is None:
                if not self._poll.poll(seconds * 1000):
                    return TOO_MUCH, f"does not end within {seconds:g} s"
                self._messages.read()
        except (EOFError, OSError):
            return self._ended()
        return answer[:1], answer[1:].decode("utf-8", "surrogatepass")

    def _ended(self) -> tuple[bytes, str]:
        self._process.kill()
        return TOO_MUCH, f"ended its process (exit code {self._process.wait()})"


def _end(process: subprocess.Popen[bytes], messages: Messages, owner: int) -> None:
    messages.close()
    if os.getpid() == owner:  # not a fork, which only has a copy of the connection
        process.kill()
        process.wait()


def _search_path() -> list[str]:
    """The folders of the packages that the process imports, after the standard library."""
    found = [find_spec(name) for name in ("bytetx", "jinja2", "markupsafe")]
    return [str(Path(spec.origin).parents[1]) for spec in found if spec and spec.origin]
