"""How the linear layers, and the norms behind them, run where one process has the whole model.

bytetx/nn/sharded_blocks.py runs the same calls where the ranks of a group share the layers.
"""

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor

from bytetx.checkpoint.spec import ModelSpec
from bytetx.nn.layer import LayerWeights
from bytetx.nn.weight_gather import WeightGather
from bytetx.ops.embedding import embed
from bytetx.ops.linear import fuses_residual
from bytetx.ops.norm import RowNorm
from bytetx.ops.weight import Weight
from bytetx.parallel.layout import ModelShard


class Rows(Protocol):
    """The rows of one pass, and what the layers do with them; LocalBlocks says what each does."""

    def local(self, x: Tensor) -> Tensor: ...

    def enter(self, x: Tensor) -> Tensor: ...

    def gather(self, x: Tensor) -> Tensor: ...

    def embed(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None,
        token_type_ids: Tensor | None,
        *,
        word: Tensor,
        position: Tensor | None = None,
        token_type: Tensor | None = None,
        norm_weight: Tensor | None = None,
        norm_bias: Tensor | None = None,
        eps: float = 1e-12,
        inputs_embeds: Tensor | None = None,
        bad_ids: Tensor | None = None,
    ) -> Tensor: ...

    def column_parallel(self, x: Tensor, w: Weight, *, activation: str = "none") -> Tensor: ...

    def row_parallel_partial(self, x: Tensor, w: Weight) -> Tensor: ...

    def row_parallel(
        self,
        x: Tensor,
        w: Weight,
        *,
        residual: Tensor,
        norm: RowNorm,
        partial: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]: ...

    def row_parallel_post_norm(
        self, x: Tensor, w: Weight, *, residual: Tensor, norm: RowNorm
    ) -> Tensor: ...

    def row_parallel_output_norm(
        self,
        x: Tensor,
        w: Weight,
        *,
        residual: Tensor,
        output_norm: RowNorm,
        norm: RowNorm | None,
    ) -> tuple[Tensor, Tensor]: ...

    def norm(self, x: Tensor, norm: RowNorm) -> Tensor: ...

    def norm_sum(
        self, x: Tensor, *, residual: Tensor, norm: RowNorm | None
    ) -> tuple[Tensor, Tensor]: ...

    def sum_ranks(self, partial: Tensor) -> Tensor: ...

    def norm_projections(
        self, q: Tensor, k: Tensor, q_norm: RowNorm, k_norm: RowNorm
    ) -> tuple[Tensor, Tensor]: ...


class Blocks(Protocol):
    """num_heads, num_kv_heads: of this rank.  shard: what it has of the model; None: all of it.

    is_capturable: by a CUDA graph, as far as the linear layers go.
    hidden: this rank's hidden features in the layers; None: all.
    weight_gather: of layers whose weights are divided over ranks; None: they are whole.
    """

    @property
    def num_heads(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def shard(self) -> ModelShard | None: ...

    @property
    def is_capturable(self) -> bool: ...

    @property
    def hidden(self) -> range | None: ...

    @property
    def weight_gather(self) -> WeightGather | None: ...

    def sync_kernel_support(self, layers: Iterable[LayerWeights]) -> None:
        """Once all ranks have loaded: kernels that wait for all ranks run on all, or on none.

        layers: this rank's.  All ranks call it.
        """
        ...

    def begin(self, total_tokens: int) -> Rows:
        """The rows of a pass of so many tokens in total."""
        ...

    def gather_vocab(self, logits: Tensor) -> Tensor:
        """[n, this rank's part of the vocabulary] -> [n, vocab_size]."""
        ...


class LocalBlocks:
    """Blocks of a whole model, and Rows that are all in this process."""

    shard: ModelShard | None = None
    is_capturable = True
    hidden: range | None = None
    weight_gather: WeightGather | None = None
    embed = staticmethod(embed)

    def __init__(self, spec: ModelSpec):
        self.num_heads, self.num_kv_heads = spec.num_heads, spec.num_kv_heads

    def sync_kernel_support(self, layers: Iterable[LayerWeights]) -> None:
        pass

    def begin(self, total_tokens: int) -> Rows:
        return self

    def gather_vocab(self, logits: Tensor) -> Tensor:
        return logits

    def local(self, x: Tensor) -> Tensor:
        """This rank's rows of x, which every rank has."""
        return x

    def enter(self, x: Tensor) -> Tensor:
        """This rank's hidden features of embedded rows, which the layers read."""
        return x

    def gather(self, x: Tensor) -> Tensor:
        """All rows with all features, from every rank's shard."""
        return x

    def column_parallel(self, x: Tensor, w: Weight, *, activation: str = "none") -> Tensor:
        """The first linear layer of a half: all rows, this rank's outputs."""
        return w.matmul(x, activation=activation)

    def row_parallel_partial(self, x: Tensor, w: Weight) -> Tensor:
        """The attention's half of a parallel layer, which row_parallel adds to the other."""
        return w.matmul(x)

    def row_parallel(
        self,
        x: Tensor,
        w: Weight,
        *,
        residual: Tensor,
        norm: RowNorm,
        partial: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(norm(h), h) of h = x @ w.T + bias + residual (+ partial), of the rows of residual.

        The residual is added by the GEMM or by the norm, whichever is faster.
        """
        if partial is None and w.has_kernel and fuses_residual(x.shape[0], w.dense):
            h = w.matmul(x, residual=residual)
            return norm(h), h
        d = w.matmul(x, residual=partial)
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
