"""Results as the bytes of an unfinished output: rows of a .npy, or JSON lines."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from bytetx.errors import InputError

NPY_HEADER_BYTES = 128
NO_COLUMNS: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Row:
    """One encoded result. list_line: for the separate list, where `data` cannot hold it."""

    data: bytes
    list_line: bytes = b""
    is_error: bool = False


class Encoder(Protocol):
    """Turns results into the bytes of an unfinished output."""

    def header(self, num_rows: int) -> bytes:
        """The bytes before the rows; their number never changes."""

    def encode(self, index: int, result: Any, kept: Mapping[str, Any] = NO_COLUMNS) -> Row:
        """The row of the result of text `index`; an exception is a result too.

        kept: columns of the input to copy.
        """


class VectorEncoder:
    """Rows of one dtype after a .npy header. An error is a row of NaN, or of zeros where the dtype
    is one of integers, and a line in the list.

    Columns to copy are lines in the list, too, until both become parquet.
    """

    def __init__(self, dim: int, dtype: np.dtype | None = None):
        """dtype: float32 where none is given."""
        self._dim = dim
        self._dtype = np.dtype("float32" if dtype is None else dtype).newbyteorder("<")
        no_vector = np.nan if self._dtype.kind == "f" else 0
        self._failed = np.full(dim, no_vector, dtype=self._dtype).tobytes()

    def header(self, num_rows: int) -> bytes:
        descr, dim = self._dtype.str, self._dim
        shape = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': ({num_rows}, {dim}), }}"
        header_bytes = NPY_HEADER_BYTES - 10  # magic (6), version (2), length of the rest (2)
        return (
            b"\x93NUMPY\x01\x00"
            + header_bytes.to_bytes(2, "little")
            + shape.encode("ascii").ljust(header_bytes - 1)
            + b"\n"
        )

    def encode(self, index: int, result: Any, kept: Mapping[str, Any] = NO_COLUMNS) -> Row:
        if not isinstance(result, Exception):
            vector = np.asarray(result, dtype=self._dtype)
            if np.isfinite(vector).all():
                return Row(vector.tobytes(), _line({"index": index, **kept}) if kept else b"")
            result = _NOT_FINITE
        line = _line({"index": index, **kept, "error": str(result)})
        return Row(self._failed, line, is_error=True)


class LineEncoder:
    """One JSON object a result: {"index": i, ...}, or {"index": i, "error": "..."}.

    to_json: a result as the text of a JSON object with at least one key.
    keeps_nan: a NaN in a column to copy stays one, which parquet has; else it becomes null.
    """

    def __init__(self, to_json: Callable[[Any], str], *, keeps_nan: bool = False):
        self._to_json = to_json
        self._keeps_nan = keeps_nan

    def header(self, num_rows: int) -> bytes:
        return b""

    def encode(self, index: int, result: Any, kept: Mapping[str, Any] = NO_COLUMNS) -> Row:
        start = {"index": index, **(kept if self._keeps_nan else _finite(dict(kept)))}
        if not isinstance(result, Exception):
            try:
                text = self._to_json(result)
            except ValueError:  # JSON has no NaN
                result = _NOT_FINITE
            else:
                return Row(_line(start)[:-2] + f", {text[1:]}\n".encode("utf-8", _HALF_PAIRS))
        return Row(_line({**start, "error": str(result)}), is_error=True)


_NOT_FINITE = InputError(
    "the model's answer is not finite; check its weights, or try another dtype"
)

# A label may hold half a surrogate pair; the escape of it is the one JSON has.
_HALF_PAIRS = "backslashreplace"


def _line(record: Mapping[str, Any]) -> bytes:
    return f"{json.dumps(record, ensure_ascii=False)}\n".encode("utf-8", _HALF_PAIRS)


def _finite(value: Any) -> Any:
    """The same with null for every NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
