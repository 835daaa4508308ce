"""Safetensors files of a checkpoint, opened lazily and read by name, with or without its prefix."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from bytetx.config import read_json
from bytetx.errors import CheckpointError
from bytetx.spec import ModelSpec

# Layer norms of checkpoints converted from TensorFlow carry their old parameter names.
_OLD_NAMES = ((".gamma", ".weight"), (".beta", ".bias"))


class Weights(Mapping[str, torch.Tensor]):
    """Tensors of a checkpoint by canonical name: the base model's without prefix, heads as saved.

    Reading a tensor loads it from the file then; `used` and `unused()` tell what a model took.
    """

    def __init__(self, folder: Path, spec: ModelSpec):
        self._prefix = spec.prefix
        self._files = {path: _open(path) for path in _safetensors_files(folder)}
        self._names: dict[str, tuple[Path, str]] = {}
        for path, file in self._files.items():
            for saved in file.keys():  # noqa: SIM118  (a safetensors handle is no mapping)
                self._names[self._canonical(saved)] = (path, saved)
        self.used: set[str] = set()

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise CheckpointError(f"tensor {name!r} is missing from the checkpoint")
        self.used.add(name)
        path, saved = self._names[name]
        try:
            # A copy: a view would keep every page of the file that was read in memory.
            return self._files[path].get_tensor(saved).clone()
        except (SafetensorError, RuntimeError, OSError) as error:
            raise CheckpointError(f"{path}: tensor {saved!r} cannot be read: {error}") from error

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def unused(self) -> list[str]:
        """Saved names that nothing has read, sorted."""
        return sorted(self._names[name][1] for name in self._names.keys() - self.used)

    def _canonical(self, saved: str) -> str:
        name = saved.removeprefix(self._prefix)
        for old, new in _OLD_NAMES:
            if name.endswith(old):
                name = name.removesuffix(old) + new
        return name


def _open(path: Path):
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is not a whole safetensors file ({error}); download or save it again"
        ) from error


def _safetensors_files(folder: Path) -> list[Path]:
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing or not names:
            raise CheckpointError(f"{index} names files that are not there: {missing or 'none'}")
        return [folder / name for name in names]
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")):
        raise CheckpointError(
            f"{folder} holds pickle weights (.bin), which can run code when opened: refused; "
            'convert once: python -c "from transformers import AutoModel as M; '
            f"M.from_pretrained('{folder}').save_pretrained('{folder}')\""
        )
    raise CheckpointError(f"{folder} has no model.safetensors (nor an index of shards)")
