"""Whether a model's weights fit a device, before gigabytes of them are read."""

import os
from pathlib import Path

import torch

from bytetx.errors import CheckpointError

# What a container may use: cgroup v2, then v1. Without a limit v2 says "max", v1 a huge number.
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_GIB = 1 << 30
# Of prefixes that are kept: most bytes by type of device, and most of its memory.
_PREFIX_CACHE_BYTES, _PREFIX_CACHE_PART = {"cpu": 256 << 20, "cuda": _GIB}, 20


def check_fits(
    num_parameters: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    parts: int,
    bits: float | None = None,
) -> None:
    """Raises CheckpointError where the weights alone take more memory than the device has.

    parts: processes that share the weights, each with a device of its own unless it is a CPU.
    bits: of a parameter in memory; None: those of dtype.
    """
    kind = str(dtype) if bits is None else f"{bits:g} bits each"
    num_bytes = int(num_parameters * (8 * dtype.itemsize if bits is None else bits)) // 8
    share = num_bytes if device.type == "cpu" else num_bytes // parts
    has = memory_bytes(device)
    if share > has:
        raise CheckpointError(
            f"the weights take {share / _GIB:,.1f} GiB in {kind}, {device} has {has / _GIB:,.1f} "
            "GiB; load them in float16 or bfloat16, on another device, or with tp"
        )


def default_prefix_cache_bytes(device: torch.device) -> int:
    """Bytes of prefixes that are kept on a device where the caller names none."""
    most = _PREFIX_CACHE_BYTES.get(device.type, 0)
    return min(most, memory_bytes(device) // _PREFIX_CACHE_PART) if most else 0


def memory_bytes(device: torch.device) -> int:
    """All of a device's memory, whether it is free or not; of a CPU what this process may use."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in _LIMITS:
        try:
            found.append(int(Path(path).read_text()))
        except (OSError, ValueError):  # another system, or no limit
            continue
    return min(found)
