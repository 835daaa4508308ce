"""Traffic: which lengths a batch has, how many texts come, and how many tokens are generated."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

from bytetx.arguments import check_not_negative, check_positive
from bytetx.errors import OptionError


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lognormal lengths in tokens: mean and sigma of their logarithm's spread, clipped to the
    range; sigma 0 is one length."""

    mean: float
    sigma: float
    least: int
    most: int

    def sample(self, count: int) -> list[int]:
        """`count` lengths at equal steps of the distribution: nothing is drawn at random."""
        # exp(mu + sigma^2 / 2) is the mean of a lognormal; clipping moves it little.
        location = math.log(self.mean) - self.sigma**2 / 2
        return [
            min(max(round(math.exp(location + self.sigma * score)), self.least), self.most)
            for score in _normal_scores(count)
        ]


@cache
def _normal_scores(count: int) -> tuple[float, ...]:
    normal = NormalDist()
    return tuple(normal.inv_cdf((i + 0.5) / count) for i in range(count))


# As of the benchmarks of this project: what queries, passages, chats and documents look like.
PROFILES = {
    "query": Lengths(9, 0.35, 4, 64),
    "passage": Lengths(78, 0.42, 8, 384),
    "ln128": Lengths(128, 0.8, 4, 512),
    "squad": Lengths(177, 0.38, 40, 384),
    "chat": Lengths(161, 1.35, 4, 1024),
    "longdoc": Lengths(549, 1.1, 1, 8192),
}


@dataclass(frozen=True, slots=True)
class Traffic:
    """seqlens: tokens of each text, or prompt, of a batch.  output_tokens: generated for each.

    rate: texts or prompts a second that the machine must serve; None: as many as it can.
    """

    seqlens: tuple[int, ...]
    output_tokens: int = 0
    rate: float | None = None

    @property
    def total_tokens(self) -> int:
        return sum(self.seqlens)


def make_traffic(
    lengths: str | int | Sequence[int],
    *,
    batch: int,
    output_tokens: int = 0,
    rate: float | None = None,
) -> Traffic:
    """lengths: a name of PROFILES, tokens of every text, or the lengths of one batch.

    batch: texts of a batch, where lengths does not list them.  Raises OptionError.
    """
    check_positive("batch", batch)
    check_not_negative("output_tokens", output_tokens)
    if rate is not None and not (isinstance(rate, int | float) and 0 < rate < math.inf):
        raise OptionError(f"rate must be above 0 and finite (texts a second), got {rate!r}")
    if isinstance(lengths, str) and not lengths.isdecimal():
        if lengths not in PROFILES:
            raise OptionError(
                f"lengths must be one of {', '.join(PROFILES)}, a number of tokens, or a list of "
                f"them, got {lengths!r}"
            )
        seqlens = PROFILES[lengths].sample(batch)
    elif isinstance(lengths, str | int):
        check_positive("lengths", int(lengths))
        seqlens = [int(lengths)] * batch
    else:
        seqlens = list(lengths) if isinstance(lengths, Iterable) else []
        if not seqlens or any(not isinstance(n, int) or n < 1 for n in seqlens):
            raise OptionError(f"lengths must be positive integers, got {str(lengths)[:80]}")
    return Traffic(tuple(seqlens), output_tokens, rate)
