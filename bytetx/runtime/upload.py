"""Uploader: many small host arrays to the device in one copy, without a wait for it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from bytetx.runtime.pinned_buffers import PinnedRing
from bytetx.runtime.step_layout import aligned

_TORCH = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
}


Upload = Callable[..., list[torch.Tensor]]  # Uploader.upload


class Uploader:
    """Arrays of int32, int64 and float32 -> tensors."""

    def __init__(self, device: torch.device):
        self._device = device
        self._ring = PinnedRing() if device.type == "cuda" else None

    def upload(self, *arrays: np.ndarray) -> list[torch.Tensor]:
        """One tensor an array, of its shape and dtype, with the values that it has now."""
        if self._ring is None:
            return [torch.from_numpy(array.copy()) for array in arrays]
        parts, num_ints = _parts(arrays)
        pinned = self._ring.take(num_ints)
        for part, array in zip(parts, arrays, strict=True):
            pinned.array[part.first : part.end].view(array.dtype)[:] = array.reshape(-1)
        block = pinned.tensor[:num_ints].to(self._device, non_blocking=True)
        pinned.is_free = torch.cuda.Event()
        pinned.is_free.record()
        return [
            block[part.first : part.end].view(_TORCH[array.dtype]).view(array.shape)
            for part, array in zip(parts, arrays, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class _UploadedArray:
    """Where an array lies in the block, in int32s."""

    first: int
    end: int


def _parts(arrays: Sequence[np.ndarray]) -> tuple[list[_UploadedArray], int]:
    """Each array's part of the buffer, and the int32s of all."""
    parts, end = [], 0
    for array in arrays:
        first = aligned(end)
        end = first + array.nbytes // 4
        parts.append(_UploadedArray(first, end))
    return parts, max(end, 1)
