"""Reads records from text, jsonl, csv and parquet; a broken line is a record with its error."""

import csv
import json
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from io import BufferedReader
from itertools import chain
from pathlib import Path
from typing import Any, cast

from bytetx.cli.files.records import (
    BadLine,
    RankRequest,
    Record,
    RecordError,
    Shape,
    Source,
    Value,
    check_columns,
    json_name,
    refuse_undecodable,
    take_value,
)
from bytetx.errors import InputError, OptionError

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

# A cell may be as long as a text is; csv's own limit is 128 KiB.
csv.field_size_limit(sys.maxsize)


def open_sources(paths: Sequence[str], *, format: str | None = None) -> list[Source]:
    """The inputs, with their formats; "-" or no path is stdin. Nothing is read yet.

    Raises OptionError where they are named wrongly, InputError for a missing or unreadable file,
    and for one of a format not read here.
    """
    if format is not None and format not in FORMATS:
        raise OptionError(f"--input-format must be one of {', '.join(FORMATS)}, got {format!r}")
    if list(paths).count("-") > 1:
        raise OptionError("- was given more than once; stdin can be read only once")
    if "" in paths:
        raise OptionError("an input has an empty name; give a file, or - for stdin")
    if format == "parquet" and (not paths or "-" in paths):
        raise OptionError("parquet cannot be read from stdin; give the file")
    if sys.stdin is None and (not paths or "-" in paths):
        raise InputError("no input: stdin is closed; give files, or pipe texts into stdin")
    if not paths and sys.stdin.isatty():
        raise OptionError("no input: give files, or pipe texts into stdin")
    return [_open_source(path, format) for path in paths or ["-"]]


def _open_source(path: str, format: str | None) -> Source:
    if path == "-":
        return Source(None, format or "text", 0, is_regular=False)
    file = Path(path)
    try:
        mode = file.stat().st_mode
        if stat.S_ISDIR(mode):
            raise InputError(
                f"{path} is a folder; give its files, such as {path.rstrip('/')}/*.txt"
            )
        if stat.S_ISFIFO(mode):  # opening it only to look would lose what its writer sends
            return Source(file, format or "text", 0, is_regular=False)
        with file.open("rb"):
            size_bytes = file.stat().st_size
    except OSError as error:  # such as a name that is too long
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    return Source(file, format or _format_of(file), size_bytes, is_regular=stat.S_ISREG(mode))


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
    An error of the input itself (no such column, binary content, a disk that cannot be read) raises
    InputError. If the beginning of a file shows it, this happens before the first record of any
    input.
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
        # Imported here: it needs what no other format does.
        from bytetx.cli.files.parquet_reader import read_parquet

        yield from read_parquet(source, shape, start_bytes)
        return
    read = {"text": _read_text, "jsonl": _read_jsonl, "csv": _read_csv}[source.format]
    if source.path is None:
        # typeshed calls it a BinaryIO, which has no peek.
        stdin = cast(BufferedReader, sys.stdin.buffer)
        yield from read(source, _Lines(stdin, source, start_bytes), shape)
        return
    try:
        file = source.path.open("rb")
    except OSError as error:  # it was there a moment ago
        raise _unreadable(source, error) from error
    with file:
        yield from read(source, _Lines(file, source, start_bytes), shape)


def _unreadable(source: Source, error: OSError) -> InputError:
    return InputError(f"{source.name} cannot be read: {error.strerror or error}")


class _Lines:
    """Decoded lines without their ends, counted; undecodable bytes become lone surrogates."""

    def __init__(self, file: BufferedReader, source: Source, start_bytes: int):
        self._file = file
        self._source = source
        self._start_bytes = self.end_bytes = start_bytes
        self.number = 0
        try:
            beginning = file.peek(_PEEK_BYTES)[:_PEEK_BYTES]
        except OSError as error:
            raise _unreadable(source, error) from error
        if b"\0" in beginning:
            raise InputError(
                f"{source.name} is not UTF-8 text: it holds NUL bytes; give a text file"
            )

    def __iter__(self) -> Iterator[str]:
        return (line.removesuffix("\n").removesuffix("\r") for line in self.with_ends())

    def with_ends(self) -> Iterator[str]:
        """The same with their ends, as a cell in quotes holds them."""
        while line := self._read():
            self.end_bytes += len(line)
            self.number += 1
            if self.number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            yield line.decode("utf-8", "surrogateescape")
        num_bytes = self.end_bytes - self._start_bytes
        if num_bytes < self._source.size_bytes:
            raise InputError(
                f"{self._source.name} became shorter while it was read: {num_bytes:,} of "
                f"{self._source.size_bytes:,} bytes; nothing may write to it meanwhile"
            )

    def _read(self) -> bytes:
        try:
            return self._file.readline()
        except OSError as error:
            raise _unreadable(self._source, error) from error

    def record(
        self, value: Value | RankRequest, kept: Mapping[str, Any], number: int | None = None
    ) -> Record:
        """number: of the line where the record starts, if it is not the last one read."""
        where = f"{self._source.name} line {number or self.number}"
        return Record(value, self.end_bytes, where, kept)

    def broken(
        self, error: Exception, kept: Mapping[str, Any], number: int | None = None
    ) -> Record:
        where = f"{self._source.name} line {number or self.number}"
        return Record(RecordError(where, error), self.end_bytes, where, kept)


def _read_text(source: Source, lines: _Lines, shape: Shape) -> Iterator[Record]:
    if len(shape.columns) > 1:
        raise InputError(
            f"{source.name} is plain text, which has no columns; pairs need .jsonl, .csv or "
            ".parquet with --column twice"
        )
    # The one column is the line, whatever --column says of other inputs.
    check_columns(source, ["text"], Shape(("text",), keep=shape.keep))
    for line in lines:
        try:
            refuse_undecodable((line,))
            yield lines.record(line, shape.kept({"text": line}))
        except BadLine as error:
            yield lines.broken(error, shape.kept({}))


def _read_jsonl(source: Source, lines: _Lines, shape: Shape) -> Iterator[Record]:
    has_read = False
    for line in lines:
        if not line.strip():
            continue
        kept = shape.kept({})
        try:
            row = _parse_object(line)
            if not has_read:
                check_columns(source, list(row), shape)
            has_read = True
            kept = shape.kept(row)
            yield lines.record(take_value(row, shape), kept)
        except BadLine as error:
            yield lines.broken(error, kept)


def _parse_object(line: str) -> dict[str, Any]:
    refuse_undecodable((line,))
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadLine(f"not JSON: {error}") from error
    if not isinstance(row, dict):
        raise BadLine(f"a JSON object is needed, got {json_name(row)}")
    return row


def _read_csv(source: Source, lines: _Lines, shape: Shape) -> Iterator[Record]:
    is_tsv = source.path is not None and source.path.suffix.lower() == ".tsv"
    # Strict, so that a quote that never ends is an error and not a cell as long as the file.
    rows = csv.reader(lines.with_ends(), delimiter="\t" if is_tsv else ",", strict=True)
    header = _csv_header(source, rows)
    check_columns(source, header, shape)
    while True:
        number = lines.number + 1
        kept = shape.kept({})
        try:
            cells = next(rows)
            if not cells:
                continue
            if len(cells) != len(header):
                raise BadLine(f"{len(cells)} cells, where the header has {len(header)}")
            row = dict(zip(header, cells, strict=True))
            kept = _kept_cells(row, shape)
            value = take_value(row, shape)
            refuse_undecodable(value if isinstance(value, tuple) else (value,))
            refuse_undecodable(row[name] for name in shape.keep)
            yield lines.record(value, kept, number)
        except StopIteration:
            return
        except (BadLine, csv.Error) as error:
            yield lines.broken(error, kept, number)


def _csv_header(source: Source, rows: Iterator[list[str]]) -> list[str]:
    try:
        header = next(rows, None)
    except csv.Error as error:
        raise InputError(f"{source.name} has no header that can be read: {error}") from error
    if header is None:
        raise InputError(f"{source.name} is empty; a csv needs a header line with column names")
    return header


def _kept_cells(row: Mapping[str, str], shape: Shape) -> dict[str, str | None]:
    """Cells to copy, None where one is not UTF-8."""
    kept = shape.kept(row)
    for name, cell in kept.items():
        try:
            refuse_undecodable((cell,))
        except BadLine:
            kept[name] = None
    return kept
