"""Layers that mix a sequence's tokens by something else than attention."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bytetx.checkpoint.config import Values
from bytetx.errors import CheckpointError

# Keys of [mixer_layer] that are linear layers, and those that hold a convolution of each feature.
MIXER_LINEARS = ("mixer_in", "mixer_out")
CONVOLUTIONS = ("conv",)
# What layer_types calls the layers of each kind.
LAYER_TYPES = {"short_conv": "conv"}
_ATTENTION = "full_attention"


@dataclass(frozen=True, slots=True)
class MixerSpec:
    """What some layers have in place of attention.

    kind: short_conv, a gated convolution (ops.short_conv).  pattern: whether each layer has it.
    conv_size: tokens that a feature's convolution reads, its own the last.
    layer: names of their tensors, with {i} for the layer.
    """

    kind: str
    pattern: tuple[bool, ...]
    conv_size: int
    layer: Mapping[str, str]

    def in_features(self, hidden_size: int) -> int:
        """Outputs of the first linear layer."""
        return 3 * hidden_size

    def mixed_features(self, hidden_size: int) -> int:
        """Inputs of the last linear layer."""
        return hidden_size

    def conv_features(self, hidden_size: int) -> int:
        """Features that the convolution reads."""
        return hidden_size


def read_mixer(
    values: Values, table: Mapping[str, Any], *, num_layers: int, layer_types: Sequence[str] | None
) -> MixerSpec | None:
    """The mixer of a family that has one; None where attention is in every layer.

    layer_types: the kind of each layer; None: config.json lists them, or all have attention.
    """
    if "mixer_layer" not in table:
        return None
    kind = table["architecture"]["mixer"]
    given = values.read(values.names["layer_types"]) if layer_types is None else layer_types
    if given is None:
        return None
    pattern = tuple(name == LAYER_TYPES[kind] for name in given)
    if all(pattern):
        raise CheckpointError(
            f"config.json: all of the {num_layers} layers are {LAYER_TYPES[kind]!r}; at least one "
            f"must be {_ATTENTION!r}"
        )
    if not any(pattern):
        return None
    return MixerSpec(kind, pattern, values.size("conv_size"), table["mixer_layer"])
