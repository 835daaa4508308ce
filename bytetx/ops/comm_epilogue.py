"""Epilogue of the sum of all ranks' partial products: bias, residual and norm."""

from dataclasses import dataclass

from torch import Tensor

from bytetx.ops.norm import RowNorm


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
        residual = self.residual
        if sums.dtype == residual.dtype:
            return self.norm(sums, residual=residual, sum_out=sums), sums
        h = sums.float() + residual.float()
        return self.norm.in_torch(h).to(residual.dtype), h.to(residual.dtype)
