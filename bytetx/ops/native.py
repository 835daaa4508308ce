"""The native core: hands out the kernels of _cpu and _cuda, or says why there is none."""

import inspect
import logging
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from types import ModuleType
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from bytetx.ops.host import core_modules, load_core
from bytetx.ops.native_params import CpuStepLayer, Launch, PanelMatrix

logger = logging.getLogger("bytetx")

DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # DType in csrc/ops.h
# Isa there: a bit for the instructions of each name, and the sets of them that a call may ask for.
ISA_BITS = {"portable": 1, "avx2": 2, "avx512": 4, "avx512_vnni": 8, "avx512_bf16": 16}
ISA_BITS |= {"neon": 32, "neon_dotprod": 64, "neon_i8mm": 128, "neon_bf16": 256}
ISA_BITS |= {"amx_int8": 512, "slow_bf16_dot": 1024}
ISA_CODES = {"auto": 0, "portable": 1, "avx2": 3, "avx512": 7, "avx512_vnni": 15, "avx512_bf16": 23}
ISA_CODES |= {"amx_int8": 543, "slow_bf16_dot": 1047}
ISA_CODES |= {"neon": 33, "neon_dotprod": 97, "neon_i8mm": 161, "neon_bf16": 289}
MAX_WINDOW = 1 << 30  # tokens; kernels add positions to it in int32
KERNEL_CAPABILITY = (9, 0)  # _cuda holds code for sm_90a, which runs on no other architecture

Kernel = Callable[..., Any]  # takes the fields of a Params struct of csrc/ops.h and launch, by name

P = ParamSpec("P")
T = TypeVar("T")

_library = torch.library.Library("bytetx", "FRAGMENT")


_modules: dict[str, ModuleType | str] = core_modules
_modules["cuda"] = load_core("_cuda")


# Clear the caches of answers that depend on the modules.
_lookups: list[Callable[[], None]] = []


def cached_lookup(fn: Callable[P, T]) -> Callable[P, T]:
    """functools.cache for what depends on which native kernels there are; see without_kernels."""
    cached = cache(fn)
    _lookups.append(cached.cache_clear)
    return cast(Callable[P, T], cached)


@contextmanager
def without_kernels(device_type: str) -> Iterator[None]:
    """Meanwhile no native kernel serves such devices, for tests and benches of what does instead.

    Models that were loaded before, or that outlast it, are not to be used with the other backend.
    """
    module = _modules[device_type]
    _set_module(device_type, f"the native kernels for {device_type} are switched off")
    try:
        yield
    finally:
        _set_module(device_type, module)


def _set_module(device_type: str, module: ModuleType | str) -> None:
    _modules[device_type] = module
    forget_lookups()


def forget_lookups() -> None:
    """Clear what cached_lookup remembers, after the kernels or the backends changed."""
    for forget in _lookups:
        forget()


@cached_lookup
def kernel(op: str, device: torch.device) -> Kernel | None:
    """The native kernel of `op` for tensors on `device`, or None where there is none.

    Call it with the fields of its Params struct (csrc/ops.h) and `launch=launch_args(device)`, all
    by name; a pointer may be a tensor, an address or None. Whether it takes the dtype and shape at
    hand is the op's to check.
    """
    found = _find_kernel(op, device)
    return None if isinstance(found, str) else found


@cached_lookup
def require_kernel(op: str, device: torch.device) -> Kernel:
    """The native kernel of `op`, which the caller has found to be there; else RuntimeError."""
    found = _find_kernel(op, device)
    if isinstance(found, str):
        raise RuntimeError(f"no kernel for {op} on {device}: {found}")
    return found


def why_no_kernel(op: str, device: torch.device) -> str | None:
    """Why `kernel` returns None, with what to do about it where something can be done."""
    found = _find_kernel(op, device)
    return found if isinstance(found, str) else None


def describe_core(device_type: str) -> str:
    """The processor and instruction set of _cpu, the architecture of _cuda, or what is missing."""
    module = _modules[device_type]
    if isinstance(module, str):
        return module
    return f"{platform.machine()}, {module.isa()}" if device_type == "cpu" else str(module.arch)


def available_isas() -> list[str]:
    """The keys of ISA_CODES whose instructions this processor has, the portable one first."""
    module = _modules["cpu"]
    missing = 0 if isinstance(module, str) else ~module.isa_set()
    return [name for name, code in ISA_CODES.items() if name != "auto" and not code & missing]


def linear_tilings() -> list[tuple[str, int, int, bool]]:
    """(name, rows, columns, whether it is for small m) of each tiling of the kernel `linear`."""
    module = _modules["cuda"]
    return [] if isinstance(module, str) else list(module.linear_tilings())


def linear_norm_workspace_bytes(m: int, n: int) -> int:
    """Bytes that the kernel `linear_norm` needs for m rows of n columns; 0 if it is not built."""
    module = _modules["cuda"]
    return 0 if isinstance(module, str) else int(module.linear_norm_workspace_bytes(m=m, n=n))


def decode_step_workspace_bytes(
    device: torch.device,
    hidden_size: int,
    inner_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    has_bias: bool,
) -> int:
    """Bytes that the kernel `decode_step` needs; 0 where it is not built or refuses these sizes."""
    if kernel("decode_step", device) is None:
        return 0
    index = launch_args(device).device
    num_bytes = _modules["cuda"].decode_step_workspace_bytes(  # type: ignore[union-attr]
        device=index,
        hidden_size=hidden_size,
        inner_size=inner_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        has_bias=has_bias,
    )
    return int(num_bytes)


def cpu_step_layers(layers: Sequence[CpuStepLayer]) -> Any:
    """The layers as the kernel `cpu_decode_step` takes them, made once."""
    return _modules["cpu"].CpuStepLayers(list(layers))  # type: ignore[union-attr]


def fp8_linear_tilings() -> list[tuple[str, int, int, bool]]:
    """Those of the kernel `fp8_linear`, like linear_tilings()."""
    module = _modules["cuda"]
    return [] if isinstance(module, str) else list(module.fp8_linear_tilings())


def gemm_all_reduce_tilings() -> list[tuple[str, int, int, bool]]:
    """The same of the kernel `gemm_all_reduce`."""
    module = _modules["cuda"]
    return [] if isinstance(module, str) else list(module.gemm_all_reduce_tilings())


def _find_kernel(op: str, device: torch.device) -> Kernel | str:
    module = _find_module(device)
    if isinstance(module, str):
        return module
    missing = f"no kernel for {op} in bytetx.{module.__name__.split('.')[-1]}"
    return cast(Kernel | str, getattr(module, op, missing))


def _find_module(device: torch.device) -> ModuleType | str:
    """The compiled module that runs on a device, or why there is none."""
    module = _modules.get(device.type, f"no native core for device type {device.type}")
    if isinstance(module, str) or device.type != "cuda":
        return module
    return refuse_gpu(device.index) or module


def refuse_gpu(index: int | None) -> str | None:
    """Why the kernels cannot run on this GPU, or None where they can."""
    if not torch.cuda.is_available():
        return "torch finds no CUDA GPU"
    capability = torch.cuda.get_device_capability(index)
    if capability == KERNEL_CAPABILITY:
        return None
    name = torch.cuda.get_device_name(index)
    return f"the kernels are for sm_90 (Hopper), and {name} is sm_{capability[0]}{capability[1]}"


def launch_args(device: torch.device, isa: str = "auto") -> Launch:
    """Where a native call runs, its argument `launch`.

    The stream is torch's current one on `device`, the thread count is torch's.
    isa: a key of ISA_CODES; the CPU's kernels run with it instead of the best that there is.
    """
    if device.type != "cuda":
        return cpu_launch(torch.get_num_threads(), isa)
    index = torch.cuda.current_device() if device.index is None else device.index
    return Launch(index, torch._C._cuda_getCurrentRawStream(index), 0, 0)


@cache
def cpu_launch(num_threads: int, isa: str) -> Launch:
    """launch_args of a CPU, for torch's number of threads."""
    return Launch(device=-1, stream=0, num_threads=num_threads, isa=ISA_CODES[isa])


@dataclass(frozen=True, slots=True)
class PanelProduct:
    """Products of rows with one matrix in panels, whose kernels are looked up once.

    dtype: of the rows, a code of DTYPE_CODES.
    """

    panels: PanelMatrix
    dtype: int
    kernel: Kernel
    workspace_bytes: Kernel

    @classmethod
    def of(cls, panels: PanelMatrix, dtype: torch.dtype) -> "PanelProduct":
        cpu = torch.device("cpu")
        kernel = require_kernel("panel_linear", cpu)
        workspace_bytes = require_kernel("panel_linear_workspace_bytes", cpu)
        return cls(panels, DTYPE_CODES[dtype], kernel, workspace_bytes)

    def __call__(self, x: Tensor, activation: int = 0, isa: str = "auto") -> Tensor:
        """As of ops.panel_linear.panel_linear."""
        m, k = x.shape
        d = x.new_empty((m, self.panels.n))
        num_bytes = self.workspace_bytes(m=m, k=k)
        self.kernel(
            x=x,
            d=d,
            workspace=torch.empty(num_bytes, dtype=torch.uint8),
            workspace_bytes=num_bytes,
            m=m,
            w=self.panels,
            activation=activation,
            dtype=self.dtype,
            launch=cpu_launch(torch.get_num_threads(), isa),
        )
        return d


def register(
    fn: Callable[..., object],
    *,
    fake: Callable[..., object],
    name: str | None = None,
    mutates: Sequence[str] = (),
    without: Sequence[str] = (),
) -> None:
    """Makes `fn` known to torch as torch.ops.bytetx.<name>, so that torch.compile sees one op.

    The schema is fn's signature; without: the optional parameters that it leaves out, such as plans
    and outputs.
    fake: returns empty outputs of the right shape and dtype; it runs while torch traces.
    name: fn's where None.  mutates: the parameters that fn writes to.
    The eager engine calls `fn` itself and pays nothing for this.
    """
    name = name or fn.__name__
    signature = inspect.signature(fn)
    passed = [p for p in signature.parameters.values() if p.name not in without]

    def prototype() -> None: ...

    prototype.__signature__ = signature.replace(parameters=passed)  # type: ignore[attr-defined]
    schema = torch.library.infer_schema(prototype, mutates_args=mutates)
    _library.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, fn, "CompositeExplicitAutograd")
    torch.library.register_fake(f"bytetx::{name}", fake, lib=_library)


# (most rows, from one row count to the next): as fine as decode steps of few sequences want it, for
# which GEMMs wait for weights, and for rows by the dozen. oneDNN takes a matrix-vector kernel for
# one row, which sums in another order, so that there are two at least.
_FEW_ROWS = ((8, 2), (32, 4), (128, 8))
# Above that spare rows are at most an eighth, and from _LARGE_ROWS on a sixteenth, of the power of
# two below m: half of that on average.
_LARGE_ROWS = 1024
_MAX_CPU_WIDTH = 16384  # kMaxRowWidth in csrc/cpu/rows.h


@lru_cache(maxsize=4096)
def tile_rows(m: int) -> int:
    """m rounded up to the row counts that CPU GEMMs run at: 46 of them up to 1024 rows, 94 to 8192.

    oneDNN builds one primitive a row count and layer shape, which takes about 0.6 ms and 0.55 MiB
    of heap, and keeps the last 1024 of them. With one for every total of ragged batches a model of
    a few MiB grew by 500.
    """
    step = _step(m)
    return -(-m // step) * step


def _step(m: int) -> int:
    for most, step in _FEW_ROWS:
        if m <= most:
            return step
    octave = 1 << ((m - 1).bit_length() - 1)  # octave < m <= 2 * octave
    return octave // (16 if m > _LARGE_ROWS else 8)


def num_tile_rows(most_rows: int) -> int:
    """How many different row counts tile_rows has for 1 to most_rows rows."""
    count, m = 0, 0
    while m < most_rows:
        m = tile_rows(m + 1)
        count += 1
    return count


def empty_rows(m: int, tail: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Uninitialised [m, *tail] on the CPU; behind it are zeros up to tile_rows(m) rows."""
    rows = torch.empty((tile_rows(m), *tail), dtype=dtype)
    if rows.shape[0] == m:
        return rows
    rows[m:].zero_()
    return rows[:m]


def padded(x: Tensor, rows: int) -> Tensor:
    """A copy of x [m, k] with zeros behind it: [rows, k]."""
    copy = x.new_empty((rows, x.shape[1]))
    copy[: x.shape[0]] = x
    copy[x.shape[0] :].zero_()
    return copy


def has_row_kernel(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Whether the native row kernels of a device take rows of this dtype and width."""
    if device.type == "cuda":
        return width > 0
    return dtype in (torch.float32, torch.bfloat16) and 0 < width <= _MAX_CPU_WIDTH
