"""Argument checks shared by the ops: each names the argument, what it needs and what it got."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HALF_DTYPES = (torch.float16, torch.bfloat16)


def describe(value: object) -> str:
    """Describe an argument in an error text: a tensor's dtype, shape and device, or the type."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} on {value.device}"


def require_tensor(
    name: str,
    t: object,
    *,
    shape: Sequence[int | None],
    dtypes: Sequence[torch.dtype] = FLOAT_DTYPES,
    device: torch.device | None = None,
) -> None:
    """Check a tensor's type, shape (None = any extent), dtype and device.

    Raises TypeError where `t` is no tensor, else ValueError naming the argument.
    """
    # The way of every right argument, at 0.4 us; what is wrong is looked for only after it.
    if isinstance(t, Tensor) and t.dtype in dtypes and (device is None or t.device == device):
        have = t.shape
        if have == shape:
            return
        if len(have) == len(shape) and None in shape and _fits(have, shape):
            return
    _raise_what_is_wrong(name, t, shape, dtypes, device)


def _fits(have: Sequence[int], shape: Sequence[int | None]) -> bool:
    # A plain loop takes half the time of all() over a generator: 0.4 us of every op's call.
    for want, extent in zip(shape, have, strict=True):  # noqa: SIM110
        if want is not None and want != extent:
            return False
    return True


def _raise_what_is_wrong(
    name: str,
    t: object,
    shape: Sequence[int | None],
    dtypes: Sequence[torch.dtype],
    device: torch.device | None,
) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {describe(t)}")
    if t.dtype not in dtypes:
        names = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise ValueError(f"{name} must be {names}, got {describe(t)}")
    if len(t.shape) != len(shape) or not _fits(t.shape, shape):
        extents = ", ".join("any" if want is None else str(want) for want in shape)
        raise ValueError(f"{name} must have shape [{extents}], got {describe(t)}")
    raise ValueError(f"{name} must be on {device} like the other arguments, got {describe(t)}")


def require_contiguous(name: str, t: Tensor) -> None:
    """Raises ValueError where `t` is not row-major contiguous."""
    if not t.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous, got strides {list(t.stride())} for {describe(t)}; "
            f"pass {name}.contiguous()"
        )


def is_operand(t: object, shape: Sequence[int], dtype: torch.dtype, device_index: int) -> bool:
    """Whether t is a contiguous tensor of this shape and dtype there (-1: on the CPU).

    A third of the time of require_tensor and require_contiguous, which say what is wrong.
    """
    return (
        isinstance(t, Tensor)
        and t.dtype is dtype
        and t.shape == shape
        and t.get_device() == device_index
        and t.is_contiguous()
    )


def require_heads(name: str, t: Tensor) -> None:
    """Check rows of heads [total_tokens, heads, head_dim], whatever lies between the rows."""
    require_tensor(name, t, shape=(None, None, None))
    if t.stride()[1:] != (t.shape[2], 1) and t.numel() > 0:
        raise ValueError(
            f"{name} must be contiguous within a row (strides [any, {t.shape[2]}, 1]), "
            f"got strides {list(t.stride())}"
        )


def require_out(name: str, out: Tensor, *, like: Tensor, shape: Sequence[int]) -> None:
    """Check a caller's output buffer: contiguous, of the given shape, `like`'s dtype and device."""
    require_tensor(name, out, shape=shape, dtypes=(like.dtype,), device=like.device)
    require_contiguous(name, out)


def is_aligned(t: Tensor) -> bool:
    """Whether the data starts at a multiple of 16 bytes, as our own allocations do."""
    return t.data_ptr() % 16 == 0


def addresses(tensors: Iterable[Tensor]) -> list[int]:
    """Where each tensor's data lies: compared to tell that one was moved, never read through."""
    return list(map(Tensor.data_ptr, tensors))


def require_softcap(softcap: float) -> None:
    """Refuse a softcap of attention scores that is neither 0 (none) nor positive and finite."""
    if not 0.0 <= softcap < math.inf:
        raise ValueError(f"softcap must be 0 (none) or a positive finite number, got {softcap}")


def version_of(tensor: torch.Tensor) -> int:
    """The count of its writes; -1 where nothing counts, as of what inference mode made."""
    try:
        return tensor._version
    except RuntimeError:  # asking is_inference() is not enough: an unpickled parameter denies it
        return -1
