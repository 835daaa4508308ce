"""WeightGather: layers whose linear weights are divided over ranks and gathered a layer ahead."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bytetx.nn.blocks import ColumnWeight, OutWeight, RowWeight
from bytetx.nn.layers import LayerWeights
from bytetx.ops.gated import GatedWeight
from bytetx.ops.linear import LinearWeight
from bytetx.parallel.grid import gathered_numbers
from bytetx.parallel.tp import GroupCollectives, Work

# Of a layer, in the order in which their weights lie in a shard.
_LINEARS = ("qkv", "attn_out", "ffn_in", "ffn_out")
_NUM_SLOTS = 2  # the layer that runs, and the one that is being gathered


@dataclass(frozen=True, slots=True)
class LayerShard:
    """layer: with empty weights in its linear layers.  numbers: this rank's part of them, one after
    the other and padded to equal parts.  shapes: of the weights."""

    layer: LayerWeights
    numbers: Tensor
    shapes: tuple[torch.Size, ...]


class WeightGather:
    """The shards of all layers, and two slots that hold whole layers: layer i is in slot i % 2.

    Biases and norms are on every rank. While layer i runs, the weights of layer i + 1 arrive in the
    slot of layer i - 1; every rank of the group runs the same layers, with rows or without.
    """

    def __init__(self, group: GroupCollectives):
        self._group = group
        self._shards: list[LayerShard] = []
        self._slots: list[Tensor] = []
        self._pending: Work | None = None

    @property
    def size(self) -> int:
        """Ranks that the weights are divided over."""
        return self._group.size

    @property
    def num_bytes(self) -> int:
        """Of this rank's shards, without the slots."""
        shards = {id(shard): shard.numbers.nbytes for shard in self._shards}
        return sum(shards.values())

    def keep(self, layer: LayerWeights) -> LayerShard:
        """This rank's part of a layer, and the layer without its weights."""
        weights = [_linear(getattr(layer, name)).weight for name in _LINEARS]
        count = sum(weight.numel() for weight in weights)
        padded = gathered_numbers(count, self._group.size)
        flat = weights[0].new_zeros(padded)
        torch.cat([weight.reshape(-1) for weight in weights], out=flat[:count])
        if not self._slots:
            self._slots = [flat, torch.empty_like(flat)]
        elif padded != self._slots[0].numel():
            raise ValueError(f"layers of {self._slots[0].numel()} and {padded} weights differ")
        shard = flat.view(self._group.size, -1)[self._group.rank].clone()
        shapes = tuple(weight.shape for weight in weights)
        return LayerShard(_with_weights(layer, [shard.new_empty(0)] * 4), shard, shapes)

    def place(self, shard: LayerShard) -> LayerWeights:
        """The next layer of the model: its weights are views of its slot, filled while it runs."""
        slot = self._slots[len(self._shards) % _NUM_SLOTS]
        self._shards.append(shard)
        numbers = [shape.numel() for shape in shard.shapes]
        views = slot[: sum(numbers)].split(numbers)
        weights = [v.view(shape) for v, shape in zip(views, shard.shapes, strict=True)]
        return _with_weights(shard.layer, weights)

    def begin(self) -> None:
        """Before the first layer of a pass."""
        if self._pending is not None:  # of a pass that failed
            self._pending.wait()
        self._start(0)

    def enter(self, i: int) -> None:
        """Before layer i runs: its weights are there, and those of the next one start."""
        assert self._pending is not None
        self._pending.wait()
        self._pending = None
        if i + 1 < len(self._shards):
            self._start(i + 1)

    def _start(self, i: int) -> None:
        slot = self._slots[i % _NUM_SLOTS]
        self._pending = self._group.start_all_gather(slot, self._shards[i].numbers)


def _linear(w: ColumnWeight | OutWeight | None) -> LinearWeight:
    if isinstance(w, GatedWeight):
        return w.fused
    if isinstance(w, RowWeight):
        return w.linear
    assert isinstance(w, LinearWeight) and not w.is_prepacked  # dense layers, loaded so
    return w


def _with_weights(layer: LayerWeights, weights: list[Tensor]) -> LayerWeights:
    def replaced(name: str, weight: Tensor) -> object:
        w = getattr(layer, name)
        linear = replace(_linear(w), weight=weight)
        if isinstance(w, GatedWeight):
            return replace(w, fused=linear)
        return replace(w, linear=linear) if isinstance(w, RowWeight) else linear

    found = {name: replaced(name, w) for name, w in zip(_LINEARS, weights, strict=True)}
    return replace(layer, **found)  # type: ignore[arg-type]  # of the same types
