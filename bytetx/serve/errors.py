"""Errors as answers: one kind for each status, in TEI's body or in OpenAI's."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import orjson
from starlette.responses import Response

from bytetx.errors import (
    BytetxError,
    ClosedError,
    DeadlineError,
    DeviceLostError,
    QueueFullError,
    StepError,
    TooLargeError,
    TooLongError,
)

Style = Literal["tei", "openai"]


@dataclass(frozen=True, slots=True)
class Kind:
    """How one kind of error is answered: statuses and types in both styles."""

    tei_status: int
    tei_type: str
    openai_status: int
    openai_type: str


KINDS = {
    "validation": Kind(422, "validation", 400, "invalid_request_error"),
    "limit": Kind(413, "validation", 400, "invalid_request_error"),
    "unsupported": Kind(400, "validation", 400, "invalid_request_error"),
    "empty": Kind(400, "empty", 400, "invalid_request_error"),
    "backend": Kind(424, "backend", 424, "backend_error"),
    "overloaded": Kind(429, "overloaded", 429, "rate_limit_error"),
    "unhealthy": Kind(503, "unhealthy", 503, "service_unavailable_error"),
    "too_large": Kind(413, "validation", 413, "invalid_request_error"),
    "unauthorized": Kind(401, "unauthorized", 401, "authentication_error"),
    "not_found": Kind(404, "validation", 404, "invalid_request_error"),
    "method": Kind(405, "validation", 405, "invalid_request_error"),
    "timeout": Kind(408, "backend", 408, "timeout_error"),
}
_OPENAI_PATHS = ("/embeddings", "/score", "/classify", "/pooling")
_CODES = {"overloaded": "rate_limit_exceeded", "unauthorized": "invalid_api_key"}


class ServeError(Exception):
    """A request's error: its kind (of KINDS) and one line for the caller.

    param: the field of the request.  code: OpenAI's, where it has one.
    retry_after_s: for overloaded and unhealthy, seconds after which a retry may succeed.
    """

    def __init__(
        self,
        kind: str,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ):
        super().__init__(message)
        self.kind, self.message = kind, message
        self.param, self.code = param, code or _CODES.get(kind)
        self.retry_after_s = retry_after_s

    def status(self, style: Style) -> int:
        kind = KINDS[self.kind]
        return kind.tei_status if style == "tei" else kind.openai_status

    def body(self, style: Style) -> dict[str, Any]:
        kind = KINDS[self.kind]
        if style == "tei":
            return {"error": self.message, "error_type": kind.tei_type}
        return {
            "error": {
                "message": self.message,
                "type": kind.openai_type,
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self, style: Style) -> Response:
        headers = {}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after_s)))
        if self.kind == "unauthorized":
            headers["www-authenticate"] = "Bearer"
        return Response(
            orjson.dumps(self.body(style)),
            status_code=self.status(style),
            headers=headers,
            media_type="application/json",
        )


def style_of(path: str) -> Style:
    """The clients of OpenAI, Cohere and vLLM read other errors than those of TEI."""
    is_openai = path.startswith(("/v1/", "/v2/")) or path in _OPENAI_PATHS
    return "openai" if is_openai else "tei"


def as_serve_error(error: Exception) -> ServeError | None:
    """The answer to an error of bytetx; None for one that is no caller's and no device's fault."""
    if isinstance(error, ServeError):
        return error
    message = str(error).replace("texts[", "inputs[").replace("\n", " ")
    for option in ("max_queued_requests", "max_queued_tokens"):
        message = message.replace(option, f"--{option.replace('_', '-')}")
    if isinstance(error, QueueFullError):
        return ServeError("overloaded", message, retry_after_s=error.retry_after_s)
    if isinstance(error, DeadlineError):
        return ServeError("timeout", message)
    if isinstance(error, StepError):
        return ServeError("backend", message)
    if isinstance(error, DeviceLostError | ClosedError):
        return ServeError("unhealthy", message, retry_after_s=5)
    if isinstance(error, TooLargeError):
        return ServeError("too_large", message)
    if isinstance(error, BytetxError):
        kind = "limit" if isinstance(error, TooLongError) else "validation"
        return ServeError(kind, message.replace("pass truncate=True", "set truncate"))
    return None
