"""Record: one text of an input, and how it is read from a row of named columns."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bytetx.checkpoint.side_files import is_deeper
from bytetx.errors import InputError

# Of lists and objects within each other in a value; Python's own stack ends beyond some hundreds.
MAX_LEVELS = 100
_MAX_QUOTED = 200  # characters of an input in an error

Chat = list[dict[str, Any]]
Value = str | tuple[str, str] | list[int] | Chat | dict[str, Any]


class RecordError(InputError):
    """A record that cannot be read.

    problem: the error without the name of the input and the line, which change with file names.
    """

    def __init__(self, where: str, problem: object):
        super().__init__(f"{where}: {problem}")
        self.problem = str(problem)


class MalformedRecord(RecordError):
    """A record of a csv that is none; its lines are lost."""


class BadLine(Exception):
    """A line or row that cannot be read; the reader adds its position."""


@dataclass(frozen=True, slots=True)
class RankRequest:
    """A query and the documents to rank for it."""

    query: str
    documents: tuple[Value | InputError, ...]


@dataclass(frozen=True, slots=True)
class Record:
    """One text of the inputs, or its error.

    end_bytes: bytes of all inputs up to the end of this record; what a progress bar counts.
    where: the input and its line or row, for errors.
    kept: the columns to copy into the output; None for each that could not be read.
    """

    value: Value | RankRequest | InputError
    end_bytes: int
    where: str
    kept: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Source:
    """One input. path is None for stdin; size_bytes is 0 where it cannot be known.

    is_regular: False for stdin, pipes and devices, which can be read only once.
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
    """The shape of one record: the columns to take, or that a jsonl line is a whole request.

    columns: one (texts) or two (pairs). Text files have none: a line is the text.
    chats: whether a text may also be a list of messages.
    decisions: whether lines are decision requests, without columns; in a text file as well.
    keep: columns that are copied into the output. The one of a text file is "text", the line.
    """

    columns: tuple[str, ...] = ("text",)
    rank_requests: bool = False
    chats: bool = False
    decisions: bool = False
    keep: tuple[str, ...] = ()

    @property
    def needed(self) -> tuple[str, ...]:
        """Every column that a row of an input must have, each once."""
        columns = ("query", "documents") if self.rank_requests else self.columns
        return tuple(dict.fromkeys((*columns, *self.keep)))

    def kept(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The columns to copy; None where a row has no such column."""
        return {name: row.get(name) for name in self.keep}


def check_columns(source: Source, names: Sequence[str], shape: Shape) -> None:
    """Raises InputError, which ends the job, where a needed column is missing or named twice."""
    for column in shape.needed:
        if column not in names:
            option = "--keep" if column in shape.keep else "--column"
            hint = "" if shape.rank_requests and option == "--column" else f" (give {option})"
            raise InputError(
                f"{source.name} has no column {column!r}; its columns: "
                f"{shorten(', '.join(names)) or 'none'}{hint}"
            )
        if names.count(column) > 1:
            raise InputError(f"{source.name} has column {column!r} twice; rename one of them")


def take_value(row: Mapping[str, Any], shape: Shape) -> Value | RankRequest:
    """The value of the columns that `shape` names. Raises BadLine."""
    if shape.rank_requests:
        return _take_request(row)
    if shape.decisions:
        if is_too_deep(row):
            raise BadLine(f"the request is nested more than {MAX_LEVELS} levels deep")
        return dict(row)
    values = [_take(row, column, shape) for column in shape.columns]
    if len(values) == 1:
        return values[0]
    texts = []
    for column, value in zip(shape.columns, values, strict=True):
        if not isinstance(value, str):
            raise BadLine(f"column {column!r} must be a string in a pair, got token ids")
        texts.append(value)
    return (texts[0], texts[1])


def refuse_undecodable(texts: Iterable[object]) -> None:
    """Raises BadLine where a text holds a byte that surrogateescape stands for."""
    for text in texts:
        if not isinstance(text, str) or text.isascii():
            continue
        bad = next((char for char in text if "\udc80" <= char <= "\udcff"), None)
        if bad is not None:
            byte = ord(bad) - 0xDC00  # where surrogateescape put it
            raise BadLine(f"byte 0x{byte:02x} is not UTF-8; convert the file, such as with iconv")


def shorten(text: str) -> str:
    """At most 200 characters of a text, on one line."""
    line = " ".join(text.split())
    return line if len(line) <= _MAX_QUOTED else f"{line[:_MAX_QUOTED]}..."


def is_too_deep(value: object) -> bool:
    """Whether lists and objects are nested beyond MAX_LEVELS in a value."""
    return is_deeper(value, MAX_LEVELS)


def json_name(value: Any) -> str:
    """Return JSON's name of the type of a value, with its article."""
    names: dict[type, str] = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    if value is None:
        return "null"
    return names.get(type(value), "a number")


def _take(row: Mapping[str, Any], column: str, shape: Shape) -> str | list[int] | Chat:
    if column not in row:
        raise BadLine(f"no column {column!r}; there are: {', '.join(row) or 'none'}")
    value = row[column]
    if shape.chats and isinstance(value, list) and all(isinstance(item, dict) for item in value):
        if is_too_deep(value):
            raise BadLine(f"column {column!r} is nested more than {MAX_LEVELS} levels deep")
        return value
    return _checked_text(value, f"column {column!r}")


def _checked_text(value: Any, what: str) -> str | list[int]:
    if isinstance(value, BadLine):  # a cell that could not be read
        raise BadLine(f"{what}: {value}")
    if isinstance(value, list) and all(type(item) is int for item in value):
        return value
    if not isinstance(value, str):
        raise BadLine(f"{what} must be a string or token ids, got {json_name(value)}")
    return value


def _take_request(row: Mapping[str, Any]) -> RankRequest:
    query, documents = row.get("query"), row.get("documents")
    if not isinstance(query, str):
        raise BadLine(f"'query' must be a string, got {json_name(query)}")
    if not isinstance(documents, list):
        raise BadLine(f"'documents' must be a list of strings, got {json_name(documents)}")
    return RankRequest(
        query, tuple(_checked_text(text, f"documents[{i}]") for i, text in enumerate(documents))
    )
