"""GGUF's block formats -> floats: one function per format, each exact in f32.

A row of a tensor is a row of blocks. A block holds the codes of 32 or 256 numbers that follow each
other in the row, and their scales. Each function takes the bytes of blocks, uint8
[num_blocks, num_bytes], and returns f32 [num_blocks, num_numbers]; every product and sum is rounded
where ggml rounds it, so that the numbers are those of the gguf package.
Source: ggml-quants.c of ggml.
"""

from collections.abc import Callable

import torch


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
    shifts = torch.arange(8, dtype=torch.uint8)
    bits = (packed[:, :, None] >> shifts).bitwise_and_(1)
    return bits.view(len(packed), 32).bitwise_left_shift_(4)


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    codes = _nibbles(blocks[:, 2:]).view(-1, 32)
    return codes.float().sub_(8).mul_(_half(blocks, 0))


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    codes = _nibbles(blocks[:, 4:]).view(-1, 32)
    return codes.float().mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    codes = _nibbles(blocks[:, 6:]).view(-1, 32).bitwise_or_(_fifth_bits(blocks[:, 2:6]))
    return codes.float().sub_(16).mul_(_half(blocks, 0))


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    codes = _nibbles(blocks[:, 8:]).view(-1, 32).bitwise_or_(_fifth_bits(blocks[:, 4:8]))
    return codes.float().mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[:, 2:].view(torch.int8).float().mul_(_half(blocks, 0))


def _q2_k(blocks: torch.Tensor) -> torch.Tensor:
    """16 groups of 16 numbers, whose scales and minima have 4 bits."""
    both = _nibbles(blocks[:, :16]).float()  # [num_blocks, 2, 16]
    scale, low = both[:, 0].mul_(_half(blocks, 80)), both[:, 1].mul_(_half(blocks, 82))
    codes = _fields(blocks[:, 16:80].reshape(-1, 2, 32), 2)  # [num_blocks, 2, 4, 32]
    numbers = codes.view(-1, 16, 16).float()
    return numbers.mul_(scale[:, :, None]).sub_(low[:, :, None]).view(-1, 256)


def _q3_k(blocks: torch.Tensor) -> torch.Tensor:
    """16 groups of 16 numbers, whose scales have 6 bits; bit i of `high` is of the i-th 32."""
    lower = _nibbles(blocks[:, 96:104]).view(-1, 16)
    upper = _fields(blocks[:, 104:108], 2).view(-1, 16).bitwise_left_shift_(4)
    scale = lower.bitwise_or_(upper).float().sub_(32).mul_(_half(blocks, 108))
    codes = _fields(blocks[:, 32:96].reshape(-1, 2, 32), 2).view(-1, 8, 32)
    codes.bitwise_or_(_fields(blocks[:, :32], 1).bitwise_left_shift_(2))
    numbers = codes.view(-1, 16, 16).float().sub_(4)
    return numbers.mul_(scale[:, :, None]).view(-1, 256)


def _scales_and_minima(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The 12 bytes of 8 scales and 8 minima of 6 bits, f32 [num_blocks, 8, 1] each."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    high = third & 15, third >> 4
    scale = torch.cat([first & 63, high[0] | ((first >> 6) << 4)], dim=1)
    low = torch.cat([second & 63, high[1] | ((second >> 6) << 4)], dim=1)
    return scale.float()[:, :, None], low.float()[:, :, None]


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    scale, low = _scales_and_minima(blocks[:, 4:16])
    scale.mul_(_half(blocks, 0)[:, :, None])
    low.mul_(_half(blocks, 2)[:, :, None])
    codes = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).view(-1, 8, 32)
    return codes.float().mul_(scale).sub_(low).view(-1, 256)


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    scale, low = _scales_and_minima(blocks[:, 4:16])
    scale.mul_(_half(blocks, 0)[:, :, None])
    low.mul_(_half(blocks, 2)[:, :, None])
    codes = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).view(-1, 8, 32)
    codes.bitwise_or_(_fields(blocks[:, 16:48], 1).bitwise_left_shift_(4))
    return codes.float().mul_(scale).sub_(low).view(-1, 256)


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    """16 groups of 16 numbers with scales of 8 bits; two bits of a number are apart."""
    scale = blocks[:, 192:208].view(torch.int8).float().mul_(_half(blocks, 208))
    codes = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).view(-1, 8, 32)
    high = _fields(blocks[:, 128:192].reshape(-1, 2, 32), 2).view(-1, 8, 32)
    codes.bitwise_or_(high.bitwise_left_shift_(4))
    numbers = codes.view(-1, 16, 16).float().sub_(32)
    return numbers.mul_(scale[:, :, None]).view(-1, 256)


# By the name of the format; those with codebooks are decoded by the gguf package.
DECODERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
