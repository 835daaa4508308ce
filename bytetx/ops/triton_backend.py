"""Which GPUs the Triton kernels serve: those that the native core has no code for."""

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch

from bytetx.ops import native

LEAST_CAPABILITY = (8, 0)  # Ampere: bf16 products, asynchronous copies
MAX_ROW_WIDTH = 16384  # elements of a row that one program holds
OPS = frozenset(
    {
        "embed",
        "layer_norm",
        "rms_norm",
        "linear",
        "gate_rows",
        "varlen_attention",
        "disentangled_attention",
        "paged_attention",
        "write_kv",
        "rotary",
        "pool",
        "argmax",
        "sample",
    }
)

_FOR_CUDA = "the Triton kernels are for CUDA GPUs"


def triton_kernels(device: torch.device) -> ModuleType | None:
    """bytetx.ops.triton_kernels where it serves this device instead of the native core."""
    return None if native.has_module(device) else triton_beside_native(device)


def triton_beside_native(device: torch.device) -> ModuleType | None:
    """The same for calls that the native core has no kernel for: Hopper GPUs get them, too."""
    found = _lookup(device.type, device.index)
    return None if isinstance(found, str) else found


def why_no_triton(device: torch.device) -> str | None:
    """Why triton_kernels gives None, with what to do about it where something can be done."""
    if native.has_module(device):
        return "the native kernels serve this GPU" if device.type == "cuda" else _FOR_CUDA
    found = _lookup(device.type, device.index)
    return found if isinstance(found, str) else None


@native.cached_lookup
def _lookup(device_type: str, index: int | None) -> ModuleType | str:
    device = torch.device(device_type) if index is None else torch.device(device_type, index)
    if device_type != "cuda" or not torch.cuda.is_available():
        return _FOR_CUDA
    if torch.version.hip is not None:
        return "the Triton kernels were not tried on ROCm"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < LEAST_CAPABILITY:
        return f"the Triton kernels are for sm_80 and later, and this GPU is sm_{major}{minor}"
    if find_spec("triton") is None:
        return "Triton is not installed: run `pip install triton`"
    return _try_out(device)


def _try_out(device: torch.device) -> ModuleType | str:
    """The kernels, or why the first of them does not run: Triton compiles for the GPU at hand."""
    try:
        kernels = import_module("bytetx.ops.triton_kernels")
        ends = torch.tensor([0, 1], dtype=torch.int32, device=device)
        kernels.sequence_bounds(ends, 1)
        torch.cuda.synchronize(device)
    # Triton raises what its compiler, the C compiler of its launcher or the driver raises.
    except Exception as error:
        what = str(error).strip().split("\n", 1)[0]
        native.logger.debug("the Triton kernels do not run", exc_info=error)
        return (
            f"Triton does not run here ({type(error).__name__}: {what}): it needs a C compiler and "
            "a version that fits torch's"
        )
    return kernels
