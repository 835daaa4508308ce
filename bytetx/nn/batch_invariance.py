"""Batch-invariant mode: what can promise it, and the one place that decides.

In this mode the bits of a sequence do not depend on what else is in its batch. The choice travels
with the data: LinearWeight.batch_invariant says which plan a product takes, Layers.batch_invariant
how attention is planned. docs/batch_invariance.md says what is promised and what it costs.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from bytetx.checkpoint.spec import ModelSpec
from bytetx.errors import OptionError
from bytetx.nn.quantization import FP8
from bytetx.nn.sentence_modules import AutoEncoder, Dense, Module, Projection, SentenceSpec
from bytetx.ops import native
from bytetx.ops.attention_plan import MAX_HEAD_DIM, is_planned
from bytetx.ops.disentangled import has_disentangled_kernel
from bytetx.ops.linear import has_invariant_bf16, has_invariant_f32
from bytetx.ops.paged_plan import has_invariant_kernel

_HALF = (torch.float16, torch.bfloat16)


def check_batch_invariant(
    spec: ModelSpec,
    sentence: SentenceSpec,
    *,
    device: torch.device,
    dtype: torch.dtype,
    quantization: str | None,
    has_adapters: bool,
) -> None:
    """Raises OptionError where this model cannot be batch-invariant so on this device.

    has_adapters: whether the checkpoint has an adapter for each task.
    """
    check = _cpu_obstacle if device.type == "cpu" else _gpu_obstacle
    obstacle = check(spec, device, dtype, quantization)
    mixer = spec.layer_spec.mixer
    if mixer is not None and mixer.delta is not None:
        obstacle = f"the delta nets of {spec.family}, whose products are torch's"
    if obstacle is None and has_adapters:
        obstacle = "checkpoints with an adapter for each task"
    if obstacle is None and device.type == "cuda":
        obstacle = _gpu_module_obstacle(sentence)
    if obstacle is not None:
        raise OptionError(f"batch_invariant is not for {obstacle}, or leave it out")


def check_invariant_generation(spec: ModelSpec, device: torch.device) -> None:
    """Raises OptionError where a loaded batch-invariant model cannot generate so."""
    obstacle = None
    rotations = {spec.layer_spec.rotary_of(i) for i in range(spec.num_layers)}
    if any(rotation is not None and rotation.scaling == "dynamic" for rotation in rotations):
        obstacle = (
            "its rotary scaling is dynamic, so that cached keys depend on how long their sequence "
            "was"
        )
    elif device.type == "cuda":
        heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        if spec.layer_spec.alibi is not None:
            obstacle = "its attention has ALiBi slopes, which the GPU adds up by tile"
        elif not has_invariant_kernel(*heads, device):
            obstacle = (
                f"heads of {spec.head_dim} features and {spec.num_heads // spec.num_kv_heads} "
                "query heads a key head do not run on one kernel (at most 128 features)"
            )
    if obstacle is not None:
        raise OptionError(
            f"a batch-invariant {spec.family} cannot generate on {device}: {obstacle}; load it "
            "without batch_invariant"
        )


def invariant_modules(modules: Sequence[Module]) -> tuple[Module, ...]:
    """The same modules with batch-invariant linear layers."""
    return tuple(_invariant(module) for module in modules)


def _invariant(module: Module) -> Module:
    if isinstance(module, Dense):
        weight = replace(module.weight, batch_invariant=True)
        residual = module.residual
        residual = None if residual is None else replace(residual, batch_invariant=True)
        return replace(module, weight=weight, residual=residual)
    if isinstance(module, Projection):
        return replace(module, weight=replace(module.weight, batch_invariant=True))
    return module


def _cpu_obstacle(
    spec: ModelSpec, device: torch.device, dtype: torch.dtype, quantization: str | None
) -> str | None:
    kinds = {"float32": has_invariant_f32(), "bfloat16": has_invariant_bf16()}
    served = " or ".join(name for name, is_served in kinds.items() if is_served)
    if dtype == torch.float16:
        return f"dtype float16 on a CPU, where attention is plain torch; use {served}"
    reason = native.why_no_kernel("varlen_attention", device)
    if reason is not None:
        return f"a CPU without the native core ({reason}); build it"
    if not torch.backends.mkldnn.is_available():
        return "a torch without oneDNN; install a build that has it"
    if dtype == torch.float32 and not has_invariant_f32():
        return "dtype float32 on an ARM CPU, where products choose by rows; use bfloat16"
    if dtype == torch.bfloat16 and not has_invariant_bf16():
        return "dtype bfloat16 on a CPU without AVX2 or NEON; use float32"
    return None


def _gpu_obstacle(
    spec: ModelSpec, device: torch.device, dtype: torch.dtype, quantization: str | None
) -> str | None:
    reason = native.why_no_kernel("linear_any", device)
    if reason is not None:
        return f"{device} without the native kernels ({reason}); use a Hopper GPU or the CPU"
    if quantization == FP8 or dtype not in _HALF:
        name = quantization or str(dtype).removeprefix("torch.")
        return f"dtype {name} on a GPU; use float16 or bfloat16"
    if spec.experts is not None:
        return f"the experts of {spec.family} on a GPU; use the CPU"
    if spec.layer_spec.disentangled is not None:
        if not has_disentangled_kernel(device) or spec.head_dim > 128 or spec.head_dim % 8:
            return f"disentangled heads of {spec.head_dim} features on a GPU; use the CPU"
        return None
    for dim in spec.head_dims:
        if dim > MAX_HEAD_DIM or not is_planned(dtype, dim, device):
            return f"heads of {dim} features on a GPU (a multiple of 8 up to 256); use the CPU"
    return None


def _gpu_module_obstacle(sentence: SentenceSpec) -> str | None:
    if sentence.splade is not None and sentence.splade.strategy == "sum":
        return "SPLADE with sums on a GPU; use the CPU"
    if any(kind == "SparseAutoEncoder" for kind, _ in sentence.modules):
        return f"the module {AutoEncoder.__name__} on a GPU; use the CPU"
    return None
