"""The native core: hands out the kernels of _cpu and _cuda, and says what backs each op."""

import inspect
import logging
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any, cast

import torch

from bytetx.ops.native_modules import load_native

logger = logging.getLogger("bytetx")

DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # DType in csrc/ops.h
ISA_CODES = {"auto": 0, "portable": 1, "avx2": 2, "avx512": 3, "avx512_bf16": 4}  # Isa there
MAX_WINDOW = 1 << 30  # tokens; kernels add positions to it in int32
KERNEL_CAPABILITY = (9, 0)  # _cuda holds code for sm_90a, which runs on no other architecture

OPS = (
    "embed",
    "layer_norm",
    "rms_norm",
    "linear",
    "int8_linear",
    "gate_rows",
    "varlen_attention",
    "disentangled_attention",
    "paged_attention",
    "write_kv",
    "rotary",
    "pool",
    "quantize_rows",
    "argmax",
    "sample",
    "fp8_linear",
    "all_gather_gemm",
    "gemm_reduce_scatter",
    "gemm_all_reduce",
    "all_reduce_one_shot",
    "all_reduce_two_shot",
    "sum_copies",
    "barrier",
    "send_copy",
    "wait_copies",
)
# FP8, and GEMMs that carry communication.
_GPU_OPS = ("quantize_rows", *OPS[OPS.index("fp8_linear") :])
_CUDA_KERNELS = {  # where the kernel's name is another
    "varlen_attention": "planned_attention",
    "paged_attention": "planned_paged_attention",
}

Kernel = Callable[..., Any]  # takes the fields of a Params struct of csrc/ops.h, then launch_args

_library = torch.library.Library("bytetx", "FRAGMENT")


def _load_modules() -> dict[str, ModuleType | str]:
    """The compiled module of each device type, or why there is none."""
    found = {"cpu": load_native("_cpu"), "cuda": load_native("_cuda")}
    for warning in dict.fromkeys(native.warning for native in found.values() if native.warning):
        logger.warning(warning)
    return {device_type: native.module for device_type, native in found.items()}


_modules = _load_modules()


def kernel(op: str, device: torch.device) -> Kernel | None:
    """The native kernel of `op` for tensors on `device`, or None where the reference runs.

    Call it with the fields of its Params struct (csrc/ops.h), in their order, then
    `*launch_args(device)`. Whether it takes the dtype and shape at hand is the op's to check.
    """
    found = _lookup(op, device.type, device.index)
    return None if isinstance(found, str) else found


def require_kernel(op: str, device: torch.device) -> Kernel:
    """The native kernel of `op`, which the caller has found to be there; else RuntimeError."""
    found = kernel(op, device)
    if found is None:
        raise RuntimeError(f"no kernel for {op} on {device}: {why_no_kernel(op, device)}")
    return found


def why_no_kernel(op: str, device: torch.device) -> str | None:
    """Why `kernel` returns None, with what to do about it where something can be done."""
    found = _lookup(op, device.type, device.index)
    return found if isinstance(found, str) else None


def linear_tilings() -> list[tuple[str, int, int, bool]]:
    """(name, rows, columns, whether it is for small m) of each tiling of the kernel `linear`."""
    module = _modules["cuda"]
    return [] if isinstance(module, str) else list(module.linear_tilings())


def linear_norm_workspace_bytes(m: int, n: int) -> int:
    """What the kernel `linear_norm` needs for m rows of n columns; 0 where it is not built."""
    module = _modules["cuda"]
    return 0 if isinstance(module, str) else int(module.linear_norm_workspace_bytes(m, n))


def fp8_linear_tilings() -> list[tuple[str, int, int, bool]]:
    """Those of the kernel `fp8_linear`, like linear_tilings()."""
    module = _modules["cuda"]
    return [] if isinstance(module, str) else list(module.fp8_linear_tilings())


def gemm_all_reduce_tilings() -> list[tuple[str, int, int, bool]]:
    """The same of the kernel `gemm_all_reduce`."""
    module = _modules["cuda"]
    return [] if isinstance(module, str) else list(module.gemm_all_reduce_tilings())


@cache
def _lookup(op: str, device_type: str, index: int | None) -> Kernel | str:
    module = _modules.get(device_type, f"no native core for device type {device_type}")
    if isinstance(module, str):
        return module
    if device_type == "cuda":
        refusal = _refuse_gpu(index)
        if refusal is not None:
            return refusal
    missing = f"no kernel for {op} in bytetx.{module.__name__.split('.')[-1]}"
    return cast(Kernel | str, getattr(module, op, missing))


def _refuse_gpu(index: int | None) -> str | None:
    """Why the kernels cannot run on this GPU, or None where they can."""
    if not torch.cuda.is_available():
        return "torch finds no CUDA GPU"
    capability = torch.cuda.get_device_capability(index)
    if capability == KERNEL_CAPABILITY:
        return None
    name = torch.cuda.get_device_name(index)
    return f"the kernels are for sm_90 (Hopper), and {name} is sm_{capability[0]}{capability[1]}"


def flatten_int_lists() -> Callable[[list[list[int]], int, int], bool] | None:
    """The native core's (lists, address of int32 [total], total) -> whether all were int32."""
    return getattr(_modules["cpu"], "flatten_int_lists", None)


def launch_args(device: torch.device, isa: str = "auto") -> tuple[int, int, int, int]:
    """(device index, stream, num_threads, isa): the arguments that end every native call.

    The stream is torch's current one on `device`, the thread count is torch's.
    isa: a key of ISA_CODES; the CPU's kernels run with it instead of the best that there is.
    """
    if device.type != "cuda":
        return -1, 0, torch.get_num_threads(), ISA_CODES[isa]
    index = torch.cuda.current_device() if device.index is None else device.index
    return index, torch._C._cuda_getCurrentRawStream(index), 0, 0


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


@dataclass(frozen=True, slots=True)
class OpBackend:
    """What runs one op on each kind of device; begins with "none" where nothing does."""

    op: str
    cpu: str
    cuda: str


@dataclass(frozen=True, slots=True)
class BackendReport:
    """What backs bytetx on this machine."""

    cpu: str  # processor and instruction set, or why _cpu does not load
    cuda: str  # the architecture that _cuda holds code for, or why it does not load
    gpu: str  # torch's current GPU, and why the kernels do not run on it where they do not
    ops: tuple[OpBackend, ...]


def backend_report() -> BackendReport:
    """Says what backs each op on this machine's processor and on its current GPU."""
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    ops = (OpBackend(op, cpu=_backing(op, cpu), cuda=_backing(op, cuda)) for op in OPS)
    return BackendReport(_describe_core("cpu"), _describe_core("cuda"), _describe_gpu(), tuple(ops))


def _describe_core(device_type: str) -> str:
    module = _modules[device_type]
    if isinstance(module, str):
        return module
    return f"{platform.machine()}, {module.isa()}" if device_type == "cpu" else module.arch


def _describe_gpu() -> str:
    refusal = _refuse_gpu(None)
    return torch.cuda.get_device_name() if refusal is None else refusal


def _backing(op: str, device: torch.device) -> str:
    if device.type == "cuda" and not torch.cuda.is_available():
        return "none: torch finds no CUDA GPU"
    if device.type == "cpu" and op in _GPU_OPS:
        return "none: on GPUs alone"
    if op == "linear" and device.type == "cpu":
        return _backing_linear()
    if op == "int8_linear":
        return _backing_int8_linear(device)
    reason = why_no_kernel(_CUDA_KERNELS.get(op, op) if device.type == "cuda" else op, device)
    if reason is None:
        return f"native, {_describe_core(device.type)}"
    has_others = why_no_kernel("embed", device) is None
    return "torch" if has_others else f"torch: {reason}"


def _backing_int8_linear(device: torch.device) -> str:
    if device.type == "cuda":
        return "none: on CPUs alone"
    has_kernel = kernel("has_int8_linear", device)
    return "native, AVX-512 VNNI" if has_kernel is not None and has_kernel() else "none: no VNNI"


def _backing_linear() -> str:
    return "oneDNN through torch" if torch.backends.mkldnn.is_available() else "torch's own GEMM"
