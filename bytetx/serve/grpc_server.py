"""TEI's gRPC interface: every call is a request of TEI's HTTP route for it, inside this process.

So keys, limits, errors, metrics and traces are those of HTTP. The messages are in tei.proto, which
is compiled when the server starts. Needs the extra `grpc`.
"""

import asyncio
import itertools
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import grpc
import orjson
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from grpc_tools import protoc
from starlette.types import ASGIApp, Scope
from starlette.types import Message as AsgiMessage

from bytetx.errors import OptionError
from bytetx.serve.settings import ServeSettings

_PACKAGE = "tei.v1"
_AHEAD = 32  # messages of one stream that are answered at a time
_RETRIES_S = (0.02, 0.05, 0.1, 0.2, 0.5)  # between attempts of a stream's message; then the last
_OVERLOADED = 429
_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    413: grpc.StatusCode.INVALID_ARGUMENT,
    422: grpc.StatusCode.INVALID_ARGUMENT,
    424: grpc.StatusCode.FAILED_PRECONDITION,
    _OVERLOADED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
}
# Fields of Metadata, and the headers of HTTP that have them, of which times are milliseconds.
_COUNTS = {"compute_chars": b"x-compute-characters", "compute_tokens": b"x-compute-tokens"}
_TIMES = {
    "total_time_ns": b"x-total-time",
    "tokenization_time_ns": b"x-tokenization-time",
    "queue_time_ns": b"x-queue-time",
    "inference_time_ns": b"x-inference-time",
}

Body = dict[str, Any]
Context = Any  # grpc.aio's, which has no types


@dataclass(frozen=True, slots=True)
class _Rpc:
    """How a call of one kind is asked over HTTP.

    answer: the fields of the response, from the answer's JSON.
    body: of the route, from the fields of the request; None is a GET.
    gathers: a stream of requests has one answer.
    """

    path: str
    answer: Callable[[Any], Body]
    body: Callable[[Body], Body] | None = lambda fields: fields
    gathers: bool = False


def _first_of(name: str, wrap: Callable[[Any], Any] = lambda row: row) -> Callable[[Any], Body]:
    return lambda rows: {name: wrap(rows[0])}


def _vectors(rows: Any) -> list[Body]:
    return [{"embeddings": row} for row in rows]


def _one_input(fields: Body) -> Body:
    return fields | {"inputs": [fields["inputs"]]}


def _model_type(content: Body) -> Body:
    """The oneof of /info as the enumeration; what TEI has no name for is an embedder."""
    (kind,) = content["model_type"]
    known = {"classifier": "MODEL_TYPE_CLASSIFIER", "reranker": "MODEL_TYPE_RERANKER"}
    return content | {"model_type": known.get(kind, "MODEL_TYPE_EMBEDDING")}


_METHODS: Mapping[str, Mapping[str, _Rpc]] = {
    "Info": {"Info": _Rpc("/info", _model_type, body=None)},
    "Embed": {
        "Embed": _Rpc("/embed", _first_of("embeddings")),
        "EmbedSparse": _Rpc("/embed_sparse", _first_of("sparse_embeddings")),
        "EmbedAll": _Rpc("/embed_all", _first_of("token_embeddings", _vectors)),
    },
    "Predict": {
        "Predict": _Rpc("/predict", lambda rows: {"predictions": rows}),
        "PredictPair": _Rpc("/predict", _first_of("predictions"), _one_input),
    },
    "Rerank": {"Rerank": _Rpc("/rerank", lambda rows: {"ranks": rows}, gathers=True)},
    "Tokenize": {
        "Tokenize": _Rpc("/tokenize", _first_of("tokens"), _one_input),
        "Decode": _Rpc("/decode", _first_of("text")),
    },
}


class GrpcServer:
    """Serves an ASGI application's routes of TEI on a port of its own."""

    def __init__(self, app: ASGIApp, settings: ServeSettings, *, shares_port: bool):
        """shares_port: other processes of this user may listen on it, too.

        OptionError where the address cannot be had.
        """
        self._app, self._pool = app, _compile()
        self._server = grpc.aio.server(
            options=[
                ("grpc.so_reuseport", int(shares_port)),
                ("grpc.max_receive_message_length", settings.payload_limit_bytes),
                ("grpc.max_send_message_length", -1),
            ],
            # Calls that wait are refused by the application; these bound what waits for it.
            maximum_concurrent_rpcs=2 * settings.max_concurrent_requests,
        )
        names = [f"{_PACKAGE}.{service}" for service in _METHODS]
        for service, methods in _METHODS.items():
            handlers = dict(self._handlers(service, methods))
            generic = grpc.method_handlers_generic_handler(f"{_PACKAGE}.{service}", handlers)
            self._server.add_generic_rpc_handlers((generic,))
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._names = ("", *names)
        shown = (*names, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(shown, self._server, pool=self._pool)
        host = f"[{settings.hostname}]" if ":" in settings.hostname else settings.hostname
        address = f"{host}:{settings.grpc_port}"
        try:
            self.port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise OptionError(
                f"cannot listen on {address}; choose another --hostname or --grpc-port"
            ) from error

    async def start(self) -> None:
        """Takes calls; the application refuses them until it is ready."""
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        await self._server.start()

    async def say_ready(self) -> None:
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)

    async def say_draining(self) -> None:
        await self._health.enter_graceful_shutdown()

    async def stop(self) -> None:
        """Ends what still runs."""
        await self._server.stop(grace=None)

    async def _set_health(self, status: int) -> None:
        for name in self._names:
            await self._health.set(name, status)

    def _handlers(
        self, service: str, methods: Mapping[str, _Rpc]
    ) -> list[tuple[str, grpc.RpcMethodHandler]]:
        """Each method as a unary call and as a stream."""
        described = self._pool.FindServiceByName(f"{_PACKAGE}.{service}").methods_by_name
        found = []
        for name, method in methods.items():
            for rpc in filter(described.__contains__, (name, f"{name}Stream")):
                types = described[rpc]
                request = message_factory.GetMessageClass(types.input_type)
                response = message_factory.GetMessageClass(types.output_type)
                call = _RpcCalls(self._app, method, request, response)
                found.append((rpc, call.handler(is_stream=rpc != name)))
        return found


def _compile() -> descriptor_pool.DescriptorPool:
    """The descriptors of tei.proto."""
    with (
        resources.as_file(resources.files("bytetx.serve") / "tei.proto") as source,
        tempfile.TemporaryDirectory() as folder,
    ):
        out = Path(folder) / "descriptors"
        command = ["protoc", f"-I{source.parent}", f"--descriptor_set_out={out}", source.name]
        if protoc.main(command) != 0:
            raise OptionError(f"{source} cannot be compiled; install bytetx[grpc] again")
        files = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes())
    pool = descriptor_pool.DescriptorPool()
    for one in files.file:
        pool.Add(one)
    return pool


class _RpcError(Exception):
    """A call's error: the status of HTTP and its message."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status, self.message = status, message


@dataclass(frozen=True, slots=True)
class _RpcCalls:
    """Calls of one method. Requests are bytes, so that wrong ones have an error like others."""

    app: ASGIApp
    method: _Rpc
    request: type[Message]
    response: type[Message]

    def handler(self, *, is_stream: bool) -> grpc.RpcMethodHandler:
        """is_stream: whether the requests are a stream."""
        write = self.response.SerializeToString
        if not is_stream:
            return grpc.unary_unary_rpc_method_handler(self.one, None, write)
        if self.method.gathers:
            return grpc.stream_unary_rpc_method_handler(self.gathered, None, write)
        return grpc.stream_stream_rpc_method_handler(self.each, None, write)

    async def one(self, request: bytes, context: Context) -> Message:
        try:
            return await self._answer(self._fields(request), context)
        except _RpcError as error:
            await _abort(context, error)

    async def each(
        self, requests: AsyncIterator[bytes], context: Context
    ) -> AsyncIterator[Message]:
        """The answers in the order of the requests, of which some run at a time.

        An overloaded server makes a stream wait, where it refuses a unary call.
        """
        running: deque[asyncio.Task[Message]] = deque()
        room, news = asyncio.Semaphore(_AHEAD), asyncio.Event()

        async def read() -> None:
            try:
                async for request in requests:
                    await room.acquire()
                    running.append(asyncio.create_task(self._patient(request, context)))
                    news.set()
            finally:
                news.set()

        reading = asyncio.create_task(read())
        try:
            while running or not reading.done():
                if not running:
                    news.clear()
                    if not reading.done():
                        await news.wait()
                    continue
                answer = await running[0]
                running.popleft()
                room.release()
                yield answer
            await reading
        except _RpcError as error:
            await _abort(context, error)
        finally:
            for task in (reading, *running):
                task.cancel()
            await asyncio.gather(reading, *running, return_exceptions=True)

    async def gathered(self, requests: AsyncIterator[bytes], context: Context) -> Message:
        """One answer to the texts of all requests, which are one body: limits are those of HTTP."""

        async def parts() -> AsyncIterator[bytes]:
            begin = b""
            async for request in requests:
                given = self._fields(request)
                text = orjson.dumps(given.pop("text"))
                if not begin:
                    begin = _begin_of(given)
                    yield begin + text
                else:
                    yield b"," + text
            yield b"]}" if begin else _begin_of({"query": ""}) + b"]}"

        def _begin_of(given: Body) -> bytes:
            return orjson.dumps(self._body(given, context))[:-1] + b',"texts":['

        try:
            return await self._finish(self.method.path, parts(), context)
        except _RpcError as error:
            await _abort(context, error)

    async def _patient(self, request: bytes, context: Context) -> Message:
        fields = self._fields(request)
        for seconds in itertools.chain(_RETRIES_S, itertools.repeat(_RETRIES_S[-1])):
            try:
                return await self._answer(fields, context)
            except _RpcError as error:
                if error.status != _OVERLOADED:
                    raise
            await asyncio.sleep(seconds)
        raise AssertionError  # it repeats

    def _fields(self, request: bytes) -> Body:
        """Raises _RpcError for bytes that are no message."""
        try:
            return _fields(self.request.FromString(request))
        except DecodeError as error:
            raise _RpcError(400, f"the message cannot be read: {error}") from None

    def _body(self, fields: Body, context: Context) -> Body:
        """With the model that the metadata name."""
        model = _metadata(context).get("model")
        return fields if model is None else fields | {"model": model}

    async def _answer(self, fields: Body, context: Context) -> Message:
        path, make, model = self.method.path, self.method.body, _metadata(context).get("model")
        if make is not None:
            content = orjson.dumps(self._body(make(fields), context))
            return await self._finish(path, content, context)
        named = path if model is None else f"/models/{model}{path}"
        return await self._finish(named, None, context)

    async def _finish(
        self, path: str, content: bytes | AsyncIterator[bytes] | None, context: Context
    ) -> Message:
        """content: of a body; None is a GET."""
        metadata = _metadata(context)
        key = metadata.get("authorization")
        headers = [] if key is None else [(b"authorization", str(key).encode())]
        headers += [
            (name.encode(), str(metadata[name]).encode())
            for name in ("traceparent", "tracestate", "x-request-id")
            if name in metadata
        ]
        status, given, answer = await _ask(self.app, path, content, headers)
        if status != 200:
            raise _RpcError(status, _message(answer))
        found = self.method.answer(orjson.loads(answer))
        known = self.response.DESCRIPTOR.fields_by_name
        if "metadata" in known and b"x-compute-tokens" in given:
            counts = {name: int(given[header]) for name, header in _COUNTS.items()}
            times = {name: int(given[header]) * 1_000_000 for name, header in _TIMES.items()}
            found["metadata"] = counts | times
        fitting = {name: value for name, value in found.items() if name in known}
        return self.response(**{name: _plain(value) for name, value in fitting.items()})


def _metadata(context: Context) -> dict[str, Any]:
    return dict(context.invocation_metadata() or ())


def _plain(value: Any) -> Any:
    """A value as a message takes it: a table without what is null."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [_plain(row) for row in value]
    if isinstance(value, dict):
        return {name: inner for name, inner in value.items() if inner is not None}
    return value


def _message(content: bytes) -> str:
    try:
        return str(orjson.loads(content)["error"])
    except (ValueError, KeyError, TypeError):
        return content[:200].decode(errors="replace")


def _fields(request: Message) -> Body:
    """The message as the body of TEI's route: what is optional and left out is not there."""
    found: Body = {}
    for one in request.DESCRIPTOR.fields:
        if one.has_presence and not request.HasField(one.name):
            continue
        value = getattr(request, one.name)
        if one.enum_type is not None:
            known = one.enum_type.values_by_number.get(value)
            value = "Left" if known is not None and known.name.endswith("LEFT") else "Right"
        found[one.name] = list(value) if one.is_repeated else value
    return found


async def _abort(context: Context, error: _RpcError) -> Any:
    code = _CODES.get(error.status, grpc.StatusCode.INTERNAL)
    await context.abort(code, error.message)


@dataclass(slots=True)
class _HttpReply:
    status: int = 500
    headers: dict[bytes, bytes] = field(default_factory=dict)
    parts: list[bytes] = field(default_factory=list)

    async def send(self, message: AsgiMessage) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], dict(message["headers"])
        else:
            self.parts.append(bytes(message.get("body", b"")))


_LEFT: AsgiMessage = {"type": "http.disconnect"}


async def _feed(messages: asyncio.Queue[AsgiMessage], parts: AsyncIterator[bytes]) -> None:
    """Gives the application a body as it comes; where that fails, its client has left."""
    try:
        async for part in parts:
            await messages.put({"type": "http.request", "body": part, "more_body": True})
    except Exception:
        await messages.put(_LEFT)
        raise
    await messages.put({"type": "http.request", "body": b"", "more_body": False})


async def _ask(
    app: ASGIApp,
    path: str,
    content: bytes | AsyncIterator[bytes] | None,
    headers: list[tuple[bytes, bytes]],
) -> tuple[int, dict[bytes, bytes], bytes]:
    """(status, headers, content) of the application's answer.

    content: of a body, in parts where it still comes; None is a GET.
    A caller that is cancelled leaves as a client of HTTP does, so that the request is recorded.
    """
    messages, feeding = asyncio.Queue[AsgiMessage](1), None
    if content is None or isinstance(content, bytes):
        whole = content or b""
        headers = [(b"content-length", b"%d" % len(whole)), *headers]
        messages.put_nowait({"type": "http.request", "body": whole, "more_body": False})
    else:
        feeding = asyncio.create_task(_feed(messages, content))
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "2",
        "method": "GET" if content is None else "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": None,
        "server": None,
    }

    async def receive() -> AsgiMessage:
        message = await messages.get()
        if message is _LEFT:  # and stays away
            messages.put_nowait(_LEFT)
        return message

    reply = _HttpReply()
    serving: Awaitable[None] = asyncio.ensure_future(app(scope, receive, reply.send))
    error = None
    try:
        await asyncio.shield(serving)
    except asyncio.CancelledError:
        if feeding is not None:
            feeding.cancel()
        if messages.full():
            messages.get_nowait()
        messages.put_nowait(_LEFT)
        await serving
        raise
    finally:
        if feeding is not None:
            feeding.cancel()
            (error,) = await asyncio.gather(feeding, return_exceptions=True)
    if isinstance(error, Exception):
        raise error
    return reply.status, reply.headers, b"".join(reply.parts)
