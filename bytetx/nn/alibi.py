"""Attention with linear biases: scores fall with the distance of two tokens."""

import torch

from bytetx.checkpoint.spec import ModelSpec


def alibi_slopes(num_heads: int, device: torch.device | str) -> torch.Tensor:
    """The slope of each head, f32 [num_heads].

    Of n heads, a power of two, head i has 2^(-8 (i + 1) / n).  Any other number of heads takes
    those of the power of two below it and, for the rest, every second one of the power above.
    Source: ALiBi (arXiv 2108.12409), section 3, and the released code for other numbers of heads.
    """
    below = 1 << (num_heads.bit_length() - 1)
    exponents = [-8 * (i + 1) / below for i in range(below)]
    exponents += [-8 * (2 * i + 1) / (2 * below) for i in range(num_heads - below)]
    return torch.tensor([2.0**exponent for exponent in exponents], device=device)


def model_slopes(spec: ModelSpec, device: torch.device | str) -> torch.Tensor | None:
    """ALiBi's slope of each head, f32 [num_heads], per token of distance; None without ALiBi."""
    alibi = spec.layer_spec.alibi
    if alibi is None:
        return None
    rounded = alibi_slopes(spec.num_heads, device).to(getattr(torch, alibi.dtype))
    return rounded.float() * alibi.scale


def alibi_bias(slopes: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
    """The bias that is added to scores, f32 [num_heads, distances]: slopes * -|distance|.

    distance: integers, of keys before and after a query.  Under a causal mask this differs from
    slope * key position by a number of each query alone, which the softmax does not see.
    """
    return slopes[:, None] * -distance.abs().float()
