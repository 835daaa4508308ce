"""Gateway: the ASGI application around the routes: ids, keys, limits, errors, records.

A request of a known path goes from here straight to its endpoint: FastAPI's own handling of bodies
and dependencies would cost more than a short text's forward pass. FastAPI makes the OpenAPI page.
WhileConnected watches the client's connection; AccessLog has a line for each request once its
answer is sent.
"""

import asyncio
import logging
import re
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar
from urllib.parse import quote

import orjson
from fastapi import FastAPI
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bytetx.errors import shown
from bytetx.serve.calls import ModelFacts, Timings
from bytetx.serve.connections import ABORT, BODY_S
from bytetx.serve.errors import ServeError, Style, as_serve_error, style_of
from bytetx.serve.records import Finished
from bytetx.serve.schemas import Fields, refusal, unknown_fields
from bytetx.serve.site import Site


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


logger = logging.getLogger("bytetx.serve")

M = TypeVar("M", bound=Fields)
CLIENT_LEFT = 499  # nginx's status; only in metrics
_TOO_LATE = 408
_BODY_SECONDS = BODY_S
_REST_SECONDS = 5.0  # for the body of a request that is refused before it has come
# A longer body is parsed in a thread: one of 2 MB takes some 50 ms.
MAX_INLINE_BYTES = 1 << 15
# Sockets take an answer of so many bytes at once, whoever reads it.
_SENT_BYTES = 1 << 16
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_MAX_KEY = 80  # characters of a key in an error
_DOCS = ("/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json")
DOCS_FILES = "/docs/files"  # what the pages load: scripts and styles
# The pages ask nobody but this server, whatever their scripts name.
_DOCS_POLICY = (
    b"default-src 'self' 'unsafe-inline' data: blob:; base-uri 'none'; frame-ancestors 'none'"
)


class Exchange(Request):
    """One request on its way through an endpoint.

    request_id: for its answer.  facts, timings and the rest: for its record; endpoints set
    them.
    """

    site: Site
    request_id: str
    route: str  # the path without the model's name
    model_name: str | None = None  # as the path's prefix names it
    started: float
    body_bytes: bytes = b""
    is_body_read: bool = False
    facts: ModelFacts | None = None
    timings: Timings | None = None
    first_token_seconds: float | None = None
    token_seconds: float | None = None
    num_ignored_fields: int = 0
    priority: int = 0  # in the engine's queue; lower numbers run first
    result_bytes: int = 0  # memory of the results that the answer is written from

    @property
    def style(self) -> Style:
        """The style of its errors."""
        return style_of(self.route)


Endpoint = Callable[..., Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Route:
    """endpoint: endpoint(body, exchange), or endpoint(exchange) where there is no body.

    is_open: answered without a key.  is_limited: counts as a concurrent request, and needs models.
    """

    path: str
    endpoint: Endpoint
    body: type[Fields] | None = None
    is_open: bool = False
    is_limited: bool = True


class Gateway:
    """The whole application; `routes` by (method, path)."""

    def __init__(self, site: Site, app: FastAPI, routes: Mapping[tuple[str, str], Route]):
        self._site, self._app, self._routes = site, app, routes
        self._paths = {path for _, path in routes}
        self._templates = [
            (compile_path(path)[0], path) for path in sorted(self._paths) if "{" in path
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = Exchange(scope, receive, send)
        exchange.site, exchange.started = self._site, time.perf_counter()
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id")
        is_usable = given is not None and _REQUEST_ID.fullmatch(given) is not None
        exchange.request_id = given.decode() if given and is_usable else uuid.uuid4().hex
        path = self._path(scope["path"], exchange)
        exchange.route = path
        is_docs = path in _DOCS or path.startswith(f"{DOCS_FILES}/")
        if is_docs and scope["method"] in ("GET", "HEAD"):
            await self._app(scope, receive, _docs_send(exchange))
            return
        tracer = self._site.tracer
        if tracer is None or path not in self._paths:
            await self._serve(exchange, path, headers)
            return
        carrier = {key.decode("latin-1"): value.decode("latin-1") for key, value in headers.items()}
        with tracer.span(f"{scope['method']} {path}", carrier) as span:
            span.set_attribute("http.request.method", scope["method"])
            span.set_attribute("http.route", path)
            span.set_attribute("bytetx.request_id", exchange.request_id)
            status = await self._serve(exchange, path, headers)
            span.set_attribute("http.response.status_code", status)
            if exchange.timings is not None:
                span.set_attribute("bytetx.tokens", exchange.timings.num_tokens)

    def _path(self, path: str, exchange: Exchange) -> str:
        """The path as it is declared, without /models/NAME, which names the model; of several the
        longest name."""
        if path.startswith("/models/") and path not in self._paths:
            names = (model.name for model in self._site.models())
            named = [name for name in names if f"{path}/".startswith(f"/models/{name}/")]
            if named:
                exchange.model_name = max(named, key=len)
                path = path[len(f"/models/{exchange.model_name}") :] or "/"
        for pattern, template in self._templates:
            found = pattern.match(path)
            if found is not None:
                exchange.scope["path_params"] = found.groupdict()
                return template
        return path

    async def _serve(self, exchange: Exchange, path: str, headers: Mapping[bytes, bytes]) -> int:
        """Answers, records, and gives the status."""
        error_kind = ""
        try:
            response = await self._respond(exchange, path, headers)
        except ServeError as error:
            response, error_kind = error.response(exchange.style), error.kind
        except ClientLeftError:
            self._record(exchange, path, CLIENT_LEFT, "")
            return CLIENT_LEFT
        except Exception as error:
            response, error_kind = self._unexpected(exchange, path, error)
        status = response.status_code
        if status == 424 and exchange.facts is not None:
            model = exchange.facts.name
            if self._site.is_first(("failed", model, path)):
                logger.warning(
                    "%s %s: %s failed; bytetx_requests_total counts those that follow",
                    *(exchange.request_id, path, model),
                )
        response.raw_headers.append((b"x-request-id", exchange.request_id.encode()))
        if self._site.phase == "draining":
            response.raw_headers.append((b"connection", b"close"))
        if status != _TOO_LATE and not exchange.is_body_read:
            await _discard_body(exchange, headers, limit=self._site.settings.payload_limit_bytes)
        try:
            await response(exchange.scope, exchange.receive, exchange._send)
        except (OSError, ClientLeftError):  # while its answer was written
            status = CLIENT_LEFT
        self._record(exchange, path, status, error_kind)
        return status

    async def _respond(
        self, exchange: Exchange, path: str, headers: Mapping[bytes, bytes]
    ) -> Response:
        method = exchange.scope["method"]
        route = self._routes.get(("GET" if method == "HEAD" else method, path))
        if route is None:
            raise self._unknown(method, path)
        site = self._site
        if not route.is_open:
            site.check_key(headers.get(b"authorization"))
        if not route.is_limited:
            return await _call(route, exchange)
        site.ready_backend()
        exchange.body_bytes = await _read_body(exchange, headers)
        exchange.is_body_read = True
        site.ready_backend()  # which may have begun to drain meanwhile
        most = site.settings.max_concurrent_requests
        if site.num_running >= most:
            site.drop_slow_reader()  # for the next one
            raise ServeError(
                "overloaded",
                f"{most} requests are being answered, which is --max-concurrent-requests; try "
                "again soon",
                retry_after_s=1,
            )
        site.num_running += 1
        try:
            body = None if route.body is None else await parse(exchange, route.body)
            async with WhileConnected(exchange.receive):
                response = await _call(route, exchange, body)
            return _Counted(response, exchange)
        except BaseException:
            site.num_running -= 1
            raise

    def _unknown(self, method: str, path: str) -> ServeError:
        if path in self._paths:
            known = ", ".join(sorted(name for name, known in self._routes if known == path))
            return ServeError("method", f"{path} takes {known}, got {method}")
        return ServeError("not_found", f"there is no route {path[:200]}; GET /docs lists them")

    def _unexpected(self, exchange: Exchange, path: str, error: Exception) -> tuple[Response, str]:
        known = as_serve_error(error)
        if known is not None:
            return known.response(exchange.style), known.kind
        logger.error("%s %s: a fault of the server", exchange.request_id, path, exc_info=error)
        message = f"the server failed; its log has request {exchange.request_id}"
        response = ServeError("backend", message).response(exchange.style)
        response.status_code = 500
        return response, "internal"

    def _record(self, exchange: Exchange, path: str, status: int, error_kind: str) -> None:
        noted, model = answered(exchange.scope), exchange.facts
        noted.status, noted.request_id = status, exchange.request_id
        noted.model = exchange.model_name if model is None else model.name
        known = path if path in self._paths else "other"
        route = self._routes.get((exchange.scope["method"], path))
        if status < 400 and (route is None or not route.is_limited):
            return  # probes and scrapes
        self._site.recorder.record(
            Finished(
                route=known,
                status=status,
                model="" if model is None else model.name,
                seconds=time.perf_counter() - exchange.started,
                error=error_kind,
                timings=exchange.timings,
                first_token_seconds=exchange.first_token_seconds,
                token_seconds=exchange.token_seconds,
                num_ignored_fields=exchange.num_ignored_fields,
            )
        )


class _Counted(Response):
    """An answer that counts as a running request, with its memory, until all of it is sent."""

    def __init__(self, inner: Response, exchange: Exchange):
        """Raises ServeError where the answers that are being sent are too much."""
        self._inner, self._site = inner, exchange.site
        self.status_code = inner.status_code
        self.raw_headers = inner.raw_headers
        body = getattr(inner, "body", None)  # streamed answers have none
        self._body = body if body is not None and len(body) > _SENT_BYTES else None
        size = exchange.result_bytes if body is None else len(body)
        if size > _SENT_BYTES:
            abort = (exchange.scope.get("extensions") or {}).get(ABORT)
            self._site.hold_answer(self, size, abort)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if self._body is None:
                await self._inner(scope, receive, send)
            else:
                await self._send_parts(memoryview(self._body), send)
        finally:
            self._site.num_running -= 1
            self._site.release_answer(self)

    async def _send_parts(self, body: memoryview, send: Send) -> None:
        """Each waits until the client has read most of the one before it."""
        start = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **start})
        for first in range(0, len(body), _SENT_BYTES):
            part, is_last = body[first : first + _SENT_BYTES], first + _SENT_BYTES >= len(body)
            message = {"type": "http.response.body", "body": bytes(part), "more_body": not is_last}
            await send(message)


def _docs_send(exchange: Exchange) -> Send:
    """Adds the headers of a page of the API."""

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [
                *message["headers"],
                (b"x-request-id", exchange.request_id.encode()),
                (b"content-security-policy", _DOCS_POLICY),
            ]
        await exchange._send(message)

    return send


async def _call(route: Route, exchange: Exchange, body: BaseModel | None = None) -> Response:
    if body is None:
        return await route.endpoint(exchange)
    return await route.endpoint(body, exchange)


async def _read_body(exchange: Exchange, headers: Mapping[bytes, bytes]) -> bytes:
    """Raises ServeError where it is too long, takes too long to arrive, or where too much of other
    bodies has arrived."""
    limit = exchange.site.settings.payload_limit_bytes
    given = headers.get(b"content-length")
    if given is not None and given.isdigit() and int(given) > limit:
        raise _too_large(limit)
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            return await _read_parts(exchange, limit=limit)
    except TimeoutError as error:
        raise ServeError(
            "timeout", f"the body did not arrive within {_BODY_SECONDS:g} s"
        ) from error


async def _read_parts(exchange: Exchange, *, limit: int) -> bytes:
    parts, size, held = [], 0, 0
    try:
        has_more = True
        while has_more:
            part, has_more = await _next_part(exchange.receive)
            size += len(part)
            if size > limit:
                raise _too_large(limit)
            parts.append(part)
            if has_more and size > MAX_INLINE_BYTES:  # a small body always has room
                exchange.site.hold_body(size - held)
                held = size
        return b"".join(parts)
    finally:
        exchange.site.release_body(held)


async def _next_part(receive: Receive) -> tuple[bytes, bool]:
    """(the next bytes of a body, whether more come)"""
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientLeftError
    return message.get("body", b""), message.get("more_body", False)


def _too_large(limit: int) -> ServeError:
    return ServeError(
        "too_large", f"the body has more than {limit} bytes, which is --payload-limit"
    )


async def _discard_body(exchange: Exchange, headers: Mapping[bytes, bytes], *, limit: int) -> None:
    """Takes the rest of a body that is no longer needed, where it is no longer than limit bytes.

    Closing a connection on which bytes still arrive resets it, and the client may lose its answer.
    """
    length = headers.get(b"content-length", b"0")
    has_body = length != b"0" or b"transfer-encoding" in headers
    if not has_body or b"expect" in headers or (length.isdigit() and int(length) > limit):
        return
    size, has_more = 0, True
    with suppress(ClientLeftError, TimeoutError):
        async with asyncio.timeout(_REST_SECONDS):
            while has_more and size <= limit:
                part, has_more = await _next_part(exchange.receive)
                size += len(part)


async def parse(exchange: Exchange, model: type[M], body: bytes | None = None) -> M:
    """A body as the model, its fields checked; raises ServeError. A long one is read in a thread.

    body: None is the exchange's.
    """
    given, site = exchange.body_bytes if body is None else body, exchange.site
    refuses = model.refuses_unknown and not site.settings.ignores_unknown_fields

    def read() -> tuple[M, str, int]:
        """(the body, its first unknown field, how many there are)."""
        made, first, count = model.model_validate_json(given), "", 0
        for name, table in unknown_fields(made):
            if refuses:
                raise refusal(name, table)
            first, count = first or name, count + 1
        return made, first, count

    try:
        is_short = len(given) <= MAX_INLINE_BYTES
        made, unknown, num_unknown = read() if is_short else await site.in_thread(read)
    except ValidationError as error:
        raise _validation_error(error, model) from None
    exchange.num_ignored_fields += num_unknown
    if num_unknown and site.is_first(("ignored", exchange.route)):
        logger.warning(
            "%s %s: the field %s is not known and is passed over, as others will be; "
            "bytetx_ignored_fields_total counts them",
            *(exchange.request_id, exchange.route, shown(unknown)),
        )
    return made


def _validation_error(error: ValidationError, kind: type[Fields]) -> ServeError:
    """The first thing that is wrong, in one line."""
    first = error.errors(include_url=False, include_context=False)[0]
    if first["type"] == "missing" and len(first["loc"]) == 1 and kind.refuses_unknown:
        given = first["input"]
        misspelt = [name for name in given if name not in kind.model_fields]
        if misspelt:  # which is why the other one is missing
            return refusal(misspelt[0], kind)
    place = ".".join(_place(part) for part in first["loc"])
    message = first["msg"][:300].replace("\n", " ")
    if first["type"] == "json_invalid":
        return ServeError("validation", f"the body is no JSON: {message}")
    param = _place(first["loc"][0]) if first["loc"] else None
    return ServeError("validation", f"{place or 'the body'}: {message}", param=param)


def _place(part: int | str) -> str:
    """A field's name or an index; a key of a table is the caller's."""
    return str(part)[:_MAX_KEY]


access_logger = logging.getLogger("bytetx.access")
access_logger.setLevel(logging.INFO)  # it is asked for by itself, and does not follow --log-level

_SCOPE_KEY = "bytetx.access"
_PLAIN = "/:@!$&'()*+,;="  # in a path; whatever could begin a line or end a word is quoted


@dataclass(slots=True)
class Answered:
    """Facts of an answer.  status: 500 where there is none, for the server closes then."""

    status: int = 500
    request_id: str | None = None
    model: str | None = None


def answered(scope: Scope) -> Answered:
    """Where the application says more of the answer than its bytes do."""
    found: Answered = scope.setdefault(_SCOPE_KEY, Answered())
    return found


class AccessLog:
    """An ASGI application that logs the requests of another one."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, answer = time.perf_counter(), answered(scope)

        async def note(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer.status = message["status"]
                given = dict(message["headers"]).get(b"x-request-id")
                answer.request_id = None if given is None else given.decode("latin-1")
            await send(message)

        try:
            await self._app(scope, receive, note)
        finally:
            _log(scope, answer, time.perf_counter() - start)


def _log(scope: Scope, answer: Answered, seconds: float) -> None:
    client = scope.get("client")  # None on a Unix socket
    fields = {
        "client": f"{client[0]}:{client[1]}" if client else None,
        "method": scope["method"],
        "path": quote(scope["path"], safe=_PLAIN),
        "status": answer.status,
        "duration_ms": round(1000 * seconds, 3),
        "request_id": answer.request_id,
        "model": answer.model,
    }
    words = {name: "-" if value is None else value for name, value in fields.items()}
    line = "%(client)s %(method)s %(path)s %(status)d %(duration_ms).3fms %(request_id)s %(model)s"
    access_logger.info(line, words, extra={"fields": fields})
