"""Limits of connections: their number, slow heads and bodies, clients that do not read, headers."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from bytetx.serve import connections, http_server
from bytetx.serve.http_server import _Server, bind_tcp

WAIT_S = 20.0  # far beyond every limit of these tests
GET = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
PART = b"GET /health HTTP/1.1\r\nHost: a"
POST = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 100000\r\n\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
LARGE = b"x" * 50_000_000

Ask = Callable[..., Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


class Application:
    """GET /health is answered at once, GET /large with LARGE, GET /wait when told to; a POST is
    answered at once, or with ?read after its body."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()
        self.num_waiting = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/wait":
            self.num_waiting += 1
            await self.may_end.wait()
        if scope["query_string"] == b"read":
            while (message := await receive()).get("more_body"):
                pass
            if message["type"] == "http.disconnect":
                return
        body = LARGE if scope["path"] == "/large" else b"ok"
        headers = [(b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def run(test: Callable[[Application, Ask, connections.Connections], Awaitable[None]]) -> None:
    """Runs a test beside a server that keeps at most 8 connections."""

    async def main() -> None:
        app = Application()
        server = _Server(app, max_connections=8)
        listener = bind_tcp("127.0.0.1", 0)
        port = listener.getsockname()[1]
        writers: list[asyncio.StreamWriter] = []

        async def ask(sent: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 26)
            writers.append(writer)
            writer.write(sent)
            return reader, writer

        serving = asyncio.create_task(server.serve([listener]))
        try:
            async with asyncio.timeout(WAIT_S):
                await test(app, ask, server.connections)
        finally:
            app.may_end.set()
            for writer in writers:
                writer.close()
            server.should_exit = True
            await serving

    asyncio.run(main())


async def status(reader: asyncio.StreamReader) -> int:
    head = await reader.readuntil(b"\r\n\r\n")
    return int(head.split()[1])


async def ends(reader: asyncio.StreamReader) -> bytes:
    """Return what comes before the server closes the connection."""
    try:
        return await reader.read()
    except ConnectionError:
        return b""


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks at the connections in each tick."""
    monkeypatch.setattr(http_server, "_CHECK_TICKS", 1)


@pytest.mark.parametrize("sent", [b"", PART, GET, POST.replace(b"POST /", b"POST /?read") + b"x"])
def test_connections_that_wait_make_room_for_new_ones(sent: bytes) -> None:
    """Silent ones, half a head, idle ones, half a body: the oldest is closed."""

    async def test(app: Application, ask: Ask, every: connections.Connections) -> None:
        first, _ = await ask(sent)
        for _ in range(30):
            await ask(sent)
        for _ in range(3):
            reader, _ = await ask(GET)
            assert await status(reader) == 200
        await ends(first)
        assert len(every.every) <= 8

    run(test)


def test_a_new_connection_is_refused_where_all_others_are_being_answered() -> None:
    async def test(app: Application, ask: Ask, every: connections.Connections) -> None:
        readers = [(await ask(b"GET /wait HTTP/1.1\r\nHost: a\r\n\r\n"))[0] for _ in range(8)]
        while app.num_waiting < 8:
            await asyncio.sleep(0)
        refused, _ = await ask(b"")
        answer = await ends(refused)
        assert answer.startswith(b"HTTP/1.1 503 ") and b"ulimit -n" in answer
        app.may_end.set()
        for reader in readers:
            assert await status(reader) == 200
        reader, _ = await ask(GET)
        assert await status(reader) == 200

    run(test)


@pytest.mark.parametrize("sent", [b"", PART, b"\r\n", GET + PART])
def test_a_head_that_does_not_end_ends_its_connection(
    monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.2)

    async def test(app: Application, ask: Ask, every: connections.Connections) -> None:
        reader, writer = await ask(sent)
        if sent.startswith(GET):
            assert await status(reader) == 200
            writer.write(b"a")  # the parts of a head do not begin its time again
        await ends(reader)
        assert not every.every

    run(test)


@pytest.mark.parametrize("path", [b"/", b"/?read"])
def test_a_body_that_does_not_end_ends_its_connection(
    monkeypatch: pytest.MonkeyPatch, path: bytes
) -> None:
    """Whether its answer was sent already or waits for it, and though bytes still come."""
    monkeypatch.setattr(connections, "BODY_S", 0.2)
    monkeypatch.setattr(connections, "_LINGER_S", 0.2)

    async def test(app: Application, ask: Ask, every: connections.Connections) -> None:
        reader, writer = await ask(POST.replace(b"POST /", b"POST " + path))

        async def drip() -> None:
            while True:
                writer.write(b"x")
                await asyncio.sleep(0.01)

        dripping = asyncio.create_task(drip())
        await ends(reader)
        dripping.cancel()
        while every.every:
            await asyncio.sleep(0)

    run(test)


def test_a_client_that_does_not_read_its_answer_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "STALL_S", 0.3)

    async def test(app: Application, ask: Ask, every: connections.Connections) -> None:
        reader, writer = await ask(b"")
        transport: Any = writer.transport
        transport.pause_reading()
        writer.write(b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n")
        while not any(one.is_busy() for one in every.every):
            await asyncio.sleep(0)
        while every.every:
            await asyncio.sleep(0)
        other, _ = await ask(b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n")
        assert await status(other) == 200
        assert len(await other.readexactly(len(LARGE))) == len(LARGE)

    run(test)


HEADER = b"X: " + b"a" * 5000 + b"\r\n"


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /health HTTP/1.1\r\nHost: a\r\n" + HEADER * 20 + b"\r\n",  # a whole head
        b"GET /health HTTP/1.1\r\nHost: a\r\n" + HEADER * 20,
        b"GET /health?" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 600_000,
        CHUNKED.replace(b"POST /", b"POST /?read") + b"1\r\nx\r\n0\r\n" + HEADER * 20 + b"\r\n",
        CHUNKED.replace(b"POST /", b"POST /?read") + b"1\r\nx\r\n0\r\n" + HEADER * 200,
    ],
)
def test_long_headers_and_trailers_end_their_connection(sent: bytes) -> None:
    """Whether they come in one read or many."""

    async def test(app: Application, ask: Ask, every: connections.Connections) -> None:
        reader, _ = await ask(sent)
        answer = await ends(reader)
        assert answer == b"" or answer.startswith(b"HTTP/1.1 400 ")
        other, _ = await ask(b"GET /health HTTP/1.1\r\nHost: a\r\n" + HEADER * 10 + b"\r\n")
        assert await status(other) == 200

    run(test)


def test_pipelined_requests_have_a_limit() -> None:
    async def test(app: Application, ask: Ask, every: connections.Connections) -> None:
        reader, _ = await ask(b"GET /wait HTTP/1.1\r\nHost: a\r\n\r\n" + GET * 1000)
        app.may_end.set()
        await ends(reader)
        few, _ = await ask(GET * 20)
        for _ in range(20):
            assert await status(few) == 200
            await few.readexactly(2)

    run(test)


def test_the_number_of_connections_follows_that_of_files(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, most in ((100, 36), (1024, 960), (1 << 20, 4096)):
        monkeypatch.setattr(
            connections.resource, "getrlimit", lambda _, limit=limit: (limit, limit)
        )
        assert 8 <= connections.max_connections() <= most


def test_a_listener_that_refuses_new_connections_keeps_those_that_wait() -> None:
    listener = bind_tcp("127.0.0.1", 0)
    place = listener.getsockname()
    with socket.create_connection(place, timeout=WAIT_S) as client:
        http_server.refuse_new(listener)
        with socket.socket() as late:
            late.settimeout(0.1)
            with pytest.raises(TimeoutError):
                late.connect(place)
        accepted, _ = listener.accept()
        accepted.sendall(b"ok")
        assert client.recv(2) == b"ok"
        http_server.accept_again(listener)
        with socket.create_connection(place, timeout=WAIT_S):
            pass
        accepted.close()
    listener.close()


@pytest.mark.skipif(not hasattr(socket, "TCP_DEFER_ACCEPT"), reason="Linux holds it half open")
def test_a_handshake_that_has_begun_ends_where_new_ones_are_refused() -> None:
    """The client is connected by the server's half of it, and sends."""
    listener = bind_tcp("127.0.0.1", 0)
    listener.settimeout(WAIT_S)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, int(WAIT_S))
    with socket.create_connection(listener.getsockname(), timeout=WAIT_S) as client:
        http_server.refuse_new(listener)
        client.sendall(GET)  # which ends the handshake
        accepted, _ = listener.accept()
        accepted.settimeout(WAIT_S)
        assert accepted.recv(len(GET)) == GET
        accepted.close()
    listener.close()


def test_a_request_that_is_not_read_yet_keeps_its_idle_connection() -> None:
    """As where the process was stopped while it came."""

    async def test(app: Application, ask: Ask, every: connections.Connections) -> None:
        reader, writer = await ask(GET)
        assert await status(reader) == 200
        await reader.readexactly(2)
        writer.write(GET)  # and no turn of the event loop
        every.close_idle(since=asyncio.get_running_loop().time() + 1)
        assert await status(reader) == 200
        await reader.readexactly(2)
        every.close_idle(since=asyncio.get_running_loop().time() + 1)
        assert await reader.read() == b""

    run(test)


@pytest.mark.parametrize("sends", ["before the end", "while new ones are refused"])
def test_no_request_that_came_in_time_is_lost_at_the_end(
    monkeypatch: pytest.MonkeyPatch, sends: str
) -> None:
    """Though all the time is over when the process goes on, as where it was stopped meanwhile."""
    for name in ("_FAREWELL_S", "_LAST_S", "_POLL_S"):
        monkeypatch.setattr(http_server, name, 0.0)

    async def main() -> bytes:
        server = _Server(Application(), max_connections=8)
        listener = bind_tcp("127.0.0.1", 0)
        serving = asyncio.create_task(server.serve([listener]))
        while not server.started:
            await asyncio.sleep(0)
        client = socket.create_connection(listener.getsockname(), timeout=WAIT_S)

        def send(one: socket.socket) -> None:
            client.sendall(GET)
            refuse(one)

        refuse = http_server.refuse_new
        if sends == "before the end":
            client.sendall(GET)
        else:
            monkeypatch.setattr(http_server, "refuse_new", send)
        site: Any = SimpleNamespace(settings=SimpleNamespace(frontends=2), backend=server)
        await http_server._say_farewell(site, server.connections, [listener], asyncio.Event())
        server.should_exit = True
        await server.shutdown([listener])  # uvicorn's tick may be due
        with client:
            received = await asyncio.to_thread(client.recv, 1000)
        await serving
        return received

    assert asyncio.run(main()).startswith(b"HTTP/1.1 200 ")
