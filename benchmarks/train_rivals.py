"""Trainers of the same GPT with torch's parallelism: DDP, FSDP2, DTensor tensor parallel."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from bytetx.parallel.grid import Grid
from bytetx.parallel.training import GptConfig

Weights = Mapping[str, Tensor]
MakeLinear = Callable[[int, int], nn.Module]  # of numbers of inputs and outputs


@dataclass(frozen=True, slots=True)
class SlotBatch:
    """Batch of a slot.  input_ids, targets: int64 [sequences, seqlen].  total_tokens: of all
    slots, the loss's divisor."""

    input_ids: Tensor
    targets: Tensor
    total_tokens: int


class Trainer(Protocol):
    """One that trains the GPT with its own weights, and the same batch at each step."""

    def backward(self) -> float:
        """The batch's mean loss; gradients are then complete."""

    def step(self) -> float:
        """backward, then an update by AdamW."""

    def gradient_error(self, wanted: Weights) -> float:
        """After backward: of all parameters, the largest |gradient - wanted| / |wanted|.

        wanted: of all weights, by their names; the norms are those of whole tensors.
        """


Make = Callable[[GptConfig, Weights, SlotBatch, Grid, torch.device], Trainer]


class PlainLayer(nn.Module):
    """A pre-norm layer of the GPT of bytetx.parallel.training, as torch's users write it."""

    def __init__(self, config: GptConfig, linear: MakeLinear, out_linear: MakeLinear):
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.head_dim = hidden // config.num_heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.attn_out = linear(hidden, 3 * hidden), out_linear(hidden, hidden)
        self.ffn_in, self.ffn_out = linear(hidden, inner), out_linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """[sequences, seqlen, hidden] -> the same."""
        h = x + self.attn_out(causal_attention(self.qkv(self.norm1(x)), self.head_dim))
        out: Tensor = h + self.ffn_out(F.gelu(self.ffn_in(self.norm2(h))))
        return out


def causal_attention(qkv: Tensor, head_dim: int) -> Tensor:
    """[sequences, seqlen, (head, (q, k, v), head_dim)] -> [sequences, seqlen, local hidden]."""
    q, k, v = qkv.unflatten(-1, (-1, 3, head_dim)).permute(3, 0, 2, 1, 4)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class PlainGpt(nn.Module):
    """The GPT of bytetx.parallel.training in plain torch: the same weights by the same names.

    linear, out_linear: of what leads into attention and feed-forward and of the head, and of what
    leads out, where a library has layers of its own.
    """

    def __init__(
        self,
        config: GptConfig,
        linear: MakeLinear = nn.Linear,
        out_linear: MakeLinear = nn.Linear,
    ):
        super().__init__()
        self.word = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position = nn.Embedding(config.max_positions, config.hidden_size)
        layers = (PlainLayer(config, linear, out_linear) for _ in range(config.num_layers))
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(config.hidden_size)
        self.head = linear(config.hidden_size, config.vocab_size)

    def forward(self, input_ids: Tensor) -> Tensor:
        """int64 [sequences, seqlen] -> logits [sequences, seqlen, vocabulary]."""
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        h = self.word(input_ids) + self.position(positions)
        for layer in self.layers:
            h = layer(h)
        logits: Tensor = self.head(self.norm(h))
        return logits


def plain_gpt(config: GptConfig, weights: Weights, device: torch.device) -> PlainGpt:
    """Make the model with copies of the weights, on the device."""
    with torch.device("meta"):
        model = PlainGpt(config)
    state = {_torch_name(name): w.to(device, copy=True) for name, w in weights.items()}
    model.load_state_dict(state, assign=True)
    return model.requires_grad_()


def _torch_name(name: str) -> str:
    """Return the name in PlainGpt of a weight of initial_weights."""
    if name in ("word", "position"):
        return f"{name}.weight"
    return f"layers.{name}" if name[0].isdecimal() else name


def plain_name(name: str) -> str:
    """The weight's name in initial_weights, of PlainGpt's name for it."""
    name = name.removeprefix("layers.")
    return name.removesuffix(".weight") if name in ("word.weight", "position.weight") else name


def adamw(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """Everyone's optimizer: torch's fused one, a group for each kind of tensor that it takes.

    A large eps: gradients of keys' biases are 0 but for rounding, which Adam would make steps of.
    """
    groups: dict[object, list[Tensor]] = {}
    for p in parameters:
        kind = (p.device_mesh, p.placements) if isinstance(p, DTensor) else None
        groups.setdefault(kind, []).append(p)
    return torch.optim.AdamW(
        [{"params": same} for same in groups.values()], lr=1e-4, eps=1e-4, fused=True
    )


class TorchTrainer:
    """PlainGpt under one of torch's wrappers.

    means_over: ranks over which the wrapper averages gradients, where the loss needs their sum.
    is_loss_parallel: whether the logits are divided over ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: SlotBatch,
        *,
        named: Mapping[str, Tensor],
        means_over: int,
        is_loss_parallel: bool,
        slots: "dist.ProcessGroup | None",
    ):
        self._model, self._batch, self._named = model, batch, named
        self._means_over, self._is_loss_parallel = means_over, is_loss_parallel
        self._slots = slots
        self._optimizer = adamw(named.values())

    def backward(self) -> float:
        self._optimizer.zero_grad()
        targets = self._batch.targets.flatten()
        scale = self._means_over / self._batch.total_tokens
        with loss_parallel() if self._is_loss_parallel else nullcontext():
            logits = self._model(self._batch.input_ids).flatten(0, 1)
            loss = F.cross_entropy(logits, targets, reduction="sum") * scale
            loss.backward()
        found = whole(loss.detach()) / self._means_over
        if self._slots is not None:
            dist.all_reduce(found, group=self._slots)
        return float(found)

    def step(self) -> float:
        loss = self.backward()
        self._optimizer.step()
        return loss

    def gradient_error(self, wanted: Weights) -> float:
        return max(
            relative_error(whole(p.grad), wanted[plain_name(name)])
            for name, p in self._named.items()
            if p.grad is not None
        )


def whole(x: Tensor) -> Tensor:
    """Return the tensor that all ranks of a DTensor hold together."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """|found - wanted| / |wanted|."""
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


def whole_gradients(
    config: GptConfig, weights: Weights, batch: SlotBatch
) -> tuple[float, dict[str, Tensor]]:
    """The loss and the gradients of plain torch on one device; batch: of all slots."""
    model = plain_gpt(config, weights, batch.input_ids.device)
    logits = model(batch.input_ids).flatten(0, 1)
    loss = F.cross_entropy(logits, batch.targets.flatten(), reduction="sum") / batch.total_tokens
    loss.backward()
    return float(loss.detach()), {
        plain_name(name): p.grad for name, p in model.named_parameters() if p.grad is not None
    }


def ddp_trainer(
    config: GptConfig, weights: Weights, batch: SlotBatch, grid: Grid, device: torch.device
) -> Trainer:
    """DistributedDataParallel: gradients in buckets, behind the backward pass."""
    model = plain_gpt(config, weights, device)
    named = dict(model.named_parameters())
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return TorchTrainer(
        wrapped,
        batch,
        named=named,
        means_over=grid.num_slots,
        is_loss_parallel=False,
        slots=dist.group.WORLD,
    )


def mesh_trainer(
    config: GptConfig,
    weights: Weights,
    batch: SlotBatch,
    grid: Grid,
    device: torch.device,
    *,
    divides_rows: bool = False,
) -> Trainer:
    """DTensor tensor parallel over y and x together, FSDP2 over z and data: hybrid over both.

    divides_rows: sequence parallelism, rows between the tensor-parallel layers are divided.
    """
    lengths = (grid.data, grid.z, grid.y * grid.x)
    mesh = init_device_mesh(device.type, lengths, mesh_dim_names=("data", "z", "y"))
    model = plain_gpt(config, weights, device)
    is_tensor_parallel = lengths[2] > 1
    if is_tensor_parallel:
        _divide_features(model, mesh["y"], divides_rows=divides_rows)
    axes = tuple(name for name, n in (("data", grid.data), ("z", grid.z)) if n > 1)
    if axes:
        shards = mesh[axes]
        for layer in model.layers:
            fully_shard(layer, mesh=shards)
        fully_shard(model, mesh=shards)
    slots = None
    if grid.num_slots > 1:
        slots = mesh["data", "z"]._flatten().get_group() if len(axes) > 1 else shards.get_group()
    return TorchTrainer(
        model,
        batch,
        named=dict(model.named_parameters()),
        means_over=grid.num_slots,
        is_loss_parallel=is_tensor_parallel,
        slots=slots,
    )


def _divide_features(model: PlainGpt, mesh: DeviceMesh, *, divides_rows: bool) -> None:
    """torch's recipe for a transformer; word embeddings and the head by vocabulary."""
    rows = Shard(1) if divides_rows else Replicate()
    ids = Replicate()
    outer: dict[str, ParallelStyle] = {
        "word": RowwiseParallel(input_layouts=ids, output_layouts=rows),
        "head": ColwiseParallel(
            input_layouts=rows, output_layouts=Shard(-1), use_local_output=False
        ),
    }
    inner: dict[str, ParallelStyle] = {
        "qkv": ColwiseParallel(input_layouts=rows),
        "attn_out": RowwiseParallel(output_layouts=rows),
        "ffn_in": ColwiseParallel(input_layouts=rows),
        "ffn_out": RowwiseParallel(output_layouts=rows),
    }
    if divides_rows:
        outer |= {"norm": SequenceParallel()}
        outer["position"] = RowwiseParallel(input_layouts=ids, output_layouts=rows)
        inner |= {"norm1": SequenceParallel(), "norm2": SequenceParallel()}
    parallelize_module(model, mesh, outer)
    for layer in model.layers:
        parallelize_module(layer, mesh, inner)
