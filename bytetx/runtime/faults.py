"""Error texts of failed steps: which op, which shapes, and what to do."""

import traceback
from types import FrameType, TracebackType

import torch

from bytetx.errors import DeviceLostError
from bytetx.ops.check import describe

_OPS = "bytetx.ops."
# Python's own kinds of RuntimeError, and what is lost for good already.
_NOT_THE_DEVICE = (NotImplementedError, RecursionError, DeviceLostError)


def is_out_of_memory(error: Exception) -> bool:
    """torch's CPU allocator and cuBLAS raise a plain RuntimeError; its text is all there is."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, DeviceLostError):  # its text may name memory as the cause
        return False
    text = str(error).lower()
    signs = ("can't allocate memory", "out of memory", "alloc_failed")
    return isinstance(error, RuntimeError) and any(sign in text for sign in signs)


def is_of_device(error: Exception, device: torch.device) -> bool:
    """Whether the device failed, and not our code: torch and the kernels raise RuntimeErrors."""
    if is_out_of_memory(error):
        return True
    is_runtime = isinstance(error, RuntimeError) and not isinstance(error, _NOT_THE_DEVICE)
    return is_runtime and device.type == "cuda"


def failed_op(error: BaseException) -> str:
    """The op that raised and the tensors it was given, read from the traceback's frames.

    So the hot path carries no context for errors. Lets go of the frames, which hold the step's
    activations.
    """
    frame = _op_frame(error.__traceback__)
    blamed = "outside an op" if frame is None else f"in {_describe_call(frame)}"
    traceback.clear_frames(error.__traceback__)
    return blamed


def lost_error(error: Exception, num_texts: int, device: torch.device) -> DeviceLostError:
    return DeviceLostError(
        f"{device} failed for good by the time of a step of {num_texts} texts "
        f"({first_line(error)}); nothing more can run on it in this process: restart the process. "
        "With CUDA_LAUNCH_BLOCKING=1 in its environment the error names the kernel"
    )


def _op_frame(trace: TracebackType | None) -> FrameType | None:
    """The outermost frame of bytetx/ops: the op's public function."""
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__", "").startswith(_OPS):
            return trace.tb_frame
        trace = trace.tb_next
    return None


def _describe_call(frame: FrameType) -> str:
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    values = {name: frame.f_locals.get(name) for name in names}
    shown = [f"{name} {text}" for name, value in values.items() if (text := _shape(value))]
    return f"{code.co_name}({', '.join(shown)})"


def _shape(value: object) -> str | None:
    if isinstance(value, torch.Tensor):
        return describe(value)
    n, k = getattr(value, "n", None), getattr(value, "k", None)
    return None if n is None or k is None else f"[{n}, {k}]"


def first_line(error: Exception) -> str:
    """The first line of an error's text; kernels and torch add long traces behind it."""
    return str(error).strip().partition("\n")[0]
