"""How the Triton kernels are launched, and what they share.

Triton compiles a kernel anew for integers that are 1 or multiples of 16. Kernels leave numbers of
tokens, sequences and pages out of that (do_not_specialize): a first step of a size would compile.
"""

from collections.abc import Hashable
from functools import cache
from typing import Any

import torch
from torch import Tensor

DESCRIPTOR_MAJORS = (9, 10)  # compute capabilities of Hopper, and of Blackwell in data centres
_ALIGNMENT = 16  # bytes of an address that Triton compiles for

_compiled: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}  # a kernel and its constants


def launch(
    kernel: Any, grid: tuple[int, ...], *args: Any, key: Hashable = None, **meta: Any
) -> None:
    """kernel[grid](*args, **meta) on the device of the first argument, in its current stream.

    key: for a call so short that the host's time counts: all that Triton compiles this kernel for,
    but for the addresses. Triton looks for it in the arguments at each launch; with a key what it
    compiled is kept, and a launch takes an H100's host 12 us, not 24.
    """
    device = args[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(kernel, grid, *args, key=key, **meta)
        return
    if key is None or device.type != "cuda" or not _are_aligned(args):
        kernel[grid](*args, **meta)
        return
    place = id(kernel), device.index, key  # kernels live as long as their modules
    found = _compiled.get(place)
    if found is None:
        constants = tuple(meta[name] for name in kernel.arg_names[len(args) :])
        _compiled[place] = kernel[grid](*args, **meta), constants
        return
    compiled, constants = found
    x, y, z = (*grid, 1, 1)[:3]
    compiled[x, y, z](*args, *constants)


def _are_aligned(args: tuple[Any, ...]) -> bool:
    return all(not isinstance(arg, Tensor) or arg.data_ptr() % _ALIGNMENT == 0 for arg in args)


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of the GPU; 1 where the kernels are interpreted on a CPU."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def has_tensor_descriptors(device: torch.device) -> bool:
    """Whether loads by descriptors pay: TMA, and 227 KiB of shared memory a multiprocessor."""
    if device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device)[0] in DESCRIPTOR_MAJORS


@cache
def launches_early(device: torch.device) -> bool:
    """Whether a kernel can start before the one before it ends (programmatic launch)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def dot_precision(dtype: torch.dtype) -> str:
    """Products of f32 are products of f32: not of TF32, unless torch's own setting allows it."""
    if dtype != torch.float32 or torch.backends.cuda.matmul.allow_tf32:
        return "tf32"
    return "ieee"


def address_or(t: Tensor | None, other: Tensor) -> Tensor:
    """A tensor to pass where the kernel does not read one that is None."""
    return other if t is None else t
