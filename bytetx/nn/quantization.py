"""dtypes that name what GEMMs multiply, not what hidden states are: which model, which weights."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from bytetx.checkpoint.spec import ModelSpec
from bytetx.checkpoint.weights import Weights
from bytetx.errors import OptionError, WeightFormatError
from bytetx.nn import fp8, int8
from bytetx.nn.kept_codes import keeps_codes, kept_bits
from bytetx.nn.layer import LayerWeights
from bytetx.ops.coded_linear import prepare_coded_linear
from bytetx.ops.grouped_blocks import why_no_coded_kernel
from bytetx.ops.panel_linear import why_no_panels


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """Kind of weights that layers multiply where a dtype names it.

    check: raises OptionError where a model's layers cannot run so on a device.
    quantize: (a layer with plain weights, whether it is the last one) -> the layer.
    dtype: of everything else on a CPU; None, and on a GPU: as of "auto".
    bits: of most parameters in memory; None: those of dtype.
    coded_bits: of codes in groups that layers are read in on a CPU, so that codes of a GGUF file
    are kept; None: they are read as floats, and converted.
    keeps_codes: whether matrices are read as they are saved, so that codes of any file are kept.
    keeps_fp8: whether matrices are read as rows in E4M3, so that codes of an FP8 file are kept.
    table_bits: of codes in groups that are kept of the word table and a head over the vocabulary;
    None: they stay.
    """

    check: Callable[[ModelSpec, torch.device], None]
    quantize: Callable[[LayerWeights, bool], LayerWeights]
    dtype: Callable[[], torch.dtype] | None = None
    bits: float | None = None
    coded_bits: int | None = None
    keeps_codes: bool = False
    keeps_fp8: bool = False
    table_bits: int | None = None


# Options that leave the dtype to the checkpoint and the device.
_OWN_DTYPES = ("auto", "fastest")
FP8, INT8, INT4 = "fp8", "int8", "int4"
SAVED = "codes as saved"  # no dtype: what a GPU makes of a checkpoint of few bits by itself


def _check_groups(name: str, spec: ModelSpec, device: torch.device) -> None:
    is_taken = spec.is_causal and device.type == "cpu"
    if spec.experts is not None and not is_taken:
        raise OptionError(f"dtype {name} is not for the experts of {spec.family}; use bfloat16")
    if device.type == "cpu":
        reason, other = why_no_panels(), "float32"
    else:
        reason, other = why_no_coded_kernel(device), "bfloat16"
    if reason is not None:
        raise OptionError(f"dtype {name} cannot run on {device}: {reason}; use {other}")


def _in_groups(layer: LayerWeights, is_last: bool, *, bits: int) -> LayerWeights:
    return layer.converted(partial(prepare_coded_linear, bits=bits))


def _check_encoder_int8(spec: ModelSpec, device: torch.device) -> None:
    if device.type == "cpu":
        int8.check(spec)
    else:
        _check_groups(INT8, spec, device)


def _encoder_int8(layer: LayerWeights, is_last: bool) -> LayerWeights:
    """On a CPU both sides of a product are integers; on a GPU weights alone, in groups."""
    is_gpu = layer.qkv.dense.weight.is_cuda
    return _in_groups(layer, is_last, bits=8) if is_gpu else int8.quantize(layer)


_INT4 = WeightFormat(
    partial(_check_groups, INT4),
    partial(_in_groups, bits=4),
    int8.activation_dtype,
    bits=5.0,
    coded_bits=4,
)
WEIGHT_FORMATS = {
    FP8: WeightFormat(fp8.check, fp8.quantize),
    INT8: WeightFormat(_check_encoder_int8, _encoder_int8, int8.activation_dtype),
    INT4: _INT4,
}
# Rows of causal models have a few features that are hundreds of times larger than the others, which
# one scale a row does not hold: these have scales of groups. Table and head keep 8 bits, because
# every token's result depends on them directly.
_CAUSAL = {
    FP8: WeightFormat(fp8.check, fp8.quantize_causal, bits=8.0, keeps_fp8=True),
    INT8: WeightFormat(
        partial(_check_groups, INT8),
        partial(_in_groups, bits=8),
        int8.activation_dtype,
        bits=8.5,
        coded_bits=8,
        table_bits=8,
    ),
    INT4: replace(_INT4, table_bits=8),
}


_SAVED = WeightFormat(lambda spec, device: None, lambda layer, is_last: layer, keeps_codes=True)


def weight_format(name: str, spec: ModelSpec) -> WeightFormat:
    """The format that a dtype, a key of WEIGHT_FORMATS, names in this model, or that of SAVED."""
    if name == SAVED:
        return _SAVED
    found = WEIGHT_FORMATS[name]
    return _CAUSAL.get(name, found) if spec.is_causal else found


def memory_bits(
    name: str | None, spec: ModelSpec, weights: Weights, dtype: torch.dtype
) -> float | None:
    """Bits of most parameters in memory; None: those of the dtype.  name: None for a plain one."""
    if name == SAVED:
        return kept_bits(weights, dtype)
    return None if name is None else weight_format(name, spec).bits


def wanted_format(
    dtype: str | torch.dtype,
    spec: ModelSpec,
    weights: Weights,
    device: torch.device,
    *,
    is_alone: bool,
) -> str | None:
    """As of wanted_quantization, or SAVED.  is_alone: one process holds the model."""
    if dtype in _OWN_DTYPES and is_alone and keeps_codes(spec, weights, device):
        return SAVED
    return wanted_quantization(dtype, spec, device)


def wanted_quantization(
    dtype: str | torch.dtype, spec: ModelSpec, device: torch.device
) -> str | None:
    """The key of WEIGHT_FORMATS that dtype is; None for a plain dtype.

    Raises WeightFormatError where this model cannot run so on this device.
    """
    if not isinstance(dtype, str) or dtype not in WEIGHT_FORMATS:
        return None
    if not spec.num_layers:
        raise WeightFormatError(
            f"dtype {dtype} is of what layers multiply, and a static embedding has no layers; use "
            "float32 or float16"
        )
    try:
        weight_format(dtype, spec).check(spec, device)
    except OptionError as error:
        raise WeightFormatError(str(error)) from error
    return dtype
