"""Tensors in files: where they lie, and how all of one or a part of it is read."""

import math
import mmap
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from io import BufferedReader
from pathlib import Path

import torch

from bytetx.errors import CheckpointError
from bytetx.ops.codes import Codes

# Of weights: the dtypes that safetensors names so.
FLOAT_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
# Of what quantised weights are computed from.
RAW_DTYPES = FLOAT_DTYPES | {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}

# Larger tensors are read into separate pages; for smaller ones, rounding up to pages costs more.
_MIN_MAPPED_BYTES = 1 << 20

# Elements that are read and cast at a time where the dtype changes.
_PIECE_NUMBERS = 1 << 20


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a tensor: ranges of one dim, concatenated."""

    dim: int
    ranges: tuple[range, ...]

    @property
    def end(self) -> int:
        return max(r.stop for r in self.ranges)


def take_part(tensor: torch.Tensor, part: Part) -> torch.Tensor:
    """The part of a tensor in memory, contiguous; a view where possible."""
    pieces = [tensor.narrow(part.dim, r.start, len(r)) for r in part.ranges]
    taken = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=part.dim)
    return taken.contiguous()


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """The position of one tensor: its file, its saved name, and its bytes from the file's start."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int

    @property
    def is_floating(self) -> bool:
        return self.dtype in FLOAT_DTYPES

    @property
    def torch_dtype(self) -> torch.dtype:
        return FLOAT_DTYPES[self.dtype]

    def require_floating(self) -> None:
        """Raises CheckpointError for a dtype that weights cannot have."""
        if self.dtype not in FLOAT_DTYPES:
            raise CheckpointError(
                f"{self.path}: tensor {self.name!r} has dtype {self.dtype}, weights must be one "
                f"of {', '.join(FLOAT_DTYPES)}"
            )

    def at(self, index: int) -> "SavedTensor":
        """One of the tensors that this one stacks along its first dim."""
        num_bytes = self.num_bytes // self.shape[0]
        offset = self.offset + index * num_bytes
        return replace(self, shape=self.shape[1:], offset=offset, num_bytes=num_bytes)

    def read(self, dtype: torch.dtype | None = None, *, part: Part | None = None) -> torch.Tensor:
        """A copy of the tensor in memory, cast to dtype (None: as saved) in pieces.

        part: the part to read, inside its shape.
        The file is not mapped: its pages would stay in memory next to the prepacked copies, and
        truncating the file would kill the process.
        """
        self.require_floating()
        shape = list(self.shape)
        if part is not None:
            shape[part.dim] = sum(map(len, part.ranges))
        tensor = self._allocated(tuple(shape), dtype or FLOAT_DTYPES[self.dtype])
        try:
            with self.path.open("rb") as file:
                if part is not None and part.dim > 0:
                    self._read_inner(file, tensor, part)
                else:
                    self._read_rows(file, tensor, part)
        except OSError as error:
            raise self._unreadable(error) from error
        return tensor

    def read_raw(self, rows: range | None = None) -> torch.Tensor:
        """A copy in the saved dtype, integers and 8-bit floats included.

        rows: those of dim 0 to read; None are all.
        """
        shape, offset = self.shape, self.offset
        if rows is not None:
            offset += self.num_bytes // self.shape[0] * rows.start
            shape = (len(rows), *self.shape[1:])
        tensor = self._allocated(shape, RAW_DTYPES[self.dtype])
        try:
            with self.path.open("rb") as file:
                file.seek(offset)
                self._fill(file, tensor)
        except OSError as error:
            raise self._unreadable(error) from error
        return tensor

    def _allocated(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        try:
            return _allocate(shape, dtype)
        except (MemoryError, OSError, OverflowError, RuntimeError) as error:
            raise CheckpointError(
                f"{self.path}: there is no memory for tensor {self.name!r} "
                f"({math.prod(shape) * dtype.itemsize:,} bytes): {error}"
            ) from error

    def _unreadable(self, error: OSError) -> CheckpointError:
        return CheckpointError(f"{self.path}: tensor {self.name!r} cannot be read: {error}")

    def _read_rows(self, file: BufferedReader, tensor: torch.Tensor, part: Part | None) -> None:
        row = math.prod(self.shape[1:])
        rows = range(self.shape[0] if self.shape else 1)
        flat = tensor.view(-1)
        for wanted in (rows,) if part is None else part.ranges:
            span, flat = flat[: len(wanted) * row], flat[len(wanted) * row :]
            file.seek(self.offset + wanted.start * row * FLOAT_DTYPES[self.dtype].itemsize)
            if tensor.dtype == FLOAT_DTYPES[self.dtype]:
                self._fill(file, span)
                continue
            for piece in span.split(_PIECE_NUMBERS):
                piece.copy_(self._staged(file, piece.shape))

    def _read_inner(self, file: BufferedReader, tensor: torch.Tensor, part: Part) -> None:
        """Reads full rows in pieces, because a row's part may be smaller than a disk block."""
        file.seek(self.offset)
        row = self.shape[1:]
        for piece in tensor.split(max(1, _PIECE_NUMBERS // max(1, math.prod(row)))):
            piece.copy_(take_part(self._staged(file, (len(piece), *row)), part))

    def _staged(self, file: BufferedReader, shape: tuple[int, ...]) -> torch.Tensor:
        staged = torch.empty(shape, dtype=FLOAT_DTYPES[self.dtype])
        self._fill(file, staged)
        return staged

    def _fill(self, file: BufferedReader, tensor: torch.Tensor) -> None:
        if file.readinto(tensor.view(-1).view(torch.uint8).numpy().data) != tensor.nbytes:
            raise CheckpointError(f"{self.path} ends within tensor {self.name!r}; save it again")


@dataclass(frozen=True, slots=True)
class SavedCodes:
    """A weight [n, k] that is saved as codes, before they are read.

    bits: of a code, 2 to 8.  group: features that share a scale.
    has_zeros: groups have zero points of their own.  has_least: they have least values.
    read: (rows, the device to unpack them on) -> their codes; None where features are in groups
    that no order of them makes neighbours.
    """

    bits: int
    group: int
    read: Callable[[range, torch.device], Codes | None]
    has_zeros: bool = False
    has_least: bool = False


@dataclass(frozen=True, slots=True)
class DecodedTensor:
    """A weight whose numbers are computed from what is saved, a piece of its rows at a time.

    scheme: the format of what is saved, for people, such as "Q4_K" or "GPTQ 4-bit".
    raw: what is saved, by its role in the scheme; a kernel that computes with codes reads them.
    torch_dtype: the dtype to use where the caller names none.
    decode: of a range of rows (indices of dim 0) -> their numbers, in any floating dtype.
    is_whole: whether some rows cost as much as all of them.
    saved_rows: of a range of rows -> their bytes in the scheme's format, uint8 [rows, bytes]; None
    where a row of the weight is no row of what is saved.
    codes: of a matrix whose numbers are those of Codes; None for others.
    """

    path: Path
    name: str
    shape: tuple[int, ...]
    scheme: str
    raw: Mapping[str, SavedTensor]
    torch_dtype: torch.dtype
    decode: Callable[[range], torch.Tensor]
    is_whole: bool = False
    saved_rows: Callable[[range], torch.Tensor] | None = None
    codes: SavedCodes | None = None

    @property
    def num_bytes(self) -> int:
        return sum(saved.num_bytes for saved in self.raw.values())

    @property
    def is_floating(self) -> bool:
        return True

    def read(self, dtype: torch.dtype | None = None, *, part: Part | None = None) -> torch.Tensor:
        """The numbers in memory, cast to dtype in pieces; part: as of SavedTensor.read."""
        shape = list(self.shape)
        if part is not None:
            shape[part.dim] = sum(map(len, part.ranges))
        some = next(iter(self.raw.values()))
        tensor = some._allocated(tuple(shape), dtype or self.torch_dtype)
        if self.is_whole:
            values = self.decode(range(self.shape[0]))
            return tensor.copy_(values if part is None else take_part(values, part))
        each = max(1, _PIECE_NUMBERS // max(math.prod(self.shape[1:]), 1))
        place = 0
        for wanted in (range(self.shape[0]),) if part is None or part.dim else part.ranges:
            for start in range(wanted.start, wanted.stop, each):
                values = self.decode(range(start, min(start + each, wanted.stop)))
                if part is not None and part.dim:
                    values = take_part(values, part)
                tensor[place : place + len(values)] = values
                place += len(values)
        return tensor


@dataclass(frozen=True, slots=True)
class LoadedTensor:
    """A tensor of a state_dict that is in memory.  name: in its file."""

    path: Path
    name: str
    tensor: torch.Tensor
    scheme = "torch.save"

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def torch_dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def num_bytes(self) -> int:
        return self.tensor.nbytes

    @property
    def is_floating(self) -> bool:
        return self.tensor.is_floating_point()

    def read(self, dtype: torch.dtype | None = None, *, part: Part | None = None) -> torch.Tensor:
        """The numbers, cast to dtype; part: as of SavedTensor.read."""
        tensor = self.tensor if part is None else take_part(self.tensor, part)
        return tensor.to(dtype or tensor.dtype, copy=True).contiguous()


StoredTensor = SavedTensor | DecodedTensor | LoadedTensor


def _allocate(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Uninitialised memory; that of a large tensor returns to the system when it is freed.

    On the heap, freed tensors leave holes between the prepacked copies: 115 MiB for the 418 MiB of
    a BERT-base, with glibc. Private pages may be huge ones (shared ones, mmap's default, may not):
    reading 300 MB into them takes 0.09 s in place of 0.20 s on a Sapphire Rapids core.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < _MIN_MAPPED_BYTES:
        return torch.empty(shape, dtype=dtype)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
