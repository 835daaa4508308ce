"""BGE-M3's linear layers on every token: one for sparse weights, one for token vectors."""

from pathlib import Path

import torch

from bytetx.checkpoint.pickled import read_pickled
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


def _check(path: Path, name: str, tensor: torch.Tensor, shape: tuple[int | None, ...]) -> None:
    if tuple(tensor.shape) != shape or not tensor.is_floating_point():
        raise CheckpointError(
            f"{path}: {name} must be floating {shape}, got {tensor.dtype} {tuple(tensor.shape)}"
        )
    if not torch.isfinite(tensor).all():
        raise CheckpointError(f"{path}: {name} holds values that are not finite")
