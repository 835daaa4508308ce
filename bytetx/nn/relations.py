"""GLiNER's relations: which pairs of spans have one, and scores of each. All of it is in f32."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bytetx.checkpoint.extraction import RelationSpec
from bytetx.nn.tensors import TensorLoader
from bytetx.ops.linear import LinearWeight, linear

# Elements of the hidden layer that is computed at a time: 4 MiB stay in a core's cache.
_BLOCK_ELEMENTS = 1 << 20
_HEADS = 8  # attention between spans has so many
_STEM = "relations_rep_layer.relation_rep_layer"

# f32 [num_spans, hidden_size] -> f32 [num_spans, num_spans], from 0 to 1.
Adjacency = Callable[[torch.Tensor], torch.Tensor]
# (words of one text, first words, last words) -> f32 [num_spans, hidden_size]
Represent = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Perceptron:
    """Two linear layers with a ReLU between."""

    up: LinearWeight
    down: LinearWeight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return linear(linear(x, self.up, activation="relu"), self.down)


@dataclass(frozen=True, slots=True)
class RelationScorer:
    """Scores of relations between spans.

    adjacency: None where every pair is scored.  sees_all: it depends on all spans of a text.
    head, tail: halves of the first layer on a pair.  out, out_bias: the second layer, f32
    [hidden_size, 4 * hidden_size].
    """

    represent: Represent
    adjacency: Adjacency | None
    sees_all: bool
    head: LinearWeight
    tail: LinearWeight
    out: torch.Tensor
    out_bias: torch.Tensor

    def scores(self, spans: torch.Tensor, relations: torch.Tensor) -> torch.Tensor:
        """Before the sigmoid, f32 [num_spans, num_spans, num_relations]: heads, tails.

        spans: f32 [num_spans, hidden_size].  relations: f32 [num_relations, hidden_size].
        """
        heads, tails = linear(spans, self.head), linear(spans, self.tail)
        folded, bias = relations @ self.out, relations @ self.out_bias
        count, width = heads.shape
        out = spans.new_empty((count, count, len(relations)))
        block = max(_BLOCK_ELEMENTS // max(count * width, 1), 1)
        for begin in range(0, count, block):
            hidden = torch.relu(heads[begin : begin + block, None] + tails)
            out[begin : begin + block] = hidden @ folded.t() + bias
        return out


def load_relations(
    spec: RelationSpec, load: TensorLoader, size: int, represent: Represent
) -> RelationScorer:
    """Raises CheckpointError where tensors are missing or wrong."""
    stem, wide = "pair_rep_layer", 4 * size
    weight = load.tensor(f"{stem}.0.weight", (wide, 2 * size))
    head, tail = weight.split(size, dim=1)
    return RelationScorer(
        represent,
        None if spec.adjacency is None else _LOADERS[spec.adjacency](load, size),
        spec.adjacency in ("attention", "gcn", "gat"),
        load.linear_from(head.contiguous(), load.tensor(f"{stem}.0.bias", (wide,))),
        load.linear_from(tail.contiguous(), None),
        load.tensor(f"{stem}.3.weight", (size, wide)),
        load.tensor(f"{stem}.3.bias", (size,)),
    )


def _products(x: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(x @ x.t())


def _load_dot(load: TensorLoader, size: int) -> Adjacency:
    return _products


def _load_bilinear(load: TensorLoader, size: int) -> Adjacency:
    projection = load.linear(f"{_STEM}.proj", size, size)
    return lambda spans: _products(linear(spans, projection))


def _load_perceptron(load: TensorLoader, size: int) -> Adjacency:
    weight = load.tensor(f"{_STEM}.mlp.0.weight", (size, 2 * size))
    head, tail = (part.contiguous() for part in weight.split(size, dim=1))
    first = load.linear_from(head, load.tensor(f"{_STEM}.mlp.0.bias", (size,)))
    second = load.linear_from(tail, None)
    out = load.tensor(f"{_STEM}.mlp.2.weight", (1, size))[0]
    bias = load.tensor(f"{_STEM}.mlp.2.bias", (1,))

    def adjacency(spans: torch.Tensor) -> torch.Tensor:
        heads, tails = linear(spans, first), linear(spans, second)
        rows = [torch.relu(row + tails) @ out + bias for row in heads]
        return torch.sigmoid(torch.stack(rows)) if rows else spans.new_empty((0, 0))

    return adjacency


def _load_graph(load: TensorLoader, size: int) -> Adjacency:
    layer = load.linear(f"{_STEM}.gcn.linear", size, size)
    projection = load.linear(f"{_STEM}.proj", size, size)

    def adjacency(spans: torch.Tensor) -> torch.Tensor:
        edges = _products(spans)
        edges = edges + torch.eye(len(spans), device=spans.device)
        scale = edges.sum(dim=1).clamp(min=1e-6).rsqrt()
        mixed = (scale[:, None] * edges * scale) @ spans
        return _products(linear(torch.relu(linear(mixed, layer)), projection))

    return adjacency


def _load_attention(load: TensorLoader, size: int) -> Adjacency:
    attend = _attention(load, size)
    return lambda spans: attend(spans)[0].mean(dim=0)


def _load_graph_attention(load: TensorLoader, size: int) -> Adjacency:
    attend = _attention(load, size)
    out = load.linear(f"{_STEM}.attn.out_proj", size, size)
    last = load.linear(f"{_STEM}.linear", size, size)

    def adjacency(spans: torch.Tensor) -> torch.Tensor:
        shares, values = attend(spans)
        mixed = (shares @ values).transpose(0, 1).reshape(spans.shape)
        return _products(linear(linear(mixed, out), last))

    return adjacency


def _attention(
    load: TensorLoader, size: int
) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Spans -> (shares, f32 [heads, num_spans, num_spans]; values, f32 [heads, num_spans, n])."""
    weight = load.tensor(f"{_STEM}.attn.in_proj_weight", (3 * size, size))
    qkv = load.linear_from(weight, load.tensor(f"{_STEM}.attn.in_proj_bias", (3 * size,)))
    head_dim = size // _HEADS

    def attend(spans: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = linear(spans, qkv).view(len(spans), 3, _HEADS, head_dim)
        q, k, v = rows.permute(1, 2, 0, 3)
        return (q @ k.transpose(1, 2) / math.sqrt(head_dim)).softmax(dim=2), v

    return attend


_LOADERS: dict[str, Callable[[TensorLoader, int], Adjacency]] = {
    "dot": _load_dot,
    "bilinear": _load_bilinear,
    "mlp": _load_perceptron,
    "gcn": _load_graph,
    "attention": _load_attention,
    "gat": _load_graph_attention,
}
