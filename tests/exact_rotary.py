"""Rotary position embedding in float64, by its definition."""

import torch
from torch import Tensor


def turn(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, is_interleaved: bool) -> Tensor:
    """Complex multiplication, in float64."""
    half = cos.shape[1]
    x = x.double()
    if is_interleaved:
        pairs = torch.view_as_complex(x[..., : 2 * half].unflatten(-1, (half, 2)).contiguous())
    else:
        pairs = torch.complex(x[..., :half], x[..., half : 2 * half])
    at = positions.long()
    turned = pairs * torch.complex(cos[at].double(), sin[at].double())[:, None]
    parts = (turned.real, turned.imag)
    rotated = torch.stack(parts, -1).flatten(-2) if is_interleaved else torch.cat(parts, -1)
    return torch.cat((rotated, x[..., 2 * half :]), -1)
