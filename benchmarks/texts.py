"""Inputs of the suites besides passages: length profiles and token ids, seeded."""

import random

from bytetx.cli.passages import Lognormal

# Tokens per sequence, special tokens included; a profile is a mixture of (weight, lognormal).
PROFILES: dict[str, tuple[tuple[float, Lognormal], ...]] = {
    "query": ((1.0, Lognormal(9, 0.35, 4, 64)),),
    "passage": ((1.0, Lognormal(78, 0.42, 8, 384)),),
    "ln128": ((1.0, Lognormal(128, 0.8, 4, 512)),),
    "squad": ((1.0, Lognormal(177, 0.38, 40, 384)),),
    "mixed": (
        (0.2, Lognormal(10, 0.3, 4, 512)),
        (0.4, Lognormal(139, 0.6, 4, 512)),
        (0.4, Lognormal(304, 0.55, 4, 512)),
    ),
}


def profile_lengths(profile: str, *, total_tokens: int, seed: int = 0) -> list[int]:
    """Lengths (tokens) from a profile of PROFILES, drawn until they sum to `total_tokens`.

    The last one is cut so that the sum is exact; a sequence has at least one token.
    """
    if profile not in PROFILES:
        raise ValueError(f"profile must be one of {', '.join(PROFILES)}, got {profile!r}")
    rng = random.Random(seed)
    weights, parts = zip(*PROFILES[profile], strict=True)
    lengths, left = [], total_tokens
    while left > 0:
        length = min(rng.choices(parts, weights)[0].draw(rng), left)
        lengths.append(length)
        left -= length
    return lengths


def random_token_ids(lengths: list[int], *, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """One sequence of uniform random token ids per length; no id is 0, which pads in BERT."""
    rng = random.Random(seed)
    return [rng.choices(range(1, vocab_size), k=length) for length in lengths]
