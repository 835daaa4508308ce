"""How a block's linear layers, and the norms behind them, run where one process has all of them.

bytetx/nn/sharded_blocks.py runs the same calls where the ranks of a group share the layers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from bytetx.checkpoint.spec import ModelSpec
from bytetx.ops.embedding import embed
from bytetx.ops.gated import GatedWeight, gated_linear
from bytetx.ops.linear import LinearWeight, fuses_residual, linear
from bytetx.ops.linear_norm import linear_norm
from bytetx.ops.norm import layer_norm, rms_norm
from bytetx.parallel.layout import ModelSplit


@dataclass(frozen=True, slots=True)
class NormWeight:
    """Scale and shift of a norm, each [hidden_size]; an RMS norm has no shift."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class RowWeight:
    """A layer whose inputs are split over ranks: linear [n, local k] without the whole bias [n]."""

    linear: LinearWeight
    bias: Tensor | None


# What ends a half of a block: whole, or split by its inputs.
OutWeight = LinearWeight | RowWeight


class Rows(Protocol):
    """The rows of one pass, and what the layers do with them; WholeBlocks says what each does."""

    embed: Callable[..., Tensor]

    def own(self, x: Tensor) -> Tensor: ...

    def whole(self, x: Tensor) -> Tensor: ...

    def column(
        self, x: Tensor, w: LinearWeight | GatedWeight, *, activation: str = "none"
    ) -> Tensor: ...

    def partial(self, x: Tensor, w: OutWeight) -> Tensor: ...

    def project(
        self,
        x: Tensor,
        w: OutWeight,
        *,
        residual: Tensor,
        norm: NormWeight,
        partial: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]: ...

    def project_norm(
        self, x: Tensor, w: OutWeight, *, residual: Tensor, norm: NormWeight
    ) -> Tensor: ...

    def norm(self, x: Tensor, norm: NormWeight) -> Tensor: ...


class Blocks(Protocol):
    """num_heads, num_kv_heads: of this rank.  split: what it has of the model; None: all of it.

    is_capturable: by a CUDA graph, as far as the layers go.
    """

    num_heads: int
    num_kv_heads: int
    split: ModelSplit | None
    is_capturable: bool

    def begin(self, total_tokens: int) -> Rows:
        """The rows of a pass of so many tokens in total."""
        ...

    def gather_vocab(self, logits: Tensor) -> Tensor:
        """[n, this rank's words] -> [n, vocab_size]."""
        ...


class WholeBlocks:
    """Blocks whose layers are whole, and Rows that are all here."""

    split = None
    is_capturable = True

    def __init__(self, spec: ModelSpec):
        self.num_heads, self.num_kv_heads = spec.num_heads, spec.num_kv_heads
        self._eps = spec.norm_eps
        self._is_rms = spec.decoder is not None and spec.decoder.norm == "rms_norm"
        self.embed = embed

    def begin(self, total_tokens: int) -> "WholeBlocks":
        return self

    def gather_vocab(self, logits: Tensor) -> Tensor:
        return logits

    def own(self, x: Tensor) -> Tensor:
        """This rank's rows of what every rank has."""
        return x

    def whole(self, x: Tensor) -> Tensor:
        """All rows, from every rank's own."""
        return x

    def column(
        self, x: Tensor, w: LinearWeight | GatedWeight, *, activation: str = "none"
    ) -> Tensor:
        """What starts a half of a block: all rows, of this rank's outputs."""
        if isinstance(w, GatedWeight):
            return gated_linear(x, w, activation=activation)
        return linear(x, w, activation=activation)

    def partial(self, x: Tensor, w: LinearWeight) -> Tensor:
        """The attention's half of a parallel block, for `project` to add to."""
        return linear(x, w)

    def project(
        self,
        x: Tensor,
        w: LinearWeight,
        *,
        residual: Tensor,
        norm: NormWeight,
        partial: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(norm(h), h) of h = x @ w.T + bias + residual (+ partial); whichever adds for less adds.

        Both are of this rank's rows, as residual is.
        """
        if partial is None and fuses_residual(x.shape[0], w):
            h = linear(x, w, residual=residual)
            return self.norm(h, norm), h
        d = linear(x, w, residual=partial)
        return self.norm(d, norm, residual=residual, sum_out=d), d

    def project_norm(
        self, x: Tensor, w: LinearWeight, *, residual: Tensor, norm: NormWeight
    ) -> Tensor:
        """project's first result alone, in the place of the sum."""
        if not self._is_rms:
            scales = {"norm_weight": norm.weight, "norm_bias": norm.bias}
            return linear_norm(x, w, residual=residual, **scales, eps=self._eps)
        is_fused = fuses_residual(x.shape[0], w)
        d = linear(x, w, residual=residual if is_fused else None)
        return self.norm(d, norm, residual=None if is_fused else residual, out=d)

    def norm(
        self,
        x: Tensor,
        norm: NormWeight,
        *,
        residual: Tensor | None = None,
        out: Tensor | None = None,
        sum_out: Tensor | None = None,
    ) -> Tensor:
        """The model's norm of x + residual; out, sum_out: as of bytetx.ops.norm."""
        options = {"eps": self._eps, "residual": residual, "out": out, "sum_out": sum_out}
        if self._is_rms:
            return rms_norm(x, norm.weight, **options)
        return layer_norm(x, norm.weight, norm.bias, **options)
