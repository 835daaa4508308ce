"""Staged results into parquet, one row group at a time, so that memory does not grow with rows."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bytetx.cli.files.parquet_reader import from_texts, import_parquet

if TYPE_CHECKING:
    import pyarrow as pa

_GROUP_ROWS = 4096
# Of lists and records within each other: Arrow writes more of them, and cannot open the file then.
_MAX_LEVELS = 32

# A column's type: the name of one of Arrow's, a list of one, or a record of several.
ColumnType = str | list["ColumnType"] | dict[str, "ColumnType"]


@dataclass(frozen=True, slots=True)
class ParquetForm:
    """The columns of an output between index and error.

    columns: the task's own, by name.  keep: names of those copied from the input, before them.
    types: of the latter where the input says; the others' are what their values show.
    """

    columns: Mapping[str, ColumnType]
    keep: Sequence[str] = ()
    types: "Mapping[str, pa.DataType]" = field(default_factory=dict)


def vectors_to_parquet(
    vectors: np.ndarray, lines: Path | None, out: Path, *, form: ParquetForm
) -> None:
    """vectors [n, dim] -> columns index, those kept, embedding (null for an error), error.

    lines: {"index", those kept, "error"} on a line for each row that has any; None where none has.
    An embedding is a plain list: fixed-size ones with nulls are not to be had back before
    pyarrow 26, nor by every other reader.
    """

    def groups() -> Iterator[tuple[range, list[dict[str, Any]]]]:
        rows = iter(()) if lines is None else _rows_of(lines)
        row = next(rows, None)
        for start in range(0, len(vectors), _GROUP_ROWS):
            index = range(start, min(start + _GROUP_ROWS, len(vectors)))
            found: list[dict[str, Any]] = [{} for _ in index]
            while row is not None and row["index"] in index:
                found[row["index"] - start] = row
                row = next(rows, None)
            yield index, found

    import pyarrow as pa

    def write(types: "Mapping[str, pa.DataType]") -> None:
        kept = [(name, types[name]) for name in form.keep]
        numbers = pa.from_numpy_dtype(vectors.dtype)
        own = [("embedding", pa.list_(numbers)), ("error", pa.string())]
        schema = pa.schema([("index", pa.int64()), *kept, *own])
        with import_parquet(str(out)).ParquetWriter(out, schema) as writer:
            for index, rows in groups():
                columns = [
                    pa.array(index, pa.int64()),
                    *_kept_columns(rows, form, types),
                    _embeddings(vectors[index.start : index.stop], rows),
                    pa.array([row.get("error") for row in rows], pa.string()),
                ]
                writer.write_batch(pa.record_batch(columns, schema=schema))

    _write_with_types(form, write, lambda: (rows for _, rows in groups()))


def _embeddings(vectors: np.ndarray, rows: Sequence[Mapping[str, Any]]) -> "pa.Array":
    import pyarrow as pa

    is_whole = np.array(["error" not in row for row in rows])
    # A null offset says that the list which begins there is null.
    offsets = np.concatenate([[0], np.cumsum(vectors.shape[1] * is_whole)]).astype(np.int32)
    begins = pa.array(offsets, mask=~np.append(is_whole, True))
    return pa.ListArray.from_arrays(begins, np.ascontiguousarray(vectors)[is_whole].reshape(-1))


def lines_to_parquet(lines: Path, out: Path, *, form: ParquetForm) -> None:
    """JSON lines of a task -> columns index, those kept, its own (null for an error) and error."""
    import pyarrow as pa

    own = [(name, _arrow_type(kind)) for name, kind in form.columns.items()]

    def write(types: "Mapping[str, pa.DataType]") -> None:
        kept = [(name, types[name]) for name in form.keep]
        schema = pa.schema([("index", pa.int64()), *kept, *own, ("error", pa.string())])
        with import_parquet(str(out)).ParquetWriter(out, schema) as writer:
            for rows in _groups(_rows_of(lines)):
                columns = [
                    pa.array([row["index"] for row in rows], pa.int64()),
                    *_kept_columns(rows, form, types),
                    *(pa.array([row.get(name) for row in rows], kind) for name, kind in own),
                    pa.array([row.get("error") for row in rows], pa.string()),
                ]
                writer.write_batch(pa.record_batch(columns, schema=schema))

    _write_with_types(form, write, lambda: _groups(_rows_of(lines)))


class _NoOneType(Exception):
    """The values of a column have no type in common."""


def _write_with_types(
    form: ParquetForm,
    write: "Callable[[Mapping[str, pa.DataType]], None]",
    groups: Callable[[], Iterable[Sequence[Mapping[str, Any]]]],
) -> None:
    """Writes with the types that are declared, and with what their values show for the others."""
    import pyarrow as pa

    types = dict(form.types)
    shown = [name for name in form.keep if name not in types]
    if shown:
        types |= _shown_types(shown, groups())
    while True:
        try:
            return write(types)
        except _NoOneType as error:  # as a large integer among fractions
            types[str(error)] = pa.string()


def _shown_types(
    names: Sequence[str], groups: Iterable[Sequence[Mapping[str, Any]]]
) -> "dict[str, pa.DataType]":
    """The type that all values of a column have; string where they have none in common."""
    import pyarrow as pa

    found: dict[str, pa.Schema] = {}
    for rows in groups:
        for name in names:
            try:
                now = pa.schema([(name, pa.array([row.get(name) for row in rows]).type)])
                both = [found.get(name, now), now]
                found[name] = pa.unify_schemas(both, promote_options="permissive")
            except (pa.ArrowException, OverflowError):
                found[name] = pa.schema([(name, pa.string())])
    types = {name: schema.field(0).type for name, schema in found.items()}
    return {name: _storable(types.get(name, pa.string())) for name in names}


def _storable(kind: "pa.DataType") -> "pa.DataType":
    """The type, or string for one that parquet does not have, cannot read or that says nothing."""
    import pyarrow as pa

    def is_storable(kind: pa.DataType, levels: int = 1) -> bool:
        if levels > _MAX_LEVELS:
            return False
        if pa.types.is_struct(kind):
            fields = [kind.field(i).type for i in range(kind.num_fields)]
            return bool(fields) and all(is_storable(field, levels + 1) for field in fields)
        return is_storable(kind.value_type, levels + 1) if pa.types.is_list(kind) else True

    return kind if is_storable(kind) and not pa.types.is_null(kind) else pa.string()


def _kept_columns(
    rows: Sequence[Mapping[str, Any]], form: ParquetForm, types: "Mapping[str, pa.DataType]"
) -> "Iterator[pa.Array]":
    import pyarrow as pa

    for name in form.keep:
        values = [row.get(name) for row in rows]
        kind = types[name]
        if name not in form.types and pa.types.is_string(kind):
            values = [v if v is None or isinstance(v, str) else json.dumps(v) for v in values]
        try:
            yield from_texts(values, kind)
        except (pa.ArrowException, OverflowError) as error:
            if name in form.types or pa.types.is_string(kind):
                raise
            raise _NoOneType(name) from error


def _rows_of(lines: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file of JSON lines, without the half surrogate pairs that parquet refuses."""
    with lines.open(encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            yield _without_half_pairs(row) if "\\ud" in line else row


def _without_half_pairs(value: Any) -> Any:
    """The same with the escape of each half surrogate pair in its place, as "\\ud800"."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, list):
        return [_without_half_pairs(item) for item in value]
    if isinstance(value, dict):
        return {_without_half_pairs(k): _without_half_pairs(v) for k, v in value.items()}
    return value


def _groups(rows: Iterable[Any]) -> Iterator[list[Any]]:
    rows = iter(rows)
    while group := list(islice(rows, _GROUP_ROWS)):
        yield group


def _arrow_type(kind: ColumnType) -> "pa.DataType":
    import pyarrow as pa

    if isinstance(kind, list):
        return pa.list_(_arrow_type(kind[0]))
    if isinstance(kind, dict):
        return pa.struct([(name, _arrow_type(item)) for name, item in kind.items()])
    return pa.type_for_alias(kind)
