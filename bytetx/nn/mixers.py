"""Layers without attention: the step between their two linear layers, and their memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from bytetx.checkpoint.mixer_spec import DeltaSpec, MixerSpec
from bytetx.checkpoint.spec import ModelSpec
from bytetx.nn.kv_cache import LayerState
from bytetx.nn.tensors import Matrix, TensorLoader
from bytetx.ops.delta_rule import (
    DeltaGates,
    DeltaPast,
    gated_delta_rule,
    gated_norm,
    has_delta_kernel,
)
from bytetx.ops.group_rows import GroupRows
from bytetx.ops.short_conv import ConvPast, short_conv
from bytetx.packed import PackedBatch


class Mixer(Protocol):
    """Mixes the tokens of each sequence; a kind is a frozen dataclass with these members.

    is_capturable: whether it launches by sizes alone, as a CUDA graph needs.
    """

    @property
    def is_capturable(self) -> bool: ...

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

    @property
    def is_capturable(self) -> bool:
        return True

    def mix(self, projected: Tensor, batch: PackedBatch, state: LayerState | None) -> Tensor:
        past = None
        if state is not None:
            past = conv_past(batch, state)
        return short_conv(
            projected, self.weight, self.bias, batch.cu_seqlens, is_gated=True, past=past
        )


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """A gated delta net on projected rows (q, k and v; gates of the result; beta; decay).

    conv: [channels, taps].  rates: f32 [num_v_heads], what decays are multiplied by, below 0.
    decay_bias: f32 [num_v_heads].  norm: [v_dim], of the result.
    """

    spec: DeltaSpec
    conv: Tensor
    rates: Tensor
    decay_bias: Tensor
    norm: Tensor
    eps: float

    @property
    def is_capturable(self) -> bool:
        own, conv = self.spec, self.conv
        return has_delta_kernel(conv.device, conv.dtype, own.k_dim, own.v_dim)

    def mix(self, projected: Tensor, batch: PackedBatch, state: LayerState | None) -> Tensor:
        own, heads = self.spec, self.spec.num_v_heads
        sizes = [len(self.conv), own.v_features, heads, heads]
        qkv, gate, beta, decay = projected.split(sizes, dim=1)
        past = memory = None
        if state is not None:
            past = conv_past(batch, state)
            assert state.memory is not None  # allocate_states made it
            memory = DeltaPast(state.memory, past.slots, past.kv_seqlens)
        mixed = short_conv(qkv, self.conv, None, batch.cu_seqlens, has_silu=True, past=past)
        q, k, v = mixed.split([own.k_features, own.k_features, own.v_features], dim=1)
        out = gated_delta_rule(
            q.unflatten(1, (-1, own.k_dim)),
            k.unflatten(1, (-1, own.k_dim)),
            v.unflatten(1, (-1, own.v_dim)),
            DeltaGates(decay, beta, self.rates, self.decay_bias),
            batch.cu_seqlens,
            batch.seqlens,
            max_seqlen=batch.max_seqlen,
            past=memory,
        )
        return gated_norm(out, gate, self.norm, self.eps)


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
    own = mixer.delta
    if own is None:
        return ShortConvolution(weight[:, 0], bias)
    log, decay_bias = (
        load.tensor(names[key], (own.num_v_heads,)).float() for key in ("decay_log", "decay_bias")
    )
    norm = load.tensor(f"{names['mixer_norm']}.weight", (own.v_dim,))
    return DeltaNet(own, weight[:, 0], -log.exp(), decay_bias, norm, spec.norm_eps)


def rows_in_order(
    parts: Sequence[tuple[Matrix, Tensor | None]], mixer: MixerSpec
) -> list[tuple[Matrix, Tensor | None]]:
    """The first linear layer's tensors as DeltaNet reads them, of rows that key heads take turns
    with: each head's q, k, values and gates; then each one's betas and decays."""
    own = mixer.delta
    assert own is not None  # is_interleaved says so
    group = own.num_v_heads // own.num_k_heads
    wide = group * own.v_dim
    sizes = ((own.k_dim, own.k_dim, wide, wide), (group, group))

    def order(rows: Tensor, own_sizes: tuple[int, ...]) -> Tensor:
        by_head = rows.unflatten(0, (own.num_k_heads, -1)).split(own_sizes, dim=1)
        return torch.cat([part.flatten(0, 1) for part in by_head])

    found: list[tuple[Matrix, Tensor | None]] = []
    for (matrix, bias), own_sizes in zip(parts, sizes, strict=True):
        turn = partial(order, own_sizes=own_sizes)
        found.append((matrix.mapped(turn) if isinstance(matrix, GroupRows) else turn(matrix), bias))
    return found


def state_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Bytes that all layers remember of one sequence beside its pages."""
    mixer = spec.layer_spec.mixer
    if mixer is None:
        return 0
    conv = (mixer.conv_size - 1) * mixer.conv_features(spec.hidden_size) * dtype.itemsize
    own = mixer.delta
    memory = 0 if own is None else 4 * own.num_v_heads * own.k_dim * own.v_dim
    return sum(mixer.pattern) * (conv + memory)


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
    own = mixer.delta

    def state() -> LayerState:
        conv = torch.zeros(shape, dtype=dtype, device=device)
        if own is None:
            return LayerState(conv)
        sizes = (num_slots, own.num_v_heads, own.k_dim, own.v_dim)
        return LayerState(conv, torch.zeros(sizes, device=device))

    return tuple(state() for _ in range(sum(mixer.pattern)))
