"""dtypes that name what GEMMs multiply, not what hidden states are: which model, which weights."""

from collections.abc import Sequence
from typing import Literal

import torch

from bytetx.checkpoint.spec import ModelSpec
from bytetx.errors import OptionError
from bytetx.nn import fp8, int8
from bytetx.nn.layers import LayerWeights
from bytetx.ops import native
from bytetx.ops.int8_linear import why_no_int8_linear

Quantization = Literal["fp8", "int8"]

FP8: Quantization = "fp8"  # E4M3 rows on Hopper GPUs; the rest in the half type of "auto" on CUDA
INT8: Quantization = "int8"  # 8-bit integers on CPUs; the rest in bfloat16
QUANTIZATIONS = (FP8, INT8)


def wanted_quantization(
    dtype: str | torch.dtype, spec: ModelSpec, device: torch.device
) -> Quantization | None:
    """Which one dtype names; None for a plain dtype.

    Raises OptionError where this model cannot run so on this device.
    """
    if dtype == FP8:
        _check_fp8(spec, device)
        return FP8
    if dtype == INT8:
        _check_int8(spec, device)
        return INT8
    return None


def quantize_layers(
    layers: Sequence[LayerWeights], quantization: Quantization
) -> list[LayerWeights]:
    """The layers of an encoder that may run so, from plain ones."""
    if quantization == INT8:
        return [int8.quantize_layer(layer) for layer in layers]
    last = len(layers) - 1
    return [fp8.quantize_layer(layer, is_last=i == last) for i, layer in enumerate(layers)]


def _check_fp8(spec: ModelSpec, device: torch.device) -> None:
    if spec.is_causal:
        raise OptionError(
            f"dtype fp8 is for encoders, and {spec.family} is a causal model; use bfloat16"
        )
    if not fp8.takes_fp8(spec):
        raise OptionError(f"dtype fp8 is not for layers as those of {spec.family}; use bfloat16")
    reason = native.why_no_kernel("fp8_linear", device)
    if reason is not None:
        raise OptionError(f"dtype fp8 cannot run on {device}: {reason}; use dtype float16")


def _check_int8(spec: ModelSpec, device: torch.device) -> None:
    if device.type != "cpu":
        raise OptionError(f"dtype int8 runs on CPUs, not on {device}; use float16 or fp8")
    if spec.is_causal:
        raise OptionError(
            f"dtype int8 is for encoders, and {spec.family} is a causal model; use bfloat16"
        )
    if not int8.takes_int8(spec):
        raise OptionError(f"dtype int8 is not for the experts of {spec.family}; use bfloat16")
    reason = why_no_int8_linear()
    if reason is not None:
        raise OptionError(f"dtype int8 cannot run on this machine: {reason}; use float32")
