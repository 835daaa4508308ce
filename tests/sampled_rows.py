"""Shared by the tests of sampling: a row's parameters, its exact distribution, its number."""

from dataclasses import dataclass

import numpy as np
import torch

from bytetx.ops.sampling import Filters


@dataclass(frozen=True)
class Row:
    """The parameters of one row."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    position: int = 0


def columns_of(rows: list[Row], device: str = "cpu") -> dict[str, object]:
    """The rows' parameters as sample() and sample_tokens() take them."""

    def column(name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.tensor([getattr(row, name) for row in rows], dtype=dtype, device=device)

    return {
        "temperature": column("temperature", torch.float32),
        "filters": Filters(
            top_k=column("top_k", torch.int64),
            top_p=column("top_p", torch.float32),
            min_p=column("min_p", torch.float32),
            max_top_k=max((row.top_k for row in rows), default=0),
            has_open_nucleus=any(row.top_p < 1 and not row.top_k for row in rows),
        ),
        "seeds": column("seed", torch.int64),
        "positions": column("position", torch.int64),
    }


def distribution(logits: torch.Tensor, row: Row) -> np.ndarray:
    """The definition, one row in float64: probabilities of every token."""
    x = logits.double().numpy()
    if row.temperature == 0:
        return np.eye(len(x))[x.argmax()]
    p = np.exp((x - x.max()) / np.float64(np.float32(row.temperature)))
    if 0 < row.top_k < len(p):
        p[p < np.sort(p)[-row.top_k]] = 0
    p[p < np.float32(row.min_p) * p.max() * (1 - 1e-6)] = 0
    p /= p.sum()
    if row.top_p < 1:
        falling = -np.sort(-p)
        more_likely = np.append(0, falling.cumsum())[np.searchsorted(-falling, -p)]
        p[(more_likely >= np.float32(row.top_p)) & (p < p.max())] = 0
    return p / p.sum()


def splitmix(seed: int, position: int) -> float:
    """The counted random number, in Python's integers."""
    mask, golden = 2**64 - 1, 0x9E3779B97F4A7C15

    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    return (mix((mix((seed + golden) & mask) + (position + 1) * golden) & mask) >> 12) * 2.0**-52
