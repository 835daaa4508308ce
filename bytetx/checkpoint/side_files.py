"""Reads the JSON and text files of a checkpoint, with limits of size, and checks each key.

Every JSON or text file of a checkpoint is read here, and each reader declares the keys that it
uses as a table of Fields. A damaged file is then a CheckpointError with its path,
the key, what the key must be and what it is, and never an error from where the value is used.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bytetx.errors import CheckpointError

# The largest in use are tokenizer_config.json and config.json with very many labels, some MiB.
_MAX_JSON_BYTES = 16 << 20
# The largest indexes of sharded weights in use are some 15 MiB, and tokenizer.json some 30 MiB.
MAX_INDEX_BYTES = 64 << 20
MAX_TOKENIZER_BYTES = 512 << 20
_MAX_TEXT_BYTES = 4 << 20
# config.json is some 4 levels deep. repr and == recurse, and a file must not choose how deep.
_MAX_DEPTH = 64
# Sizes and ids of models fit 32 bits; numpy and torch refuse what does not fit 64.
_MAX_INTEGER = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Field:
    """A condition on the value of one key: in words, for the error, and as a test."""

    needs: str
    accepts: Callable[[Any], bool]


def read_json(
    path: Path,
    fields: Mapping[str, Field] | None = None,
    *,
    max_bytes: int = _MAX_JSON_BYTES,
) -> dict[str, Any]:
    """The JSON object in a file, with the keys in `fields` checked; other keys are not looked at.

    Raises CheckpointError that names the file, and the key or the place where it breaks.
    """
    content = _parse(path, max_bytes)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(content).__name__}")
    check_fields(path, content, fields or {})
    return content


def read_fields(
    path: Path, fields: Mapping[str, Field], *, may_be_absent: bool = False
) -> dict[str, Any]:
    """The keys in `fields` that the JSON object in a file has, but for those that are null.

    may_be_absent: without the file it is {}.
    """
    if may_be_absent and not path.is_file():
        return {}
    content = read_json(path, fields)
    return {key: content[key] for key in fields if content.get(key) is not None}


def read_json_objects(
    path: Path, fields: Mapping[str, Field] | None = None
) -> list[dict[str, Any]]:
    """The JSON list of objects in a file; checks and errors as of read_json."""
    content = _parse(path, _MAX_JSON_BYTES)
    if not isinstance(content, list) or not all(isinstance(entry, dict) for entry in content):
        raise CheckpointError(f"{path} must hold a JSON list of objects")
    for number, entry in enumerate(content):
        check_fields(f"{path}: entry {number}", entry, fields or {})
    return content


def check_fields(
    where: Path | str, content: Mapping[str, Any], fields: Mapping[str, Field]
) -> None:
    """Raises CheckpointError for the first key whose value is not null and not as declared."""
    for key, field in fields.items():
        value = content.get(key)
        if value is not None and not field.accepts(value):
            raise CheckpointError(f"{where}: {key} must be {field.needs}, got {value!r:.120}")


def read_text(path: Path) -> str:
    """A text file in UTF-8; CheckpointError where it is not, or has more than 4 MiB."""
    try:
        return read_bytes(path, max_bytes=_MAX_TEXT_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8: {error}") from error


def read_bytes(path: Path, *, max_bytes: int) -> bytes:
    """A regular file's content; CheckpointError where it cannot be read or has more bytes."""
    if not path.is_file():  # a pipe would wait for a writer for ever
        raise CheckpointError(f"{path} cannot be read: there is no such file")
    try:
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if len(content) > max_bytes:
        raise CheckpointError(f"{path} has more than {max_bytes >> 20} MiB; it is damaged")
    return content


def integer(low: int, high: int = _MAX_INTEGER) -> Field:
    """An integer from low to high; true and false are none."""
    upper = "" if high == _MAX_INTEGER else f" to {high}"
    return Field(f"an integer from {low}{upper}", lambda v: type(v) is int and low <= v <= high)


def number(low: float, high: float = 1e38) -> Field:
    """A number from low to high, which float32 holds; true and false are none."""
    upper = "" if high == 1e38 else f" to {high:g}"
    return Field(
        f"a number from {low}{upper}", lambda v: type(v) in (int, float) and low <= v <= high
    )


def one_of(*values: str) -> Field:
    return Field(f"one of {', '.join(values)}", lambda v: isinstance(v, str) and v in values)


def list_of(field: Field) -> Field:
    return Field(
        f"a list, each entry {field.needs}",
        lambda v: isinstance(v, list) and all(map(field.accepts, v)),
    )


def table_of(field: Field) -> Field:
    """An object of any keys; null counts as a value that is left out."""
    return Field(
        f"a table, each value {field.needs}",
        lambda v: isinstance(v, dict) and all(e is None or field.accepts(e) for e in v.values()),
    )


def either(*fields: Field) -> Field:
    return Field(
        " or ".join(field.needs for field in fields),
        lambda v: any(field.accepts(v) for field in fields),
    )


def _is_text(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:  # half a surrogate pair, written as \ud800
        return False
    return True


def _is_path(value: Any) -> bool:
    """Relative, without .. and of names that a file system takes, which raises for others."""
    if not _is_text(value) or "\0" in value or value.startswith("/"):
        return False
    parts = value.split("/")
    return ".." not in parts and all(len(part.encode()) <= 255 for part in parts)


TEXT = Field("text", _is_text)
PATH = Field("a path inside the folder", _is_path)
FLAG = Field("true or false", lambda v: isinstance(v, bool))
TABLE = Field("a table", lambda v: isinstance(v, dict))
TOKEN_IDS = either(
    Field("a token id", lambda v: type(v) is int and -1 <= v <= _MAX_INTEGER),
    Field("a list of token ids", list_of(integer(0)).accepts),
)


def _parse(path: Path, max_bytes: int) -> Any:
    raw = read_bytes(path, max_bytes=max_bytes)
    try:
        content = json.loads(raw.decode("utf-8"), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if is_deeper(content, _MAX_DEPTH):
        raise CheckpointError(
            f"{path} cannot be read as JSON: it nests deeper than {_MAX_DEPTH} levels"
        )
    return content


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object from its pairs, for json.loads; ValueError where one key has two values.

    Readers differ in which of the two counts, so that the file would mean two models. A key that
    is repeated with the same value is harmless.
    """
    content = dict(pairs)
    if len(content) != len(pairs):
        for key, value in pairs:
            if content[key] != value:
                raise ValueError(f"the key {key!r:.120} has two values")
    return content


def is_deeper(content: object, depth: int) -> bool:
    """Whether lists and objects are nested beyond `depth` levels in a value."""
    level = [content]
    for _ in range(depth + 1):
        level = [
            child
            for part in level
            if isinstance(part, dict | list)
            for child in (part.values() if isinstance(part, dict) else part)
        ]
        if not level:
            return False
    return True
