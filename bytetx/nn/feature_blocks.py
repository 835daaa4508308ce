"""Blocks whose hidden features are divided over ranks: the x axis of a grid, beside its y."""

from torch import Tensor

from bytetx.checkpoint.spec import ModelSpec
from bytetx.nn.layer import Rows
from bytetx.nn.sharded_blocks import ShardedBlocks, ShardedRows
from bytetx.ops.linear import taken
from bytetx.ops.norm import RowNorm
from bytetx.ops.weight import Weight
from bytetx.parallel.layout import feature_offsets, local_range, shard_model
from bytetx.parallel.tp import AxisGroups


class FeatureBlocks(ShardedBlocks):
    """The calls of LocalBlocks where each x rank has some hidden features of every row.

    Embeddings are whole on every x rank, and so is attention: x saves products, not these.
    """

    def __init__(self, spec: ModelSpec, axes: AxisGroups):
        y = axes.y
        super().__init__(spec, y, shard_model(spec, rank=y.rank, size=y.size))
        self.x_group = axes.x
        self.hidden_offsets = feature_offsets(spec.hidden_size, axes.x.size)
        self.hidden = local_range(self.hidden_offsets, axes.x.rank)

    def begin(self, total_tokens: int) -> Rows:
        return _FeatureRows(self)


class _FeatureRows(ShardedRows):
    """All rows of a pass on every rank, each with its hidden features."""

    def __init__(self, blocks: FeatureBlocks):
        super().__init__(blocks, None)
        self._features, self._x = blocks, blocks.x_group

    def enter(self, x: Tensor) -> Tensor:
        return taken(x, self._features.hidden, dim=1)

    def gather(self, x: Tensor) -> Tensor:
        return self._x.all_gather_columns(x, self._features.hidden_offsets)

    def column_parallel(self, x: Tensor, w: Weight, *, activation: str = "none") -> Tensor:
        """The bias and the activation follow the sum over x."""
        summed = self._x.all_reduce(w.product(x))
        if w.sum_bias is not None:
            summed += w.sum_bias
        return w.activated(summed.to(x.dtype), activation)

    def row_parallel(
        self,
        x: Tensor,
        w: Weight,
        *,
        residual: Tensor,
        norm: RowNorm | None,
        partial: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        assert norm is not None  # layers without a last norm are not shared
        h = self._sum(x, w, partial=partial) + residual
        h = h.to(x.dtype)
        return self.norm(h, norm), h

    def row_parallel_output_norm(
        self,
        x: Tensor,
        w: Weight,
        *,
        residual: Tensor,
        output_norm: RowNorm,
        norm: RowNorm | None,
    ) -> tuple[Tensor, Tensor]:
        d = self.norm(self._sum(x, w, partial=None).to(x.dtype), output_norm)
        return self.norm_sum(d, residual=residual, norm=norm)

    def norm_sum(
        self, x: Tensor, *, residual: Tensor, norm: RowNorm | None
    ) -> tuple[Tensor, Tensor]:
        h = x + residual
        return (h, h) if norm is None else (self.norm(h, norm), h)

    def norm(self, x: Tensor, norm: RowNorm) -> Tensor:
        """Statistics are sums over x ranks."""
        return norm.over_ranks(x, self._x.all_reduce, self._features.hidden_offsets[-1])

    def _sum(self, x: Tensor, w: Weight, *, partial: Tensor | None) -> Tensor:
        """The product's sum over y, with the bias: this rank's hidden features of it."""
        summed = self._collectives.all_reduce(w.matmul(x, residual=partial))
        return summed if w.sum_bias is None else summed + w.sum_bias
