"""Relations of GLiNER2.5: pairs of a text's candidates, and scores of each. All of it is in f32."""

import math
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from bytetx.checkpoint.schema_spec import BoundaryRelationSpec
from bytetx.nn.tensors import TensorLoader
from bytetx.ops.linear import LinearWeight, linear

_STEM = "relation_scorer"


@dataclass(frozen=True, slots=True)
class RelationContent:
    """A part of a relation's scores, by the words inside two spans."""

    head: LinearWeight
    tail: LinearWeight
    gate: LinearWeight
    out: LinearWeight

    def __call__(
        self, sums: torch.Tensor, heads: torch.Tensor, tails: torch.Tensor, relation: torch.Tensor
    ) -> torch.Tensor:
        """f32 [n].  sums: f32 [num_words + 1, size], of the words before.  heads, tails: int64
        [n, 2].  relation: f32 [n, relation_size]."""
        parts = []
        for weight, spans in ((self.head, heads), (self.tail, tails)):
            starts, ends = spans.unbind(1)
            mean = (sums[ends] - sums[starts]) / (ends - starts).clamp_min(1)[:, None]
            parts.append(linear(mean, weight))
        product = parts[0] * torch.sigmoid(linear(relation, self.gate)) * parts[1]
        both = torch.cat([*parts, relation], dim=1)
        return product.sum(1) / math.sqrt(sums.shape[1]) + linear(both, self.out)[:, 0]


@dataclass(frozen=True, slots=True)
class BoundaryRelations:
    """hidden, out: a perceptron on the ends of two spans and a relation."""

    spec: BoundaryRelationSpec
    hidden: LinearWeight
    out: LinearWeight
    content: RelationContent | None

    def __call__(
        self,
        words: torch.Tensor,
        ends: torch.Tensor,
        spans: torch.Tensor,
        logits: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The likeliest pairs of a text's candidates, for a relation.

        words: f32 [num_words, size].  ends: f32 [2, size], rows of the relation's head and tail.
        spans: int64 [n, 2], candidates.  logits: f32 [n, 2], as heads and as tails.
        Returns (int64 [max_pairs, 2], the candidates of each pair, -1 where there is none; f32
        [max_pairs], before the sigmoid).
        """
        pairs, is_pair = self._pairs(spans, logits)
        relation = ends.flatten() if self.spec.is_directional else ends.mean(dim=0)
        relation = relation.expand(len(pairs), -1)
        heads, tails = spans[pairs[:, 0]], spans[pairs[:, 1]]
        delta = (tails[:, 0] - heads[:, 0]).float()
        rows = [words[side - at] for one in (heads, tails) for at, side in enumerate(one.unbind(1))]
        order = torch.stack([delta.sign(), delta.abs() / max(len(words), 1)], dim=1)
        read = torch.cat([*rows, relation, order], dim=1)
        scores = linear(linear(read, self.hidden, activation="gelu"), self.out)[:, 0]
        if self.content is not None:
            sums = F.pad(words.cumsum(0), (0, 0, 1, 0))
            scores = scores + self.content(sums, heads, tails, relation.contiguous())
        lacks = self.spec.max_pairs - len(pairs)
        pairs = torch.where(is_pair[:, None], pairs, -1)
        return F.pad(pairs, (0, 0, 0, lacks), value=-1), F.pad(scores, (0, lacks))

    def _pairs(
        self, spans: torch.Tensor, logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(int64 [n, 2], places of spans; bool [n], whether it is a pair)"""
        starts, ends = spans.unbind(1)
        chances = torch.sigmoid(logits)
        may = (ends > starts)[:, None] & (chances >= self.spec.threshold)
        order = torch.argsort(starts * (ends.amax() + 1) + ends, stable=True)
        kept, sides = [], []
        for side, most in enumerate((self.spec.max_heads, self.spec.max_tails)):
            own = chances[:, side].masked_fill(~may[:, side], -1)
            best = order[own[order].sort(descending=True, stable=True).indices[:most]]
            sides.append(best)
            kept.append(own[best])
        heads, tails = sides
        product = kept[0][:, None] * kept[1]
        is_pair = (kept[0] >= 0)[:, None] & (kept[1] >= 0) & (heads[:, None] != tails)
        product = product.masked_fill(~is_pair, -1).flatten()
        best = product.sort(descending=True, stable=True).indices[: self.spec.max_pairs]
        pairs = torch.stack([heads[best // len(tails)], tails[best % len(tails)]], dim=1)
        return pairs, is_pair.flatten()[best]


def load_boundary_relations(
    spec: BoundaryRelationSpec, load: TensorLoader, size: int
) -> BoundaryRelations:
    """Raises CheckpointError where tensors are missing or wrong."""
    width = 2 * size if spec.is_directional else size
    content = None
    if spec.reads_content:
        content = RelationContent(
            load.linear(f"{_STEM}.head_content_projection", size, size),
            load.linear(f"{_STEM}.tail_content_projection", size, size),
            load.linear(f"{_STEM}.relation_content_gate", size, width),
            load.linear(f"{_STEM}.content_linear", 1, 2 * size + width),
        )
    return BoundaryRelations(
        spec,
        load.linear(f"{_STEM}.mlp.0", size, 4 * size + width + 2),
        load.linear(f"{_STEM}.mlp.3", 1, size),
        content,
    )
