"""Row buffers with room up to a whole GEMM tile, so that a CPU meets few different row counts."""

from collections.abc import Sequence

import torch
from torch import Tensor


def tile_rows(m: int) -> int:
    """m rounded up to the row counts that CPU GEMMs run at: about 80 values below 4096 rows.

    oneDNN builds and keeps one primitive a row count (about 0.5 ms and some heap, per layer
    shape); with one for every total of a ragged stream those pieces land in the gaps that freed
    activations leave, and the heap grows to several times what is live (measured: 291 MiB against
    130 after 1 500 texts of MiniLM in f32).
    """
    step = 8 if m <= 64 else 32 if m <= 512 else 64
    return -(-m // step) * step


def empty_rows(m: int, tail: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Uninitialised [m, *tail] on the CPU, in a storage of tile_rows(m) rows."""
    return torch.empty((tile_rows(m), *tail), dtype=dtype)[:m]


def whole_tiles(x: Tensor) -> Tensor:
    """x [m, k] with the spare rows of its storage: [tile_rows(m), k], or x where it has none.

    What the spare rows hold is arbitrary; only for functions that treat each row alone.
    """
    rows = tile_rows(x.shape[0])
    if rows == x.shape[0] or torch.compiler.is_compiling():
        return x
    end = (x.storage_offset() + rows * x.shape[1]) * x.element_size()
    if end > x.untyped_storage().nbytes():
        return x
    return x.as_strided((rows, x.shape[1]), x.stride())
