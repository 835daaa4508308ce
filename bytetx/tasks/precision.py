"""f32 vectors to half floats, integers or bits, as sentence-transformers quantises them."""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch.nn import functional as F

from bytetx.errors import OptionError, shown
from bytetx.ops.pooling import largest

Precision = Literal["float32", "float16", "int8", "uint8", "binary", "ubinary"]

DTYPES: dict[str, np.dtype] = {
    "float32": np.dtype("float32"),
    "float16": np.dtype("float16"),
    "int8": np.dtype("int8"),
    "uint8": np.dtype("uint8"),
    "binary": np.dtype("int8"),
    "ubinary": np.dtype("uint8"),
}
_INTEGERS = ("int8", "uint8")
_BITS = ("binary", "ubinary")
_BLOCK_ROWS = 8192


@dataclass(frozen=True, slots=True)
class Quantizer:
    """f32 vectors [n, dim] to one of DTYPES, row by row.

    precision: int8 and uint8 divide the range of each dimension into 256 equal steps; binary and
    ubinary pack the signs of 8 dimensions into a byte, the first in its highest bit.
    ranges: f32 [2, dim], minima and maxima, for int8 and uint8; on the device of the vectors.
    is_whole: the vectors are whole numbers from -128 to 127, which int8 and uint8 round to.
    key: equal for quantizers that do the same.
    """

    precision: str
    ranges: torch.Tensor | None = None
    key: Hashable = None
    is_whole: bool = False

    @property
    def dtype(self) -> np.dtype:
        return DTYPES[self.precision]

    @property
    def needs_ranges(self) -> bool:
        """Whether all vectors must be known before the first one can be quantised."""
        return self.precision in _INTEGERS and self.ranges is None and not self.is_whole

    def size(self, dim: int) -> int:
        """Numbers of a row that was `dim` numbers."""
        return -(-dim // 8) if self.precision in _BITS else dim

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: f32 [n, dim] -> [n, size(dim)], the bits of quantize_embeddings."""
        if self.precision == "float16":
            return x.half()
        if self.precision in _BITS:
            return self._pack(x)
        if self.ranges is not None:
            return self._divide(x, self.ranges)
        return self._round(x) if self.is_whole else x

    def on_host(self, x: np.ndarray) -> np.ndarray:
        """The same of f32 rows on the host."""
        ranges = None if self.ranges is None else self.ranges.cpu()
        rows: np.ndarray = replace(self, ranges=ranges)(torch.from_numpy(x)).numpy()
        return rows

    def _pack(self, x: torch.Tensor) -> torch.Tensor:
        bits = F.pad((x > 0).to(torch.uint8), (0, -x.shape[1] % 8))
        places = torch.arange(7, -1, -1, dtype=torch.uint8, device=x.device)
        eights = bits.view(x.shape[0], self.size(x.shape[1]), 8) << places
        packed = eights.sum(dim=2, dtype=torch.uint8)
        # The signed form is the unsigned one less 128.
        return packed if self.precision == "ubinary" else (packed ^ 128).view(torch.int8)

    def _round(self, x: torch.Tensor) -> torch.Tensor:
        values = x.round().clamp_(-128, 127)
        if self.precision == "uint8":
            return (values + 128).to(torch.uint8)
        return values.to(torch.int8)

    def _divide(self, x: torch.Tensor, ranges: torch.Tensor) -> torch.Tensor:
        starts = ranges[0]
        steps = (ranges[1] - starts) / 255
        steps = torch.where(steps == 0, torch.ones_like(steps), steps)
        values = ((x - starts) / steps).floor_().clamp_(0, 255)
        if self.precision == "uint8":
            return values.to(torch.uint8)
        return (values - 128).to(torch.int8)


def quantized(x: torch.Tensor, quantizer: Quantizer | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(the vectors in their precision, f32 [n], `largest` of each) of f32 vectors [n, dim].

    Integers hide what is not finite, and half floats have a narrower range than f32.
    """
    if quantizer is None:
        return x, largest(x)
    rows = quantizer(x)
    return rows, largest(rows if rows.is_floating_point() else x)


def make_quantizer(
    precision: str, ranges: object, *, dim: int, device: torch.device, is_whole: bool = False
) -> Quantizer | None:
    """The quantizer of a precision; None for float32, whose vectors stay as they are.

    is_whole: as of Quantizer.

    Raises OptionError for an unknown precision, and for ranges that are not finite [2, dim] or
    that the precision does not use.
    """
    if not isinstance(precision, str) or precision not in DTYPES:
        known = ", ".join(DTYPES)
        raise OptionError(f"precision must be one of {known}, got {shown(precision)}")
    if ranges is not None and precision not in _INTEGERS:
        raise OptionError(f"ranges go with precision int8 or uint8, got {shown(precision)}")
    if precision == "float32":
        return None
    if ranges is None:
        is_whole = is_whole and precision in _INTEGERS
        return Quantizer(precision, key=(precision, is_whole), is_whole=is_whole)
    given = _checked(ranges, dim)
    key = precision, given.tobytes()
    return Quantizer(precision, torch.from_numpy(given).to(device), key)


def quantize_all(vectors: np.ndarray, precision: str, *, failed: list[int]) -> np.ndarray:
    """f32 [n, dim] to int8 or uint8 by the ranges of these vectors; rows in `failed` become 0.

    Raises OptionError where fewer than two vectors are left, which have no range.
    """
    whole = vectors if not failed else np.delete(vectors, failed, axis=0)
    out: np.ndarray = np.zeros(vectors.shape, dtype=DTYPES[precision])
    if not len(whole):
        return out
    if len(whole) == 1:
        raise OptionError(
            f"precision {precision} takes the range of each dimension from the texts of the call, "
            "and one text has none; pass ranges (f32 [2, dimensions], minima and maxima)"
        )
    ranges = torch.from_numpy(np.stack([whole.min(axis=0), whole.max(axis=0)]))
    quantizer = Quantizer(precision, ranges)
    for start in range(0, len(vectors), _BLOCK_ROWS):
        rows = slice(start, start + _BLOCK_ROWS)
        out[rows] = quantizer(torch.from_numpy(vectors[rows])).numpy()
    out[failed] = 0
    return out


def _checked(ranges: object, dim: int) -> np.ndarray:
    """A copy, f32 [2, dim]."""
    try:
        array = np.array(ranges, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise OptionError(f"ranges must be f32 [2, {dim}], minima and maxima: {error}") from error
    if array.shape != (2, dim) or not np.isfinite(array).all() or (array[0] > array[1]).any():
        raise OptionError(
            f"ranges must be f32 [2, {dim}], finite minima and maxima of each dimension, got shape "
            f"{array.shape}"
            + ("" if array.shape != (2, dim) else " with values that are no minima and maxima")
        )
    return array
