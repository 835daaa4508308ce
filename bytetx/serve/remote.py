"""A front-end's side: a ServeBackend and a Recorder whose work is done in the engine process."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator
from itertools import count
from typing import Any

import numpy as np

from bytetx.serve.calls import Call, ModelFacts, Outcome, Piece, Timings
from bytetx.serve.errors import ServeError
from bytetx.serve.records import Finished, group_records
from bytetx.serve.ring_client import RingClient
from bytetx.serve.wire import FrameProtocol

logger = logging.getLogger("bytetx.serve")

_RECONNECT_S = 0.1
_FLUSH_S = 1.0  # each time costs the engine's process the interpreter's lock, much or little
_LOST = "the engine process ended; it is being started again"


class EngineClient:
    """The connection to the engine process, made again whenever it is lost."""

    def __init__(self, path: str):
        """path: of the engine's socket."""
        self._path = path
        self._ids = count()
        self._is_open = False  # whether there is a connection, greeted or not
        self._protocol: FrameProtocol | None = None  # that has been greeted
        self._waiting: dict[int, asyncio.Future[tuple[dict[str, Any], Any]]] = {}
        self._streams: dict[int, asyncio.Queue[dict[str, Any]]] = {}
        self._is_connected = asyncio.Event()
        self._models: tuple[ModelFacts, ...] = ()
        self._records: list[tuple[float, Finished]] = []
        self._rings = RingClient(rings_path(path), self._ask, _lost_error)
        self.num_running = lambda: 0

    @property
    def models(self) -> tuple[ModelFacts, ...]:
        return self._models

    @property
    def is_healthy(self) -> bool:
        return self._protocol is not None

    async def keep_connected(self) -> None:
        """Runs until it is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            if not self._is_open:
                with contextlib.suppress(OSError):  # the engine does not listen yet
                    await loop.create_unix_connection(
                        lambda: FrameProtocol(self._on_frame, self._on_close), self._path
                    )
                    self._is_open = True
            await asyncio.sleep(_RECONNECT_S)

    async def flush_records(self) -> None:
        """Sends records now and then; runs until it is cancelled."""
        while True:
            await asyncio.sleep(_FLUSH_S)
            self._flush()

    async def wait_until_connected(self) -> None:
        await self._is_connected.wait()

    async def run(self, call: Call) -> Outcome:
        sent = None if call.priority else self._rings.start(call)  # a ring has one class
        if sent is not None:
            try:
                outcome = await sent.answer
            except asyncio.CancelledError:
                sent.kind.ring.cancel(sent)
                raise
            if outcome is not None:
                return outcome
        header, arrays = await self._ask({"op": "run", "call": _call_row(call)})
        return Outcome(Timings(*header["timings"]), header.get("rows"), arrays)

    async def generate(self, call: Call) -> AsyncGenerator[Piece, None]:
        protocol, number = self._need_protocol(), next(self._ids)
        queue = self._streams[number] = asyncio.Queue()
        is_open = False
        try:
            _send(protocol, {"id": number, "op": "generate", "call": _call_row(call)})
            is_open = True
            while True:
                header = await queue.get()
                if "error" in header:
                    is_open = False
                    raise _error(header["error"])
                if "piece" not in header:
                    is_open = False
                    return
                yield Piece(*header["piece"])
        finally:
            del self._streams[number]
            if is_open:
                protocol.send({"id": number, "op": "cancel"})

    def record(self, finished: Finished) -> None:
        self._records.append((time.time(), finished))

    async def metrics_page(self) -> bytes:
        return await self._document("metrics")

    async def stats(self) -> bytes:
        return await self._document("stats")

    async def _document(self, name: str) -> bytes:
        self._flush()
        _, arrays = await self._ask({"op": name})
        document: bytes = arrays[0].tobytes()
        return document

    def _flush(self) -> None:
        if self._protocol is None:
            return
        records, self._records = self._records, []
        groups = group_records(records)
        header = {"op": "records", "kinds": [*map(list, groups)], "running": self.num_running()}
        self._protocol.send(header, list(groups.values()))

    async def _ask(self, header: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        protocol, number = self._need_protocol(), next(self._ids)
        future = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            _send(protocol, header | {"id": number})
            answer: tuple[dict[str, Any], Any] = await future
        except asyncio.CancelledError:
            protocol.send({"id": number, "op": "cancel"})
            raise
        finally:
            self._waiting.pop(number, None)
        return answer

    def _need_protocol(self) -> FrameProtocol:
        if self._protocol is None:
            raise _lost_error()
        return self._protocol

    def _on_frame(
        self, protocol: FrameProtocol, header: dict[str, Any], arrays: tuple[np.ndarray, ...]
    ) -> None:
        if "models" in header:
            self._models = tuple(_facts(row) for row in header["models"])
            if self._protocol is not protocol:
                logger.info("connected to the engine process")
            self._protocol = protocol
            self._is_connected.set()
            return
        stream = self._streams.get(header["id"])
        if stream is not None:
            stream.put_nowait(header)
            return
        future = self._waiting.get(header["id"])
        if future is None or future.done():
            return  # the client left
        if "error" in header:
            future.set_exception(_error(header["error"]))
        else:
            future.set_result((header, arrays))

    def _on_close(self, protocol: FrameProtocol) -> None:
        self._is_open = False
        if self._protocol is not protocol:
            return
        self._protocol = None
        self._rings.close()
        logger.warning("the connection to the engine process is lost")
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(_lost_error())
        for stream in self._streams.values():
            stream.put_nowait({"error": ["unhealthy", _LOST, None, None, 5]})


def rings_path(path: str) -> str:
    """Where rings are handed over.  path: of the engine's socket."""
    return f"{path}-rings"


def _lost_error() -> ServeError:
    return ServeError("unhealthy", _LOST, retry_after_s=5)


def _send(protocol: FrameProtocol, header: dict[str, Any]) -> None:
    """Raises ServeError where a frame cannot hold what the client gave."""
    try:
        protocol.send(header)
    except TypeError as error:  # orjson's integers have 64 bits
        raise ServeError("validation", f"the request has a value out of range: {error}") from None


def _call_row(call: Call) -> list[Any]:
    return [call.model, call.task, call.inputs, call.options, call.priority]


def _error(row: list[Any]) -> ServeError:
    kind, message, param, code, retry_after_s = row
    return ServeError(kind, message, param=param, code=code, retry_after_s=retry_after_s)


def _facts(row: dict[str, Any]) -> ModelFacts:
    return ModelFacts(**row | {"tasks": tuple(row["tasks"])})
