"""Layers that mix a sequence's tokens by something else than attention."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bytetx.checkpoint.config import Values
from bytetx.errors import CheckpointError
from bytetx.ops.delta_chunk import CHUNK

# Keys of [mixer_layer] that are linear layers, and those that hold a convolution of each feature.
MIXER_LINEARS = ("mixer_in", "mixer_gate", "mixer_beta", "mixer_decay", "mixer_out")
# Whole names of tensors with a number for each head.
MIXER_TENSORS = ("decay_log", "decay_bias")
CONVOLUTIONS = ("conv",)
# What layer_types calls the layers of each kind.
LAYER_TYPES = {"short_conv": "conv", "delta_net": "linear_attention"}
_ATTENTION = "full_attention"


@dataclass(frozen=True, slots=True)
class DeltaSpec:
    """Heads of a gated delta net, and their features; see ops.delta_rule."""

    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int

    @property
    def k_features(self) -> int:
        return self.num_k_heads * self.k_dim

    @property
    def v_features(self) -> int:
        return self.num_v_heads * self.v_dim


@dataclass(frozen=True, slots=True)
class MixerSpec:
    """The mixer that some layers have in place of attention.

    kind: short_conv, a gated convolution (ops.short_conv); delta_net, a gated delta net, of delta.
    pattern: whether each layer has it.
    conv_size: tokens that a feature's convolution reads, its own the last.
    layer: names of their tensors, with {i} for the layer.
    """

    kind: str
    pattern: tuple[bool, ...]
    conv_size: int
    layer: Mapping[str, str]
    delta: DeltaSpec | None = None

    @property
    def is_interleaved(self) -> bool:
        """Whether two tensors hold the first linear layer, in which key heads take turns."""
        return self.delta is not None and "mixer_gate" not in self.layer

    def parts(self, hidden_size: int) -> dict[str, int]:
        """Outputs of the first linear layer, by the tensors that hold its rows, in their order."""
        own = self.delta
        if own is None:
            return {"mixer_in": 3 * hidden_size}
        if self.is_interleaved:
            rows = self.conv_features(hidden_size) + own.v_features
            return {"mixer_in": rows, "mixer_decay": 2 * own.num_v_heads}
        sizes = (own.v_features, own.num_v_heads, own.num_v_heads)
        gates = zip(("mixer_gate", "mixer_beta", "mixer_decay"), sizes, strict=True)
        return {"mixer_in": self.conv_features(hidden_size), **dict(gates)}

    def in_features(self, hidden_size: int) -> int:
        """Outputs of the first linear layer."""
        return sum(self.parts(hidden_size).values())

    def mixed_features(self, hidden_size: int) -> int:
        """Inputs of the last linear layer."""
        return hidden_size if self.delta is None else self.delta.v_features

    def held_features(self, hidden_size: int) -> int:
        """Features a token between the two linear layers, of what is held at once beside them."""
        own = self.delta
        if own is None:
            return 0
        # The convolution's rows; what each chunk writes, reads and attends to; and the result.
        of_head = 2 * own.v_dim + own.k_dim + CHUNK
        return self.conv_features(hidden_size) + own.num_v_heads * of_head

    def conv_features(self, hidden_size: int) -> int:
        """Features that the convolution reads."""
        own = self.delta
        return hidden_size if own is None else 2 * own.k_features + own.v_features


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
    delta = _read_delta(values) if kind == "delta_net" else None
    return MixerSpec(kind, pattern, values.size("conv_size"), table["mixer_layer"], delta)


def _read_delta(values: Values) -> DeltaSpec:
    keys = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    delta = DeltaSpec(*(values.common_size(f"linear_{key}") for key in keys))
    if delta.num_v_heads % delta.num_k_heads:
        raise CheckpointError(
            f"config.json: linear_num_value_heads {delta.num_v_heads} is no multiple of "
            f"linear_num_key_heads {delta.num_k_heads}"
        )
    return delta
