"""Connections of the HTTP server: limits of their number, of time in each phase, and of headers."""

import asyncio
import os
import resource
import select
from collections import OrderedDict
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

ABORT = "bytetx.abort"  # the scope's extension that drops the client
RENEW = "bytetx.renew"  # and the one that gives the rest of a long body BODY_S again
KEEP_ALIVE_S = 75  # that a connection may be idle between requests
HEAD_S = 20.0  # from the first byte, or the connection, to the end of the headers
BODY_S = 30.0  # from there to the end of the body
# A client that reads less than this of its answer is taken to be gone.
STALL_S, _STALL_BYTES = 30.0, 30_000
_LINGER_S = 5.0  # for the rest of a body whose answer was sent already
_HEAD_BYTES = 1 << 16  # headers and trailers
_MAX_PIPELINED = 64  # requests of one connection that wait for an earlier answer
_MAX_CONNECTIONS = 4096
# Files that are neither connections nor open at the start: pipes, the template's process, sockets.
_RESERVED_FILES = 64
_FULL_TEXT = b"every connection is in use (their number follows ulimit -n); try again later\n"
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: text/plain; charset=utf-8\r\n"
    b"content-length: %d\r\nretry-after: 1\r\nconnection: close\r\n\r\n%b"
) % (len(_FULL_TEXT), _FULL_TEXT)


def max_connections() -> int:
    """Connections of this process, by the limit of its open files (ulimit -n)."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return _MAX_CONNECTIONS
    folder = "/proc/self/fd"
    num_open = len(os.listdir(folder)) if os.path.isdir(folder) else _RESERVED_FILES
    return max(min(limit - num_open - _RESERVED_FILES, _MAX_CONNECTIONS), 8)


def is_readable(socket: Any) -> bool:
    """Whether a socket has something to read, or a connection to accept, that the event loop has
    not come to."""
    poll = select.poll()
    poll.register(socket, select.POLLIN)
    return bool(poll.poll(0))


class Connections:
    """The open connections of one listener.

    Beyond `limit` of them, the one that has waited longest for a request is closed for a new one;
    where each has a request that is being answered, the new one gets 503.
    """

    def __init__(self, *, limit: int):
        self.limit = limit
        self.every: set[Connection] = set()
        self.waiting: OrderedDict[Connection, None] = OrderedDict()  # for a whole request

    def protocol(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> "Connection":
        """uvicorn's factory of protocols."""
        return Connection(config, server_state, app_state, _loop, connections=self)

    def check(self, now: float) -> None:
        """Closes connections whose time is over. Call it about once a second."""
        for connection in list(self.every):
            connection.check(now)

    def num_busy(self) -> int:
        """Connections with a request that is being answered, or an answer that is not sent."""
        return sum(map(Connection.is_busy, self.every))

    def num_arriving(self) -> int:
        """Connections with a part of a request."""
        return sum(map(Connection.is_arriving, self.every))

    def has_unread(self) -> bool:
        """Whether a connection that waits for a request was sent bytes that are not read yet."""
        return any(map(Connection.has_unread, self.waiting))

    def close_idle(self, *, since: float) -> None:
        """Closes connections that wait for a request and have not had a byte since that time."""
        for connection in list(self.waiting):
            is_idle = not connection.is_arriving() and connection.changed < since
            if is_idle and not connection.has_unread():
                connection.close()

    def admit(self, connection: "Connection") -> bool:
        """Makes room for a new connection; whether there is any."""
        if len(self.every) >= self.limit:
            if not self.waiting:
                return False
            self.waiting.popitem(last=False)[0].drop()
        self.every.add(connection)
        self.waiting[connection] = None
        return True

    def forget(self, connection: "Connection") -> None:
        self.every.discard(connection)
        self.waiting.pop(connection, None)


class Connection(HttpToolsProtocol):
    """uvicorn's HTTP with limits that it does not have: Connections.check() ends what is late."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        loop: asyncio.AbstractEventLoop | None = None,
        *,
        connections: Connections,
    ):
        super().__init__(config, server_state, app_state, loop)
        self._connections = connections
        self.changed = self.loop.time()  # when the present phase began
        self._has_part = False  # whether a head has come in part
        self._is_in_body = False
        self._head_bytes = self._fed_bytes = 0
        self._is_head_too_long = False
        self._stalled: tuple[float, int] | None = None  # since when, with how many bytes unsent
        self._closing: float | None = None

    # What Connections asks.

    def is_busy(self) -> bool:
        """Whether a whole request has no answer, or its answer is not sent."""
        if self.transport.get_write_buffer_size():
            return True
        return self._is_answering() and not self._is_in_body

    def is_arriving(self) -> bool:
        """Whether a part of a request has come."""
        return self._has_part or self._is_in_body

    def has_unread(self) -> bool:
        """Whether bytes, or the end, of what the client sends wait in its socket."""
        transport = self.transport
        return not transport.is_closing() and is_readable(transport.get_extra_info("socket"))

    def drop(self) -> None:
        """Closes a connection that has no whole request."""
        self._connections.forget(self)
        self.transport.abort()

    def close(self) -> None:
        """Closes it once its answer is sent."""
        self._connections.waiting.pop(self, None)
        self.transport.close()

    def check(self, now: float) -> None:
        """Closes the connection where its phase has taken too long."""
        if self._is_stalled(now):
            self.transport.abort()
        elif self._is_in_body:
            if self.flow.read_paused:  # by the server: an earlier answer comes first
                self.changed = now
            limit = _LINGER_S if not self._is_answering() else BODY_S + _LINGER_S
            if now - self.changed > limit:
                self.transport.abort()
        elif self._waits_for_head() and now - self.changed > HEAD_S:
            self.transport.close()

    def _is_stalled(self, now: float) -> bool:
        """Whether the client has read next to nothing of what it was sent for STALL_S."""
        unsent = self.transport.get_write_buffer_size()
        if not unsent:
            self._stalled = None
            return False
        if self._stalled is None:
            self._stalled = now, unsent
        since, before = self._stalled
        if before - unsent >= _STALL_BYTES:
            self._stalled = now, unsent
        return now - since > STALL_S

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _waits_for_head(self) -> bool:
        """Whether a head is due: of a new connection, or one whose first bytes have come."""
        return self._has_part or (self.cycle is None and not self.transport.is_closing())

    # What the transport calls.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if not self._connections.admit(self):
            transport.write(_FULL)
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.forget(self)
        super().connection_lost(exc)

    def resume_writing(self) -> None:
        self._stalled = None  # most of a full buffer was read
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if not self._is_in_body:
            if not self._has_part:
                self._has_part, self.changed = True, self.loop.time()
            self._fed_bytes += len(data)
        super().data_received(data)
        if self._has_part and self._fed_bytes > _HEAD_BYTES and not self.transport.is_closing():
            self._is_head_too_long = True
            self.send_400_response("")

    def send_400_response(self, msg: str) -> None:
        if self._is_answering():
            # The request is pipelined, and the answer before it is not disturbed.
            self.transport.close()
            return
        if self._is_head_too_long:
            msg = f"The headers have more than {_HEAD_BYTES} bytes."
        super().send_400_response(msg)

    # What the parser calls; an error here ends the connection with 400.

    def on_message_begin(self) -> None:
        super().on_message_begin()
        extensions: dict[str, Any] = {ABORT: self.transport.abort, RENEW: self._renew}
        self.scope["extensions"] = extensions

    def _renew(self) -> None:
        self.changed = self.loop.time()

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value) + 4)
        super().on_header(name, value)

    def _count_head(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        if self._head_bytes > _HEAD_BYTES:
            self._is_head_too_long = True
            raise ValueError("the headers are too long")

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= _MAX_PIPELINED:
            raise ValueError("too many pipelined requests")
        self._has_part, self._is_in_body, self._fed_bytes = False, True, 0
        self.changed = self.loop.time()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._is_in_body, self._head_bytes = False, 0
        if self._is_answering():
            self._connections.waiting.pop(self, None)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self.changed = self.loop.time()
        super().on_response_complete()
        if not self._is_answering() and self in self._connections.every:
            self._connections.waiting[self] = None
            self._connections.waiting.move_to_end(self)
