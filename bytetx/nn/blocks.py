"""Blocks: a process's part of all layers, and the rows of each of its passes."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from bytetx.checkpoint.spec import ModelSpec
from bytetx.nn.layer import LayerWeights, LocalRows, Rows

if TYPE_CHECKING:  # what only processes that share a model import
    from bytetx.nn.weight_gather import WeightGather
    from bytetx.parallel.layout import ModelShard


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
    def shard(self) -> "ModelShard | None": ...

    @property
    def is_capturable(self) -> bool: ...

    @property
    def hidden(self) -> range | None: ...

    @property
    def weight_gather(self) -> "WeightGather | None": ...

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


class LocalBlocks(LocalRows):
    """Blocks of a whole model, which are the rows of its passes as well."""

    shard: "ModelShard | None" = None
    is_capturable = True
    hidden: range | None = None
    weight_gather: "WeightGather | None" = None

    def __init__(self, spec: ModelSpec):
        self.num_heads, self.num_kv_heads = spec.num_heads, spec.num_kv_heads

    def sync_kernel_support(self, layers: Iterable[LayerWeights]) -> None:
        pass
