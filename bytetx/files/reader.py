"""Records out of text, jsonl, csv and parquet inputs; a broken line is a record with its error."""

import csv
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from io import BufferedReader
from itertools import chain
from pathlib import Path
from typing import Any

from bytetx.errors import InputError

FORMATS = ("text", "jsonl", "csv", "parquet")
_SUFFIXES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
}
_COMPRESSED = {".gz": "zcat", ".bz2": "bzcat", ".xz": "xzcat", ".zst": "zstdcat"}
_PEEK_BYTES = 8192
_PARQUET_ROWS = 1024  # rows of a parquet file in memory at a time

# A cell may be as long as a text is; csv's own limit is 128 KiB.
csv.field_size_limit(sys.maxsize)

Chat = list[dict[str, Any]]
Value = str | tuple[str, str] | list[int] | Chat


@dataclass(frozen=True, slots=True)
class RankRequest:
    """A query and the documents to rank for it."""

    query: str
    documents: tuple[Value | InputError, ...]


@dataclass(frozen=True, slots=True)
class Record:
    """One text of the inputs, or what is wrong with it.

    end_bytes: bytes of all inputs up to the end of this record; what a progress bar counts.
    where: the input and the line or row in it, as errors name it.
    """

    value: Value | RankRequest | InputError
    end_bytes: int
    where: str


@dataclass(frozen=True, slots=True)
class Source:
    """One input. path is None for stdin; size_bytes is 0 where it cannot be known.

    is_regular: False for stdin and pipes, which can be read only once.
    """

    path: Path | None
    format: str
    size_bytes: int
    is_regular: bool

    @property
    def name(self) -> str:
        return "stdin" if self.path is None else str(self.path)


@dataclass(frozen=True, slots=True)
class Shape:
    """What one record is: the columns to take, and whether jsonl lines are rerank requests.

    columns: one (texts) or two (pairs). Text files have none: a line is the text.
    chats: whether a text may also be a list of messages.
    """

    columns: tuple[str, ...] = ("text",)
    rank_requests: bool = False
    chats: bool = False


def open_sources(paths: Sequence[str], *, format: str | None = None) -> list[Source]:
    """The inputs, with their formats; "-" or no path is stdin. Nothing is read yet.

    Raises InputError for a missing or unreadable file, and for one of a format not read here.
    """
    if format is not None and format not in FORMATS:
        raise InputError(f"--input-format must be one of {', '.join(FORMATS)}, got {format!r}")
    if sys.stdin is None and (not paths or "-" in paths):
        raise InputError("no input: stdin is closed; give files, or pipe texts into stdin")
    if not paths and sys.stdin.isatty():
        raise InputError("no input: give files, or pipe texts into stdin")
    if list(paths).count("-") > 1:
        raise InputError("- was given more than once; stdin can be read only once")
    return [_open_source(path, format) for path in paths or ["-"]]


def _open_source(path: str, format: str | None) -> Source:
    if path == "-":
        if format == "parquet":
            raise InputError("parquet cannot be read from stdin; give the file")
        return Source(None, format or "text", 0, is_regular=False)
    if not path:
        raise InputError("an input has an empty name; give a file, or - for stdin")
    file = Path(path)
    try:
        file.exists()
    except OSError as error:  # such as a name that is too long
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    if file.is_dir():
        raise InputError(f"{path} is a folder; give its files, such as {path.rstrip('/')}/*.txt")
    if file.is_fifo():  # opening it only to look would lose what its writer sends
        return Source(file, format or "text", 0, is_regular=False)
    try:
        with file.open("rb"):
            size_bytes = file.stat().st_size
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    return Source(file, format or _format_of(file), size_bytes, is_regular=True)


def _format_of(path: Path) -> str:
    suffix = path.suffix.lower()
    if suffix in _COMPRESSED:
        inner = _SUFFIXES.get(Path(path.stem).suffix.lower(), "text")
        raise InputError(
            f"{path} is compressed; pipe it in: {_COMPRESSED[suffix]} {path} | bytetx ... "
            f"--input-format {inner}"
        )
    if suffix == ".json":
        raise InputError(
            f"{path} is one JSON document; one object a line is needed: jq -c '.[]' {path} > "
            f"{path.stem}.jsonl"
        )
    return _SUFFIXES.get(suffix, "text")


def read_records(sources: Sequence[Source], shape: Shape) -> Iterator[Record]:
    """All records of the inputs, in order. A line that cannot be used is an InputError value.

    A text file gives one record a line, blank lines too, so that record i is line i. A jsonl file
    gives one a line that is not blank, csv and parquet one a row.
    What is wrong with a whole input (no such column, binary content) raises InputError; for files
    this happens before the first record of any input.
    """
    for source in sources:
        if source.is_regular:
            next(_read_source(source, shape, 0), None)
    records = _chain_sources(sources, shape)
    first = next(records, None)
    return iter(()) if first is None else chain([first], records)


def _chain_sources(sources: Sequence[Source], shape: Shape) -> Iterator[Record]:
    start_bytes = 0
    for source in sources:
        yield from _read_source(source, shape, start_bytes)
        start_bytes += source.size_bytes


def _read_source(source: Source, shape: Shape, start_bytes: int) -> Iterator[Record]:
    if source.format == "parquet":
        yield from _read_parquet(source, shape, start_bytes)
        return
    read = {"text": _read_text, "jsonl": _read_jsonl, "csv": _read_csv}[source.format]
    if source.path is None:
        yield from read(source, _Lines(sys.stdin.buffer, source.name, start_bytes), shape)
        return
    with source.path.open("rb") as file:
        yield from read(source, _Lines(file, source.name, start_bytes), shape)


class _Lines:
    """Decoded lines without their ends, counted; undecodable bytes become lone surrogates."""

    def __init__(self, file: BufferedReader, name: str, start_bytes: int):
        if b"\0" in file.peek(_PEEK_BYTES)[:_PEEK_BYTES]:
            raise InputError(f"{name} is not UTF-8 text: it holds NUL bytes; give a text file")
        self._file = file
        self._name = name
        self.end_bytes = start_bytes
        self.number = 0

    def __iter__(self) -> Iterator[str]:
        for line in self._file:
            self.end_bytes += len(line)
            self.number += 1
            if self.number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            yield line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8", "surrogateescape")

    def record(self, value: Value | RankRequest, number: int | None = None) -> Record:
        """number: of the line where the record starts, if it is not the last one read."""
        return Record(value, self.end_bytes, f"{self._name} line {number or self.number}")

    def broken(self, error: Exception, number: int | None = None) -> Record:
        record = self.record("", number)
        return replace(record, value=InputError(f"{record.where}: {error}"))


def _refuse_undecodable(texts: Iterable[Value]) -> None:
    for text in texts:
        if not isinstance(text, str) or text.isascii():
            continue
        bad = next((char for char in text if "\udc80" <= char <= "\udcff"), None)
        if bad is not None:
            byte = ord(bad) - 0xDC00  # where surrogateescape put it
            raise _BadLine(f"byte 0x{byte:02x} is not UTF-8; convert the file, such as with iconv")


def _read_text(source: Source, lines: _Lines, shape: Shape) -> Iterator[Record]:
    if len(shape.columns) > 1:
        raise InputError(
            f"{source.name} is plain text, which has no columns; pairs need .jsonl, .csv or "
            ".parquet with --column twice"
        )
    for line in lines:
        try:
            _refuse_undecodable((line,))
            yield lines.record(line)
        except _BadLine as error:
            yield lines.broken(error)


def _read_jsonl(source: Source, lines: _Lines, shape: Shape) -> Iterator[Record]:
    take = _take_request if shape.rank_requests else _take_columns
    has_read = False
    for line in lines:
        if not line.strip():
            continue
        try:
            row = _parse_object(line)
            if not has_read:
                _check_columns(source, row, ("query", "documents"), shape)
            has_read = True
            yield lines.record(take(row, shape))
        except _BadLine as error:
            yield lines.broken(error)


def _read_csv(source: Source, lines: _Lines, shape: Shape) -> Iterator[Record]:
    is_tsv = source.path is not None and source.path.suffix.lower() == ".tsv"
    # The reader needs line ends to keep those inside a quoted cell; strict, so that a quote that
    # never ends is an error and not a cell as long as the file.
    rows = csv.reader(
        (f"{line}\n" for line in lines), delimiter="\t" if is_tsv else ",", strict=True
    )
    header = next(rows, None)
    if header is None:
        raise InputError(f"{source.name} is empty; a csv needs a header line with column names")
    _check_columns(source, header, (), shape)
    twice = [column for column in shape.columns if header.count(column) > 1]
    if twice:
        raise InputError(f"{source.name} has column {twice[0]!r} twice; rename one of them")
    while True:
        number = lines.number + 1
        try:
            cells = next(rows)
            if not cells:
                continue
            if len(cells) != len(header):
                raise _BadLine(f"{len(cells)} cells, where the header has {len(header)}")
            value = _take_columns(dict(zip(header, cells, strict=True)), shape)
            _refuse_undecodable(value if isinstance(value, tuple) else (value,))
            yield lines.record(value, number)
        except StopIteration:
            return
        except (_BadLine, csv.Error) as error:
            yield lines.broken(error, number)


def _read_parquet(source: Source, shape: Shape, start_bytes: int) -> Iterator[Record]:
    parquet = import_parquet(source.name)
    from pyarrow import ArrowException

    try:
        file = parquet.ParquetFile(source.path)
        _check_columns(source, file.schema_arrow.names, (), shape)
        number = 0
        for batch in file.iter_batches(_PARQUET_ROWS, columns=list(shape.columns)):
            for row in batch.to_pylist():
                number += 1
                where = f"{source.name} row {number}"
                try:
                    value = _take_columns(row, shape)
                except _BadLine as error:
                    value = InputError(f"{where}: {error}")
                done = number / file.metadata.num_rows
                yield Record(value, start_bytes + int(source.size_bytes * done), where)
    except (ArrowException, OSError) as error:
        raise InputError(f"{source.name} cannot be read as parquet: {error}") from error


def import_parquet(name: str) -> Any:
    """pyarrow.parquet, or InputError with the extra that brings it. name: the file it is for."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise InputError(f"{name} needs pyarrow; run: pip install pyarrow") from error
    return pyarrow.parquet


class _BadLine(Exception):
    """What is wrong with one line; the caller adds where it stands."""


def _parse_object(line: str) -> dict[str, Any]:
    _refuse_undecodable((line,))
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _BadLine(f"not JSON: {error}") from error
    if not isinstance(row, dict):
        raise _BadLine(f"a JSON object is needed, got {_json_name(row)}")
    return row


def _check_columns(
    source: Source, names: Sequence[str] | dict[str, Any], request: Sequence[str], shape: Shape
) -> None:
    """Raises InputError, which ends the job, where the input as a whole lacks a column."""
    needed = request if shape.rank_requests else shape.columns
    missing = [column for column in needed if column not in names]
    if missing:
        raise InputError(
            f"{source.name} has no column {missing[0]!r}; its columns: "
            f"{', '.join(names) or 'none'}" + ("" if shape.rank_requests else " (give --column)")
        )


def _take_columns(row: dict[str, Any], shape: Shape) -> Value:
    values = [_take(row, column, shape) for column in shape.columns]
    if len(values) == 1:
        return values[0]
    for column, value in zip(shape.columns, values, strict=True):
        if not isinstance(value, str):
            raise _BadLine(f"column {column!r} must be a string in a pair, got token ids")
    return (values[0], values[1])


def _take(row: dict[str, Any], column: str, shape: Shape) -> str | list[int] | Chat:
    if column not in row:
        raise _BadLine(f"no column {column!r}; there are: {', '.join(row) or 'none'}")
    value = row[column]
    if shape.chats and isinstance(value, list) and all(isinstance(item, dict) for item in value):
        return value
    return _checked_text(row[column], f"column {column!r}")


def _checked_text(value: Any, what: str) -> str | list[int]:
    if isinstance(value, list) and all(type(item) is int for item in value):
        return value
    if not isinstance(value, str):
        raise _BadLine(f"{what} must be a string or token ids, got {_json_name(value)}")
    return value


def _take_request(row: dict[str, Any], shape: Shape) -> RankRequest:
    query, documents = row.get("query"), row.get("documents")
    if not isinstance(query, str):
        raise _BadLine(f"'query' must be a string, got {_json_name(query)}")
    if not isinstance(documents, list):
        raise _BadLine(f"'documents' must be a list of strings, got {_json_name(documents)}")
    return RankRequest(
        query, tuple(_checked_text(text, f"documents[{i}]") for i, text in enumerate(documents))
    )


def _json_name(value: Any) -> str:
    names: dict[type, str] = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    if value is None:
        return "null"
    return names.get(type(value), "a number")
