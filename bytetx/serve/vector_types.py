"""Vectors as the answers of embedding routes give them."""

import base64
from typing import Any, Literal

import numpy as np

VectorType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]
_LARGEST = 127.0  # the most of int8


def as_base64(vectors: np.ndarray) -> list[str]:
    """The bytes of each vector; floats are little-endian float32."""
    rows = vectors.astype("<f4", copy=False) if vectors.dtype.kind == "f" else vectors
    return [base64.b64encode(row).decode() for row in rows]


def as_type(vectors: np.ndarray, kind: VectorType) -> Any:
    """f32 vectors [n, size] in one of the types that Cohere names.

    int8: each vector so that its largest number is 127, which changes no cosine; whole numbers up
    to 127 stay as they are.  uint8: these numbers plus 128.  binary, ubinary: the signs of 8
    numbers a byte, the first in its highest bit; binary is the same less 128.
    """
    if kind == "float":
        return vectors
    if kind == "base64":
        return as_base64(vectors)
    if kind in ("binary", "ubinary"):
        packed = np.packbits(vectors > 0, axis=1)
        return packed if kind == "ubinary" else (packed ^ 128).view(np.int8)
    largest = np.abs(vectors).max(axis=1, keepdims=True, initial=0.0)
    is_whole = (np.rint(vectors) == vectors).all(axis=1, keepdims=True) & (largest <= _LARGEST)
    scales = np.where(is_whole | (largest == 0), 1.0, _LARGEST / np.maximum(largest, 1e-30))
    values = np.rint(vectors * scales).astype(np.int8)
    return values if kind == "int8" else (values.view(np.uint8) ^ 128)
