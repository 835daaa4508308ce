"""The errors of bytetx; each says what was given, what is needed and what to do."""

import reprlib

_MAX_SHOWN = 200  # characters of a caller's value in an error


class BytetxError(ValueError):
    """Base of every error that is the caller's or the checkpoint's to fix."""


class CheckpointError(BytetxError):
    """A checkpoint that cannot be loaded: files, config or tensors are not as they should be."""


class InputError(BytetxError):
    """An input that cannot be run: text, token ids, lengths or options."""


class OptionError(InputError):
    """An option whose value is refused, whatever the texts are."""


class WeightFormatError(OptionError):
    """A dtype of weights, such as int8, that a model cannot run in on its device."""


class TooLongError(InputError):
    """A text with more tokens than the model has positions, where truncation was not asked for."""


class TooLargeError(InputError):
    """A call with more texts or tokens than a queue ever holds: it has to be divided."""


class StepError(InputError, RuntimeError):
    """A text whose forward pass failed on the device. Other texts are not affected."""


class NotFiniteError(StepError):
    """A text for which the model gave NaN or infinity, as where a dtype's range is too narrow."""


class DeviceMemoryError(StepError, MemoryError):
    """A text that does not fit the device's memory, not even alone."""


class ForkError(BytetxError):
    """A forked process cannot compute here: its parent's threads, which it needs, are missing."""


class DeviceLostError(RuntimeError):
    """The device failed for good: nothing runs on it until the process is started again."""


class GroupError(DeviceLostError):
    """A rank of a tensor-parallel group failed or ended: the model must be loaded again."""


class QueueFullError(BytetxError):
    """A request that the queue of an AsyncModel has no room for; later it will.

    retry_after_s: seconds until there is likely to be room.
    """

    def __init__(self, message: str, *, retry_after_s: float = 1.0):
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineError(BytetxError, TimeoutError):
    """A request without results within its timeout_s; what it had queued is dropped."""


class ClosedError(RuntimeError):
    """A request to an AsyncModel that was closed, or that it was closed before the results of."""


class _Shown(reprlib.Repr):
    """reprlib's, whose work and length are bounded, with limits for one line of an error."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 4
        self.maxlist = self.maxtuple = self.maxset = self.maxdict = self.maxarray = 8
        self.maxstring = self.maxother = self.maxlong = _MAX_SHOWN

    def repr_int(self, x: int, level: int) -> str:
        bits = x.bit_length()  # Python writes no integer of thousands of digits
        return repr(x) if bits < 4 * _MAX_SHOWN else f"an integer of {bits} bits"


_SHOWN = _Shown()


def shown(value: object) -> str:
    """A caller's value as an error quotes it: its repr, at most 200 characters of it."""
    text = _SHOWN.repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."
