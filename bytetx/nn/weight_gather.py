"""WeightGather: layers whose linear weights are divided over ranks and gathered a layer ahead."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from bytetx.nn.layer import LayerWeights
from bytetx.ops.linear import LinearWeight, tensors_bytes
from bytetx.parallel.grid import gathered_numbers
from bytetx.parallel.tp import GroupCollectives, Work
from bytetx.runtime.on_stream import OnStream

_NUM_SLOTS = 2  # the layer that runs, and the one that is being gathered


@dataclass(frozen=True, slots=True)
class LayerShard:
    """layer: with empty weights in its linear layers.  numbers: this rank's part of them, one after
    the other and padded to equal parts.  shapes: of the weights.  index: among those kept."""

    layer: LayerWeights
    numbers: Tensor
    shapes: tuple[torch.Size, ...]
    index: int


class WeightGather:
    """The shards of all layers, and two slots that hold whole layers: layer i is in slot i % 2.

    Biases and norms are on every rank. While layer i runs, the weights of layer i + 1 arrive in the
    slot of layer i - 1. Where GPUs read one another's memory, each rank copies the others' shards
    when it likes, for shards never change once `connect` has found all of them loaded. Elsewhere a
    gather is a collective: every rank of the group runs the same layers, with rows or without.
    """

    def __init__(self, group: GroupCollectives):
        self._group = group
        self._shards: list[LayerShard] = []
        self._slots: list[Tensor] = []
        self._pending: Work | ShardCopies | None = None
        # One allocation with all shards of this rank, which peers read.
        self._region: Tensor | None = None
        self._num_kept = 0
        self._copies: ShardCopies | None = None
        self._holds_first = False

    @property
    def size(self) -> int:
        """Ranks that the weights are divided over."""
        return self._group.size

    @property
    def num_bytes(self) -> int:
        """Bytes of this rank's shards, without the slots."""
        shards = {id(shard): shard.numbers.nbytes for shard in self._shards}
        return sum(shards.values())

    @property
    def is_capturable(self) -> bool:
        """Whether CUDA graphs can hold its gathers."""
        return self._copies is not None or self._group.is_capturable

    def keep(self, layer: LayerWeights, *, num_layers: int) -> LayerShard:
        """This rank's part of a layer, and the layer without its weights.

        num_layers: that will be kept in all.
        """
        weights = [w.dense.weight for w in layer.linears]
        count = sum(weight.numel() for weight in weights)
        padded = gathered_numbers(count, self._group.size)
        flat = weights[0].new_zeros(padded)
        torch.cat([weight.reshape(-1) for weight in weights], out=flat[:count])
        if not self._slots:
            self._slots = [flat, torch.empty_like(flat)]
            if self._group.peer_reads is not None:
                num_bytes = num_layers * flat.nbytes // self._group.size
                self._region = self._group.peer_reads.allocate(num_bytes)
        elif padded != self._slots[0].numel():
            raise ValueError(f"layers of {self._slots[0].numel()} and {padded} weights differ")
        own = flat.view(self._group.size, -1)[self._group.rank]
        index = self._num_kept
        self._num_kept += 1
        shard = self._place_of(index, own).copy_(own)
        shapes = tuple(weight.shape for weight in weights)
        return LayerShard(_with_weights(layer, [shard.new_empty(0)] * 4, 1), shard, shapes, index)

    def _place_of(self, index: int, own: Tensor) -> Tensor:
        """Where the shard kept as number `index` lies."""
        if self._region is None:
            return torch.empty_like(own)
        start = index * own.nbytes
        return self._region[start : start + own.nbytes].view(own.dtype)

    def place(self, shard: LayerShard) -> LayerWeights:
        """The next layer of the model: its weights are views of its slot, filled while it runs."""
        slot = self._slots[len(self._shards) % _NUM_SLOTS]
        self._shards.append(shard)
        numbers = [shape.numel() for shape in shard.shapes]
        views = slot[: sum(numbers)].split(numbers)
        weights = [v.view(shape) for v, shape in zip(views, shard.shapes, strict=True)]
        return _with_weights(shard.layer, weights, self._group.size)

    def connect(self) -> None:
        """Once all ranks have loaded, which all call it: from now on each copies by itself."""
        if self._group.peer_reads is None:
            return
        # Ranks load for minutes, and exchange addresses in less.
        self._group.all_reduce(self._slots[0].new_zeros(1)).item()
        peers = self._group.peer_reads.connect(self._region)
        if peers is None or self._region is None:
            return
        self._copies = ShardCopies(
            [view.view(self._slots[0].dtype) for view in peers.views],
            [shard.index * shard.numbers.numel() for shard in self._shards],
            rank=self._group.rank,
            owner=peers.owner,
        )
        self.prepare()

    def prepare(self) -> None:
        """Before a pass on the current stream, captured or not."""
        if self._wraps and not self._holds_first:
            self._start(0).wait()
            self._holds_first = True

    def begin(self) -> None:
        """Before the first layer of a pass."""
        if self._pending is not None:  # left by a pass that failed
            self._pending.wait()
            self._pending = None
        if self._wraps:
            self.prepare()
            self._holds_first = False
        else:
            self._pending = self._start(0)

    def enter(self, i: int) -> None:
        """Before layer i runs: its weights are there, and those of the next one start."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        following = i + 1
        if following < len(self._shards):
            self._pending = self._start(following)
        elif self._wraps:
            self._pending = self._start(0)

    def end(self) -> None:
        """Behind the last layer of a pass: the first one is in its slot again."""
        if self._wraps:
            assert self._pending is not None
            self._pending.wait()
            self._pending = None
            self._holds_first = True

    @property
    def _wraps(self) -> bool:
        """Whether the first layer of the next pass arrives beside the last layer of this one: where
        this costs no other rank a collective, and they are in different slots."""
        return self._copies is not None and len(self._shards) % _NUM_SLOTS == 0

    def _start(self, i: int) -> "Work | ShardCopies":
        slot, numbers = self._slots[i % _NUM_SLOTS], self._shards[i].numbers
        if self._copies is None:
            return self._group.start_all_gather(slot, numbers)
        self._group.count_all_gather(slot)
        return self._copies.start(slot, i)


class ShardCopies:
    """Copies of a layer's shards from the memory of all ranks, beside the current stream.

    Copy engines move them, where a collective's kernels would take SMs from the layer that runs.
    """

    def __init__(
        self, regions: Sequence[Tensor], starts: Sequence[int], *, rank: int, owner: object
    ):
        """regions: of each rank, [numbers].  starts: where each layer's shard begins, the same in
        every region.  owner: keeps them alive."""
        self._regions, self._starts, self._owner = regions, starts, owner
        # Each rank begins with the next one: no two read from the same GPU at once.
        self._order = [(rank + step) % len(regions) for step in range(1, len(regions) + 1)]
        self._side = torch.cuda.Stream(regions[0].device)

    def start(self, received: Tensor, i: int) -> "ShardCopies":
        """Begins to copy layer i into received, after what the current stream has been given."""
        shards = received.view(len(self._regions), -1)
        shard_bytes = slice(self._starts[i], self._starts[i] + shards.shape[1])
        self._side.wait_stream(torch.cuda.current_stream())
        with OnStream(self._side):
            for source in self._order:
                shards[source].copy_(self._regions[source][shard_bytes])
        return self

    def wait(self) -> None:
        """The current stream waits for what was started."""
        torch.cuda.current_stream().wait_stream(self._side)


@dataclass(frozen=True, slots=True)
class GatheredWeight(LinearWeight):
    """A matrix that lies in a slot while its layer runs; num_ranks hold a part of it each."""

    num_ranks: int = 1

    @property
    def num_bytes(self) -> int:
        return tensors_bytes(self) - self.weight.nbytes + self.weight.nbytes // self.num_ranks

    def shard(self, *, outputs: range | None = None, inputs: range | None = None) -> LinearWeight:
        raise TypeError("a gathered weight is divided over its ranks already")


def _with_weights(layer: LayerWeights, weights: list[Tensor], num_ranks: int) -> LayerWeights:
    places = iter(weights)

    def gathered(w: LinearWeight) -> LinearWeight:
        own = {one.name: getattr(w, one.name) for one in fields(w) if one.init}
        return GatheredWeight(**{**own, "weight": next(places), "num_ranks": num_ranks})

    return layer.converted(gathered)
