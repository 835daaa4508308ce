"""A batch job: reads records, and commits their results in the same order."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Protocol

from bytetx.cli.files.encoders import Encoder
from bytetx.cli.files.records import MalformedRecord, RankRequest, Record, Value
from bytetx.cli.files.resume import Counts, JobProgress, digest_record
from bytetx.cli.files.writer import Output
from bytetx.encode.request import RunStats
from bytetx.errors import InputError

COMMIT_SECONDS = 0.5  # between commits; one takes about a millisecond on an SSD
COMMIT_ROWS = 4096  # that wait at most, so that memory does not grow


class JobStream(Protocol):
    """Results in the order of the texts, an InputError where one could not be run.

    stats: of the windows of texts that are finished so far.
    """

    @property
    def stats(self) -> RunStats: ...

    def __iter__(self) -> Iterator[Any]: ...


def run_job(
    records: Iterator[Record],
    run: Callable[[Iterator[Value | RankRequest]], JobStream],
    *,
    output: Output,
    encoder: Encoder,
    show: Callable[[Counts, int], None],
) -> JobProgress:
    """Runs all records and commits their rows; returns the last committed state.

    run: the model's task on a stream of texts, which it may read ahead.
    show: called after each row with the counts so far and the bytes of input that are done.
    Raises the InputError of an input that cannot be read to its end, once all records before it
    are run and committed.
    """
    pending: deque[Record] = deque()
    values = _GoodValues(records, pending)
    stream = run(iter(values))
    rows = _PendingRows(output, encoder, stream.stats)
    for record, result in _merge(stream, pending):
        rows.add(record, result, stats=stream.stats)
        show(rows.counts, record.end_bytes)
    rows.commit(stream.stats)
    if values.failure is not None:
        raise values.failure
    return output.progress


class _GoodValues:
    """The values that the model reads; `pending` gets every record, in order.

    failure: what ended the inputs early.
    """

    def __init__(self, records: Iterator[Record], pending: deque[Record]):
        self._records = records
        self._pending = pending
        self.failure: InputError | None = None

    def __iter__(self) -> Iterator[Value | RankRequest]:
        try:
            for record in self._records:
                self._pending.append(record)
                if not isinstance(record.value, InputError):
                    yield record.value
        except InputError as error:
            self.failure = error


def _merge(results: JobStream, pending: deque[Record]) -> Iterator[tuple[Record, Any]]:
    """Each record with its result, in input order; records that are errors are their own result."""
    for result in results:
        while isinstance(pending[0].value, InputError):
            yield pending[0], pending.popleft().value
        record = pending.popleft()
        if isinstance(result, InputError):
            result = InputError(f"{record.where}: {result}")
        yield record, result
    while pending:
        yield pending[0], pending.popleft().value


def _is_malformed(value: object) -> bool:
    """Whether a record, or one of the documents that it asks for, is a malformed one."""
    parts = value.documents if isinstance(value, RankRequest) else (value,)
    return any(isinstance(part, MalformedRecord) for part in parts)


class _PendingRows:
    """Encoded rows that wait for the next commit."""

    def __init__(self, output: Output, encoder: Encoder, stats: RunStats):
        self._output = output
        self._encoder = encoder
        self._data: list[bytes] = []
        self._lines: list[bytes] = []
        self._stats = stats
        self._digest = output.progress.digest
        self._start = output.progress.counts
        self.counts = output.progress.counts
        self._start_time = self._commit_time = time.monotonic()

    def add(self, record: Record, result: Any, *, stats: RunStats) -> None:
        """Encodes a row; commits earlier rows if a commit is due and their window is complete.

        A window's results come out together and its tokens are counted at once, so a commit
        between windows is soon enough and makes the counts of a resumed job exact.
        """
        if stats.num_texts != self._stats.num_texts and self._is_due():
            self.commit(self._stats)
        self._stats = stats
        row = self._encoder.encode(self.counts.num_texts, result, record.kept)
        self._data.append(row.data)
        self._lines.append(row.list_line)
        self._digest = digest_record(self._digest, record)
        self.counts = replace(
            self._with_stats(stats),
            num_texts=self.counts.num_texts + 1,
            num_blank=self.counts.num_blank + (record.value == ""),
            num_errors=self.counts.num_errors + row.is_error,
            num_malformed=self.counts.num_malformed + _is_malformed(record.value),
        )

    def _is_due(self) -> bool:
        is_late = time.monotonic() - self._commit_time > COMMIT_SECONDS
        return is_late or len(self._data) >= COMMIT_ROWS

    def commit(self, stats: RunStats) -> None:
        self.counts = self._with_stats(stats)
        progress = replace(self._output.progress, counts=self.counts, digest=self._digest)
        self._output.append(b"".join(self._data), b"".join(self._lines), progress)
        self._data, self._lines = [], []
        self._commit_time = time.monotonic()

    def _with_stats(self, stats: RunStats) -> Counts:
        """The counts with what the model says of this run on top of the runs before."""
        start = self._start
        return replace(
            self.counts,
            num_tokens=start.num_tokens + stats.num_tokens,
            num_pad_tokens=start.num_pad_tokens + (stats.num_pad_tokens or 0),
            num_truncated=start.num_truncated + stats.num_truncated,
            seconds=start.seconds + time.monotonic() - self._start_time,
        )
