"""Work of the C library and the native core with data on the host; needs no torch.

The C library's heaps: how many there are, and when freed pages go back to the system.
"""

import ctypes
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np

from bytetx.ops.native_modules import load_native

logger = logging.getLogger("bytetx")

_MANY_TOKENS = 1 << 16  # each took some hundred bytes of the library's
# As in glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_OWN_PAGES_BYTES = 1 << 20  # blocks from this size on get pages of their own
# Where glibc's own thresholds end after large blocks have come and gone.
_MOST_MMAP_BYTES, _MOST_TRIM_BYTES = 32 << 20, 64 << 20
_NUM_HEAPS = 2


def load_core(name: str) -> ModuleType | str:
    """The compiled module of that name, or why there is none; a warning goes to the log once."""
    found = load_native(name)
    if found.warning and found.warning not in _said:
        logger.warning(found.warning)
        _said.add(found.warning)
    return found.module


_said: set[str] = set()
# The compiled module of each device type, or why there is none; ops/native.py adds that of GPUs.
core_modules: dict[str, ModuleType | str] = {"cpu": load_core("_cpu")}


def write_step_block() -> Callable[..., None] | None:
    """The native core's (layout, block, input_ids, seqlens, token_type_ids or None, prompt_tokens
    or None), of csrc/cpu/step_block.h; arrays of int32."""
    return getattr(core_modules["cpu"], "write_step_block", None)


def maxsim_tiles() -> Callable[[int, int, int, np.ndarray], int] | None:
    """The native core's (address of cu_documents int64 [num_documents + 1], num_documents, tile,
    int32 array to be filled) -> number of tiles; see csrc/cpu/maxsim_tiles.h."""
    return getattr(core_modules["cpu"], "maxsim_tiles", None)


def word_piece() -> Callable[..., Any] | None:
    """The native core's class WordPiece, of csrc/bindings_wordpiece.h."""
    return getattr(core_modules["cpu"], "WordPiece", None)


def text_ring() -> Any:
    """The native core's class TextRing, of csrc/bindings_text_ring.h; None where it is missing."""
    return getattr(core_modules["cpu"], "TextRing", None)


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


@contextmanager
def in_own_pages() -> Iterator[None]:
    """Has large blocks of all threads lie in pages of their own meanwhile, where the C library can
    (glibc): these go back to the system when they are freed.

    For weights that leave the memory later. In heaps, others' blocks between them keep pages: 30 of
    the 150 MB of a model of 512 features stayed.
    """
    mallopt = _libc_function("mallopt")
    if mallopt is None:
        yield
        return
    mallopt(_M_MMAP_THRESHOLD, _OWN_PAGES_BYTES)
    try:
        yield
    finally:
        mallopt(_M_MMAP_THRESHOLD, _MOST_MMAP_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _MOST_TRIM_BYTES)


@cache
def _libc_function(name: str) -> "ctypes._NamedFuncPointer | None":
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
