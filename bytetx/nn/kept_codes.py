"""Weights of a checkpoint that stay on a GPU in the bits that they were saved in."""

import math
from collections.abc import Mapping
from pathlib import Path

import torch

from bytetx.checkpoint.families import read_families
from bytetx.checkpoint.files import load_config
from bytetx.checkpoint.saved_tensor import DecodedTensor, StoredTensor
from bytetx.checkpoint.spec import ModelSpec, build_spec
from bytetx.checkpoint.weights import Weights
from bytetx.ops.coded_rows import GROUP
from bytetx.ops.group_rows import GroupRows, held_form, join_rows, number_count
from bytetx.ops.grouped_blocks import why_no_coded_kernel

_PIECE = 1 << 26  # weights whose codes are unpacked at a time


def form_of(stored: StoredTensor | None) -> tuple[int, str] | None:
    """(bits, form) in which a GPU holds a saved tensor's codes; None for one that is read as
    numbers."""
    if not isinstance(stored, DecodedTensor) or stored.codes is None or len(stored.shape) != 2:
        return None
    codes = stored.codes
    return held_form(
        codes.bits,
        codes.group,
        stored.shape[1],
        has_zeros=codes.has_zeros,
        has_least=codes.has_least,
    )


def read_rows(
    tensors: Mapping[str, torch.Tensor], name: str, device: torch.device
) -> GroupRows | None:
    """The rows of codes of a matrix, on a device; None where they are no codes, or cannot be held.

    Then a reason is left in Weights.dequantised. Check what comes with are_finite.
    """
    stored = tensors.stored(name) if isinstance(tensors, Weights) else None
    if not isinstance(tensors, Weights) or not isinstance(stored, DecodedTensor):
        return None
    form = form_of(stored)
    if form is None or stored.codes is None:
        tensors.dequantised[stored.scheme] = _why_not(stored)
        return None
    n, k = stored.shape
    each = n if stored.is_whole else max(1, _PIECE // max(k, 1))
    parts = []
    for start in range(0, n, each):
        codes = stored.codes.read(range(start, min(start + each, n)), device)
        if codes is None:
            tensors.dequantised[stored.scheme] = "groups of inputs have different sizes"
            return None
        parts.append(GroupRows.of(codes, *form))
    return parts[0] if len(parts) == 1 else join_rows(parts)


def _why_not(stored: DecodedTensor) -> str:
    if stored.codes is None:
        return "its codes are no multiples of a scale"
    beside = "zero points" if stored.codes.has_zeros else "least values"
    return f"groups of {stored.codes.group} features with {beside} have no place in blocks"


def keeps_codes(spec: ModelSpec, weights: Weights, device: torch.device) -> bool:
    """Whether weights stay as they are saved where no dtype is asked for: some of a causal model's
    are codes, and the device multiplies them.

    An encoder's steps have many tokens, and its few weights take little memory: it is faster with
    numbers.
    """
    if device.type != "cuda" or not may_keep(spec, weights):
        return False
    return why_no_coded_kernel(device) is None


def may_keep(spec: ModelSpec, weights: Weights) -> bool:
    """Whether keeps_codes says so on a GPU with the kernels."""
    if not spec.is_causal or spec.experts is not None:
        return False
    return any(form_of(stored) is not None for stored in weights.all_stored())


def kept_bits(weights: Weights, dtype: torch.dtype) -> float:
    """Bits of a parameter in memory, on average, where codes are kept.  dtype: of all others."""
    bits, count = 0.0, 0
    for stored in weights.all_stored():
        if stored.is_floating:
            form, numbers = form_of(stored), math.prod(stored.shape)
            own = 8.0 * dtype.itemsize
            if form is not None:
                own = form[0] + 16 * number_count(form[1]) / GROUP
            bits, count = bits + own * numbers, count + numbers
    return bits / max(count, 1)


def planned_bits(folder: Path, families: str | Path | None) -> float:
    """kept_bits of a checkpoint's folder, in bfloat16; 0 where nothing is kept."""
    spec = build_spec(load_config(folder), read_families(families))
    weights = Weights(folder, spec)
    return kept_bits(weights, torch.bfloat16) if may_keep(spec, weights) else 0.0
