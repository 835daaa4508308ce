"""What layers without attention do between their two linear layers, and what they remember."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from bytetx.checkpoint.mixer_spec import MixerSpec
from bytetx.checkpoint.spec import ModelSpec
from bytetx.nn.kv_cache import LayerState
from bytetx.nn.tensors import TensorLoader
from bytetx.ops.short_conv import ConvPast, short_conv
from bytetx.packed import PackedBatch


class Mixer(Protocol):
    """Mixes the tokens of each sequence; a kind is a frozen dataclass with this method."""

    def mix(self, projected: Tensor, batch: PackedBatch, state: LayerState | None) -> Tensor:
        """[total_tokens, outputs of the first linear layer] -> [total_tokens, inputs of the last].

        state: of the layer, in a step of generation; it becomes that behind the step's tokens.
        """
        ...


@dataclass(frozen=True, slots=True)
class ShortConvolution:
    """c * convolution(b * x) of projected rows (b, c, x).

    weight: [hidden_size, taps].  bias: [hidden_size].
    """

    weight: Tensor
    bias: Tensor | None

    def mix(self, projected: Tensor, batch: PackedBatch, state: LayerState | None) -> Tensor:
        past = None
        if state is not None:
            past = conv_past(batch, state)
        return short_conv(
            projected, self.weight, self.bias, batch.cu_seqlens, is_gated=True, past=past
        )


def conv_past(batch: PackedBatch, state: LayerState) -> ConvPast:
    """The past of a step's convolution."""
    assert batch.past is not None and batch.past.state_slots is not None  # Layers has seen to it
    return ConvPast(state.conv, batch.past.state_slots, batch.past.kv_seqlens)


def load_mixer(
    spec: ModelSpec, mixer: MixerSpec, names: Mapping[str, str], load: TensorLoader
) -> Mixer:
    """A layer's mixer from named tensors; raises as TensorLoader does.  names: of the layer."""
    channels = mixer.conv_features(spec.hidden_size)
    weight = load.tensor(f"{names['conv']}.weight", (channels, 1, mixer.conv_size))
    bias = None
    if "conv" in spec.layer_spec.biases:
        bias = load.tensor(f"{names['conv']}.bias", (channels,))
    return ShortConvolution(weight[:, 0], bias)


def state_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Bytes that all layers remember of one sequence beside its pages."""
    mixer = spec.layer_spec.mixer
    if mixer is None:
        return 0
    conv = (mixer.conv_size - 1) * mixer.conv_features(spec.hidden_size) * dtype.itemsize
    return sum(mixer.pattern) * conv


def allocate_states(
    spec: ModelSpec, num_slots: int, *, dtype: torch.dtype, device: torch.device
) -> tuple[LayerState, ...]:
    """The states of every layer without attention, of zeros, for so many sequences.

    No result depends on what a slot holds before its sequence's first step.
    """
    mixer = spec.layer_spec.mixer
    if mixer is None:
        return ()
    shape = (num_slots, mixer.conv_size - 1, mixer.conv_features(spec.hidden_size))
    return tuple(
        LayerState(torch.zeros(shape, dtype=dtype, device=device))
        for _ in range(sum(mixer.pattern))
    )
