"""Reads saved tensors straight to a GPU, through two pinned buffers that are used again and again.

A tensor that is read into fresh memory costs a page fault every 4 KiB, and its copy from there to a
GPU goes through a pinned buffer of the driver. Here the file is read into pinned memory whose pages
are there already, and the copy of one buffer runs while the next one is read.
"""

import math
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from bytetx.checkpoint.saved_tensor import Part, SavedTensor, take_part
from bytetx.errors import CheckpointError

_BUFFER_BYTES = 32 << 20
_NUM_BUFFERS = 2
# Threads that share the reading of a buffer: one copies some 3 to 6 GB/s out of the page cache.
_NUM_THREADS = 4
_MIN_THREAD_BYTES = 1 << 20


class StagedReader:
    """Reads tensors of safetensors files onto one device, on the caller's stream.

    Its copies are ordered on the stream that is current when `read` is called; the tensors may be
    used there without a wait. One thread at a time.
    """

    def __init__(self, device: torch.device, *, buffer_bytes: int = _BUFFER_BYTES):
        """device: a GPU, or for tests the CPU.  buffer_bytes: of each buffer, pinned at once."""
        self.device = device
        is_cuda = device.type == "cuda"
        self._buffers = [
            _Buffer(torch.empty(buffer_bytes, dtype=torch.uint8, pin_memory=is_cuda))
            for _ in range(_NUM_BUFFERS)
        ]
        self._buffer_bytes = buffer_bytes
        self._next = 0
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="bytetx-read")

    def read(
        self, saved: SavedTensor, dtype: torch.dtype, *, part: Part | None = None
    ) -> torch.Tensor:
        """The tensor, or a part of it, in dtype on the device; cast there.

        Of rows, only those of the part are read; of columns, whole rows are.
        Raises CheckpointError where the file cannot be read or ends too early.
        """
        saved.require_floating()
        shape = list(saved.shape)
        if part is not None:
            shape[part.dim] = sum(map(len, part.ranges))
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        try:
            with saved.path.open("rb", buffering=0) as opened:
                file = opened.fileno()
                if part is not None and part.dim > 0:
                    self._read_inner(file, saved, tensor, part)
                else:
                    self._read_rows(file, saved, tensor.view(-1), part)
        except OSError as error:
            raise CheckpointError(
                f"{saved.path}: tensor {saved.name!r} cannot be read: {error}"
            ) from error
        return tensor

    def close(self) -> None:
        """Waits for the copies and gives the buffers back."""
        for buffer in self._buffers:
            buffer.wait()
        self._buffers.clear()
        self._threads.shutdown()

    def _read_rows(
        self, file: int, saved: SavedTensor, flat: torch.Tensor, part: Part | None
    ) -> None:
        row, itemsize = math.prod(saved.shape[1:]), saved.torch_dtype.itemsize
        rows = range(saved.shape[0] if saved.shape else 1)
        count = max(1, self._buffer_bytes // itemsize)
        for wanted in (rows,) if part is None else part.ranges:
            span, flat = flat[: len(wanted) * row], flat[len(wanted) * row :]
            offset = saved.offset + wanted.start * row * itemsize
            for piece in span.split(count):
                with self._filled(file, saved, offset, piece.numel()) as staged:
                    piece.copy_(self._on_device(staged, piece.dtype), non_blocking=True)
                offset += piece.numel() * itemsize

    def _read_inner(self, file: int, saved: SavedTensor, tensor: torch.Tensor, part: Part) -> None:
        row, itemsize = saved.shape[1:], saved.torch_dtype.itemsize
        width = math.prod(row)
        count = max(1, self._buffer_bytes // max(1, width * itemsize))
        offset = saved.offset
        for piece in tensor.split(count):
            with self._filled(file, saved, offset, len(piece) * width) as staged:
                rows = staged.to(self.device, non_blocking=True).view(len(piece), *row)
                piece.copy_(take_part(rows, part))
            offset += len(piece) * width * itemsize

    def _on_device(self, staged: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """staged where it is, if a copy of it needs no cast, which the device does faster."""
        if staged.dtype == dtype or self.device.type == "cpu":
            return staged
        return staged.to(self.device, non_blocking=True)

    def _filled(self, file: int, saved: SavedTensor, offset: int, count: int) -> "_Filled":
        """The next buffer with `count` elements from `offset` of the file."""
        num_bytes = count * saved.torch_dtype.itemsize
        buffer = self._buffers[self._next]
        if num_bytes > len(buffer.memory):  # one row that is wider than a buffer
            buffer.wait()
            buffer.memory = torch.empty(
                num_bytes, dtype=torch.uint8, pin_memory=buffer.memory.is_pinned()
            )
        self._next = (self._next + 1) % _NUM_BUFFERS
        buffer.wait()
        self._fill(file, saved, offset, buffer.memory[:num_bytes])
        return _Filled(buffer, buffer.memory[:num_bytes].view(saved.torch_dtype), self.device)

    def _fill(self, file: int, saved: SavedTensor, offset: int, memory: torch.Tensor) -> None:
        view = memoryview(memory.numpy().data)
        share = max(-(-len(view) // _NUM_THREADS), _MIN_THREAD_BYTES)
        starts = range(0, len(view), share)
        reads = [(view[at : at + share], offset + at) for at in starts]
        if len(reads) == 1:
            is_whole = [_read_at(file, *reads[0])]
        else:
            is_whole = list(self._threads.map(lambda read: _read_at(file, *read), reads))
        if not all(is_whole):
            raise CheckpointError(f"{saved.path} ends within tensor {saved.name!r}; save it again")


@dataclass
class _Buffer:
    """Memory, and the event after which the device has read it."""

    memory: torch.Tensor
    is_free: torch.cuda.Event | None = None

    def wait(self) -> None:
        if self.is_free is not None:
            self.is_free.synchronize()
            self.is_free = None


@dataclass
class _Filled:
    """A buffer's content; where the block ends, what was queued in it must end before its reuse."""

    buffer: _Buffer
    staged: torch.Tensor
    device: torch.device

    def __enter__(self) -> torch.Tensor:
        return self.staged

    def __exit__(self, *error: object) -> None:
        if self.device.type == "cuda":
            self.buffer.is_free = torch.cuda.Event()
            self.buffer.is_free.record(torch.cuda.current_stream(self.device))


def _read_at(file: int, view: memoryview, offset: int) -> bool:
    """Fills view from there; False where the file ends before."""
    while len(view):
        count = os.preadv(file, [view], offset)
        if count == 0:
            return False
        view, offset = view[count:], offset + count
    return True
