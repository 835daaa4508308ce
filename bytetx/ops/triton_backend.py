"""The Triton kernels: where they run, and why they do not where they do not."""

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch

from bytetx.ops import native

LEAST_CAPABILITY = (8, 0)  # Ampere: bf16 products, asynchronous copies
MAX_ROW_WIDTH = 16384  # elements of a row that one program holds
_FOR_CUDA = "the Triton kernels are for CUDA GPUs"


def kernels(device: torch.device) -> ModuleType:
    """bytetx.ops.triton_kernels, where why_no_triton says nothing against it."""
    found = _lookup(device.type, device.index)
    if isinstance(found, str):
        raise RuntimeError(found)
    return found


def why_no_triton(device: torch.device) -> str | None:
    """Why the Triton kernels do not run there, with what to do where something can be done."""
    found = _lookup(device.type, device.index)
    return found if isinstance(found, str) else None


def holds_rows(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Whether a program of the row kernels holds a row of so many elements."""
    return 0 < width <= MAX_ROW_WIDTH


@native.cached_lookup
def _lookup(device_type: str, index: int | None) -> ModuleType | str:
    device = torch.device(device_type) if index is None else torch.device(device_type, index)
    if device_type != "cuda" or not torch.cuda.is_available():
        return _FOR_CUDA
    if torch.version.hip is not None:
        return "the Triton kernels were not tried on ROCm"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < LEAST_CAPABILITY:
        # Triton compiles products for sm_75 without its tensor cores: torch's are faster.
        return (
            "the Triton kernels are for sm_80 and later, whose tensor cores Triton uses, and this "
            f"GPU is sm_{major}{minor}"
        )
    if find_spec("triton") is None:
        return "Triton is not installed: run `pip install triton`"
    return _try_out(device)


def _try_out(device: torch.device) -> ModuleType | str:
    """The module, or why the first of them does not run: Triton compiles for the GPU at hand."""
    try:
        module = import_module("bytetx.ops.triton_kernels")
        ends = torch.tensor([0, 1], dtype=torch.int32, device=device)
        module.sequence_bounds(ends, 1)
        torch.cuda.synchronize(device)
    # Triton raises what its compiler, the C compiler of its launcher or the driver raises.
    except Exception as error:
        what = str(error).strip().split("\n", 1)[0]
        native.logger.debug("the Triton kernels do not run", exc_info=error)
        return (
            f"Triton does not run here ({type(error).__name__}: {what}): it needs a C compiler and "
            "a version that fits torch's"
        )
    return module
