"""Weight files of a checkpoint, read tensor by tensor, with or without the model's prefix."""

import copy
import json
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from bytetx.checkpoint.files import GLINER, GLINER2, PICKLED
from bytetx.checkpoint.gguf.file import GGUF_SUFFIX, read_gguf
from bytetx.checkpoint.gguf.tensors import named_tensors
from bytetx.checkpoint.pickled import read_pickled
from bytetx.checkpoint.quantized_tensors import decode_quantized
from bytetx.checkpoint.saved_tensor import (
    RAW_DTYPES,
    LoadedTensor,
    Part,
    SavedTensor,
    StoredTensor,
    take_part,
)
from bytetx.checkpoint.side_files import MAX_INDEX_BYTES, PATH, TABLE, read_json
from bytetx.checkpoint.spec import ModelSpec
from bytetx.checkpoint.static_table import as_floats
from bytetx.checkpoint.weight_changes import Change
from bytetx.errors import CheckpointError

logger = logging.getLogger("bytetx")

# The format's own limit: a longer header is a damaged length, not a list of tensors.
_MAX_HEADER_BYTES = 100_000_000

# The largest models in use, whose experts are tensors of their own, have some 150 000.
_MAX_TENSORS = 1 << 18
# Those with the most shards have some 200.
_MAX_SHARDS = 4096
_MAX_DIMS = 16  # weights have 4 at most

_INDEX = "model.safetensors.index.json"

# Layer norms of checkpoints converted from TensorFlow carry their old parameter names.
# A weight beside the adapters of Jina embeddings v3's tasks carries that of torch's parametrize.
_OLD_NAMES = (
    (".gamma", ".weight"),
    (".beta", ".bias"),
    (".parametrizations.weight.original", ".weight"),
)


class TensorReader(Protocol):
    """A reader of saved tensors, such as StagedReader onto a GPU."""

    def read(
        self, saved: SavedTensor, dtype: torch.dtype, *, part: Part | None = None
    ) -> torch.Tensor: ...


class Weights(Mapping[str, torch.Tensor]):
    """Tensors of a checkpoint by canonical name: the base model's without prefix, heads as saved.

    Opening reads the headers only; each look-up reads one tensor from its file, and no file stays
    open.  `used` and `unused()` list the tensors that a model read and did not read.
    """

    def __init__(
        self,
        folder: Path,
        spec: ModelSpec,
        *,
        beside: Sequence[str] = (),
        on_tensor: Callable[[], None] | None = None,
    ):
        """Raises CheckpointError for files that are absent, damaged or contradict each other.

        beside: names of more files, which hold what is not the model's own.
        on_tensor: called before each tensor is read; what it raises ends the reading.
        """
        paths, more = weight_files(folder, spec), [folder / name for name in beside]
        self._saved: Mapping[str, StoredTensor]
        if paths[0].name == PICKLED:
            tensors = read_pickled(paths[0], safe_name="model.safetensors")
            self._saved = {
                canonical_name(name, spec.prefixes): LoadedTensor(paths[0], name, tensor)
                for name, tensor in tensors.items()
            }
        elif paths[0].suffix == GGUF_SUFFIX:
            self._saved = {**named_tensors(read_gguf(paths), spec), **_safetensors(more, spec)}
        elif not spec.num_layers:
            self._saved = as_floats(_safetensors(paths, spec))
        else:
            found = _safetensors([*paths, *more], spec)
            _check_index(folder, {tensor.name for tensor in found.values()})
            is_transposed = spec.layer_spec.weight_layout == "conv1d"
            self._saved = decode_quantized(found, spec.quantization, is_transposed=is_transposed)
        self.used: set[str] = set()
        self._prefix = ""
        # Formats of tensors that were asked for as codes and are read as numbers, and why.
        self.dequantised: dict[str, str] = {}
        self._added: Mapping[str, Sequence[Change]] = {}
        self._dtype: torch.dtype | None = None
        self._on_tensor = on_tensor
        self._reader: TensorReader | None = None
        self._has_numbers = True

    def cast(self, dtype: torch.dtype) -> "Weights":
        """These tensors in another dtype, cast while they are read; `used` is shared."""
        other = copy.copy(self)
        other._dtype = dtype
        return other

    def read_by(self, reader: TensorReader) -> "Weights":
        """These tensors, read by `reader` to where it puts them; `used` is shared.

        Those that something is added to are read on the host, as without it.
        """
        other = copy.copy(self)
        other._reader = reader
        return other

    def without_numbers(self) -> "Weights":
        """These tensors on torch's meta device, known by headers alone; `used` is shared."""
        other = copy.copy(self)
        other._has_numbers = False
        return other

    def below(self, prefix: str) -> "Weights":
        """The tensors whose names begin with `prefix`, without it; `used` is shared and has it."""
        other = copy.copy(self)
        other._saved = {
            name.removeprefix(prefix): tensor
            for name, tensor in self._saved.items()
            if name.startswith(prefix)
        }
        other._added, other._prefix = {}, self._prefix + prefix
        return other

    def change(
        self, added: Mapping[str, Sequence[Change]], replaced: Mapping[str, SavedTensor]
    ) -> None:
        """Adds to tensors, or replaces them, when they are read; shapes and names must be theirs.

        A tensor that is added to is read in f32, and cast with what is added to it.
        """
        other = self.changed(added, replaced)
        self._added, self._saved = other._added, other._saved

    def changed(
        self,
        added: Mapping[str, Sequence[Change]],
        replaced: Mapping[str, SavedTensor] | None = None,
    ) -> "Weights":
        """These tensors with some replaced and more added to some; `used` is shared."""
        other, replaced = copy.copy(self), replaced or {}
        other._saved = {**self._saved, **replaced}
        kept = {name: own for name, own in self._added.items() if name not in replaced}
        more = {name: (*kept.get(name, ()), *changes) for name, changes in added.items()}
        other._added = {**kept, **more}
        return other

    def saved(self, name: str) -> SavedTensor:
        """Where a tensor is saved; it then counts as used. CheckpointError for a quantised one."""
        self.used.add(self._prefix + name)
        saved = self._saved[name]
        if not isinstance(saved, SavedTensor):
            raise CheckpointError(
                f"{saved.path}: tensor {saved.name!r} is quantised ({saved.scheme}), and what is "
                "added to weights must be floats; give the adapters as they were trained"
            )
        return saved

    def stored(self, name: str) -> StoredTensor | None:
        """How a tensor is stored; it then counts as used.  None where something is added to it."""
        if self._on_tensor is not None:
            self._on_tensor()
        self.used.add(self._prefix + name)
        return None if name in self._added else self._saved[name]

    def all_stored(self) -> Iterable[StoredTensor]:
        """How all tensors are stored that nothing is added to; none counts as used."""
        return [one for name, one in self._saved.items() if name not in self._added]

    def saved_name(self, name: str) -> str:
        """The name of a tensor in its file."""
        return self._saved[name].name

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._saved:
            raise KeyError(name)
        return self._read(name, None)

    def shape(self, name: str) -> tuple[int, ...]:
        """As saved; known without reading the tensor."""
        return self._saved[name].shape

    def read(self, name: str, part: Part) -> torch.Tensor:
        """A part of a tensor, inside its shape; only the part is allocated."""
        return self._read(name, part)

    def _read(self, name: str, part: Part | None) -> torch.Tensor:
        if self._on_tensor is not None:
            self._on_tensor()
        self.used.add(self._prefix + name)
        saved, added = self._saved[name], self._added.get(name)
        if not self._has_numbers:
            if isinstance(saved, SavedTensor):
                saved.require_floating()
            whole = torch.empty(saved.shape, dtype=self._dtype or saved.torch_dtype, device="meta")
            return whole if part is None else take_part(whole, part)
        if added is None and self._reader is not None and isinstance(saved, SavedTensor):
            return self._reader.read(saved, self._dtype or saved.torch_dtype, part=part)
        if added is None:
            return saved.read(self._dtype, part=part)
        needed = None if any(change.needs_all for change in added) else part
        tensor = saved.read(torch.float32, part=needed)
        for change in added:
            change.apply_to(tensor, needed)
        if needed is None and part is not None:
            tensor = take_part(tensor, part)
        return tensor.to(self._dtype or saved.torch_dtype)

    def __contains__(self, name: object) -> bool:
        return name in self._saved

    def __iter__(self) -> Iterator[str]:
        return iter(self._saved)

    def __len__(self) -> int:
        return len(self._saved)

    def unused(self) -> list[str]:
        """Saved names that nothing has read, sorted."""
        return sorted(
            tensor.name
            for name, tensor in self._saved.items()
            if self._prefix + name not in self.used
        )

    @property
    def num_parameters(self) -> int:
        """Elements of all floating tensors, without position ids, which old versions saved."""
        return sum(math.prod(t.shape) for t in self._saved.values() if t.is_floating)

    @property
    def dtype(self) -> torch.dtype:
        """The floating dtype that most of the checkpoint's numbers have; f32 where it has none."""
        counts: Counter[torch.dtype] = Counter()
        for tensor in self._saved.values():
            if tensor.is_floating:
                counts[tensor.torch_dtype] += math.prod(tensor.shape) * tensor.torch_dtype.itemsize
        return counts.most_common(1)[0][0] if counts.total() else torch.float32

    @property
    def formats(self) -> dict[str, int]:
        """Bytes that are saved in each format: dtypes of safetensors, and those of quantisers."""
        found: Counter[str] = Counter()
        for tensor in self._saved.values():
            if tensor.is_floating:
                format_name = tensor.dtype if isinstance(tensor, SavedTensor) else tensor.scheme
                found[format_name] += tensor.num_bytes
        return dict(found.most_common())


def _safetensors(paths: list[Path], spec: ModelSpec) -> dict[str, SavedTensor]:
    """The tensors of safetensors files by canonical name."""
    found: dict[str, SavedTensor] = {}
    num_tensors = 0
    for path in paths:
        header = read_header(path)
        num_tensors += len(header)
        if num_tensors > _MAX_TENSORS:
            raise _too_many_tensors(path)
        for tensor in header:
            name = canonical_name(tensor.name, spec.prefixes)
            if other := found.get(name):
                raise CheckpointError(
                    f"tensor {name!r} is saved twice: as {other.name!r} in {other.path} and "
                    f"as {tensor.name!r} in {tensor.path}"
                )
            found[name] = tensor
    return found


def read_header(path: Path) -> list[SavedTensor]:
    """The tensors of one safetensors file, in the header's order; reads the header only.

    Trusts nothing: every length, offset and shape is checked against the size of the file.
    Raises CheckpointError naming the file and, where there is one, the tensor.
    """
    raw, file_bytes = _header_bytes(path)
    # Before they are parsed, which takes a minute for a million.
    if raw.count(b'"data_offsets"') > _MAX_TENSORS:
        raise _too_many_tensors(path)
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_table_of_tensors)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"header: {error}") from error
    if not isinstance(header, dict):
        raise _damaged(path, f"header is a {type(header).__name__}, not a table of tensors")
    header.pop("__metadata__", None)
    if len(header) > _MAX_TENSORS:
        raise _too_many_tensors(path)
    data_start = 8 + len(raw)
    tensors = [_saved_tensor(path, name, entry, data_start) for name, entry in header.items()]
    needed = _check_layout(path, tensors, data_start)
    if needed != file_bytes:
        raise _damaged(path, f"{file_bytes} bytes, its header describes {needed}")
    return tensors


def _table_of_tensors(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object of a header. A name that is there twice is refused, even with equal entries."""
    table = dict(pairs)
    if len(table) != len(pairs):
        name, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"{name!r:.120} is described twice")
    return table


def _check_layout(path: Path, tensors: list[SavedTensor], data_start: int) -> int:
    """Where the last tensor ends. CheckpointError unless each begins where one before it ends, as
    the format asks for: bytes of two tensors, or of none, can only be a damaged header."""
    end, last = data_start, "the header"
    for tensor in sorted(tensors, key=lambda t: (t.offset, t.num_bytes)):
        if tensor.offset != end:
            how = "overlaps" if tensor.offset < end else "leaves a gap behind"
            raise _damaged(path, f"tensor {tensor.name!r} {how} {last}")
        end, last = end + tensor.num_bytes, f"tensor {tensor.name!r}"
    return end


def _header_bytes(path: Path) -> tuple[bytes, int]:
    """(the JSON header: its length is the file's first 8 bytes, the file's size in bytes)"""
    try:
        file_bytes = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            if start == b"version ":
                raise CheckpointError(
                    f"{path} is a Git LFS pointer, not the weights; run `git lfs pull` there"
                )
            header_bytes = int.from_bytes(start, "little")
            if len(start) < 8 or header_bytes > min(file_bytes - 8, _MAX_HEADER_BYTES):
                raise _damaged(path, f"{file_bytes} bytes, with a header of {header_bytes}")
            return file.read(header_bytes), file_bytes
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _saved_tensor(path: Path, name: str, entry: Any, data_start: int) -> SavedTensor:
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(begin), int(end)]} if (
            len(shape) <= _MAX_DIMS
            and all(type(size) is int and size >= 0 for size in shape)
            and type(begin) is type(end) is int
            and 0 <= begin <= end
        ):
            num_bytes = end - begin
        case _:
            raise _damaged(path, f"tensor {name!r} is described as {entry!r:.120}")
    if dtype in RAW_DTYPES and num_bytes != math.prod(shape) * RAW_DTYPES[dtype].itemsize:
        raise _damaged(path, f"tensor {name!r}: {num_bytes} bytes are no {dtype} {shape!r:.80}")
    return SavedTensor(path, name, dtype, tuple(shape), data_start + begin, num_bytes)


def _too_many_tensors(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} brings the checkpoint to more than {_MAX_TENSORS:,} tensors, and the largest "
        "models have some 150,000; it is damaged, or made to stop its readers: download it again"
    )


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is not a complete safetensors file ({what}); download or save it again"
    )


def canonical_name(saved: str, prefixes: Iterable[str]) -> str:
    """A tensor's name in `Weights` from the one that it has in a model or its file.

    prefixes: of the base model's tensors; the longest that fits is left out.
    """
    longest = max((prefix for prefix in prefixes if saved.startswith(prefix)), key=len, default="")
    name = saved.removeprefix(longest)
    for old, new in _OLD_NAMES:
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name


def weight_files(folder: Path, spec: ModelSpec) -> list[Path]:
    """The files of a checkpoint's weights: model.safetensors, else those that the index names, else
    those of a GGUF model.

    Raises CheckpointError where there are none.
    """
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    if not (folder / _INDEX).is_file():
        if gguf := sorted(folder.glob(f"*{GGUF_SUFFIX}")):
            return [path.resolve() for path in gguf]
        if spec.architectures in ((GLINER,), (GLINER2,)) and (folder / PICKLED).is_file():
            return [folder / PICKLED]  # what their packages write unless they are told otherwise
        raise CheckpointError(_no_weights(folder, spec))
    names = sorted(set(_weight_map(folder).values()))
    if len(names) > _MAX_SHARDS:
        raise CheckpointError(
            f"{folder / _INDEX} names {len(names):,} files, more than {_MAX_SHARDS:,}; save the "
            "checkpoint again in larger shards"
        )
    missing = [name for name in names if not (folder / name).is_file()]
    if missing or not names:
        more = f" and {len(missing) - 12:,} more" if len(missing) > 12 else ""
        raise CheckpointError(
            f"{folder / _INDEX} names files that are not there: "
            f"{', '.join(missing[:12]) or 'none'}{more}"
        )
    return [folder / name for name in names]


def _weight_map(folder: Path) -> dict[str, str]:
    """Tensor name -> shard's file name, which must be in the folder."""
    index = read_json(folder / _INDEX, {"weight_map": TABLE}, max_bytes=MAX_INDEX_BYTES)
    weight_map: dict[str, str] | None = index.get("weight_map")
    if weight_map is None:
        raise CheckpointError(f"{folder / _INDEX}: weight_map must be a table of tensor names")
    for name in weight_map.values():
        if not PATH.accepts(name) or not name or Path(name).name != name:
            raise CheckpointError(
                f"{folder / _INDEX}: shard {name!r:.120} must be the name of a file in the folder"
            )
    return weight_map


def _check_index(folder: Path, saved: set[str]) -> None:
    """Raises CheckpointError where the index of a sharded checkpoint names missing tensors."""
    if (folder / "model.safetensors").is_file():
        return
    absent = sorted(_weight_map(folder).keys() - saved)
    if absent:
        raise CheckpointError(
            f"{folder / _INDEX} names {len(absent)} tensors that no shard holds: "
            f"{', '.join(absent[:12])}"
        )


def _no_weights(folder: Path, spec: ModelSpec) -> str:
    """The error for a folder without safetensors, by the files that it has."""
    pickles = [p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in folder.glob(pattern)]
    onnx = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*.onnx"))
    if onnx and not pickles:
        return (
            f"{folder} has its weights in ONNX only ({', '.join(onnx[:3])}), which bytetx does not "
            "read; give the checkpoint in safetensors that they were exported from: dtype='int8' "
            "of bytetx.load quantises it"
        )
    if not pickles:
        found = ", ".join(sorted(p.name for p in folder.iterdir())[:12])
        return f"{folder} has no model.safetensors (nor {_INDEX}); it has: {found or 'nothing'}"
    name = next((name for name in spec.architectures if name.isidentifier()), "AutoModel")
    code = f"import transformers as t; t.{name}.from_pretrained('.').save_pretrained('.')"
    return (
        f"{folder} has pickle weights ({', '.join(sorted(pickles)[:3])}), which can run code when "
        f"opened and are refused; if you trust them, convert them once, in that folder: "
        f'python -c "{code}"'
    )


def report_unused(folder: Path, unused: tuple[str, ...]) -> None:
    """Unused layers mean that config.json and the files disagree: that is worth a warning."""
    if not unused:
        return
    has_layers = any(re.search(r"\.layer\.\d+\.", name) for name in unused)
    level = logging.WARNING if has_layers else logging.INFO
    logger.log(level, "%s: tensors that are not used: %s", folder, ", ".join(unused))
