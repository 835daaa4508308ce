"""A record of each finished request: what metrics and the status page are made of."""

from collections.abc import Iterable
from typing import NamedTuple, Protocol

import numpy as np

from bytetx.serve.calls import Timings

BATCH_LINE = "batch:"  # before the route of a line of a batch, for which nobody waits
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


class RecordKind(NamedTuple):
    """The fields that records have in common that are counted together; as of Finished.

    is_timed: whether they have timings.
    """

    route: str
    status: int
    model: str
    error: str
    is_timed: bool


# Columns of records: f64 [num_records, NUM_COLUMNS]; NaN is what a record has not.
(
    ENDED,  # seconds since 1970
    SECONDS,
    FIRST_TOKEN,
    NEXT_TOKEN,
    IGNORED_FIELDS,
    TEXTS,
    TOKENS,
    TRUNCATED,
    TOKENIZE,
    QUEUE,
    COMPUTE,
    NUM_COLUMNS,
) = range(12)
_NO_TIMINGS = Timings().row()


def group_records(records: Iterable[tuple[float, Finished]]) -> dict[RecordKind, np.ndarray]:
    """The columns of the records of each kind.  records: with the time of each."""
    groups: dict[RecordKind, list[tuple[float | None, ...]]] = {}
    for ended, one in records:
        timings = one.timings
        kind = RecordKind(one.route, one.status, one.model, one.error, timings is not None)
        row = _NO_TIMINGS if timings is None else timings.row()
        tokens = one.first_token_seconds, one.token_seconds
        groups.setdefault(kind, []).append(
            (ended, one.seconds, *tokens, one.num_ignored_fields, *row)
        )
    return {
        kind: np.array(rows, dtype=np.float64)  # None is NaN
        for kind, rows in groups.items()
    }


class Recorder(Protocol):
    """Where records go."""

    def record(self, finished: Finished) -> None: ...

    async def metrics_page(self) -> bytes:
        """Prometheus' text."""
        ...

    async def stats(self) -> bytes:
        """JSON, for the status page."""
        ...
