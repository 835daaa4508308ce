"""Reads records from parquet inputs, and the types of the columns to copy."""

import base64
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from bytetx.cli.files.records import (
    BadLine,
    Record,
    RecordError,
    Shape,
    Source,
    check_columns,
    take_value,
)
from bytetx.errors import InputError

if TYPE_CHECKING:
    import pyarrow as pa

_BATCH_ROWS = 1024  # rows of a file in memory at a time


def import_parquet(name: str) -> Any:
    """pyarrow.parquet, or InputError that says how to install it. name: the file it is for."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise InputError(f"{name} needs pyarrow; run: pip install pyarrow") from error
    return pyarrow.parquet


def read_parquet(source: Source, shape: Shape, start_bytes: int) -> Iterator[Record]:
    """One record a row. A string that is not UTF-8 is an error of its row.

    Raises InputError where the file itself cannot be read.
    """
    parquet = import_parquet(source.name)
    from pyarrow import ArrowException

    number = 0
    try:
        with parquet.ParquetFile(source.path) as file:
            check_columns(source, file.schema_arrow.names, shape)
            num_rows = file.metadata.num_rows
            for batch in file.iter_batches(_BATCH_ROWS, columns=list(shape.needed)):
                for row, kept in _rows(batch, shape):
                    number += 1
                    end_bytes = start_bytes + source.size_bytes * number // num_rows
                    where = f"{source.name} row {number}"
                    yield _record(row, kept, shape, where, end_bytes)
    except (ArrowException, OSError) as error:
        after = f" after row {number}" if number else ""
        raise InputError(f"{source.name} cannot be read as parquet{after}: {error}") from error


def kept_types(sources: Sequence[Source], keep: Sequence[str]) -> "dict[str, pa.DataType]":
    """The types of columns that are copied into a parquet output, where the inputs declare them.

    Columns of csv and text are strings. Empty where an input is jsonl, whose values show them.
    Raises InputError where two inputs do not agree, or where a type cannot be copied.
    """
    import pyarrow as pa

    found: dict[str, pa.DataType] = {}
    if not keep or any(source.format == "jsonl" for source in sources):
        return found
    for source in sources:
        for name in keep:
            now = _declared_type(source, name)
            was = found.setdefault(name, now)
            if was != now:
                raise InputError(
                    f"column {name!r} is {now} in {source.name} and {was} in an input before it; "
                    "--keep needs one type"
                )
    return found


def _declared_type(source: Source, name: str) -> "pa.DataType":
    import pyarrow as pa

    if source.format != "parquet":
        return pa.string()
    try:
        schema = import_parquet(source.name).read_schema(source.path)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{source.name} cannot be read as parquet: {error}") from error
    check_columns(source, schema.names, Shape((name,), keep=(name,)))
    kind = schema.field(name).type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    _text_encoder(kind, name)
    return kind


def from_texts(values: list[Any], kind: "pa.DataType") -> "pa.Array":
    """Values as `read_parquet` gave them for a column to copy -> the column with its own type."""
    import pyarrow as pa

    if is_json_type(kind):
        return pa.array(values, kind)
    if _is_binary(kind):
        return pa.array([v if v is None else base64.b64decode(v) for v in values], kind)
    return pa.array(values, pa.string()).cast(kind)


def is_json_type(kind: "pa.DataType") -> bool:
    """Whether JSON spells every value of a type, NaN aside, such that it can be had back."""
    from pyarrow import types

    if types.is_struct(kind):
        return all(is_json_type(kind.field(i).type) for i in range(kind.num_fields))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return is_json_type(kind.value_type)
    is_string = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
    is_number = types.is_integer(kind) or types.is_float32(kind) or types.is_float64(kind)
    return bool(is_string or is_number or types.is_boolean(kind) or types.is_null(kind))


def _is_binary(kind: "pa.DataType") -> bool:
    from pyarrow import types

    is_variable = types.is_binary(kind) or types.is_large_binary(kind)
    return bool(is_variable or types.is_fixed_size_binary(kind))


def _text_encoder(kind: "pa.DataType", name: str) -> "Callable[[pa.Array], list[Any]]":
    """How a column becomes values that JSON has: itself, base64, or Arrow's own text."""
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if is_json_type(kind):
        return _values
    if _is_binary(kind):
        return lambda column: [
            None if value is None else base64.b64encode(value).decode("ascii")
            for value in column.to_pylist()
        ]
    try:
        pa.array([], kind).cast(pa.string()).cast(kind)
    except pa.ArrowException as error:
        raise InputError(
            f"column {name!r} is of type {kind}, which --keep does not copy; leave it out"
        ) from error
    return lambda column: column.cast(pa.string()).to_pylist()


def _rows(batch: "pa.RecordBatch", shape: Shape) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The columns to take and those to copy, row by row; a BadLine for what cannot be read."""
    names = batch.schema.names
    taken = {name: _values(batch.column(names.index(name))) for name in shape.columns}
    kept = {}
    for name in shape.keep:
        column = batch.column(names.index(name))
        kept[name] = _text_encoder(column.type, name)(column)
    for number in range(len(batch)):
        yield (
            {name: values[number] for name, values in taken.items()},
            {name: values[number] for name, values in kept.items()},
        )


def _values(column: "pa.Array") -> list[Any]:
    try:
        values: list[Any] = column.to_pylist()
        return values
    except UnicodeDecodeError:  # arrow checks strings when they are taken out, not when read
        return [_value(cell) for cell in column]


def _value(cell: "pa.Scalar") -> Any:
    try:
        return cell.as_py()
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        return BadLine(f"byte 0x{byte:02x} is not UTF-8; write the column as UTF-8")


def _record(
    row: dict[str, Any], kept: dict[str, Any], shape: Shape, where: str, end_bytes: int
) -> Record:
    unreadable = {name: value for name, value in kept.items() if isinstance(value, BadLine)}
    kept |= dict.fromkeys(unreadable)
    try:
        value = take_value(row, shape)
        for name, error in unreadable.items():
            raise BadLine(f"column {name!r}: {error}")
        return Record(value, end_bytes, where, kept)
    except BadLine as error:
        return Record(RecordError(where, error), end_bytes, where, kept)
