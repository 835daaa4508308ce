"""Memory of slow clients: bodies that do not end, answers that are not read."""

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from other_processes import resident_mib
from serving import InProcess, start_server

from bytetx.serve import site as site_module
from bytetx.serve.http_server import _Server, bind_tcp

WAIT_S = 60.0
BODY = json.dumps({"inputs": "a " * 120_000}).encode()  # 240 KB
ALL = json.dumps({"inputs": ["the quick brown fox " * 10] * 400}).encode()

Ask = Callable[..., Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


def request(path: str, body: bytes, *, length: int | None = None) -> bytes:
    """A request, or one whose body is announced with more bytes than are sent."""
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {length or len(body)}\r\n\r\n".encode() + body


async def status(reader: asyncio.StreamReader) -> int:
    return int((await reader.readuntil(b"\r\n\r\n")).split()[1])


def run(served: InProcess, test: Callable[[Ask], Awaitable[None]]) -> None:
    """Runs a test beside a server of the application."""

    async def main() -> None:
        server = _Server(served.app, max_connections=100)
        listener = bind_tcp("127.0.0.1", 0)
        port = listener.getsockname()[1]
        writers: list[asyncio.StreamWriter] = []

        async def ask(sent: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 16)
            writers.append(writer)
            writer.write(sent)
            return reader, writer

        serving = asyncio.create_task(server.serve([listener]))
        try:
            async with asyncio.timeout(WAIT_S):
                await test(ask)
        finally:
            for writer in writers:
                writer.transport.abort()
            server.should_exit = True
            await serving

    asyncio.run(main())


def test_bodies_that_do_not_end_have_a_limit_together(
    in_process: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site_module, "_BODY_BYTES", 1 << 20)
    one = in_process.with_settings(only="embedder", payload_limit_bytes=1 << 18)
    whole, part = request("/embed", BODY), request("/embed", BODY[:-100], length=len(BODY))
    chunked = b"POST /embed HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunked += b"%x\r\n%b\r\n" % (len(BODY), BODY)

    async def test(ask: Ask) -> None:
        held = []
        for sent in (part, chunked, part, part):
            held.append(await ask(sent))
            while one.site.body_bytes < len(held) * (len(BODY) - 200):
                await asyncio.sleep(0)
        for sent in (part, whole):
            reader, writer = await ask(sent)
            writer.write(BODY[-100:] if sent is part else b"")
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.split()[1] == b"429" and b"retry-after: 1" in head
            assert one.site.body_bytes <= 1 << 20
        small, _ = await ask(request("/embed", b'{"inputs": "a"}'))
        assert await status(small) == 200
        reader, writer = held[0]
        writer.write(BODY[-100:])  # one that was held goes on
        assert await status(reader) == 200
        reader, _ = await ask(whole)  # and leaves room
        assert await status(reader) == 200
        for _, writer in held:
            writer.transport.abort()
        while one.site.body_bytes or one.site.num_running:
            await asyncio.sleep(0)

    run(one, test)


@pytest.mark.parametrize("seconds", [0.0, 1000.0])
def test_answers_that_are_not_read_have_a_limit_together(
    in_process: InProcess, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """The client that has read for long makes room for others; where none has, they get 429."""
    monkeypatch.setattr(site_module, "_READING_S", seconds)
    one = in_process.with_settings(only="embedder", max_client_batch_size=400)
    size = len(one.post("/embed_all", content_of(ALL)).content)
    assert size > 8_000_000  # more than the kernel's buffers take

    async def test(ask: Ask) -> None:
        unread = []
        for number in range(3):
            reader, writer = await ask(request("/embed_all", ALL))
            writer.transport.pause_reading()  # type: ignore[attr-defined]  # a socket's
            unread.append(writer)
            while len(one.site._answers) <= number:
                await asyncio.sleep(0)
        most = one.site.answer_bytes
        monkeypatch.setattr(site_module, "_ANSWER_BYTES", most)
        reader, writer = await ask(request("/embed_all", ALL))
        head = await reader.readuntil(b"\r\n\r\n")
        assert one.site.answer_bytes <= most
        if seconds:
            assert head.split()[1] == b"429" and b"retry-after: 1" in head
        else:
            assert head.split()[1] == b"200" and len(await dechunked(reader)) == size
            assert len(one.site._answers) == 2
        small, _ = await ask(request("/embed", b'{"inputs": "a"}'))
        assert await status(small) == 200
        for writer in unread:
            writer.transport.abort()
        while one.site.answer_bytes or one.site.num_running:
            await asyncio.sleep(0)

    run(one, test)


def test_answers_that_are_not_read_leave_places_for_others(
    in_process: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that finds --max-concurrent-requests answers unread makes a place for the next."""
    monkeypatch.setattr(site_module, "_READING_S", 0.0)
    limits = {"max_client_batch_size": 400, "max_concurrent_requests": 2}
    one = in_process.with_settings(only="embedder", **limits)

    async def test(ask: Ask) -> None:
        for number in range(2):
            _, writer = await ask(request("/embed_all", ALL))
            writer.transport.pause_reading()  # type: ignore[attr-defined]  # a socket's
            while len(one.site._answers) <= number:
                await asyncio.sleep(0)
        refused, _ = await ask(request("/embed", b'{"inputs": "a"}'))
        assert await status(refused) == 429
        while one.site.num_running > 1:
            await asyncio.sleep(0)
        answered, _ = await ask(request("/embed", b'{"inputs": "a"}'))
        assert await status(answered) == 200

    run(one, test)


def content_of(body: bytes) -> object:
    return json.loads(body)


async def dechunked(reader: asyncio.StreamReader) -> bytes:
    parts = []
    while size := int(await reader.readline(), 16):
        parts.append(await reader.readexactly(size))
        await reader.readline()
    return b"".join(parts)


def test_an_answer_of_one_piece_waits_for_its_reader(in_process: InProcess) -> None:
    """Not in the socket's buffers, which nothing would limit."""
    one = in_process.with_settings()
    body = json.dumps({"inputs": ["the quick brown fox"] * 32}).encode()
    expected = one.post("/embed_all", content_of(body)).content
    assert len(expected) > 1 << 16

    async def test(ask: Ask) -> None:
        reader, _ = await ask(request("/embed_all", body))
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"content-length: %d\r\n" % len(expected) in head
        assert await reader.readexactly(len(expected)) == expected
        assert one.site.answer_bytes == 0

    run(one, test)


def test_many_slow_uploaders_leave_the_server_small_and_reachable(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """250 bodies of 1.9 MB whose last byte does not come: 475 MB, of which 256 MiB are kept."""
    part = request("/embed", b"x" * 1_900_000, length=1_999_999)
    with contextlib.ExitStack() as stack:
        arguments = ["--model", f"embedder={checkpoints['embedder']}"]
        server = stack.enter_context(start_server(arguments, log=tmp_path / "log"))
        place = server.url.removeprefix("http://").rsplit(":", 1)
        before, waits = resident_mib(server.process.pid), []
        client = stack.enter_context(server.client())
        for number in range(250):
            one = stack.enter_context(socket.create_connection((place[0], int(place[1])), WAIT_S))
            one.sendall(part)
            if number % 20 == 0:
                start = time.perf_counter()
                assert client.get("/health").status_code == 200
                waits.append(time.perf_counter() - start)
        grown = resident_mib(server.process.pid) - before
        assert client.post("/embed", json={"inputs": "a"}).status_code == 200
    assert grown < 360, grown
    assert sorted(waits)[-2] < 5.0, waits
