"""Report of the backend that runs each op on this machine, and why no faster one does."""

from dataclasses import dataclass
from importlib.metadata import version

import torch

from bytetx.ops import native, triton_backend
from bytetx.ops.bf16_linear import bf16_linear_isa, why_no_bf16_linear
from bytetx.ops.int8_linear import int8_linear_isa, why_no_int8_linear

OPS = (
    "embed",
    "layer_norm",
    "rms_norm",
    "linear",
    "int8_linear",
    "bf16_linear",
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
# Ops whose CUDA kernel has another name.
_CUDA_KERNELS = {
    "varlen_attention": "planned_attention",
    "paged_attention": "planned_paged_attention",
}


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
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    ops = (OpBackend(op, cpu=_backing(op, cpu), cuda=_backing(op, cuda)) for op in OPS)
    return BackendReport(
        native.describe_core("cpu"), native.describe_core("cuda"), _describe_gpu(), tuple(ops)
    )


def _describe_gpu() -> str:
    refusal = native.refuse_gpu(None)
    return torch.cuda.get_device_name() if refusal is None else refusal


def _backing(op: str, device: torch.device) -> str:
    if device.type == "cuda" and not torch.cuda.is_available():
        return "none: torch finds no CUDA GPU"
    if device.type == "cpu" and op in _GPU_OPS:
        return "none: on GPUs alone"
    if op == "linear" and device.type == "cpu":
        return _backing_linear()
    if op == "int8_linear":
        return _backing_on_cpu(int8_linear_isa(), why_no_int8_linear(), device)
    if op == "bf16_linear":
        return _backing_on_cpu(bf16_linear_isa(), why_no_bf16_linear(), device)
    reason = native.why_no_kernel(
        _CUDA_KERNELS.get(op, op) if device.type == "cuda" else op, device
    )
    if reason is None:
        return f"native, {native.describe_core(device.type)}"
    if native.has_module(device):
        return "torch"
    if device.type == "cuda" and op in triton_backend.OPS:
        why_not = triton_backend.why_no_triton(device)
        if why_not is None:
            return f"Triton {version('triton')}: {reason}"
        return f"torch: {reason}; {why_not}"
    return f"torch: {reason}"


def _backing_on_cpu(isa: str | None, why_not: str | None, device: torch.device) -> str:
    """The backend of an op that only the CPU's native core has."""
    if device.type == "cuda":
        return "none: on CPUs alone"
    return f"none: {why_not}" if isa is None else f"native, {isa}"


def _backing_linear() -> str:
    return "oneDNN through torch" if torch.backends.mkldnn.is_available() else "torch's own GEMM"
