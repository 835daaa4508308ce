"""Codes of 8 and 4 bits for groups of 32 features, with a scale and a least value for each."""

import torch
from torch import Tensor

from bytetx.ops.check import require_tensor
from bytetx.ops.coded_rows import GROUP
from bytetx.ops.linear import LinearWeight, taken

OFFSET = 128.0  # added to codes of 8 bits, which are stored without a sign
# Rounded f16 scales are normal numbers in groups 2^22 times smaller than their output's largest.
_LARGEST_EXPONENT = 10
_LEAST_EXPONENT = -100
_SHRINKS = {8: (1.0, 0.985), 4: (1.0, 0.95, 0.9, 0.85)}

# (codes, scale, least): [n, groups, GROUP] of whole numbers and [n, groups, 1], f32.
Groups = tuple[Tensor, Tensor, Tensor]


def require_plain(plain: LinearWeight, dtypes: tuple[torch.dtype, ...]) -> None:
    """Raises ValueError for a weight that cannot be rounded."""
    if plain.is_prepacked:
        raise ValueError("plain must be a plain weight, got one in another layout")
    require_tensor("weight", plain.weight, shape=(None, None), dtypes=dtypes)


def output_factors(weight: Tensor) -> Tensor:
    """Powers of two, f32 [n], by which the rows [n, k] are divided before they are rounded."""
    n, k = weight.shape
    largest = weight.abs().amax(1).float() if k else weight.new_zeros(n, dtype=torch.float32)
    exponent = torch.frexp(largest).exponent.clamp(min=_LEAST_EXPONENT) - _LARGEST_EXPONENT
    ones = torch.ones_like(largest)
    return torch.where(largest > 0, torch.ldexp(ones, exponent), ones)


def in_whole_groups(rows: Tensor) -> Tensor:
    """Rows [n, k] with their last number again and again up to a whole group."""
    return torch.cat((rows, rows[:, -1:].expand(-1, -rows.shape[1] % GROUP)), 1)


def round_groups(rows: Tensor, bits: int, *, numbers: torch.dtype = torch.float16) -> Groups:
    """Codes of rows, f32 [n, whole groups], that miss them least of those that are tried.

    numbers: dtype that scales and least values are stored in.
    """
    w = rows.unflatten(1, (-1, GROUP))
    candidates = _candidates8(w) if bits == 8 else _candidates4(w)
    top = 255.0 if bits == 8 else 15.0
    best: Groups | None = None
    least_error = torch.full_like(w[..., :1], torch.inf)

    def attempt(scale: Tensor, least: Tensor) -> None:
        nonlocal best, least_error
        scale = scale.to(numbers).float()
        least = -OFFSET * scale if bits == 8 else least.to(numbers).float()
        codes = ((w - least) / torch.where(scale == 0, 1.0, scale)).round_().clamp_(0, top)
        error = (codes * scale + least - w).square_().sum(2, keepdim=True)
        if best is None:
            best, least_error = (codes, scale, least), error
            return
        is_better = error < least_error
        found = zip((codes, scale, least), best, strict=True)
        codes, scale, least = (torch.where(is_better, new, old) for new, old in found)
        best, least_error = (codes, scale, least), torch.where(is_better, error, least_error)

    for scale, least in candidates:
        attempt(scale, least)
    assert best is not None
    if bits == 4:  # the line through the best codes
        codes, _, _ = best
        mean, middle = codes.mean(2, keepdim=True), w.mean(2, keepdim=True)
        spread = (codes - mean).square().sum(2, keepdim=True)
        slope = ((codes - mean) * w).sum(2, keepdim=True) / spread.clamp(min=1e-9)
        attempt(slope, middle - slope * mean)
    return best


def scale_and_least(numbers: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """numbers: [..., 1 or 2], as they are stored -> (scale, least), f32 [..., 1]."""
    scale = numbers[..., :1].float()
    return scale, -OFFSET * scale if bits == 8 else numbers[..., 1:].float()


def taken_groups(
    groups: Groups, k: int, *, outputs: range | None, inputs: range | None
) -> tuple[Groups, int]:
    """(the groups of some outputs and inputs, how many inputs): a rank's share of k features.

    Raises ValueError for inputs that are not whole groups.
    """
    codes, scale, least = (taken(t, outputs) for t in groups)
    if inputs is None:
        return (codes, scale, least), k
    if inputs.start % GROUP or (inputs.stop % GROUP and inputs.stop != k):
        raise ValueError(
            f"inputs must be whole groups of {GROUP} features, got {inputs.start} to "
            f"{inputs.stop}; load the model in bfloat16, or divide it in other parts"
        )
    part = range(inputs.start // GROUP, -(-inputs.stop // GROUP))
    codes, scale, least = (taken(t, part, dim=1) for t in (codes, scale, least))
    return (codes, scale, least), len(inputs)


def group_values(codes: Tensor, scale: Tensor, least: Tensor, factor: Tensor) -> Tensor:
    """The matrix that codes stand for, f32 [n, features of whole groups]."""
    return (codes * scale + least).flatten(1) * factor[:, None]


def _candidates8(w: Tensor) -> list[tuple[Tensor, Tensor]]:
    scale = w.abs().amax(2, keepdim=True) / 127.0
    return [(scale * shrink, scale) for shrink in _SHRINKS[8]]


def _candidates4(w: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Ranges between least and largest value, and that of Q4_0: code 0 is the largest in size."""
    low, high = w.amin(2, keepdim=True), w.amax(2, keepdim=True)
    extreme = torch.where(high > -low, high, low)
    found = [((high - low) * shrink / 15.0, low * shrink) for shrink in _SHRINKS[4]]
    return [*found, (extreme / -8.0, extreme)]
