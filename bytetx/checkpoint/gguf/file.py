"""The container: metadata and the positions of tensors, each length checked against the file."""

import math
import re
import struct
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

from bytetx.checkpoint.gguf.formats import FORMATS, Format
from bytetx.checkpoint.side_files import Field
from bytetx.errors import CheckpointError

GGUF_SUFFIX = ".gguf"

_VERSIONS = (2, 3)  # 1 counted in 32 bits, and no file in use has it
# The largest vocabularies in use have 300 000 tokens and merges, some 15 MiB.
_MAX_HEADER_BYTES = 1 << 29
_MAX_FIELDS = 1 << 16
_MAX_TENSORS = 1 << 18
_MAX_DIMS = 4  # ggml has no more
_MAX_SPLITS = 4096
_FIRST_READ_BYTES = 1 << 24

_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")
_COUNT = struct.Struct("<I")

_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor: its numbers' shape and format, and its bytes from the file's start."""

    path: Path
    name: str
    shape: tuple[int, ...]
    format: Format
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """One file, or the files of one model that was split."""

    path: Path
    fields: dict[str, Any]
    tensors: dict[str, GgufTensor]

    def get(self, key: str, field: Field) -> Any:
        """A field of the metadata; None where it is absent. CheckpointError for another value."""
        value = self.fields.get(key)
        if value is not None and not field.accepts(value):
            raise CheckpointError(
                f"{self.path}: metadata {key} must be {field.needs}, got {value!r:.120}"
            )
        return value

    def need(self, key: str, field: Field) -> Any:
        """As get; CheckpointError where it is absent, too."""
        value = self.get(key, field)
        if value is None:
            raise CheckpointError(
                f"{self.path} lacks {key} in its metadata; convert the model again with a newer "
                "llama.cpp"
            )
        return value


def gguf_of(names: list[str]) -> list[str]:
    """The GGUF files among the names of a folder's files, one for each model of several files."""
    found = sorted(name for name in names if "/" not in name and name.lower().endswith(GGUF_SUFFIX))
    firsts: dict[str, str] = {}
    for name in found:
        stem, _, count = name.removesuffix(GGUF_SUFFIX).rpartition("-of-")
        is_split = count.isdigit() and stem[-6:-5] == "-" and stem[-5:].isdigit()
        firsts.setdefault(f"{stem[:-6]} of {count}" if is_split else name, name)
    return list(firsts.values())


def split_files(path: Path) -> list[Path]:
    """All files of the model that `path` is a part of; itself alone where it was not split.

    Raises CheckpointError where some are not there.
    """
    match = _SPLIT.fullmatch(path.name)
    if match is None:
        return [path]
    stem, count = match[1], int(match[3])
    if not 1 <= int(match[2]) <= count <= _MAX_SPLITS:
        raise CheckpointError(
            f"{path}: the name says part {int(match[2])} of {count}, which cannot be; give the "
            "file the name that it was downloaded by"
        )
    paths = [path.with_name(f"{stem}-{n:05d}-of-{count:05d}.gguf") for n in range(1, count + 1)]
    missing = [part.name for part in paths if not part.is_file()]
    if missing:
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        raise CheckpointError(
            f"{path} is one of {count} files of a model, and {', '.join(missing[:8])}{more} are "
            "not beside it; download them all"
        )
    return paths


def read_gguf(paths: list[Path]) -> GgufFile:
    """The metadata and tensors of one model's files; nothing of the tensors' bytes is read.

    The metadata is that of the first file. Raises CheckpointError that names the file where one is
    damaged, cut off, of another version, or holds a tensor that another one holds as well.
    """
    first: GgufFile | None = None
    for path in paths:
        file = _read_file(path)
        if first is None:
            first = file
            continue
        for name, tensor in file.tensors.items():
            if name in first.tensors:
                raise CheckpointError(
                    f"tensor {name!r:.120} is in {first.tensors[name].path} and in {path}"
                )
            first.tensors[name] = tensor
    assert first is not None
    wanted = first.fields.get("split.count", len(paths))
    if wanted not in (0, len(paths)):
        raise CheckpointError(
            f"{first.path} is the first of {wanted!r:.20} files, and {len(paths)} are here; give "
            "the files the names that they were downloaded by, all in one folder"
        )
    return first


def _read_file(path: Path) -> GgufFile:
    try:
        with path.open("rb") as file:
            return _parse(path, file)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _parse(path: Path, file: BufferedReader) -> GgufFile:
    file_bytes = path.stat().st_size
    size = _FIRST_READ_BYTES
    while True:
        file.seek(0)
        raw = file.read(size)
        try:
            return _Parser(path, raw, file_bytes).file()
        except struct.error as error:
            if len(raw) >= file_bytes:
                raise _cut_off(path, file_bytes, "its header goes on") from error
            if size >= _MAX_HEADER_BYTES:
                raise _damaged(path, f"a header of more than {size >> 20} MiB") from error
        size *= 4


class _Parser:
    """Reads one header; struct.error where it goes beyond the bytes at hand."""

    def __init__(self, path: Path, raw: bytes, file_bytes: int):
        self.path, self.raw, self.file_bytes, self.at = path, raw, file_bytes, 0

    def file(self) -> GgufFile:
        self._check_start()
        num_tensors, num_fields = self._number(_LENGTH), self._number(_LENGTH)
        if num_fields > _MAX_FIELDS or num_tensors > _MAX_TENSORS:
            raise _damaged(self.path, f"{num_tensors:,} tensors and {num_fields:,} fields")
        fields: dict[str, Any] = {}
        for _ in range(num_fields):
            key = self._text()
            if key in fields:
                raise _damaged(self.path, f"metadata {key!r:.120} is there twice")
            fields[key] = self._value(self._number(_COUNT))
        alignment = fields.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= 1 << 16 or alignment % 8:
            raise _damaged(self.path, f"general.alignment {alignment!r:.40}")
        entries = [self._entry() for _ in range(num_tensors)]
        start = -(-self.at // alignment) * alignment
        return GgufFile(self.path, fields, self._tensors(entries, start, alignment))

    def _check_start(self) -> None:
        magic = self.raw[:4]
        if self.raw[:8] == b"version ":
            raise CheckpointError(
                f"{self.path} is a Git LFS pointer, not the weights; run `git lfs pull` there"
            )
        if magic != b"GGUF":
            raise CheckpointError(
                f"{self.path} is no GGUF file (it begins with {magic!r}); download it again"
            )
        self.at = 4
        version = self._number(_COUNT)
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            kind = "big-endian" if swapped in _VERSIONS else f"of version {version}"
            raise CheckpointError(
                f"{self.path} is a GGUF file {kind}, and bytetx reads little-endian ones of "
                f"version {' and '.join(map(str, _VERSIONS))}; convert the model again with a "
                "newer llama.cpp"
            )

    def _number(self, kind: struct.Struct) -> Any:
        (value,) = kind.unpack_from(self.raw, self.at)
        self.at += kind.size
        return value

    def _text(self) -> str:
        (length,) = _LENGTH.unpack_from(self.raw, self.at)
        begin = self.at + 8
        if length > self.file_bytes:
            raise _damaged(self.path, f"a text of {length:,} bytes")
        if begin + length > len(self.raw):
            raise struct.error
        self.at = begin + length
        try:
            return self.raw[begin : self.at].decode("utf-8")
        except UnicodeDecodeError as error:
            raise _damaged(self.path, f"a text that is not UTF-8: {error}") from error

    def _texts(self, count: int) -> list[str]:
        """An array of texts, which may be a vocabulary: as _text, in one loop."""
        raw, at, most, length_at = self.raw, self.at, len(self.raw), _LENGTH.unpack_from
        found = []
        for _ in range(count):
            (length,) = length_at(raw, at)
            begin = at + 8
            at = begin + length
            if at > most:
                break
            found.append(raw[begin:at])
        if len(found) < count:
            self.at = begin - 8
            self._text()  # says what is wrong
        self.at = at
        try:
            return [text.decode() for text in found]
        except UnicodeDecodeError as error:
            raise _damaged(self.path, f"a text that is not UTF-8: {error}") from error

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind == _STRING:
            return self._text()
        if kind != _ARRAY:
            raise _damaged(self.path, f"metadata of type {kind}")
        kind, count = self._number(_COUNT), self._number(_LENGTH)
        if count > self.file_bytes:
            raise _damaged(self.path, f"an array of {count:,}")
        if kind == _STRING:
            return self._texts(count)
        if kind not in _SCALARS:
            raise _damaged(self.path, f"an array of type {kind}")
        num_bytes = count * _SCALARS[kind].size
        if self.at + num_bytes > len(self.raw):
            raise struct.error
        values = struct.unpack_from(f"<{count}{_SCALARS[kind].format[1:]}", self.raw, self.at)
        self.at += num_bytes
        return list(values)

    def _entry(self) -> tuple[str, tuple[int, ...], int, int]:
        """(name, shape, format, offset); dims are saved with the fastest first."""
        name, num_dims = self._text(), self._number(_COUNT)
        if num_dims > _MAX_DIMS:
            raise _damaged(self.path, f"tensor {name!r:.120} has {num_dims} dims")
        dims = [self._number(_LENGTH) for _ in range(num_dims)]
        return name, tuple(reversed(dims)), self._number(_COUNT), self._number(_LENGTH)

    def _tensors(
        self, entries: list[tuple[str, tuple[int, ...], int, int]], start: int, alignment: int
    ) -> dict[str, GgufTensor]:
        """Each tensor must begin where the one before it ends, as the format asks for."""
        tensors: dict[str, GgufTensor] = {}
        end = 0
        for name, shape, kind, offset in entries:
            if name in tensors:
                raise _damaged(self.path, f"tensor {name!r:.120} is there twice")
            if offset != end:
                raise _damaged(self.path, f"tensor {name!r:.120} is at {offset}, not at {end}")
            tensor = self._tensor(name, shape, kind, start + offset)
            tensors[name] = tensor
            last = offset + tensor.num_bytes
            if start + last > self.file_bytes:
                raise _cut_off(self.path, self.file_bytes, f"tensor {name!r:.120} ends later")
            end = -(-last // alignment) * alignment
        return tensors

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
        found = FORMATS.get(kind)
        if found is None:
            raise CheckpointError(
                f"{self.path}: tensor {name!r:.120} is of ggml's format number {kind}, which "
                f"bytetx does not know; known: {', '.join(one.name for one in FORMATS.values())}"
            )
        if not found.is_plain and (not shape or shape[-1] % found.numbers):
            raise _damaged(
                self.path,
                f"tensor {name!r:.120} of shape {shape} in {found.name}, whose blocks have "
                f"{found.numbers} numbers",
            )
        num_bytes = math.prod(shape) // found.numbers * found.num_bytes
        return GgufTensor(self.path, name, shape, found, offset, num_bytes)


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path} is a damaged GGUF file ({what}); download it again")


def _cut_off(path: Path, file_bytes: int, what: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is cut off after {file_bytes:,} bytes ({what}); download it again"
    )
