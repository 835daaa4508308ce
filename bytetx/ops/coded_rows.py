"""Rows of codes: a weight in groups of 32 features before it is laid out for a CPU's products.

A row holds the blocks of its groups, as GGUF has them (with 4 bits Q4_1's, with 8 bits Q8_0's), and
an f32 factor, as csrc/coded_rows_ops.h says: uint8 [n, row_bytes(k, bits)]. Rows may be put in any
order, or together, before `stack_rows`.
"""

import torch
from torch import Tensor

from bytetx.ops import native

GROUP = 32  # features that share a scale; kGroupFeatures of csrc/cpu/panels.h
COLUMNS = 16  # outputs of a strip
GROUP_BYTES = {8: 34, 4: 20}
_FACTOR_BYTES = 4
_CPU = torch.device("cpu")
# SavedFormat of csrc/coded_rows_ops.h, by GGUF's names, for the bits that they go into.
_SAVED = {
    ("Q4_0", 4): 0,
    ("Q4_0", 8): 0,
    ("Q4_1", 4): 1,
    ("Q4_K", 4): 2,
    ("Q5_0", 8): 3,
    ("Q8_0", 8): 4,
    ("Q6_K", 4): 5,
    ("Q6_K", 8): 5,
}


def takes_blocks(scheme: str, bits: int) -> bool:
    """Whether convert_rows makes rows of that many bits of one of GGUF's formats."""
    return (scheme, bits) in _SAVED


def row_bytes(k: int, bits: int) -> int:
    return -(-k // GROUP) * GROUP_BYTES[bits] + _FACTOR_BYTES


def features_of(rows: Tensor, bits: int) -> int:
    """Features of whole groups that rows of codes have."""
    return (rows.shape[1] - _FACTOR_BYTES) // GROUP_BYTES[bits] * GROUP


def round_rows(x: Tensor, bits: int, *, out: Tensor | None = None) -> Tensor:
    """Rows of codes of numbers x, f32 or bf16 [n, k], contiguous.

    Each group's scale, and with 4 bits its least value, are those of a few with the least square
    error. Check what comes of them with `are_finite`.  out: where they are written, contiguous.
    """
    n, k = x.shape
    rows = empty_rows(n, k, bits) if out is None else out
    native.require_kernel("round_rows", _CPU)(
        x=x,
        rows=rows,
        n=n,
        k=k,
        bits=bits,
        dtype=native.DTYPE_CODES[x.dtype],
        launch=native.launch_args(_CPU),
    )
    return rows


def convert_rows(
    blocks: Tensor, scheme: str, k: int, bits: int, *, out: Tensor | None = None
) -> Tensor:
    """Rows of codes of a GGUF file's rows of blocks, uint8 [n, bytes].

    scheme: for which takes_blocks says so.  k: numbers of a row.  out: as of round_rows.
    Codes, scales and least values stay as they are, but for Q4_K's scales and least values, which
    are products of two numbers, rounded to f16, and for Q6_K, which is rounded as numbers are.
    """
    rows = empty_rows(len(blocks), k, bits) if out is None else out
    native.require_kernel("convert_rows", _CPU)(
        blocks=blocks.contiguous(),
        rows=rows,
        n=len(blocks),
        k=k,
        bits=bits,
        format=_SAVED[scheme, bits],
        launch=native.launch_args(_CPU),
    )
    return rows


def empty_rows(n: int, k: int, bits: int) -> Tensor:
    return torch.empty((n, row_bytes(k, bits)), dtype=torch.uint8)


def are_finite(rows: Tensor) -> bool:
    """Whether every number that rows of codes were made of is finite."""
    factors = rows[:, -_FACTOR_BYTES:].contiguous().view(torch.float32)
    return bool(factors.isfinite().all())


def stack_rows(rows: Tensor, k: int, bits: int) -> tuple[Tensor, Tensor]:
    """(strips, factor) of a GroupedWeight, from its rows of codes."""
    n, groups = len(rows), -(-k // GROUP)
    strips = torch.empty((-(-n // COLUMNS), groups, COLUMNS * GROUP_BYTES[bits]), dtype=torch.uint8)
    factor = torch.empty(n)
    native.require_kernel("stack_rows", _CPU)(
        rows=rows,
        strips=strips,
        factor=factor,
        n=n,
        k=k,
        bits=bits,
        launch=native.launch_args(_CPU),
    )
    return strips, factor
