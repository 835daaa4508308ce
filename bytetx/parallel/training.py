"""A small GPT whose training step runs on any grid of ranks: the use of bytetx.parallel.autograd.

    groups = join_training_groups(store, parse_grid("data2.z2"), rank=rank, device=device)
    model = GridGpt(config, initial_weights(config, seed=0), groups=groups)
    optimizer = torch.optim.AdamW(model.parameters())
    loss = train_step(model, optimizer, sequences)  # on every rank, with the same sequences

Pre-norm layers with learned positions, erf GELU and a head of its own. Sequences are packed: each
slot of the grid gets whole ones, and no pad token is computed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from bytetx.errors import InputError
from bytetx.parallel.autograd import (
    GridLinear,
    ShardedWeights,
    TrainingGroups,
    cross_entropy_sum,
    layer_norm,
    local_part,
)
from bytetx.parallel.grid import assign_sequences
from bytetx.parallel.tp import GroupCollectives

_LINEARS = ("qkv", "attn_out", "ffn_in", "ffn_out")


@dataclass(frozen=True, slots=True)
class GptConfig:
    """Sizes. Of a grid, y divides num_heads, intermediate_size and vocab_size, x hidden_size."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    max_positions: int


def initial_weights(
    config: GptConfig, *, seed: int, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """All weights on the CPU, by name; the same on every rank.

    "word" [vocab, hidden], "position" [max_positions, hidden]; of each layer i "i.qkv.weight",
    whose rows are [head, (q, k, v), head_dim], "i.attn_out.weight", "i.ffn_in.weight" and
    "i.ffn_out.weight" [outputs, inputs]; "i.norm1.weight" and "i.norm2.weight" [hidden]; "norm" and
    "head" at the end. Each but the first two has a ".bias".
    """
    generator = torch.Generator().manual_seed(seed)
    hidden, inner = config.hidden_size, config.intermediate_size

    def normal(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) * 0.02).to(dtype)

    weights = {
        "word": normal(config.vocab_size, hidden),
        "position": normal(config.max_positions, hidden),
    }
    shapes = {
        "qkv": (3 * hidden, hidden),
        "attn_out": (hidden, hidden),
        "ffn_in": (inner, hidden),
        "ffn_out": (hidden, inner),
    }
    linears = {f"{i}.{name}": s for i in range(config.num_layers) for name, s in shapes.items()}
    for name, shape in {**linears, "head": (config.vocab_size, hidden)}.items():
        weights[f"{name}.weight"] = normal(*shape)
        weights[f"{name}.bias"] = torch.zeros(shape[0], dtype=dtype)
    layers = range(config.num_layers)
    for name in [f"{i}.{norm}" for i in layers for norm in ("norm1", "norm2")] + ["norm"]:
        weights[f"{name}.weight"] = torch.ones(hidden, dtype=dtype)
        weights[f"{name}.bias"] = torch.zeros(hidden, dtype=dtype)
    return weights


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """A rank's share of a batch: its slot's whole sequences, packed.

    input_ids, position_ids, targets: int64 [tokens], on the rank's device.  seqlens: their sum is
    tokens.  total_tokens: of all slots, the divisor of the mean.
    """

    input_ids: Tensor
    position_ids: Tensor
    targets: Tensor
    seqlens: tuple[int, ...]
    total_tokens: int


class _Norm(torch.nn.Module):
    """A layer norm of hidden features that x divides."""

    def __init__(self, weight: Tensor, bias: Tensor, groups: TrainingGroups):
        super().__init__()
        self._group = groups.x
        self.weight = _parameter(weight, groups, dim=0)
        self.bias = _parameter(bias, groups, dim=0)

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, group=self._group)


class GridGpt(torch.nn.Module):
    """A rank's part of a GPT. Parameters are its own shards: AdamW and others that update each
    number by itself need no communication.
    """

    def __init__(
        self,
        config: GptConfig,
        weights: Mapping[str, Tensor],
        *,
        groups: TrainingGroups,
        overlaps: bool = True,
    ):
        """weights: all of them, as of initial_weights, of which the rank keeps its part.
        overlaps: as of ShardedWeights.

        Raises InputError where the grid does not divide the sizes.
        """
        super().__init__()
        y = groups.grid.y
        if config.num_heads % y or config.hidden_size % config.num_heads:
            raise InputError(
                f"num_heads must be a multiple of y={y} and divide the hidden size "
                f"{config.hidden_size}, got {config.num_heads}"
            )
        self.config, self.groups = config, groups
        self._sharded = ShardedWeights(groups, overlaps=overlaps)
        self.word = _parameter(weights["word"], groups, dim=1)
        self.position = _parameter(weights["position"], groups, dim=1)

        def norm(name: str) -> _Norm:
            return _Norm(weights[f"{name}.weight"], weights[f"{name}.bias"], groups)

        def linear(name: str, inputs: GroupCollectives, outputs: GroupCollectives) -> GridLinear:
            return GridLinear(
                weights[f"{name}.weight"],
                weights[f"{name}.bias"],
                inputs=inputs,
                outputs=outputs,
                weights=self._sharded,
            )

        def layer(i: int) -> torch.nn.ModuleDict:
            axes = ((groups.x, groups.y), (groups.y, groups.x)) * 2
            linears = {
                name: linear(f"{i}.{name}", *groups_of)
                for name, groups_of in zip(_LINEARS, axes, strict=True)
            }
            return torch.nn.ModuleDict(
                {**linears, "norm1": norm(f"{i}.norm1"), "norm2": norm(f"{i}.norm2")}
            )

        self.layers = torch.nn.ModuleList(layer(i) for i in range(config.num_layers))
        self.norm = norm("norm")
        self.head = linear("head", groups.x, groups.y)
        # Norms, biases and embeddings are whole on every slot: their gradients wait here until
        # finish_gradients sums them.
        self._own_gradients: dict[torch.nn.Parameter, Tensor] = {}
        if groups.slots.size > 1:
            shards = {id(layer.shard) for layer in self.modules() if isinstance(layer, GridLinear)}
            for parameter in self.parameters():
                if id(parameter) not in shards:
                    parameter.register_hook(partial(self._hold_gradient, parameter))

    def _hold_gradient(self, parameter: torch.nn.Parameter, grad: Tensor) -> Tensor:
        """Keeps this slot's gradient; what goes into `.grad` meanwhile is zeros."""
        held = self._own_gradients.get(parameter)
        self._own_gradients[parameter] = grad if held is None else held + grad
        return torch.zeros_like(grad)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._own_gradients.clear()
        super().zero_grad(set_to_none)

    def forward(self, batch: TrainingBatch) -> Tensor:
        """Logits [tokens, vocabulary / y] of packed sequences, of which each sees itself alone."""
        h = F.embedding(batch.input_ids, self.word) + F.embedding(batch.position_ids, self.position)
        for w in self.layers:
            assert isinstance(w, torch.nn.ModuleDict)
            h = h + w["attn_out"](self._attention(w["qkv"](w["norm1"](h)), batch.seqlens))
            h = h + w["ffn_out"](F.gelu(w["ffn_in"](w["norm2"](h))))
        logits: Tensor = self.head(self.norm(h))
        return logits

    def _attention(self, qkv: Tensor, seqlens: Sequence[int]) -> Tensor:
        """[tokens, 3 * hidden / y] -> [tokens, hidden / y], causal."""
        head_dim = self.config.hidden_size // self.config.num_heads
        heads = qkv.view(len(qkv), qkv.shape[1] // (3 * head_dim), 3, head_dim)
        if not seqlens:  # a slot without sequences still calls every collective
            return heads[:, :, 0].flatten(1)
        if len(set(seqlens)) == 1:  # sequences of one length take one call
            q, k, v = heads.unflatten(0, (len(seqlens), -1)).permute(3, 0, 2, 1, 4)
            found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return found.transpose(1, 2).flatten(2).flatten(0, 1)
        out = []
        for one in heads.permute(2, 1, 0, 3).split(list(seqlens), dim=2):
            q, k, v = one[:, None]
            out.append(F.scaled_dot_product_attention(q, k, v, is_causal=True)[0])
        return torch.cat(out, dim=1).transpose(0, 1).flatten(1)

    def pack(self, sequences: Sequence[Sequence[int]]) -> TrainingBatch:
        """This slot's part of a batch; all ranks of a grid pack the same one.

        sequences: token ids of the whole batch, the same on every rank. One of fewer than two
        tokens predicts nothing.  Raises InputError where none does, or one is too long.
        """
        used = [ids for ids in sequences if len(ids) > 1]
        longest = max((len(ids) for ids in sequences), default=0) - 1
        if not 1 <= longest <= self.config.max_positions:
            raise InputError(
                f"a batch needs a sequence of two tokens or more, and none of more than "
                f"{self.config.max_positions + 1}; the longest has {longest + 1}"
            )
        seqlens = [len(ids) - 1 for ids in used]
        slots = assign_sequences(
            seqlens, self.groups.grid.num_slots, hidden_size=self.config.hidden_size
        )
        own = slots[self.groups.slot]
        rows = (
            [token for i in own for token in used[i][:-1]],
            [position for i in own for position in range(seqlens[i])],
            [token for i in own for token in used[i][1:]],
        )
        ids, positions, targets = torch.tensor(rows, dtype=torch.int64).to(self.groups.device)
        own_seqlens = tuple(seqlens[i] for i in own)
        return TrainingBatch(ids, positions, targets, own_seqlens, sum(seqlens))

    def loss(self, batch: TrainingBatch | Sequence[Sequence[int]]) -> Tensor:
        """This slot's share of the mean cross entropy of all next tokens; slots' shares add up.

        batch: of pack, or sequences for it.
        """
        packed = batch if isinstance(batch, TrainingBatch) else self.pack(batch)
        losses = cross_entropy_sum(self(packed), packed.targets, group=self.groups.y)
        return losses / packed.total_tokens

    def finish_gradients(self) -> None:
        """After backward passes, on every rank: adds their gradients, summed over slots, to .grad.

        After each of several micro-batches or once after all of them.
        """
        self._sharded.finish()
        held = [p for p in self.parameters() if p in self._own_gradients]
        if not held:
            return
        own = torch.cat([self._own_gradients[p].reshape(-1) for p in held])
        self._own_gradients.clear()
        flat = self.groups.slots.all_reduce(own)
        for parameter, summed in zip(held, flat.split([p.numel() for p in held]), strict=True):
            assert parameter.grad is not None
            parameter.grad.add_(summed.view_as(parameter))


def train_step(
    model: GridGpt,
    optimizer: torch.optim.Optimizer,
    batch: TrainingBatch | Sequence[Sequence[int]],
) -> float:
    """One step on a batch, which every rank calls with its part of it: as of GridGpt.loss.

    Returns the batch's mean cross entropy before the step, the same on every rank.
    """
    loss = compute_gradients(model, batch)
    optimizer.step()
    return float(loss)


def compute_gradients(model: GridGpt, batch: TrainingBatch | Sequence[Sequence[int]]) -> Tensor:
    """train_step without the update: the loss [1], and `.grad` of all parameters anew."""
    model.zero_grad()
    loss = model.loss(batch)
    loss.backward()
    model.finish_gradients()
    return model.groups.slots.all_reduce(loss.detach().reshape(1))


def _parameter(whole: Tensor, groups: TrainingGroups, *, dim: int) -> torch.nn.Parameter:
    """x divides hidden features; y, z and data have copies."""
    return torch.nn.Parameter(local_part(whole, groups.x, dim=dim).to(groups.device, copy=True))
