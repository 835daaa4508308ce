"""A record of each finished request: what metrics and the status page are made of."""

from typing import NamedTuple, Protocol

from bytetx.serve.calls import Timings

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"  # Prometheus' text


class Finished(NamedTuple):
    """One answered request.

    route: the path as it is declared.  status: HTTP's; 499 where the client left first.
    model: empty where none was asked for.  error: the kind of ServeError, or empty.
    first_token_seconds, token_seconds: of a stream, until its first token and between tokens.
    num_ignored_fields: fields of the request that nothing here knows.
    """

    route: str
    status: int
    model: str
    seconds: float
    error: str = ""
    timings: Timings | None = None
    first_token_seconds: float | None = None
    token_seconds: float | None = None
    num_ignored_fields: int = 0


class Recorder(Protocol):
    """Where records go."""

    def record(self, finished: Finished) -> None: ...

    async def metrics_page(self) -> bytes:
        """Prometheus' text."""
        ...

    async def stats(self) -> bytes:
        """JSON, for the status page."""
        ...
