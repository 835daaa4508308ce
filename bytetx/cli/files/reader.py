"""Reads records from text, jsonl, csv and parquet; a broken line is a record with its error."""

import json
import re
import stat
import sys
from collections.abc import Iterator, Sequence
from io import BufferedReader
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, cast

from bytetx.cli.files.csv_reader import read_csv
from bytetx.cli.files.lines import Lines, unreadable
from bytetx.cli.files.records import (
    MAX_LEVELS,
    BadLine,
    Record,
    Shape,
    Source,
    check_columns,
    is_too_deep,
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
_MAX_PARSED_LEVELS = 600
_STRINGS, _BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"'), re.compile(r"[\[\]{}]")
_COMPRESSED = {".gz": "zcat", ".bz2": "bzcat", ".xz": "xzcat", ".zst": "zstdcat"}


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
    read = {"text": _read_text, "jsonl": _read_jsonl, "csv": read_csv}[source.format]
    if source.path is None:
        # typeshed calls it a BinaryIO, which has no peek.
        stdin = cast(BufferedReader, sys.stdin.buffer)
        yield from read(source, Lines(stdin, source, start_bytes), shape)
        return
    try:
        file = source.path.open("rb")
    except OSError as error:  # it was there a moment ago
        raise unreadable(source, error) from error
    with file:
        yield from read(source, Lines(file, source, start_bytes), shape)


def _read_text(source: Source, lines: Lines, shape: Shape) -> Iterator[Record]:
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


def _read_jsonl(source: Source, lines: Lines, shape: Shape) -> Iterator[Record]:
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
            deep = [name for name, value in kept.items() if is_too_deep(value)]
            if deep:
                kept |= dict.fromkeys(deep)
                raise BadLine(f"column {deep[0]!r} is nested more than {MAX_LEVELS} levels deep")
            yield lines.record(take_value(row, shape), kept)
        except BadLine as error:
            yield lines.broken(error, kept)


def _parse_object(line: str) -> dict[str, Any]:
    refuse_undecodable((line,))
    if _num_levels(line) > _MAX_PARSED_LEVELS:
        raise BadLine(f"not JSON that can be read: nested beyond {_MAX_PARSED_LEVELS} levels")
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadLine(f"not JSON: {error}") from error
    if not isinstance(row, dict):
        raise BadLine(f"a JSON object is needed, got {json_name(row)}")
    return row


def _num_levels(line: str) -> int:
    """How deep a line of JSON is nested, where that may be beyond _MAX_PARSED_LEVELS; else 0.

    The parser's own limit is the stack that is left, which is another one when a job resumes.
    """
    if line.count("[") + line.count("{") <= _MAX_PARSED_LEVELS:
        return 0
    brackets = _BRACKETS.findall(_STRINGS.sub("", line))
    return max(accumulate(1 if bracket in "[{" else -1 for bracket in brackets), default=0)
