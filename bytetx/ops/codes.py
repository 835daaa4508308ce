"""Weights as files of few bits hold them: whole numbers, and what groups of features share."""

from dataclasses import dataclass, replace

from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True, slots=True)
class Codes:
    """Rows of a weight [n, k]: scale * (code - zero) + least.

    codes: uint8 [n, k].  group: features that share numbers; the last group may have fewer.
    scale: f32 [n, ceil(k / group)].  zero: whole numbers, f32 like scale, or one for all.
    least: f32 like scale, or None for zeros.
    order: int64 [k]: column i is feature order[i] of the weight; None: they are in order.
    """

    codes: Tensor
    scale: Tensor
    group: int
    zero: Tensor | float = 0.0
    least: Tensor | None = None
    order: Tensor | None = None

    @property
    def values(self) -> Tensor:
        """The columns' numbers, f32 [n, k]; a product and a sum are rounded one by one."""
        groups = self.scale.shape[1]
        if self.codes.shape[1] != groups * self.group:  # the last group has fewer
            wide = replace(
                self, codes=pad(self.codes, (0, groups * self.group - self.codes.shape[1]))
            )
            return wide.values[:, : self.codes.shape[1]]
        found = self.codes.float().view(len(self.codes), groups, self.group)
        zero = self.zero[..., None] if isinstance(self.zero, Tensor) else self.zero
        found.sub_(zero).mul_(self.scale[..., None])
        return (found if self.least is None else found.add_(self.least[..., None])).flatten(1)
