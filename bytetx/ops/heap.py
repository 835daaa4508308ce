"""The C library's heaps: how many there are, and when freed pages go back to the system."""

import ctypes
import sys
from functools import cache

_MANY_TOKENS = 1 << 16  # each took some hundred bytes of the library's
_M_ARENA_MAX = -8  # as in glibc's malloc.h
_NUM_HEAPS = 2


def release_heap() -> None:
    """Gives freed pages of the C heap back, where the C library can (glibc); else does nothing.

    Activations of ever different sizes leave gaps that glibc keeps resident: MiniLM in f32 grew to
    twice what was live. Costs a few milliseconds, so call it between windows, not between steps.
    """
    trim = _libc_function("malloc_trim")
    if trim is not None:
        trim(0)


def release_heap_after(num_tokens: int) -> None:
    """release_heap() where so many tokens were tokenised that their objects took tens of MiB."""
    if num_tokens > _MANY_TOKENS:
        release_heap()


def limit_heaps() -> None:
    """Has all threads of a server share few heaps, where the C library has several (glibc).

    Call it before threads start.  malloc_trim leaves free pages at the end of every heap but the
    first, and any thread may work on a largest body.
    """
    mallopt = _libc_function("mallopt")
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, _NUM_HEAPS)


@cache
def _libc_function(name: str) -> "ctypes._NamedFuncPointer | None":
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
