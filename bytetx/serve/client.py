"""The client's connection while its answer is computed or streamed."""

import asyncio
from collections.abc import AsyncGenerator
from types import TracebackType

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from bytetx.serve.errors import as_serve_error


class ClientLeftError(Exception):
    """The client closed its connection before its answer was complete."""


class WhileConnected:
    """Cancels what the current task waits for when the client leaves, as a ClientLeftError."""

    def __init__(self, receive: Receive):
        self._receive = receive
        self._is_left = False

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._watcher = asyncio.get_running_loop().create_task(self._watch())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._watcher.cancel()
        if self._is_left and kind is asyncio.CancelledError:
            self._task.uncancel()
            raise ClientLeftError from None

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._is_left = True
        self._task.cancel()


class EventStream(Response):
    """Server-sent events: a JSON document each, then [DONE]; an error is the last event."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]):
        """events: JSON documents."""
        self._events = events
        self.status_code = 200
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        self.raw_headers = [pair for pair in self.raw_headers if pair[0] != b"content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        try:
            async with WhileConnected(receive):
                await self._send_events(send)
        finally:
            await self._events.aclose()

    async def _send_events(self, send: Send) -> None:
        try:
            async for event in self._events:
                await _send(send, b"data: " + event + b"\n\n", more=True)
        except Exception as error:
            found = as_serve_error(error)
            if found is None:
                raise
            body = orjson.dumps(found.body("openai"))
            await _send(send, b"data: " + body + b"\n\n", more=False)
            return
        await _send(send, b"data: [DONE]\n\n", more=False)


async def _send(send: Send, body: bytes, *, more: bool) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})
