"""The supervisor of several processes: front-ends that share the port, and one engine process."""

import asyncio
import logging
import socket
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bytetx.errors import OptionError
from bytetx.serve.child_process import ChildProcess, drain_on_signals, run_until_told
from bytetx.serve.http_server import address, bind, remove_path
from bytetx.serve.ports import reserved_grpc_port
from bytetx.serve.settings import ServeSettings

logger = logging.getLogger("bytetx.serve")

_MODULE = "bytetx.serve.child"


async def supervise(settings: ServeSettings) -> None:
    """Runs until SIGTERM or SIGINT; starts a process again that ends by itself.

    Raises SystemExit with the engine's code where it ends before it has been ready once.
    """
    if settings.prometheus_port is not None:
        raise OptionError("--prometheus-port needs --frontends 1; scrape /metrics on the port")
    listeners = _listeners(settings)
    ends = asyncio.Event()
    with (
        tempfile.TemporaryDirectory(prefix="bytetx-serve-") as folder,
        reserved_grpc_port(settings) as settings,
    ):
        path = str(Path(folder) / "engine")
        engine = ChildProcess(settings, [_MODULE, "engine", path], "engine process")
        frontends = [
            ChildProcess(
                settings,
                [_MODULE, "frontend", path, str(listener.fileno())],
                f"front-end {number}",
                descriptors=(listener.fileno(),),
                may_fail=True,
            )
            for number, listener in enumerate(listeners)
        ]
        drain_on_signals(frontends, ends)
        logger.info("listening on %s", address(listeners[0]))
        code = await _run(engine, frontends, listeners, ends)
    if code is not None:
        raise SystemExit(code if code > 0 else 1)
    logger.info("ended")


async def _run(
    engine: ChildProcess,
    frontends: Sequence[ChildProcess],
    listeners: Sequence[socket.socket],
    ends: asyncio.Event,
) -> int | None:
    """None after a signal, else the exit code of an engine that did not get ready."""
    ready: set[ChildProcess] = set()

    def note_ready(child: ChildProcess) -> None:
        ready.add(child)
        if len(ready) == 1 + len(frontends):
            logger.info("ready")

    for child in (*frontends, engine):
        child.start(note_ready)
    failed = await run_until_told([engine], ends)
    logger.info("shutting down")
    for listener in set(listeners):
        remove_path(listener)
        listener.close()  # the front-ends have theirs, and nothing waits where nobody accepts
    await asyncio.gather(*(child.stop() for child in frontends))  # they drain
    await engine.stop()
    return None if failed is None else failed[1]


def _listeners(settings: ServeSettings) -> list[socket.socket]:
    """A socket for each front-end on the same port; on a Unix path one that all accept from.

    Raises OptionError where another server listens there, even one that shares its port.
    """
    if settings.uds_path is not None:
        return [bind(settings)] * settings.frontends
    if settings.port:
        bind(settings).close()  # which shares with nobody
    first = bind(settings, shares_port=True)
    same = replace(settings, port=first.getsockname()[1])
    more = [bind(same, shares_port=True) for _ in range(settings.frontends - 1)]
    return [first, *more]
