"""Runs the application on sockets: starting, ready, draining, end."""

import asyncio
import ctypes
import logging
import os
import signal
import socket
import stat
import struct
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from bytetx.errors import OptionError
from bytetx.serve.app import ROUTES, build_app
from bytetx.serve.batch_runner import BatchRunner
from bytetx.serve.connections import KEEP_ALIVE_S, Connections, is_readable, max_connections
from bytetx.serve.interpreter import settle_interpreter
from bytetx.serve.records import METRICS_TYPE, Recorder
from bytetx.serve.settings import ServeSettings
from bytetx.serve.site import Site
from bytetx.serve.tracing import Tracer

if TYPE_CHECKING:
    from bytetx.serve.grpc_server import GrpcServer

logger = logging.getLogger("bytetx.serve")

_BACKLOG = 2048
_METRICS_CONNECTIONS = 32  # on the port of /metrics alone
_POLL_S = 0.02
_CHECK_TICKS = 10  # uvicorn's ticks take a tenth of a second
# At the end: for requests that have come in part, for clients that use their connection again and
# are told to close it, and for those that were accepted last.
_ARRIVING_S, _FAREWELL_S, _IDLE_S, _LAST_S = 2.0, 1.0, 0.25, 0.5
_ACCEPT_TURNS = 4  # turns of the event loop from an accept to its entry in the connections
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27  # Linux' numbers


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
    limit = max_connections()
    app = build_app(site)
    servers = [_Server(app, max_connections=limit)]
    listeners = [sockets]
    interface: GrpcServer | None = None
    if settings.grpc_port is not None:
        interface = _grpc_server(app, settings, sockets[0])
    if settings.prometheus_port is not None:
        metrics = _Server(_MetricsApp(site.recorder), max_connections=_METRICS_CONNECTIONS)
        servers.append(metrics)
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
    connections = servers[0].connections
    if interface is not None:
        await interface.start()
    batches: asyncio.Task[None] | None = None
    try:
        if await _start(site, start, ends):
            site.phase = "ready"
            if site.batches is not None:
                runner = BatchRunner(site, site.batches, ROUTES)
                batches = asyncio.create_task(runner.run())
            settle_interpreter()
            if interface is not None:
                await interface.say_ready()
            on_ready()
            await ends.wait()
            if interface is not None:
                await interface.say_draining()
            if batches is not None:
                await _cancel(batches)  # what it has begun is run again at the next start
            await _drain(site, connections, ends)
        site.phase = "draining"
        await _say_farewell(site, connections, sockets, ends)
    finally:
        for server in servers:
            server.should_exit = True
        await asyncio.gather(*running)
        if interface is not None:
            await interface.stop()
        site.close()
        if site.tracer is not None:
            await asyncio.to_thread(site.tracer.close)
    logger.info("ended")


async def _cancel(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.wait((task,))


def _grpc_server(app: ASGIApp, settings: ServeSettings, listener: socket.socket) -> "GrpcServer":
    """On --grpc-port, which several processes share where they share the listener's."""
    from bytetx.serve.grpc_server import GrpcServer

    is_shared = bool(listener.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT))
    shares_port = is_shared or settings.frontends > 1
    made = GrpcServer(app, settings, shares_port=shares_port)
    if not shares_port:
        logger.info("gRPC on port %d", made.port)
    return made


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


async def _drain(site: Site, connections: Connections, ends: asyncio.Event) -> None:
    """Refuses requests and waits for those that run, until the timeout or a second signal."""
    site.phase = "draining"
    logger.info("shutting down: %d requests are being answered", site.num_running)
    ends.clear()
    clock = asyncio.get_running_loop().time
    start = clock()
    while not ends.is_set():
        is_arriving = connections.num_arriving() and clock() < start + _ARRIVING_S
        if not (site.num_running or connections.num_busy() or is_arriving):
            return
        if clock() > start + site.settings.shutdown_timeout_s:
            logger.warning(
                "%d requests did not end within %g s (--shutdown-timeout) and are dropped",
                max(site.num_running, connections.num_busy()),
                site.settings.shutdown_timeout_s,
            )
            return
        await asyncio.sleep(_POLL_S)


async def _say_farewell(
    site: Site, connections: Connections, sockets: Sequence[socket.socket], ends: asyncio.Event
) -> None:
    """Ends connections so that no client loses a request that it has sent.

    One that is in use is told to close with its next answer, which is 503; idle ones are closed.
    Then nothing new is accepted, and what was accepted meanwhile is refused as well.
    """
    clock = asyncio.get_running_loop().time

    async def wait(seconds: float, *, more_s: float = 0.0) -> None:
        """more_s: beyond the time, while something was sent that is not read: this process may
        have been stopped for all of the time."""
        end = clock() + seconds
        while not ends.is_set():
            for _ in range(_ACCEPT_TURNS):
                await asyncio.sleep(0)
            is_read = not any(map(is_readable, sockets)) and not connections.has_unread()
            is_over = clock() >= end or not connections.every
            if is_over and (is_read or clock() >= end + more_s):
                return
            connections.close_idle(since=clock() - _IDLE_S)
            await asyncio.sleep(_POLL_S)

    if site.backend is None:  # it did not start
        ends.clear()
    await wait(_FAREWELL_S)
    for one in sockets:
        if site.settings.frontends == 1:  # else it is the supervisor's
            remove_path(one)
        refuse_new(one)
    await asyncio.sleep(_POLL_S)  # handshakes that had begun end
    await wait(_LAST_S, more_s=_ARRIVING_S)


def remove_path(listener: socket.socket) -> None:
    """Removes the file of a Unix socket, so that nobody finds it any more."""
    if listener.family == socket.AF_UNIX:
        with suppress(OSError):
            os.unlink(listener.getsockname())


def refuse_new(listener: socket.socket) -> None:
    """Lets no new connection wait at a listener, so that closing it resets none.

    The kernel drops what asks for one; the client asks again, and is refused once the listener is
    closed. What ends a handshake that has begun passes: its client may be connected already.
    """
    # Of the classic packet filter, over a TCP header: load the flags; where SYN is among them go
    # on, else skip one; keep no byte of the packet; keep all of it.
    code = ((0x30, 0, 0, 13), (0x45, 0, 1, 0x02), (0x06, 0, 0, 0), (0x06, 0, 0, 0xFFFFFFFF))
    instructions = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *row) for row in code))
    program = struct.pack("@HP", len(code), ctypes.addressof(instructions))
    with suppress(OSError):  # no Linux, or no TCP
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def accept_again(listener: socket.socket) -> None:
    """Undoes refuse_new(): of a listener that the next process goes on with."""
    with suppress(OSError):  # it was not called
        listener.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)


class _Server(uvicorn.Server):
    """uvicorn without its own handling of signals, which would refuse connections at once."""

    def __init__(self, app: ASGIApp, *, max_connections: int):
        self.connections = Connections(limit=max_connections)
        super().__init__(
            uvicorn.Config(
                app,
                http=self.connections.protocol,  # type: ignore[arg-type]  # a factory will do
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=_BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=1,
            )
        )

    async def on_tick(self, counter: int) -> bool:
        if counter % _CHECK_TICKS == 0:
            self.connections.check(asyncio.get_running_loop().time())
        return await super().on_tick(counter)

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
