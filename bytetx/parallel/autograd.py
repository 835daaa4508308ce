"""Linear layers of a 4D grid with their backward pass: AxoNN's algorithm (arXiv 2305.13525).

A weight [n, k] is a block over the ranks that divide its inputs and its outputs. Each block is
flattened and divided once more over z. Of y = x W^T + b, per rank and layer:

- forward: all-gather W over z (started a layer ahead), product, all-reduce y over the input ranks;
- backward: all-gather W over z (a layer ahead), dx = dy W, all-reduce dx over the output ranks
  while dw = dy^T x runs, reduce-scatter dw over z and all-reduce it over data while the layers
  before run.

A column-parallel layer has its inputs on x and its outputs on y, a row-parallel layer the other way
round, so that the outputs of one are the inputs of the next and nothing is laid out again.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bytetx.errors import InputError
from bytetx.parallel.grid import Grid, gathered_numbers
from bytetx.parallel.nccl import loopback_sockets
from bytetx.parallel.tp import GroupCollectives, Store, Work, join_axis


@dataclass(frozen=True, slots=True)
class TrainingGroups:
    """The groups of one rank of a grid, along each axis; slots: data and z together."""

    grid: Grid
    rank: int
    device: torch.device
    data: GroupCollectives
    z: GroupCollectives
    y: GroupCollectives
    x: GroupCollectives
    slots: GroupCollectives

    @property
    def slot(self) -> int:
        """The part of a batch's sequences that this rank takes."""
        return self.grid.slot(self.rank)


def join_training_groups(
    store: Store, grid: Grid, *, rank: int, device: torch.device
) -> TrainingGroups:
    """Joins the groups of a grid's rank; every rank of the grid calls it.

    store: where all ranks meet.  device: gloo connects CPUs, NCCL one GPU a rank.
    """

    def join(name: str, members: tuple[int, ...]) -> GroupCollectives:
        group = join_axis(store, name, members, rank=rank, device=device, num_ranks=grid.size)
        group.counts.clear()
        return group

    with loopback_sockets() if device.type == "cuda" else nullcontext():
        data, z, y, x = (join(axis, grid.group(axis, rank)) for axis in ("data", "z", "y", "x"))
        return TrainingGroups(grid, rank, device, data, z, y, x, join("slots", grid.slots(rank)))


class GridLinear(torch.nn.Module):
    """This rank's part of a linear layer. After a backward pass, ShardedWeights.finish sets
    `shard.grad`; the gradient of `bias` is this rank's own, not yet summed over slots.

    shard: [numbers], 1/z of the block [n / outputs, k / inputs], padded to equal parts.
    bias: [n / outputs], added once, after the sum over the input ranks.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor,
        *,
        inputs: GroupCollectives,
        outputs: GroupCollectives,
        weights: "ShardedWeights",
    ):
        """weight: [n, k], all of it, on any device.  bias: [n].  inputs, outputs: the ranks that
        divide k and n.  weights: of all layers of a model, which are made in the order they run.

        Raises InputError where the ranks do not divide n or k.
        """
        super().__init__()
        block = local_part(local_part(weight, outputs, dim=0), inputs, dim=1)
        self.shape = block.shape
        self.inputs, self.outputs, self.weights = inputs, outputs, weights
        padded = _padded(block.reshape(-1), weights.z.size)
        own = padded.view(weights.z.size, -1)[weights.z.rank]
        self.shard = torch.nn.Parameter(own.to(weights.device, copy=True))
        part = local_part(bias, outputs, dim=0)
        self.bias = torch.nn.Parameter(part.to(weights.device, copy=True))
        self.index = weights.append(self)

    def forward(self, x: Tensor) -> Tensor:
        """[m, k / inputs] -> [m, n / outputs], the same on all input ranks."""
        y: Tensor = _Linear.apply(x, self.shard, self.bias, self)
        return y


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: Tensor, bias: Tensor, layer: GridLinear) -> Tensor:
        # shard is an argument so that a backward pass exists even where x needs no gradient.
        ctx.layer = layer
        ctx.save_for_backward(x)
        weight = layer.weights.take(layer.index, step=1, has_backward=ctx.needs_input_grad[1])
        y = layer.inputs.all_reduce(x @ weight.t())
        return y.to(x.dtype).add_(bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, Tensor, None]:
        (dy,), (x,), layer = grads, ctx.saved_tensors, ctx.layer
        dx = work = None
        if ctx.needs_input_grad[0]:
            dx = dy @ layer.weights.take(layer.index, step=-1)
            work = layer.outputs.start_all_reduce(dx)
            if work is not None and not layer.weights.overlaps:
                work.wait()
        layer.weights.reduce(layer, dy.t() @ x)
        dbias = dy.sum(0)
        if work is not None:
            work.wait()
        return dx, None, dbias, None


@dataclass(slots=True)
class _Gather:
    """A weight that arrives.  version: of the shard, whose change makes it out of date."""

    flat: Tensor
    work: Work
    version: int


@dataclass(slots=True)
class _Reduction:
    """A gradient on its way: grad is the shard's part.  sent: what work still reads."""

    layer: GridLinear
    grad: Tensor
    sent: Tensor
    work: Work | None
    is_scattered: bool


class ShardedWeights:
    """Gathers of weights, a layer ahead, and sums of their gradients, behind the layers before.

    Whole weights live while their product runs and during the product before it; the last layer's
    from its forward to its backward pass, which comes next.
    """

    def __init__(self, groups: TrainingGroups, *, overlaps: bool = True):
        """overlaps: False waits for every collective where it starts, and gathers a weight when it
        is needed; results are the same bits."""
        self.overlaps = overlaps
        self.device, self.z, self._data = groups.device, groups.z, groups.data
        self._layers: list[GridLinear] = []
        self._gathers: dict[int, _Gather] = {}
        self._reductions: list[_Reduction] = []

    def append(self, layer: GridLinear) -> int:
        """The layer's index in the order in which a forward pass runs them."""
        self._layers.append(layer)
        return len(self._layers) - 1

    def take(self, i: int, *, step: int, has_backward: bool = False) -> Tensor:
        """Layer i's weight [n / outputs, k / inputs]; starts the gather of the next layer's.

        step: 1 in a forward pass, -1 in a backward pass.  has_backward: whether one follows.
        """
        layer = self._layers[i]
        if self.z.size == 1:
            return layer.shard.detach().view(layer.shape)
        self._start(i)
        if self.overlaps and 0 <= i + step < len(self._layers):
            self._start(i + step)
        gather = self._gathers.pop(i)
        gather.work.wait()
        if has_backward and i + step == len(self._layers):
            self._gathers[i] = gather
        return gather.flat[: layer.shape.numel()].view(layer.shape)

    def _start(self, i: int) -> None:
        shard, gather = self._layers[i].shard, self._gathers.get(i)
        if gather is not None:
            if gather.version == shard._version:
                return
            gather.work.wait()  # started by a pass that did not end, and never read
        flat = shard.new_empty(self.z.size * shard.numel())
        work = self.z.start_all_gather(flat, shard.detach())
        self._gathers[i] = _Gather(flat, work, shard._version)

    def reduce(self, layer: GridLinear, dw: Tensor) -> None:
        """Begins to sum a layer's gradient over z, and those of layers behind it over data."""
        self._advance()
        flat = dw.reshape(-1)
        if self.z.size == 1:
            work = self._data.start_all_reduce(flat)
            self._reductions.append(_Reduction(layer, flat, flat, work, True))
        else:
            sent = _padded(flat, self.z.size)
            grad = torch.empty_like(layer.shard)
            work = self.z.start_reduce_scatter(grad, sent)
            self._reductions.append(_Reduction(layer, grad, sent, work, False))

        if not self.overlaps:
            self._advance()
            self._wait()

    def _advance(self) -> None:
        for one in self._reductions:
            if not one.is_scattered:
                assert one.work is not None
                one.work.wait()
                one.work = self._data.start_all_reduce(one.grad)
                one.sent, one.is_scattered = one.grad, True

    def _wait(self) -> None:
        for one in self._reductions:
            if one.work is not None:
                one.work.wait()
                one.work = None

    def finish(self) -> None:
        """After a backward pass: adds the gradients, summed over z and data, to `shard.grad`."""
        self._advance()
        self._wait()
        for one in self._reductions:
            shard = one.layer.shard
            shard.grad = one.grad if shard.grad is None else shard.grad + one.grad
        self._reductions.clear()


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, *, group: GroupCollectives, eps: float = 1e-5
) -> Tensor:
    """[m, hidden / ranks of group] -> the same; the statistics are of all hidden features."""
    if group.size == 1:
        return F.layer_norm(x, (x.shape[1],), weight, bias, eps)
    hidden = x.shape[1] * group.size
    centered = x - _sum_over(x.sum(1, keepdim=True), group) / hidden
    variance = _sum_over(centered.square().sum(1, keepdim=True), group) / hidden
    return centered * torch.rsqrt(variance + eps) * weight + bias


def _sum_over(x: Tensor, group: GroupCollectives) -> Tensor:
    y: Tensor = _SumOver.apply(x, group)
    return y


class _SumOver(torch.autograd.Function):
    """A sum that every rank uses for features of its own: their gradients are summed as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: GroupCollectives) -> Tensor:
        ctx.group = group
        return group.all_reduce(x.clone()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.group.all_reduce(grads[0].clone()).to(grads[0].dtype), None


def cross_entropy_sum(logits: Tensor, targets: Tensor, *, group: GroupCollectives) -> Tensor:
    """The sum of the rows' cross entropies, a scalar, where the ranks of group divide the logits.

    logits: [m, vocabulary / ranks], the same rows on each rank.  targets: int64 [m], of the whole
    vocabulary.
    """
    loss: Tensor = _CrossEntropy.apply(logits, targets, group)
    return loss


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: GroupCollectives) -> Tensor:
        local = targets - group.rank * logits.shape[1]
        is_local = (local >= 0) & (local < logits.shape[1])
        column = local.where(is_local, 0)[:, None]
        # In f32 at least: a sum of a vocabulary's exponentials has no 8 bits to lose.
        ctx.dtype, logits = (
            logits.dtype,
            logits.to(torch.promote_types(logits.dtype, torch.float32)),
        )
        largest = logits.amax(1, keepdim=True)
        largest = group.all_gather_columns(largest, range(group.size + 1)).amax(1, keepdim=True)
        shifted = logits - largest
        exps = shifted.exp()
        own = shifted.gather(1, column).where(is_local[:, None], 0)
        sums = group.all_reduce(torch.cat([exps.sum(1, keepdim=True), own], dim=1))
        total, of_target = sums.unbind(1)
        ctx.save_for_backward(exps / total[:, None], column, is_local)
        return (total.log() - of_target).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        softmax, column, is_local = ctx.saved_tensors
        dlogits = softmax.scatter_add(1, column, -is_local[:, None].to(softmax.dtype))
        return (dlogits * grads[0]).to(ctx.dtype), None, None


def local_part(x: Tensor, group: GroupCollectives, *, dim: int) -> Tensor:
    """This rank's equal part of a dimension. Raises InputError where the ranks do not divide it."""
    if x.shape[dim] % group.size:
        raise InputError(
            f"{group.size} ranks must divide dimension {dim} of a weight {tuple(x.shape)} evenly; "
            "choose another grid or other sizes"
        )
    return x.chunk(group.size, dim)[group.rank]


def _padded(flat: Tensor, size: int) -> Tensor:
    return F.pad(flat, (0, gathered_numbers(flat.numel(), size) - flat.numel()))
