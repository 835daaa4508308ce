"""Lengths of the sequences that the GPU suites run, from a seed."""

import math

import numpy as np
import torch


class Lengths:
    """Draws lists of lengths (tokens, int64 [count]) from one seeded generator, one after another.

    The lists depend on the order of the draws: a suite draws all of its cases, then chooses.
    """

    def __init__(self, seed: int = 0):
        self._rng = np.random.default_rng(seed)

    def lognormal(self, mean: float, sigma: float, count: int, low: int, high: int) -> np.ndarray:
        """Clipped to [low, high]; `mean` is the unclipped mean."""
        draws = self._rng.lognormal(math.log(mean) - sigma**2 / 2, sigma, count)
        return np.clip(np.round(draws), low, high).astype(np.int64)

    def uniform(self, longest: int, count: int) -> np.ndarray:
        """Integers between a fifth of `longest` and `longest`: a mean of 0.6 of it."""
        return self._rng.integers(math.ceil(0.2 * longest), longest + 1, count)


def dense(length: int, count: int) -> np.ndarray:
    return np.full(count, length)


def bytetransformer(longest: int, count: int = 16) -> np.ndarray:
    """The lengths that ByteTransformer's benchmark draws for a longest sequence.

    Source: bytedance/ByteTransformer, unit_test/bert_transformer_test.py: seed 2, uniform around a
    mean of 0.6 of the longest.
    """
    mean = int(0.6 * longest)
    low, high = (2 * mean - longest, longest + 1) if 2 * mean > longest else (0, 2 * mean + 1)
    generator = torch.Generator().manual_seed(2)
    return torch.randint(low, high, (count,), generator=generator).numpy()


def prefix_sums(lengths: np.ndarray, device: torch.device | str = "cuda") -> torch.Tensor:
    """cu_seqlens: int32 [batch_size + 1]."""
    sums = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=sums[1:])
    return torch.from_numpy(sums).to(device)
