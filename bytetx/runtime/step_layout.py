"""StepLayout: a step's arrays in one int32 block, so that one copy moves all of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

_ALIGNMENT = 4  # int32s: every array starts at a multiple of 16 bytes


@dataclass(frozen=True, slots=True)
class BlockField:
    """One int32 array of a step. shape: its room in the block, one or two dimensions."""

    name: str
    shape: tuple[int, ...]


class StepLayout:
    """The offsets of declared fields in a block of `num_ints` int32s, in the order given."""

    def __init__(self, fields: Sequence[BlockField]):
        self._fields: dict[str, tuple[int, int, tuple[int, ...]]] = {}
        end = 0
        for field in fields:
            start = aligned(end)
            end = start + int(np.prod(field.shape))
            self._fields[field.name] = (start, end, field.shape)
        self.num_ints = end

    def write(
        self,
        block: np.ndarray,
        arrays: Mapping[str, np.ndarray],
        *,
        fillers: Mapping[str, int] | None = None,
    ) -> None:
        """Copies arrays into a host block; the rows after an array's own get the field's filler.

        arrays: int32, one for each field, at most as large as the field.  fillers: by field name, 0
        by default.  Columns of a two-dimensional field beyond those of its array are not written.
        """
        for name in self._fields:
            filler = 0 if fillers is None else fillers.get(name, 0)
            self.write_array(block, name, arrays[name], filler=filler)

    def write_array(
        self, block: np.ndarray, name: str, array: np.ndarray, *, filler: int = 0
    ) -> None:
        """`write` of one field."""
        (start, end, shape), num_rows = self._fields[name], len(array)
        if array.ndim == 1:
            block[start : start + num_rows] = array
            block[start + num_rows : end] = filler
        else:
            target = block[start:end].reshape(shape)
            target[:num_rows, : array.shape[1]] = array
            target[num_rows:] = filler

    def start(self, name: str) -> int:
        """Where a field begins in the block; -1 where there is no such field."""
        return self._fields[name][0] if name in self._fields else -1

    def views(self, block: torch.Tensor) -> dict[str, torch.Tensor]:
        """Each field of a device block, as a view of its shape."""
        return {
            name: block[start:end].view(shape) for name, (start, end, shape) in self._fields.items()
        }


def aligned(num_ints: int) -> int:
    """The next offset, in int32s, at which an array of a block may start."""
    return -(-num_ints // _ALIGNMENT) * _ALIGNMENT
