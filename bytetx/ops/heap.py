"""Freed heap memory, given back to the system between windows of a long run."""

import ctypes
import sys
from functools import cache


def release_heap() -> None:
    """Gives freed pages of the C heap back, where the C library can (glibc); else does nothing.

    Activations of ever different sizes leave gaps that glibc keeps resident: MiniLM in f32 grew to
    twice what was live. Costs a few milliseconds, so call it between windows, not between steps.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> "ctypes._NamedFuncPointer | None":
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
