"""Runs the application on sockets: starting, ready, draining, end."""

import asyncio
import logging
import os
import signal
import socket
import stat
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from bytetx.errors import OptionError
from bytetx.serve.app import build_app
from bytetx.serve.interpreter import settle_interpreter
from bytetx.serve.records import METRICS_TYPE, Recorder
from bytetx.serve.settings import ServeSettings
from bytetx.serve.site import Site
from bytetx.serve.tracing import Tracer

logger = logging.getLogger("bytetx.serve")

_BACKLOG = 2048
_KEEP_ALIVE_S = 75
_HEAD_BYTES = 1 << 16
_POLL_S = 0.02


def make_site(settings: ServeSettings, recorder: Recorder) -> Site:
    tracer = None
    if settings.otlp_endpoint is not None:
        tracer = Tracer(settings.otlp_endpoint, service_name=settings.otlp_service_name)
    return Site(settings, recorder, tracer=tracer)


def _log_ready() -> None:
    logger.info("ready")


async def run_site(
    site: Site,
    start: Callable[[], Coroutine[Any, Any, None]],
    sockets: list[socket.socket],
    *,
    ends: asyncio.Event | None = None,
    on_ready: Callable[[], None] = _log_ready,
) -> None:
    """Answers on the sockets at once, with 503 until `start` is done.

    on_ready: called then.
    Until SIGTERM, SIGINT, or `ends`; what `start` raises is raised.
    """
    settings = site.settings
    servers = [_Server(build_app(site))]
    listeners = [sockets]
    if settings.prometheus_port is not None:
        servers.append(_Server(_MetricsApp(site.recorder)))
        listeners.append([bind_tcp(settings.hostname, settings.prometheus_port)])
    ends = asyncio.Event() if ends is None else ends
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ends.set)
    running = [
        asyncio.create_task(server.serve(listening))
        for server, listening in zip(servers, listeners, strict=True)
    ]
    if site.settings.frontends == 1:
        for one in sockets:
            logger.info("listening on %s", address(one))
    try:
        if await _start(site, start, ends):
            site.phase = "ready"
            settle_interpreter()
            on_ready()
            await ends.wait()
            await _drain(site, ends)
    finally:
        for server in servers:
            server.should_exit = True
        await asyncio.gather(*running)
        if site.tracer is not None:
            await asyncio.to_thread(site.tracer.close)
    logger.info("ended")


async def _start(
    site: Site, start: Callable[[], Coroutine[Any, Any, None]], ends: asyncio.Event
) -> bool:
    """Whether it got ready before it was told to end; raises what `start` raises."""
    starting = asyncio.create_task(start())
    told = asyncio.create_task(ends.wait())
    await asyncio.wait((starting, told), return_when=asyncio.FIRST_COMPLETED)
    told.cancel()
    if not starting.done():
        starting.cancel()
        await asyncio.wait((starting,))
        return False
    await starting
    return True


async def _drain(site: Site, ends: asyncio.Event) -> None:
    """Refuses requests and waits for those that run, until the timeout or a second signal."""
    site.phase = "draining"
    logger.info("shutting down: %d requests are being answered", site.num_running)
    ends.clear()
    deadline = asyncio.get_running_loop().time() + site.settings.shutdown_timeout_s
    while site.num_running and not ends.is_set():
        if asyncio.get_running_loop().time() > deadline:
            logger.warning(
                "%d requests did not end within %g s (--shutdown-timeout) and are dropped",
                site.num_running,
                site.settings.shutdown_timeout_s,
            )
            return
        await asyncio.sleep(_POLL_S)


class _Protocol(HttpToolsProtocol):
    """HTTP with a limit on the bytes before a body, which uvicorn does not have."""

    _head_bytes = 0
    _is_in_head = True

    def data_received(self, data: bytes) -> None:
        if self._is_in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._is_in_head and self._head_bytes > _HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The headers have more than {_HEAD_BYTES} bytes.")

    def on_headers_complete(self) -> None:
        self._is_in_head, self._head_bytes = False, 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._is_in_head = True
        super().on_message_complete()


class _Server(uvicorn.Server):
    """uvicorn without its own handling of signals, which would refuse connections at once."""

    def __init__(self, app: ASGIApp):
        super().__init__(
            uvicorn.Config(
                app,
                http=_Protocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=_BACKLOG,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=1,
            )
        )

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class _MetricsApp:
    """GET /metrics on a port of its own, as TEI has it."""

    def __init__(self, recorder: Recorder):
        self._recorder = recorder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_right = scope["type"] == "http" and scope["path"] in ("/metrics", "/")
        body = await self._recorder.metrics_page() if is_right else b"there is only /metrics\n"
        headers = [
            (b"content-type", METRICS_TYPE.encode()),
            (b"content-length", str(len(body)).encode()),
        ]
        status = 200 if is_right else 404
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def bind(settings: ServeSettings, *, shares_port: bool = False) -> socket.socket:
    """The listening socket of the settings; OptionError where the address cannot be had."""
    if settings.uds_path is not None:
        return _bind_unix(settings.uds_path)
    return bind_tcp(settings.hostname, settings.port, shares_port=shares_port)


def bind_tcp(hostname: str, port: int, *, shares_port: bool = False) -> socket.socket:
    """shares_port: other processes of this user may listen on it, too (SO_REUSEPORT)."""
    try:
        found = socket.getaddrinfo(hostname, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, place = found[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shares_port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(place)
    except OSError as error:
        raise OptionError(
            f"cannot listen on {hostname}:{port}: {error.strerror or error}; choose another "
            "--hostname or --port"
        ) from error
    listener.listen(_BACKLOG)
    listener.setblocking(False)
    return listener


def _bind_unix(path: Path) -> socket.socket:
    """A socket that an ended server left behind is replaced; any other file is not."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                if probe.connect_ex(str(path)) != 0:
                    os.unlink(path)
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        raise OptionError(
            f"cannot listen on {path}: {error.strerror or error}; choose another --uds-path"
        ) from error
    listener.listen(_BACKLOG)
    listener.setblocking(False)
    return listener


def address(listener: socket.socket) -> str:
    name = listener.getsockname()
    if listener.family == socket.AF_UNIX:
        return f"unix:{name}"
    host = f"[{name[0]}]" if ":" in name[0] else name[0]
    return f"http://{host}:{name[1]}"
