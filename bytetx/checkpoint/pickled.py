"""Tensors that torch.save wrote, read without running code of their file."""

import pickle
import zipfile
from pathlib import Path

import torch

from bytetx.errors import CheckpointError


def read_pickled(path: Path, *, safe_name: str | None = None) -> dict[str, torch.Tensor]:
    """The tensors of a state_dict that torch.save wrote, on the CPU in their own dtypes.

    torch's loader of plain tensors (weights_only) reads them, which runs no code of the file.
    Raises CheckpointError for one that holds anything else, or that takes more memory than it has
    bytes: torch.save compresses nothing.
    safe_name: the safetensors file that would be read in its place, for errors.
    """
    safe_name = safe_name or f"{path.stem}.safetensors"
    try:
        num_bytes = path.stat().st_size
        _require_plain(path, num_bytes)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, OSError, KeyError) as error:
        line = " ".join(str(error).split())
        raise CheckpointError(
            f"{path} cannot be read as plain tensors: {line:.200}; save its state_dict as "
            f"{safe_name}"
        ) from error
    if not isinstance(content, dict) or not all(
        isinstance(key, str) and isinstance(value, torch.Tensor) for key, value in content.items()
    ):
        raise CheckpointError(f"{path} must hold a state_dict, got {type(content).__name__}")
    whole = sum(tensor.numel() * tensor.element_size() for tensor in content.values())
    if whole > num_bytes or any(t.layout != torch.strided for t in content.values()):
        raise _too_large(path, f"tensors of {whole:,} bytes")
    return content


def _require_plain(path: Path, num_bytes: int) -> None:
    """Refuses a zip file that becomes larger when it is read; other formats hold plain bytes."""
    if not zipfile.is_zipfile(path):
        return
    try:
        with zipfile.ZipFile(path) as file:
            whole = sum(record.file_size for record in file.infolist())
    except (zipfile.BadZipFile, NotImplementedError) as error:
        raise ValueError(str(error)) from error
    if whole > num_bytes:
        raise _too_large(path, f"records of {whole:,} bytes")


def _too_large(path: Path, found: str) -> CheckpointError:
    return CheckpointError(
        f"{path} holds {found}, more than its own bytes; it is damaged, or was not saved by "
        f"torch.save: save its state_dict as {path.stem}.safetensors"
    )
