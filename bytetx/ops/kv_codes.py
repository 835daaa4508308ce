"""Keys and values in FP8: E4M3 codes and a scale for each token's vector of a head.

A vector's scale is the least power of two with which its numbers are at most 448, E4M3's largest:
a code times its scale is a number of bf16, exactly, and no token's scale depends on another one's.
Scales are stored as E8M0, the exponent plus 127 (OCP Microscaling Formats 1.0, section 5.4.1).
"""

import torch
from torch import Tensor

# Exponents of scales as they are stored. Codes times the largest fit f16; what is beyond 57 344 is
# cut off there. A vector with a number that is not finite has the scale NaN.
LEAST_SCALE, LARGEST_SCALE, NAN_SCALE = 105, 134, 255
MAX_RELATIVE_ERROR = 2.0**-4  # where a number is at least 2^-14 of its vector's largest
_LARGEST_CODE = 448.0
_E4M3 = torch.float8_e4m3fn


def quantize_kv(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., head_dim], floats -> (codes uint8 [..., head_dim], scales uint8 [...])."""
    x = x.float()
    largest = x.abs().amax(-1)
    # A significand above 1.75 (448 is 1.75 * 2^8) carries into the exponent.
    exponents = (largest.view(torch.int32) + 0x1FFFFF >> 23) - 8
    exponents = exponents.clamp_(LEAST_SCALE, LARGEST_SCALE)
    scaled = x * (254 - exponents << 23).view(torch.float32)[..., None]
    codes = scaled.clamp_(-_LARGEST_CODE, _LARGEST_CODE).to(_E4M3).view(torch.uint8)
    scales = exponents.masked_fill_(~largest.isfinite(), NAN_SCALE)
    return codes, scales.to(torch.uint8)


def restore_kv(codes: Tensor, scales: Tensor) -> Tensor:
    """(codes uint8 [..., head_dim], scales uint8 [...]) -> f32 [..., head_dim]."""
    factors = (scales.int() << 23).view(torch.float32)  # NaN becomes inf, whose products show it
    return codes.view(_E4M3).float() * factors[..., None]
