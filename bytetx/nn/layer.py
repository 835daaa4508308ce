"""LayerWeights: what one layer multiplies, norms and adds, whatever kinds its weights are."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from bytetx.ops.experts import ExpertsWeight
from bytetx.ops.linear import LinearWeight
from bytetx.ops.norm import RowNorm
from bytetx.ops.weight import Weight


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer; ffn_norm is None where a parallel layer has one norm for both halves, and both
    norms are where the results of the halves are normed instead."""

    qkv: Weight  # rows of q, then k, then v, unless Layers.is_interleaved
    attn_out: Weight
    attn_norm: RowNorm | None  # None as well where the first of pre-norm layers has none
    ffn_in: Weight | None  # this and ffn_out are None where the layer has experts
    ffn_out: Weight | None
    ffn_norm: RowNorm | None
    q_norm: RowNorm | None = None
    k_norm: RowNorm | None = None
    # Norms of a block's output, before the residual is added.
    attn_out_norm: RowNorm | None = None
    ffn_out_norm: RowNorm | None = None
    # Position projections of disentangled attention, [num_buckets, num_heads, head_dim] each.
    pos_k: torch.Tensor | None = None
    pos_q: torch.Tensor | None = None
    experts: ExpertsWeight | None = None

    @property
    def linears(self) -> tuple[Weight, ...]:
        """Its linear layers but those of experts, in the order in which they run."""
        found = (self.qkv, self.attn_out, self.ffn_in, self.ffn_out)
        return tuple(w for w in found if w is not None)

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights that this process holds of it, without norms."""
        return sum(w.num_bytes for w in (*self.linears, self.experts) if w is not None)

    def converted(self, convert: Callable[[LinearWeight], Weight]) -> "LayerWeights":
        """The same layer, with convert(matrix) in place of each weight's matrix."""

        def one(w: Weight) -> Weight:
            return w.with_matrix(convert(w.dense))

        experts = None if self.experts is None else self.experts.converted(convert)
        return replace(self._mapped(one, one), experts=experts)

    def shard(self, hidden: range) -> "LayerWeights":
        """The same layer, reading and adding some of the hidden features; it has no experts."""
        return self._mapped(lambda w: w.shard(inputs=hidden), lambda w: w.shard(outputs=hidden))

    def _mapped(
        self, first: Callable[[Weight], Weight], last: Callable[[Weight], Weight]
    ) -> "LayerWeights":
        return replace(
            self,
            qkv=first(self.qkv),
            attn_out=last(self.attn_out),
            ffn_in=None if self.ffn_in is None else first(self.ffn_in),
            ffn_out=None if self.ffn_out is None else last(self.ffn_out),
        )
