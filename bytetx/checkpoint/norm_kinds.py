"""Kinds of norms that families name, and the facts of each that need no tensor."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NormKind:
    """has_shift: whether its weight may come with a bias.  has_offset: whether checkpoints may save
    the weight less a constant.  num_sums: sums over a row that its statistics are made of."""

    has_shift: bool
    has_offset: bool
    num_sums: int


# The default first. bytetx.ops.norm computes each of them.
NORM_KINDS = {
    "layer_norm": NormKind(has_shift=True, has_offset=False, num_sums=2),
    "rms_norm": NormKind(has_shift=False, has_offset=True, num_sums=1),
}
