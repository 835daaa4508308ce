"""Epilogue of the sum of all ranks' partial products: bias, residual and norm."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from bytetx.ops import reference
from bytetx.ops.norm import layer_norm, rms_norm


@dataclass(frozen=True, slots=True)
class RowNorm:
    """The norm of a sum: weight, bias [n] (an RMS norm has no bias)."""

    weight: Tensor
    bias: Tensor | None
    eps: float
    kind: Literal["layer_norm", "rms_norm"] = "layer_norm"


@dataclass(frozen=True, slots=True)
class SumEpilogue:
    """(norm(h), h) of h = sum + bias + residual.

    residual: [rows, n].  bias: [n] or None, added once.
    """

    residual: Tensor
    bias: Tensor | None
    norm: RowNorm

    def after_collective(self, sums: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(h), h) of h = sums + residual: some rank's product has the bias.

        sums: [rows, n] in residual's dtype, which are overwritten with h, or in float32.
        """
        norm, residual = self.norm, self.residual
        if sums.dtype == residual.dtype:
            if norm.kind == "rms_norm":
                normalized = rms_norm(
                    sums, norm.weight, eps=norm.eps, residual=residual, sum_out=sums
                )
            else:
                normalized = layer_norm(
                    sums, norm.weight, norm.bias, eps=norm.eps, residual=residual, sum_out=sums
                )
            return normalized, sums
        h = sums.float() + residual.float()
        if norm.kind == "rms_norm":
            normalized = reference.rms_norm(h, norm.weight, eps=norm.eps)
        else:
            normalized = reference.layer_norm(h, norm.weight, norm.bias, eps=norm.eps)
        return normalized.to(residual.dtype), h.to(residual.dtype)
