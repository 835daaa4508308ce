"""BGE-M3's linear layers on every token: one for sparse weights, one for token vectors."""

import pickle
import zipfile
from pathlib import Path

import torch

from bytetx.checkpoint.weights import read_header
from bytetx.errors import CheckpointError
from bytetx.ops.linear import LinearWeight, prepare_linear


def load_token_head(
    folder: Path,
    name: str,
    *,
    out_features: int | None,
    in_features: int,
    dtype: torch.dtype,
    device: torch.device,
    batch_invariant: bool = False,
) -> LinearWeight | None:
    """The layer in `name`.safetensors, else in `name`.pt; None where the folder has neither.

    out_features: None takes any number.  batch_invariant: as prepare_linear's.
    A .pt file is read by torch's loader of plain tensors (weights_only), which runs no code of the
    file. Raises CheckpointError where the file is damaged or is no such layer.
    """
    safe, pickled = folder / f"{name}.safetensors", folder / f"{name}.pt"
    if safe.is_file():
        path, tensors = safe, {saved.name: saved.read() for saved in read_header(safe)}
    elif pickled.is_file():
        path, tensors = pickled, read_pickled(pickled)
    else:
        return None
    tensors = {key.removeprefix("linear."): tensor for key, tensor in tensors.items()}
    if not set(tensors) <= {"weight", "bias"} or "weight" not in tensors:
        raise CheckpointError(f"{path} must hold weight and bias, got {', '.join(tensors) or '{}'}")
    weight, bias = tensors["weight"], tensors.get("bias")
    rows = weight.shape[0] if out_features is None and weight.dim() == 2 else out_features
    _check(path, "weight", weight, (rows, in_features))
    if bias is not None:
        _check(path, "bias", bias, (rows,))
        bias = bias.to(device=device, dtype=dtype)
    return prepare_linear(
        weight.to(device=device, dtype=dtype),
        bias,
        prepack=device.type == "cpu",
        batch_invariant=batch_invariant,
    )


def read_pickled(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a state_dict that torch.save wrote, on the CPU in their own dtypes.

    torch's loader of plain tensors (weights_only) reads them, which runs no code of the file.
    Raises CheckpointError for one that holds anything else, or that takes more memory than it has
    bytes: torch.save compresses nothing.
    """
    try:
        num_bytes = path.stat().st_size
        _require_plain(path, num_bytes)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, OSError, KeyError) as error:
        line = " ".join(str(error).split())
        raise CheckpointError(
            f"{path} cannot be read as plain tensors: {line:.200}; save its state_dict as "
            f"{path.stem}.safetensors"
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


def _check(path: Path, name: str, tensor: torch.Tensor, shape: tuple[int | None, ...]) -> None:
    if tuple(tensor.shape) != shape or not tensor.is_floating_point():
        raise CheckpointError(
            f"{path}: {name} must be floating {shape}, got {tensor.dtype} {tuple(tensor.shape)}"
        )
    if not torch.isfinite(tensor).all():
        raise CheckpointError(f"{path}: {name} holds values that are not finite")
