"""Reads weights of a checkpoint as rows of codes, some rows at a time."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from bytetx.checkpoint.saved_tensor import DecodedTensor, Part, StoredTensor
from bytetx.checkpoint.weights import Weights
from bytetx.ops.coded_rows import convert_rows, empty_rows, round_rows, takes_blocks

_PIECE = 1 << 22  # weights at a time, so that their numbers are never all in memory


def read_coded(tensors: Mapping[str, Tensor], name: str, bits: int) -> Tensor:
    """The rows of codes (bytetx/ops/coded_rows.py) of a matrix [n, k]; k is whole groups.

    Codes of a GGUF file that rows of so many bits hold are kept as they are; numbers are rounded
    from those of the file, whatever the model's dtype. Check with `are_finite`.
    """
    stored = tensors.stored(name) if isinstance(tensors, Weights) else None
    if stored is None:
        whole = tensors.cast(torch.float32) if isinstance(tensors, Weights) else tensors
        n, k = whole[name].shape
        read = _slices(whole[name].detach())
    else:
        n, k = stored.shape
        read = _reader(stored)
    write: Callable[[range, Tensor], object]
    if (
        isinstance(stored, DecodedTensor)
        and stored.saved_rows
        and takes_blocks(stored.scheme, bits)
    ):
        saved_rows, scheme = stored.saved_rows, stored.scheme

        def write(rows: range, out: Tensor) -> object:
            return convert_rows(saved_rows(rows), scheme, k, bits, out=out)
    else:

        def write(rows: range, out: Tensor) -> object:
            x = read(rows)
            is_taken = x.dtype in (torch.float32, torch.bfloat16)
            return round_rows((x if is_taken else x.float()).contiguous(), bits, out=out)

    coded = empty_rows(n, k, bits)
    each = max(1, _PIECE // max(k, 1))
    for start in range(0, n, each):
        rows = range(start, min(start + each, n))
        write(rows, coded[rows.start : rows.stop])
    return coded


def _slices(tensor: Tensor) -> Callable[[range], Tensor]:
    return lambda rows: tensor[rows.start : rows.stop]


def _reader(stored: StoredTensor) -> Callable[[range], Tensor]:
    """Reads a range of rows as numbers in a floating dtype."""
    if not isinstance(stored, DecodedTensor):
        return lambda rows: stored.read(part=Part(0, (rows,)))
    return _slices(stored.read(torch.float32)) if stored.is_whole else stored.decode
