"""Rows of codes in groups of 32 features: a weight before it is laid out for a GPU's products."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bytetx.ops.coded_rows import GROUP
from bytetx.ops.codes import Codes
from bytetx.ops.grouped_rounding import OFFSET, taken_groups
from bytetx.ops.linear import taken

# How the numbers of a group make a weight of a code; see GroupRows.
SYMMETRIC, LEAST, ZERO, HALVES = "symmetric", "least", "zero", "halves"
FORMS = (SYMMETRIC, LEAST, ZERO, HALVES)  # GroupedForm of csrc/grouped_ops.h
# Scales of an output lie below this, so that 255 of them and a least value fit float16.
_MOST_SCALE_EXPONENT = 6
_LEAST_EXPONENT = -120


def held_form(
    bits: int, group: int, k: int, *, has_zeros: bool, has_least: bool
) -> tuple[int, str] | None:
    """(bits, form) in which a GPU holds codes of a file; None where none of its forms has room.

    bits: of a code in the file.  group: features that share a scale, of k.
    has_zeros: groups have zero points of their own.  has_least: they have least values.
    """
    if group % GROUP and group < k:
        fits = group % (GROUP // 2) == 0 and not has_zeros and not has_least
        return (8, HALVES) if fits and bits <= 8 else None
    if bits > 8:
        return None
    if has_zeros:
        return (4 if bits <= 4 else 8), ZERO
    return (4, LEAST) if bits <= 4 else (8, LEAST if has_least else SYMMETRIC)


def number_count(form: str) -> int:
    """Numbers that a group has in memory."""
    return 1 if form == SYMMETRIC else 2


@dataclass(frozen=True, slots=True)
class GroupRows:
    """Rows of a weight [n, k], in groups of 32 features.

    codes: uint8 [n, groups, 32].  first, second: f32 [n, groups, 1].  factor: f32 [n].
    bits: of a code in memory, 4 or 8.  A weight is factor times, by form:
      symmetric  first * (code - 128)
      least      first * code + second
      zero       first * (code - second), whole numbers up to 256
      halves     (code - 128) * first, the last 16 features of a group: * second
    order: int64 [k], column i is feature order[i]; None: they are in order.
    """

    codes: Tensor
    first: Tensor
    second: Tensor
    factor: Tensor
    k: int
    bits: int
    form: str
    order: Tensor | None = None

    @classmethod
    def of(cls, codes: Codes, bits: int, form: str) -> "GroupRows":
        """A file's codes in memory, where held_form names these bits and this form."""
        n, k = codes.codes.shape
        scale, factor = codes.scale, None
        if scale.shape[1] == 1 and codes.least is None:  # in f32, where no number is rounded
            factor, scale = scale[:, 0].contiguous(), torch.ones_like(scale)
        size = GROUP // 2 if form == HALVES else GROUP
        count = -(-k // GROUP) * (GROUP // size)

        def each(numbers: Tensor) -> Tensor:
            """Numbers of every `size` columns, [n, count]."""
            if numbers.shape[1] == 1:
                return numbers.expand(n, count)
            found = numbers.repeat_interleave(codes.group // size, 1)[:, :count]
            return torch.nn.functional.pad(found, (0, count - found.shape[1]))

        first, least, zero = each(scale), codes.least, codes.zero
        own, second = codes.codes, torch.zeros_like(first)
        if form == LEAST and least is None:
            assert not isinstance(zero, Tensor)
            second = -zero * first
        elif form == LEAST:
            assert least is not None
            second = each(least)
        elif form == ZERO:
            assert isinstance(zero, Tensor)
            second = each(zero)
        else:
            assert not isinstance(zero, Tensor)
            own = own + (int(OFFSET) - int(zero))
        if form == HALVES:
            first, second = first.reshape(n, -1, 2).unbind(2)
        own = torch.nn.functional.pad(own, (0, -k % GROUP)).view(n, -1, GROUP)
        rows = cls(own, first[..., None], second[..., None], scale[:, 0], k, bits, form)
        rows = replace(rows, order=codes.order)
        return rows._scaled_by_powers() if factor is None else replace(rows, factor=factor)

    def _scaled_by_powers(self) -> "GroupRows":
        """The same rows with factors that are powers of two, and numbers that fit float16."""
        largest = self.first.abs().amax((1, 2))
        if self.form == LEAST:
            largest = torch.maximum(largest, self.second.abs().amax((1, 2)) / 16)
        elif self.form == HALVES:
            largest = torch.maximum(largest, self.second.abs().amax((1, 2)))
        exponent = torch.frexp(largest).exponent.clamp(min=_LEAST_EXPONENT) - _MOST_SCALE_EXPONENT
        ones = torch.ones_like(largest)
        # What is not finite stays so, and are_finite finds it.
        factor = torch.where(largest > 0, torch.ldexp(ones, exponent), ones)
        inverse = (1.0 / factor)[:, None, None]
        second = self.second if self.form == ZERO else self.second * inverse
        return replace(self, first=self.first * inverse, second=second, factor=factor)

    def __len__(self) -> int:
        return len(self.factor)

    @property
    def are_finite(self) -> bool:
        """Whether every number that the weight is made of is finite."""
        numbers = (self.first, self.second, self.factor)
        return all(bool(own.isfinite().all()) for own in numbers)

    @property
    def values(self) -> Tensor:
        """The matrix, f32 [n, k], in the order of its features."""
        found = self.codes.float()
        if self.form == LEAST:
            found = found.mul_(self.first).add_(self.second)
        elif self.form == HALVES:
            scales = torch.cat((self.first, self.second), 2).repeat_interleave(GROUP // 2, 2)
            found = found.sub_(OFFSET).mul_(scales)
        else:
            found = found.sub_(self.second if self.form == ZERO else OFFSET).mul_(self.first)
        found = (found.flatten(1) * self.factor[:, None])[:, : self.k]
        if self.order is None:
            return found.contiguous()
        return torch.empty_like(found).index_copy_(1, self.order, found)

    def is_like(self, other: object) -> bool:
        """Whether the rows of both may be those of one weight."""
        if not isinstance(other, GroupRows):
            return False
        if (self.k, self.bits, self.form) != (other.k, other.bits, other.form):
            return False
        if self.order is None or other.order is None:
            return self.order is other.order
        return torch.equal(self.order, other.order)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "GroupRows":
        """The rows that `change` makes of tensors with one of them each: in another order, or some
        of them."""
        return self._with_rows([change(own) for own in self._rows()])

    def _rows(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The tensors with a row for each output."""
        return self.codes, self.first, self.second, self.factor

    def _with_rows(self, rows: Sequence[Tensor]) -> "GroupRows":
        codes, first, second, factor = rows
        return replace(self, codes=codes, first=first, second=second, factor=factor)

    def chunk(self, count: int) -> tuple["GroupRows", ...]:
        """The rows in `count` parts, as of a tensor."""
        parts = zip(*(own.chunk(count) for own in self._rows()), strict=True)
        return tuple(self._with_rows(own) for own in parts)

    def taken(self, *, outputs: range | None, inputs: range | None) -> "GroupRows":
        """A rank's share.  Raises ValueError for inputs that are not whole groups, or no range."""
        if inputs is not None and self.order is not None:
            raise ValueError(
                "inputs of a weight whose groups are not of neighbours cannot be divided; load the "
                "model in bfloat16"
            )
        groups = (self.codes, self.first, self.second)
        groups, k = taken_groups(groups, self.k, outputs=outputs, inputs=inputs)
        codes, first, second = groups
        factor = taken(self.factor, outputs)
        return replace(self, codes=codes, first=first, second=second, factor=factor, k=k)


def join_rows(parts: Sequence[GroupRows], join: Callable[..., Tensor] | None = None) -> GroupRows:
    """The rows of alike parts, one part behind the other, or as `join` puts their tensors."""
    put = join or (lambda *tensors: torch.cat(tensors))
    tensors = zip(*(part._rows() for part in parts), strict=True)
    return parts[0]._with_rows([put(*own) for own in tensors])
