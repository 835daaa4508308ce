"""Linear layers with weights of 8 or 4 bits in groups of features, which stay so in a CPU's memory.

Rows are rounded to 8 bits as a product reads them, each group of each row on its own, so that
nothing is calibrated and a row's result depends on no other row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from bytetx.ops.check import is_operand, require_contiguous, require_tensor
from bytetx.ops.coded_rows import COLUMNS, GROUP, round_rows, stack_rows
from bytetx.ops.grouped_rounding import (
    Groups,
    group_values,
    require_plain,
    scale_and_least,
    taken_groups,
)
from bytetx.ops.linear import ACTIVATIONS, LinearWeight, taken, taken_biases
from bytetx.ops.native_params import PanelMatrix
from bytetx.ops.panel_linear import INT4, INT8, panel_linear
from bytetx.ops.weight import QuantizedWeight

_STEP = 4  # features of an output that lie side by side
_DTYPES = (torch.float32, torch.bfloat16)
_FORMATS = {8: INT8, 4: INT4}


@dataclass(frozen=True, slots=True)
class GroupedWeight(QuantizedWeight):
    """A layer's weight [n, k] of about factor[:, None] * (scale * codes + least) by groups.

    strips: uint8 [ceil(n / 16), ceil(k / 32), bytes of a group of 16 outputs]: the codes, the f16
    scales and, with 4 bits, the f16 leasts, as csrc/cpu/group_kernel.h says.
    factor: f32 [n], powers of two.  bias: [n] of dtype, or None.  bits: of a code, 8 or 4.
    dtype: of rows and results, f32 or bf16.  Other members: as of bytetx.ops.weight.Weight.
    """

    strips: Tensor
    factor: Tensor
    bias: Tensor | None
    n: int
    k: int
    bits: int
    dtype: torch.dtype
    sum_bias: Tensor | None = None

    @property
    def codes(self) -> Tensor:
        """All that it holds but factors and biases."""
        return self.strips

    @property
    def panels(self) -> PanelMatrix:
        """The native call's view of it, into memory that the caller keeps."""
        features = self.strips.shape[1] * GROUP
        layout = (features, COLUMNS, features, _FORMATS[self.bits])
        return PanelMatrix(self.strips, self.bias, self.factor, self.n, self.k, *layout)

    @property
    def restored(self) -> Tensor:
        """The matrix that it stands for, f32 [n, k]."""
        return group_values(*self._groups(), self.factor)[:, : self.k].contiguous()

    def rows(self, indices: Tensor) -> Tensor:
        """Those rows of the matrix, a new [len(indices), k] of dtype, as an embedding reads them.

        Raises ValueError for an index outside of it.
        """
        index = indices.long()
        if len(index) and not 0 <= int(index.min()) <= int(index.max()) < self.n:
            wrong = index[(index < 0) | (index >= self.n)][0]
            raise ValueError(f"input_ids must be in [0, {self.n}), got {int(wrong)}")
        strip, column = index // COLUMNS, index % COLUMNS
        codes, numbers = self._parts()
        steps = codes[strip, :, :, column]  # [m, groups, steps or pairs of them, 4]
        if self.bits == 4:
            steps = torch.stack((steps & 15, steps >> 4), 3)
        scale, least = scale_and_least(numbers[strip, :, :, column], self.bits)
        groups = steps.reshape(len(index), self.strips.shape[1], GROUP).float()
        found = group_values(groups, scale, least, self.factor[index])[:, : self.k]
        return found.to(self.dtype).contiguous()

    def shard(
        self, *, outputs: range | None = None, inputs: range | None = None
    ) -> "GroupedWeight":
        """Raises ValueError for inputs that are not whole groups."""
        parts, k = taken_groups(self._groups(), self.k, outputs=outputs, inputs=inputs)
        bias, sum_bias = taken_biases(self.bias, self.sum_bias, outputs=outputs, inputs=inputs)
        factor = taken(self.factor, outputs)
        strips = _in_strips(parts, self.bits)
        return GroupedWeight(
            strips, factor, bias, len(factor), k, self.bits, self.dtype, sum_bias=sum_bias
        )

    def matmul(
        self, x: Tensor, *, activation: str = "none", residual: Tensor | None = None
    ) -> Tensor:
        if not is_operand(x, (*x.shape[:1], self.k), self.dtype, -1):
            require_tensor("x", x, shape=(None, self.k), dtypes=(self.dtype,))
            require_contiguous("x", x)
        d = panel_linear(x, self.panels, activation=ACTIVATIONS.index(activation))
        return d if residual is None else d.add_(residual)

    def _parts(self) -> tuple[Tensor, Tensor]:
        """(codes [strips, groups, steps, 16, 4], f16 [strips, groups, 1 or 2, 16]), views."""
        num_strips, groups, _ = self.strips.shape
        num_bytes = COLUMNS * GROUP * self.bits // 8
        codes = self.strips[..., :num_bytes].unflatten(2, (-1, COLUMNS, _STEP))
        numbers = self.strips[..., num_bytes:].view(torch.float16)
        return codes, numbers.reshape(num_strips, groups, -1, COLUMNS)

    def _groups(self) -> Groups:
        codes, numbers = self._parts()
        if self.bits == 4:
            codes = torch.stack((codes & 15, codes >> 4), 3).flatten(2, 3)
        num_strips, groups = codes.shape[:2]
        rows = codes.permute(0, 3, 1, 2, 4).reshape(-1, groups, GROUP)[: self.n].float()
        scale, least = scale_and_least(
            numbers.permute(0, 3, 1, 2).flatten(0, 1)[: self.n], self.bits
        )
        return rows, scale, least


def prepare_grouped_linear(plain: LinearWeight, *, bits: int) -> GroupedWeight:
    """A plain weight, f32 or bf16 on the CPU, rounded to 8 or 4 bits in groups of 32 features.

    Raises ValueError for another weight.
    """
    require_plain(plain, _DTYPES)
    rows = round_rows(plain.weight.contiguous(), bits)
    return grouped_from_rows(
        rows, plain.bias, plain.k, bits, dtype=plain.dtype, sum_bias=plain.sum_bias
    )


def grouped_from_rows(
    rows: Tensor,
    bias: Tensor | None,
    k: int,
    bits: int,
    *,
    dtype: torch.dtype,
    sum_bias: Tensor | None = None,
) -> GroupedWeight:
    """A weight of n rows of codes (bytetx/ops/coded_rows.py) with k features each."""
    strips, factor = stack_rows(rows, k, bits)
    return GroupedWeight(strips, factor, bias, len(rows), k, bits, dtype, sum_bias=sum_bias)


def _in_strips(groups: Groups, bits: int) -> Tensor:
    codes, scale, least = groups
    n, num_groups, _ = codes.shape
    more = -n % COLUMNS
    codes = torch.nn.functional.pad(codes.to(torch.uint8), (0, 0, 0, 0, 0, more))
    codes = codes.view(-1, COLUMNS, num_groups, GROUP // _STEP, _STEP).permute(0, 2, 3, 1, 4)
    if bits == 4:
        codes = codes[:, :, ::2] | (codes[:, :, 1::2] << 4)
    numbers = torch.cat((scale, least)[: 1 if bits == 8 else 2], 2).half()
    numbers = torch.nn.functional.pad(numbers, (0, 0, 0, 0, 0, more))
    numbers = numbers.view(-1, COLUMNS, num_groups, numbers.shape[2]).permute(0, 2, 3, 1)
    both = (codes.flatten(2), numbers.flatten(2).contiguous().view(torch.uint8))
    return torch.cat(both, 2).contiguous()
