"""The log of requests: a line for each, once its answer is sent."""

import logging
import time
from dataclasses import dataclass
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger("bytetx.access")
logger.setLevel(logging.INFO)  # it is asked for by itself, and does not follow --log-level

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
    logger.info(line, words, extra={"fields": fields})
