"""The engine process: models that answer the calls of front-ends on a Unix socket."""

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine
from contextlib import aclosing, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from bytetx.errors import DeviceLostError
from bytetx.serve.backends import open_backend
from bytetx.serve.calls import Call, Outcome
from bytetx.serve.engine import LocalBackend
from bytetx.serve.errors import ServeError
from bytetx.serve.interpreter import settle_interpreter
from bytetx.serve.metrics import Metrics
from bytetx.serve.records import RecordKind
from bytetx.serve.remote import rings_path
from bytetx.serve.settings import ServeSettings, say_ready
from bytetx.serve.text_rings import RingModels
from bytetx.serve.wire import FrameProtocol

logger = logging.getLogger("bytetx.serve")


async def run_engine(settings: ServeSettings, path: str, ends: asyncio.Event) -> None:
    """Loads the models, then answers on the socket until `ends`; says so on stdout when ready.

    Raises DeviceLostError where the device is lost: the supervisor starts another process.
    """
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ends.set)
    metrics = Metrics(settings)
    async with open_backend(settings, metrics, on_lost=ends.set) as backend:
        for one in (path, rings_path(path)):
            Path(one).unlink(missing_ok=True)  # an engine that was killed leaves it
        calls = EngineCalls(backend, metrics)
        calls.listen_for_rings(rings_path(path))
        server = await asyncio.get_running_loop().create_unix_server(calls.protocol, path)
        settle_interpreter(is_engine=True)
        say_ready()
        async with server:
            await ends.wait()
            calls.close()
    if not backend.is_healthy:
        raise DeviceLostError("the device was lost")


_Work = Callable[[FrameProtocol, dict[str, Any]], Coroutine[Any, Any, None]]


class EngineCalls:
    """Calls of all front-ends: a task each, until it is answered or cancelled."""

    def __init__(self, backend: LocalBackend, metrics: Metrics):
        self._backend, self._metrics = backend, metrics
        self._rings = RingModels(backend.ring_models)
        self._tasks: dict[tuple[int, int], asyncio.Future[Any]] = {}  # by connection and id
        self._running: dict[int, int] = {}  # requests of each connection
        self._protocols: dict[int, FrameProtocol] = {}
        metrics.count_running(lambda: sum(self._running.values()))
        backend.on_models = self._send_models

    def protocol(self) -> FrameProtocol:
        """Make the protocol of a new connection, which is told the models."""
        protocol = _Greeting(self._on_frame, self._on_close, self._backend)
        self._protocols[id(protocol)] = protocol
        return protocol

    def listen_for_rings(self, path: str) -> None:
        """Takes the rings of front-ends on a Unix socket, until the process ends."""
        listener = socket.socket(socket.AF_UNIX)
        listener.setblocking(False)
        listener.bind(path)
        listener.listen()
        asyncio.get_running_loop().add_reader(listener, self._accept_ring, listener)

    def _accept_ring(self, listener: socket.socket) -> None:
        with suppress(OSError):
            connection, _ = listener.accept()
            connection.setblocking(False)
            asyncio.get_running_loop().add_reader(connection, self._open_ring, connection)

    def _open_ring(self, connection: socket.socket) -> None:
        """The first bytes of a connection bring the memory of a ring; later ones wake the engine,
        and its end says that the front-end is gone."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(connection)
        hello, descriptors, _, _ = socket.recv_fds(connection, 1 << 12, 1)
        try:
            rings = self._rings.find(orjson.loads(hello)["model"])
            assert rings is not None  # the front-end was told of it
            ring = rings.add(connection, descriptors[0])
        except (ValueError, LookupError, AssertionError, OSError):
            logger.exception("a front-end's ring was not taken")
            connection.close()
            return
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

        def on_readable() -> None:
            try:
                is_open = bool(connection.recv(1 << 12))
            except BlockingIOError:
                return
            except OSError:
                is_open = False
            if not is_open:
                ring.is_lost = True
                loop.remove_reader(connection)
                connection.close()
            rings.wake()

        loop.add_reader(connection, on_readable)

    def _send_models(self) -> None:
        """Tells all front-ends of models that have changed."""
        for protocol in list(self._protocols.values()):
            protocol.send(_models(self._backend))

    def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        for protocol in list(self._protocols.values()):
            protocol.close()

    def _on_frame(
        self, protocol: FrameProtocol, header: dict[str, Any], arrays: tuple[np.ndarray, ...]
    ) -> None:
        op = header["op"]
        if op == "records":
            self._running[id(protocol)] = header["running"]
            for kind, rows in zip(header["kinds"], arrays, strict=True):
                self._metrics.add(RecordKind(*kind), rows)
            return
        key = (id(protocol), header["id"])
        if op == "cancel":
            task = self._tasks.get(key)
            if task is not None:
                task.cancel()
            return
        work = {
            "run": self._run,
            "kind": self._kind,
            "generate": self._generate,
            "metrics": self._document,
            "stats": self._document,
        }[op]
        self._start(key, self._guard(protocol, header, work))

    def _start(self, key: tuple[int, int], work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[key] = task
        task.add_done_callback(lambda _: self._tasks.pop(key, None))

    async def _guard(self, protocol: FrameProtocol, header: dict[str, Any], work: _Work) -> None:
        """Sends the error of a call to its front-end."""
        try:
            await work(protocol, header)  # made here: a call that is cancelled first has no other
        except Exception as error:
            _send_error(protocol, header["id"], error)

    async def _run(self, protocol: FrameProtocol, header: dict[str, Any]) -> None:
        _send(protocol, header["id"], await self._backend.run(Call(*header["call"])))

    async def _kind(self, protocol: FrameProtocol, header: dict[str, Any]) -> None:
        """How a front-end sends a call's texts by a ring."""
        call = Call(*header["call"])
        found, arrays = self._rings.kind(call.model, call.options, has_reader=header["has_reader"])
        protocol.send({"id": header["id"], **found}, arrays)

    async def _generate(self, protocol: FrameProtocol, header: dict[str, Any]) -> None:
        number = header["id"]
        async with aclosing(self._backend.generate(Call(*header["call"]))) as pieces:
            async for piece in pieces:
                protocol.send({"id": number, "piece": list(piece)})
        protocol.send({"id": number, "end": True})

    async def _document(self, protocol: FrameProtocol, header: dict[str, Any]) -> None:
        is_page = header["op"] == "metrics"
        text = await (self._metrics.metrics_page() if is_page else self._metrics.stats())
        protocol.send({"id": header["id"]}, [np.frombuffer(text, dtype=np.uint8)])

    def _on_close(self, protocol: FrameProtocol) -> None:
        """The front-end is gone, and nobody waits for its calls."""
        self._protocols.pop(id(protocol), None)
        self._running.pop(id(protocol), None)
        for (connection, _), task in list(self._tasks.items()):
            if connection == id(protocol):
                task.cancel()


def _send(protocol: FrameProtocol, number: int, outcome: Outcome) -> None:
    answer = {"id": number, "timings": outcome.timings.row(), "rows": outcome.rows}
    protocol.send(answer, outcome.arrays)


def _send_error(protocol: FrameProtocol, number: int, error: Exception) -> None:
    """Send the client its error; a fault of the program goes to the log."""
    if isinstance(error, ServeError):
        row = [error.kind, error.message, error.param, error.code, error.retry_after_s]
    else:
        sys.excepthook(type(error), error, error.__traceback__)
        row = ["backend", "the engine failed with this request; see its log", None, None, None]
    protocol.send({"id": number, "error": row})


class _Greeting(FrameProtocol):
    """A connection whose first frame tells the models."""

    def __init__(self, on_frame: Any, on_close: Any, backend: LocalBackend):
        super().__init__(on_frame, on_close)
        self._backend = backend

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.send(_models(self._backend))


def _models(backend: LocalBackend) -> dict[str, Any]:
    return {"models": [asdict(facts) for facts in backend.models]}
