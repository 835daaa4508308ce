"""A layer: its weights, its feed-forward half, and what its linear layers do with rows.

bytetx/nn/sharded_blocks.py has the rows of layers that the ranks of a group share.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from bytetx.nn.attended import Attended, OutputGate
from bytetx.nn.mixers import Mixer
from bytetx.nn.shared_expert import SharedExpert
from bytetx.ops.embedding import embed
from bytetx.ops.experts import ExpertsWeight, run_experts
from bytetx.ops.linear import LinearWeight, fuses_residual
from bytetx.ops.linear_rotary import HeadRotation, linear_rotary
from bytetx.ops.norm import RowNorm
from bytetx.ops.weight import Weight


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer; ffn_norm is None where a parallel layer has one norm for both halves, and both
    norms are where the results of the halves are normed instead.

    mixer: what stands between qkv and attn_out in place of attention; None: attention does.
    """

    qkv: Weight  # rows of q, then k, then v, unless Layers.is_interleaved; or what a mixer reads
    attn_out: Weight
    attn_norm: RowNorm | None  # None as well where the first of pre-norm layers has none
    ffn_norm: RowNorm | None
    feed_forward: "FeedForward"
    q_norm: RowNorm | None = None
    k_norm: RowNorm | None = None
    v_norm: RowNorm | None = None
    # The norm of the attention's output, before the residual is added.
    attn_out_norm: RowNorm | None = None
    # Position projections of disentangled attention, [num_buckets, num_heads, head_dim] each.
    pos_k: Tensor | None = None
    pos_q: Tensor | None = None
    # Values of the vocabulary's tokens, [vocab_size, num_kv_heads * head_dim].
    value_table: Tensor | None = None
    attended: Attended | OutputGate | None = None
    # f32 [num_heads]: a further score of each row of a head; see varlen_attention.
    sinks: Tensor | None = None
    mixer: Mixer | None = None

    @property
    def linears(self) -> tuple[Weight, ...]:
        """Its linear layers but those of experts, in the order in which they run."""
        return (self.qkv, self.attn_out, *self.feed_forward.linears)

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights that this process holds of it, without norms."""
        return self.qkv.num_bytes + self.attn_out.num_bytes + self.feed_forward.num_bytes

    def converted(self, convert: Callable[[LinearWeight], Weight]) -> "LayerWeights":
        """The same layer, with convert(matrix) in place of each weight's matrix."""
        return replace(
            self,
            qkv=self.qkv.with_matrix(convert(self.qkv.dense)),
            attn_out=self.attn_out.with_matrix(convert(self.attn_out.dense)),
            feed_forward=self.feed_forward.converted(convert),
        )

    def shard(self, hidden: range) -> "LayerWeights":
        """The same layer, reading and adding some of the hidden features; it has no experts."""
        return replace(
            self,
            qkv=self.qkv.shard(inputs=hidden),
            attn_out=self.attn_out.shard(outputs=hidden),
            feed_forward=self.feed_forward.mapped(
                lambda w: w.shard(inputs=hidden), lambda w: w.shard(outputs=hidden)
            ),
        )


class FeedForward(Protocol):
    """A feed-forward half of any kind; a kind is a frozen dataclass with these members.

    linears: its linear layers, as many inputs or outputs of which are hidden features as a layer's
    others have; experts have none.
    num_bytes: of the weights that this process holds of it.
    """

    @property
    def linears(self) -> tuple[Weight, ...]: ...

    @property
    def num_bytes(self) -> int: ...

    def converted(self, convert: Callable[[LinearWeight], Weight]) -> "FeedForward":
        """The same half, with convert(matrix) in place of each weight's matrix."""
        ...

    def mapped(
        self, first: Callable[[Weight], Weight], out: Callable[[Weight], Weight]
    ) -> "FeedForward":
        """The same half, with first(w) and out(w) in place of its two linear layers.

        Raises TypeError where it has experts.
        """
        ...

    def run(
        self,
        h: Tensor,
        x: Tensor,
        norm: RowNorm | None,
        step: "RowPass",
        *,
        partial: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As RowPass.add_and_norm, of the half's result for h.

        partial: the attention's half of a parallel layer, which is added, too.
        """
        ...


@dataclass(frozen=True, slots=True)
class DenseFeedForward:
    """Two linear layers; activation: between them, "relu2" the square of relu.

    out_norm: of the result, before it is added.
    """

    first: Weight
    out: Weight
    activation: str
    out_norm: RowNorm | None = None

    @property
    def linears(self) -> tuple[Weight, ...]:
        return self.first, self.out

    @property
    def num_bytes(self) -> int:
        return self.first.num_bytes + self.out.num_bytes

    def converted(self, convert: Callable[[LinearWeight], Weight]) -> "DenseFeedForward":
        def one(w: Weight) -> Weight:
            return w.with_matrix(convert(w.dense))

        return self.mapped(one, one)

    def mapped(
        self, first: Callable[[Weight], Weight], out: Callable[[Weight], Weight]
    ) -> "DenseFeedForward":
        return replace(self, first=first(self.first), out=out(self.out))

    def run(
        self,
        h: Tensor,
        x: Tensor,
        norm: RowNorm | None,
        step: "RowPass",
        *,
        partial: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        if step.pause is not None:
            step.pause()
        squares = self.activation == "relu2"
        activation = "relu" if squares else self.activation
        inner = step.rows.column_parallel(h, self.first, activation=activation)
        if squares:
            inner.square_()
        return step.add_and_norm(inner, self.out, x, norm, self.out_norm, partial=partial)


@dataclass(frozen=True, slots=True)
class ExpertFeedForward:
    """A mixture of experts.

    Every rank routes all rows alike, and sums its features of each row's experts.
    shared: what every row goes through besides, of a model in one process.
    """

    experts: ExpertsWeight
    activation: str
    out_norm: RowNorm | None = None
    shared: SharedExpert | None = None

    @property
    def linears(self) -> tuple[Weight, ...]:
        return ()

    @property
    def num_bytes(self) -> int:
        shared = 0 if self.shared is None else self.shared.num_bytes
        return self.experts.num_bytes + shared

    def converted(self, convert: Callable[[LinearWeight], Weight]) -> "ExpertFeedForward":
        return replace(self, experts=self.experts.converted(convert))

    def mapped(
        self, first: Callable[[Weight], Weight], out: Callable[[Weight], Weight]
    ) -> "ExpertFeedForward":
        raise TypeError("experts are not two linear layers")

    def run(
        self,
        h: Tensor,
        x: Tensor,
        norm: RowNorm | None,
        step: "RowPass",
        *,
        partial: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        rows = step.rows
        h = rows.gather(h)
        summed = run_experts(h, self.experts, activation=self.activation)
        if self.shared is not None:
            summed += self.shared.run(h, self.activation)
        if partial is not None:
            summed += partial
        mixed = rows.sum_ranks(summed).to(x.dtype)
        if self.experts.bias is not None:
            mixed += self.experts.bias
        if self.out_norm is not None:
            mixed = rows.norm(mixed, self.out_norm)
        h, x = rows.norm_sum(mixed, residual=x, norm=norm)
        return (h, h) if step.is_post else (h, x)


@dataclass(frozen=True, slots=True)
class RowPass:
    """The rows of a pass, and how both halves of a layer end.

    is_post: whether what the next linear layer reads, the norm of the sum, is the residual, too.
    pause: called before each linear layer; None: nothing is.
    """

    rows: "Rows"
    is_post: bool
    pause: Callable[[], None] | None

    def add_and_norm(
        self,
        y: Tensor,
        w: Weight,
        x: Tensor,
        norm: RowNorm | None,
        output_norm: RowNorm | None,
        *,
        partial: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(what the next linear layer reads, the residual) after y @ w.T + bias + x (+ partial).

        output_norm: of y @ w.T + bias, before x is added.
        """
        if self.pause is not None:
            self.pause()
        if output_norm is not None:
            return self.rows.row_parallel_output_norm(
                y, w, residual=x, output_norm=output_norm, norm=norm
            )
        if self.is_post:
            assert norm is not None  # the sum is what the next layer reads
            x = self.rows.row_parallel_post_norm(y, w, residual=x, norm=norm)
            return x, x
        return self.rows.row_parallel(y, w, residual=x, norm=norm, partial=partial)


class Rows:
    """The rows of one pass, all in this process; a subclass has those of a group's ranks."""

    embed = staticmethod(embed)
    changes_words = False  # whether rows have words of their own

    def changed_words(self, words: Tensor, input_ids: Tensor) -> Tensor:
        """The rows' own words: [total_tokens, embedding_size], which may change in place."""
        return words

    def local(self, x: Tensor) -> Tensor:
        """This rank's rows of x, which every rank has."""
        return x

    def enter(self, x: Tensor) -> Tensor:
        """This rank's hidden features of embedded rows, which the layers read."""
        return x

    def gather(self, x: Tensor) -> Tensor:
        """All rows with all features, from every rank's shard."""
        return x

    def project(self, x: Tensor, w: Weight) -> Tensor:
        """Embedded rows in the layers' width, on every rank alike."""
        return w.matmul(x)

    def column_parallel(self, x: Tensor, w: Weight, *, activation: str = "none") -> Tensor:
        """The first linear layer of a half: all rows, this rank's outputs."""
        return w.matmul(x, activation=activation)

    def project_heads(self, x: Tensor, w: Weight, rotation: HeadRotation) -> Tensor:
        """column_parallel of a half without activation, whose first heads are then turned."""
        return linear_rotary(x, w, rotation)

    def row_parallel_partial(self, x: Tensor, w: Weight) -> Tensor:
        """The attention's half of a parallel layer, which row_parallel adds to the other.

        Where ranks share the layer it has no bias: the loader added that to the other half's.
        """
        return w.matmul(x)

    def row_parallel(
        self,
        x: Tensor,
        w: Weight,
        *,
        residual: Tensor,
        norm: RowNorm | None,
        partial: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(norm(h), h) of h = x @ w.T + bias + residual (+ partial), of the rows of residual.

        norm: None gives (h, h), of a model whose layers are in this process alone.
        The residual is added by the GEMM or by the norm, whichever is faster.
        """
        if partial is None and norm is not None and w.has_kernel:
            plan = norm.parts_plan(x, w.dense, residual)
            if plan is not None:
                h = torch.empty_like(residual)
                return norm.after_parts(x, w.dense, plan, residual=residual, sum_out=h), h
        if partial is None and w.has_kernel and fuses_residual(x.shape[0], w.dense):
            h = w.matmul(x, residual=residual)
            return (h if norm is None else norm(h)), h
        d = w.matmul(x, residual=partial)
        if norm is None:
            d += residual
            return d, d
        return norm(d, residual=residual, sum_out=d), d

    def row_parallel_post_norm(
        self, x: Tensor, w: Weight, *, residual: Tensor, norm: RowNorm
    ) -> Tensor:
        """The first result of row_parallel alone; it overwrites the sum."""
        return norm.after_linear(x, w, residual=residual)

    def row_parallel_output_norm(
        self,
        x: Tensor,
        w: Weight,
        *,
        residual: Tensor,
        output_norm: RowNorm,
        norm: RowNorm | None,
    ) -> tuple[Tensor, Tensor]:
        """(norm(h), h) of h = output_norm(x @ w.T + bias) + residual; (h, h) without a norm."""
        d = w.matmul(x)
        return self.norm_sum(output_norm(d, out=d), residual=residual, norm=norm)

    def norm_sum(
        self, x: Tensor, *, residual: Tensor, norm: RowNorm | None
    ) -> tuple[Tensor, Tensor]:
        """(norm(h), h) of h = x + residual, which takes x's memory; (h, h) without a norm."""
        if norm is None:
            x += residual
            return x, x
        return norm(x, residual=residual, sum_out=x), x

    def norm(self, x: Tensor, norm: RowNorm) -> Tensor:
        return norm(x)

    def sum_ranks(self, partial: Tensor) -> Tensor:
        """This rank's rows of the sum over ranks; partial: all rows, f32."""
        return partial

    def norm_projections(
        self, q: Tensor, k: Tensor, q_norm: RowNorm, k_norm: RowNorm
    ) -> tuple[Tensor, Tensor]:
        """RMS norms of a token's queries, and of its keys, over all heads together; new tensors.

        q, k: [total_tokens, heads, head_dim].  Weights: [heads * head_dim].
        """
        new_q, new_k = (norm(x.flatten(1).contiguous()) for x, norm in ((q, q_norm), (k, k_norm)))
        return new_q.view(q.shape), new_k.view(k.shape)


class LocalRows(Rows):
    """One object for every pass: the part of Blocks of a whole model that each pass calls."""

    def begin(self, total_tokens: int) -> Rows:
        return self

    def gather_vocab(self, logits: Tensor) -> Tensor:
        return logits
