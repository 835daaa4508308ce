"""Begins a process's CUDA context while Python imports torch, which takes seconds as well.

This module imports neither torch nor anything of it.
"""

import ctypes
from threading import Thread

_DRIVER = "libcuda.so.1"


def begin_context(index: int) -> Thread:
    """Retains the primary context of a GPU in a thread, which ends when it is there.

    torch uses the same context from its first call on. Where the driver refuses, nothing happens
    here, and torch says why when it is asked for the GPU.
    """
    thread = Thread(target=_retain, args=(index,), name="bytetx-context", daemon=True)
    thread.start()
    return thread


def _retain(index: int) -> None:
    try:
        driver = ctypes.CDLL(_DRIVER)  # its calls let Python run
    except OSError:
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), index) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
