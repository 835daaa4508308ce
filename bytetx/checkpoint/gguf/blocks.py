"""GGUF's block formats -> codes and the numbers of their groups: one function per format.

A row of a tensor is a row of blocks. A block holds the codes of 32 or 256 numbers that follow each
other in the row, and their scales. Each function takes the bytes of blocks, uint8
[num_blocks, num_bytes], and returns Codes of [num_blocks, num_numbers]; every product and sum is
rounded where ggml rounds it, so that the numbers are those of the gguf package.
Source: ggml-quants.c of ggml.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from bytetx.ops.codes import Codes


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """The float16 at a byte of every block, f32 [num_blocks, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [..., n] -> codes uint8 [..., 2, n]: the low halves of all bytes, then the others."""
    codes = packed.new_empty((*packed.shape[:-1], 2, packed.shape[-1]))
    torch.bitwise_and(packed, 15, out=codes[..., 0, :])
    torch.bitwise_right_shift(packed, 4, out=codes[..., 1, :])
    return codes


def _fields(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [..., n] -> codes uint8 [..., 8 / bits, n], the lowest bits of all bytes first."""
    shifts = range(0, 8, bits)
    codes = packed.new_empty((*packed.shape[:-1], len(shifts), packed.shape[-1]))
    for place, shift in enumerate(shifts):
        torch.bitwise_right_shift(packed, shift, out=codes[..., place, :])
    return codes.bitwise_and_((1 << bits) - 1)


def _fifth_bits(packed: torch.Tensor) -> torch.Tensor:
    """Four bytes, bit i of which is of number i -> uint8 [num_blocks, 32] of 0 and 16."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    bits = (packed[:, :, None] >> shifts).bitwise_and_(1)
    return bits.view(len(packed), 32).bitwise_left_shift_(4)


def _q4_0(blocks: torch.Tensor) -> Codes:
    return Codes(_nibbles(blocks[:, 2:]).view(-1, 32), _half(blocks, 0), 32, 8.0)


def _q4_1(blocks: torch.Tensor) -> Codes:
    codes = _nibbles(blocks[:, 4:]).view(-1, 32)
    return Codes(codes, _half(blocks, 0), 32, least=_half(blocks, 2))


def _q5_0(blocks: torch.Tensor) -> Codes:
    codes = _nibbles(blocks[:, 6:]).view(-1, 32).bitwise_or_(_fifth_bits(blocks[:, 2:6]))
    return Codes(codes, _half(blocks, 0), 32, 16.0)


def _q5_1(blocks: torch.Tensor) -> Codes:
    codes = _nibbles(blocks[:, 8:]).view(-1, 32).bitwise_or_(_fifth_bits(blocks[:, 4:8]))
    return Codes(codes, _half(blocks, 0), 32, least=_half(blocks, 2))


def _q8_0(blocks: torch.Tensor) -> Codes:
    codes = blocks[:, 2:].bitwise_xor(128)  # numbers with a sign, and 128
    return Codes(codes, _half(blocks, 0), 32, 128.0)


def _q2_k(blocks: torch.Tensor) -> Codes:
    """16 groups of 16 numbers, whose scales and minima have 4 bits."""
    both = _nibbles(blocks[:, :16]).float()  # [num_blocks, 2, 16]
    scale, low = both[:, 0].mul_(_half(blocks, 80)), both[:, 1].mul_(_half(blocks, 82))
    codes = _fields(blocks[:, 16:80].reshape(-1, 2, 32), 2)  # [num_blocks, 2, 4, 32]
    return Codes(codes.view(-1, 256), scale, 16, least=-low)


def _q3_k(blocks: torch.Tensor) -> Codes:
    """16 groups of 16 numbers, whose scales have 6 bits; bit i of `high` is of the i-th 32."""
    lower = _nibbles(blocks[:, 96:104]).view(-1, 16)
    upper = _fields(blocks[:, 104:108], 2).view(-1, 16).bitwise_left_shift_(4)
    scale = lower.bitwise_or_(upper).float().sub_(32).mul_(_half(blocks, 108))
    codes = _fields(blocks[:, 32:96].reshape(-1, 2, 32), 2).view(-1, 8, 32)
    codes.bitwise_or_(_fields(blocks[:, :32], 1).bitwise_left_shift_(2))
    return Codes(codes.view(-1, 256), scale, 16, 4.0)


def _scales_and_minima(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The 12 bytes of 8 scales and 8 minima of 6 bits, f32 [num_blocks, 8] each."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    high = third & 15, third >> 4
    scale = torch.cat([first & 63, high[0] | ((first >> 6) << 4)], dim=1)
    low = torch.cat([second & 63, high[1] | ((second >> 6) << 4)], dim=1)
    return scale.float(), low.float()


def _q4_k(blocks: torch.Tensor) -> Codes:
    scale, low = _scales_and_minima(blocks[:, 4:16])
    codes = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).view(-1, 256)
    return Codes(codes, scale.mul_(_half(blocks, 0)), 32, least=low.mul_(_half(blocks, 2)).neg_())


def _q5_k(blocks: torch.Tensor) -> Codes:
    scale, low = _scales_and_minima(blocks[:, 4:16])
    codes = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).view(-1, 8, 32)
    codes.bitwise_or_(_fields(blocks[:, 16:48], 1).bitwise_left_shift_(4))
    least = low.mul_(_half(blocks, 2)).neg_()
    return Codes(codes.view(-1, 256), scale.mul_(_half(blocks, 0)), 32, least=least)


def _q6_k(blocks: torch.Tensor) -> Codes:
    """16 groups of 16 numbers with scales of 8 bits; two bits of a number are apart."""
    scale = blocks[:, 192:208].view(torch.int8).float().mul_(_half(blocks, 208))
    codes = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).view(-1, 8, 32)
    high = _fields(blocks[:, 128:192].reshape(-1, 2, 32), 2).view(-1, 8, 32)
    codes.bitwise_or_(high.bitwise_left_shift_(4))
    return Codes(codes.view(-1, 256), scale, 16, 32.0)


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """bits: of a code.  group: numbers that share a scale.  has_least: groups have least values."""

    bits: int
    group: int
    codes: Callable[[torch.Tensor], Codes]
    has_least: bool = False

    def values(self, blocks: torch.Tensor) -> torch.Tensor:
        """The numbers of blocks, f32 [num_blocks, num_numbers]."""
        return self.codes(blocks).values


# By the name of the format; those with codebooks are decoded by the gguf package.
BLOCK_FORMATS = {
    "Q4_0": BlockFormat(4, 32, _q4_0),
    "Q4_1": BlockFormat(4, 32, _q4_1, has_least=True),
    "Q5_0": BlockFormat(5, 32, _q5_0),
    "Q5_1": BlockFormat(5, 32, _q5_1, has_least=True),
    "Q8_0": BlockFormat(8, 32, _q8_0),
    "Q2_K": BlockFormat(2, 16, _q2_k, has_least=True),
    "Q3_K": BlockFormat(3, 16, _q3_k),
    "Q4_K": BlockFormat(4, 32, _q4_k, has_least=True),
    "Q5_K": BlockFormat(5, 32, _q5_k, has_least=True),
    "Q6_K": BlockFormat(6, 16, _q6_k),
}
