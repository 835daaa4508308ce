"""Norms as objects: a kind's weights, and everything that a layer or a collective asks of them."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from bytetx.ops import reference
from bytetx.ops.linear import fuses_residual
from bytetx.ops.linear_norm import fused_linear_norm
from bytetx.ops.norm import LAYER_NORM, RMS_NORM
from bytetx.ops.registry import Backend, Operation
from bytetx.ops.weight import Weight


@dataclass(frozen=True, slots=True)
class RowNorm(ABC):
    """A norm of each row: weight and bias [hidden_size], or [hidden_size] and None.

    operation: computes the norm; backend: its choice for these weights.
    fused_kind: the kind's number in the kernels of collectives that norm their sums; None where
    these do not compute it, and the collective comes first.
    """

    weight: Tensor
    bias: Tensor | None
    eps: float
    backend: Backend = field(init=False, compare=False, repr=False)

    operation: ClassVar[Operation]
    fused_kind: ClassVar[int | None] = None

    def __post_init__(self) -> None:
        w = self.weight
        object.__setattr__(self, "backend", self.operation.choose(w.device, w.dtype, w.shape[-1]))

    def __call__(
        self,
        x: Tensor,
        *,
        residual: Tensor | None = None,
        out: Tensor | None = None,
        sum_out: Tensor | None = None,
        fp8_out: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """The norm of x + residual; arguments as of bytetx.ops.norm.layer_norm, unchecked."""
        outs = {"out": out, "sum_out": sum_out, "fp8_out": fp8_out}
        normed: Tensor = self.backend.run(
            x, self.weight, self.bias, eps=self.eps, residual=residual, **outs
        )
        return normed

    @abstractmethod
    def in_torch(self, h: Tensor) -> Tensor:
        """The norm of f32 rows in plain torch, f32."""

    @abstractmethod
    def over_ranks(self, x: Tensor, sum_ranks: Callable[[Tensor], Tensor], count: int) -> Tensor:
        """The norm of rows whose features are divided over ranks; x: this rank's of `count`.

        sum_ranks: sums f64 [rows, sums] over ranks. In f64, for a mean far from 0 then costs no
        digits.
        """

    def after_linear(self, x: Tensor, w: Weight, *, residual: Tensor) -> Tensor:
        """The norm of x @ w.T + bias + residual, a new tensor."""
        adds = w.has_kernel and fuses_residual(x.shape[0], w.dense)
        d = w.matmul(x, residual=residual if adds else None)
        return self(d, residual=None if adds else residual, out=d)


class LayerNorm(RowNorm):
    """Layer norm, with or without a shift."""

    __slots__ = ()
    operation = LAYER_NORM
    fused_kind = 0

    def in_torch(self, h: Tensor) -> Tensor:
        return reference.layer_norm(h, self.weight, self.bias, eps=self.eps)

    def over_ranks(self, x: Tensor, sum_ranks: Callable[[Tensor], Tensor], count: int) -> Tensor:
        wide = x.float()
        squares = wide.square().sum(1, dtype=torch.float64)
        sums = torch.stack([wide.sum(1, dtype=torch.float64), squares], dim=1)
        mean, mean_square = (sum_ranks(sums) / count).unbind(1)
        variance = (mean_square - mean.square()).clamp_(min=0)
        scale = torch.rsqrt(variance + self.eps)
        normed = (wide - mean.float()[:, None]) * scale.float()[:, None] * self.weight
        return (normed if self.bias is None else normed + self.bias).to(x.dtype)

    def after_linear(self, x: Tensor, w: Weight, *, residual: Tensor) -> Tensor:
        fused = None
        if w.has_kernel:
            norm = (self.weight, self.bias)
            fused = fused_linear_norm(x, w.dense, residual=residual, norm=norm, eps=self.eps)
        return super().after_linear(x, w, residual=residual) if fused is None else fused


class RmsNorm(RowNorm):
    """Root mean square norm; bias is None."""

    __slots__ = ()
    operation = RMS_NORM
    fused_kind = 1

    def in_torch(self, h: Tensor) -> Tensor:
        return reference.rms_norm(h, self.weight, eps=self.eps)

    def over_ranks(self, x: Tensor, sum_ranks: Callable[[Tensor], Tensor], count: int) -> Tensor:
        wide = x.float()
        squares = wide.square().sum(1, dtype=torch.float64)
        mean_square = sum_ranks(squares[:, None]) / count
        scale = torch.rsqrt(mean_square + self.eps)
        return (wide * scale.float() * self.weight).to(x.dtype)


# By the names of bytetx.checkpoint.norm_kinds.
NORMS: dict[str, type[RowNorm]] = {"layer_norm": LayerNorm, "rms_norm": RmsNorm}
