"""Report of the backend that runs each op on this machine, and why no faster one does."""

from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version

import torch

from bytetx.ops import native
from bytetx.ops.bf16_linear import bf16_linear_isa
from bytetx.ops.int8_linear import int8_linear_isa
from bytetx.ops.registry import OPERATIONS, Backend, Operation

# Modules whose operations the report shows, in its order.
_MODULES = (
    *("embedding", "norm", "linear", "int8_linear", "bf16_linear", "gated", "attention"),
    *("disentangled", "paged", "rotary_kv", "pooling", "maxsim", "padding"),
    *("sampling", "sample_tokens", "quantize", "fp8_linear", "comm_kernels"),
)


@dataclass(frozen=True, slots=True)
class OpBackend:
    """The backend of one op on each kind of device; begins with "none" where there is none."""

    op: str
    cpu: str
    cuda: str


@dataclass(frozen=True, slots=True)
class BackendReport:
    """The backends that bytetx has on this machine."""

    cpu: str  # processor and instruction set, or why _cpu does not load
    cuda: str  # the architecture that _cuda holds code for, or why it does not load
    gpu: str  # torch's current GPU, and why the kernels do not run on it where they do not
    ops: tuple[OpBackend, ...]


def backend_report() -> BackendReport:
    """Says what backs each op on this machine's processor and on its current GPU."""
    for module in _MODULES:
        import_module(f"bytetx.ops.{module}")
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    ops = (
        OpBackend(op.name, cpu=_backing(op, cpu), cuda=_backing(op, cuda))
        for op in OPERATIONS.values()
    )
    return BackendReport(
        native.describe_core("cpu"), native.describe_core("cuda"), _describe_gpu(), tuple(ops)
    )


def _describe_gpu() -> str:
    refusal = native.refuse_gpu(None)
    return torch.cuda.get_device_name() if refusal is None else refusal


def _backing(op: Operation, device: torch.device) -> str:
    """The first backend that runs there, and why those before it do not."""
    if device.type == "cuda" and not torch.cuda.is_available():
        return "none: torch finds no CUDA GPU"
    other = "on CPUs alone" if device.type == "cuda" else "on GPUs alone"
    if device.type not in op.device_types:
        return f"none: {other}"
    reasons: list[str] = []
    for backend in op.backends:
        if device.type in backend.device_types:
            reason = backend.why_missing(device)
            if reason is None:
                described = _describe(op, backend, device)
                return f"{described}: {'; '.join(reasons)}" if reasons else described
            if reason not in reasons:  # backends of one kernel lack it alike
                reasons.append(reason)
    return f"none: {'; '.join(reasons) or other}"


def _describe(op: Operation, backend: Backend, device: torch.device) -> str:
    if backend.name == "triton":
        return f"Triton {version('triton')}"
    if backend.name != "native":
        return backend.name
    isa = {"int8_linear": int8_linear_isa, "bf16_linear": bf16_linear_isa}.get(op.name)
    return f"native, {native.describe_core(device.type) if isa is None else isa()}"
