"""The 8-bit linear layer's kernel on tiles of AMX, built on an emulation of them.

`tests/emulated_tiles` holds an emulation of csrc/cpu/tiles.h, which everything else includes.
"""

import ctypes
import runpy
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bytetx.ops import native

ROOT = Path(__file__).resolve().parent.parent
EMULATION = ROOT / "tests" / "emulated_tiles"
_SUFFIX = "_amxint8"
_COMMON = ("csrc/cpu/int8_linear.cpp", "csrc/cpu/parallel.cpp")


def why_no_emulation() -> str | None:
    """Why the emulated kernels cannot run here, or None where they can."""
    names = {"avx512_vnni", "avx512_bf16"}
    if names <= set(native.available_isas()):
        return None
    return "the kernels' other instructions are AVX-512's, VNNI's and bf16's"


def build_library(folder: Path) -> ctypes.CDLL:
    """Compile and load the library; folder: for its files."""
    build = runpy.run_path(str(ROOT / "setup.py"), run_name="setup")
    flags, compiler = build["ISA_FLAGS"]["x86_64"], build["host_compiler"]()
    command = [*compiler, "-std=c++20", "-O2", "-fPIC", "-pthread", "-Wall", "-Wextra"]
    command += [f"-I{EMULATION}", f"-I{ROOT / 'csrc'}"]
    kernel, library = str(folder / "kernel.o"), str(folder / "emulated.so")
    source = ROOT / "csrc" / "cpu" / f"int8_linear{_SUFFIX}.cpp"
    _run([*command, *flags[_SUFFIX], "-c", str(source), "-o", kernel])
    sources = [str(ROOT / source) for source in _COMMON] + [str(EMULATION / "library.cpp")]
    define = f"-DBYTETX_HAS{_SUFFIX.upper()}"
    _run([*command, define, "-shared", *sources, kernel, "-ldl", "-o", library])
    loaded = ctypes.CDLL(library)
    loaded.int8_linear.restype = ctypes.c_char_p
    loaded.int8_linear_workspace_bytes.restype = ctypes.c_int64
    return loaded


def emulated_kernel(library: ctypes.CDLL, name: str) -> Callable[..., Any]:
    """The library's function as bytetx.ops.native gives that of the core."""
    function = getattr(library, name)

    def call(**arguments: Any) -> Any:
        launch = arguments.pop("launch", None)
        if launch is not None:
            arguments["num_threads"] = launch.num_threads
        result = function(*(_as_c(value) for value in arguments.values()))
        if isinstance(result, bytes):
            raise ValueError(result.decode())
        return result

    return call


def _as_c(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return ctypes.c_void_p(value.data_ptr())
    if value is None:
        return ctypes.c_void_p(None)
    return ctypes.c_bool(value) if isinstance(value, bool) else ctypes.c_int64(value)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
