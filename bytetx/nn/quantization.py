"""dtypes that name what GEMMs multiply, not what hidden states are: which model, which weights."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from bytetx.checkpoint.spec import ModelSpec
from bytetx.nn import fp8, int8
from bytetx.nn.layer import LayerWeights


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """Kind of weights that layers multiply where a dtype names it.

    check: raises OptionError where a model's layers cannot run so on a device.
    quantize: (a layer with plain weights, whether it is the last one) -> the layer.
    dtype: of everything else; None: as of "auto".
    """

    check: Callable[[ModelSpec, torch.device], None]
    quantize: Callable[[LayerWeights, bool], LayerWeights]
    dtype: Callable[[], torch.dtype] | None = None


FP8, INT8 = "fp8", "int8"
WEIGHT_FORMATS = {
    FP8: WeightFormat(fp8.check, fp8.quantize),
    INT8: WeightFormat(int8.check, int8.quantize, int8.activation_dtype),
}


def wanted_quantization(
    dtype: str | torch.dtype, spec: ModelSpec, device: torch.device
) -> str | None:
    """The key of WEIGHT_FORMATS that dtype is; None for a plain dtype.

    Raises OptionError where this model cannot run so on this device.
    """
    if not isinstance(dtype, str) or dtype not in WEIGHT_FORMATS:
        return None
    WEIGHT_FORMATS[dtype].check(spec, device)
    return dtype
