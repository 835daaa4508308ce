"""Which sequence a token or a block of rows belongs to; lengths stay on the device."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bytetx.ops.triton_kernels.launch import launch

_BLOCK = 256


@triton.jit
def sequence_of(index, cu_seqlens, batch_size, num_steps, TOKENS: tl.constexpr):
    """The sequence that owns each index; batch_size where none does, at padding.

    TOKENS: 0: indices are of tokens, each owned by the last sequence that starts there or before.
    Else of blocks of so many rows; sequence i's first one is cu_seqlens[i] // TOKENS + i, which
    rises, and leaves room for all.  num_steps: bits of batch_size.
    """
    low = index * 0
    high = low + batch_size
    for _ in range(num_steps):
        middle = (low + high + 1) // 2
        begins = tl.load(cu_seqlens + middle)
        if TOKENS > 0:
            begins = begins // TOKENS + middle
        low = tl.where(begins <= index, middle, low)
        high = tl.where(begins <= index, high, middle - 1)
    return low


@triton.jit(do_not_specialize=["batch_size", "total_tokens", "num_steps"])
def _bounds_kernel(
    cu_seqlens, starts, ends, batch_size, total_tokens, num_steps, BLOCK: tl.constexpr
):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = token < total_tokens
    sequence = sequence_of(token, cu_seqlens, batch_size, num_steps, 0)
    is_padding = sequence >= batch_size
    start = tl.load(cu_seqlens + sequence)
    end = tl.load(cu_seqlens + tl.minimum(sequence + 1, batch_size))
    tl.store(starts + token, tl.where(is_padding, token, start), mask=is_row)
    tl.store(ends + token, tl.where(is_padding, 0, end), mask=is_row)


def sequence_bounds(cu_seqlens: Tensor, total_tokens: int) -> Tensor:
    """int32 [2, total_tokens]: first row, and row behind the last, of each token's sequence.

    cu_seqlens: int32 [batch_size + 1].  A row past cu_seqlens[-1] has an empty range: (itself, 0).
    """
    bounds = torch.empty((2, total_tokens), dtype=torch.int32, device=cu_seqlens.device)
    batch_size = cu_seqlens.shape[0] - 1
    launch(
        _bounds_kernel,
        (triton.cdiv(total_tokens, _BLOCK),),
        cu_seqlens,
        bounds[0],
        bounds[1],
        batch_size,
        total_tokens,
        batch_size.bit_length(),
        BLOCK=_BLOCK,
    )
    return bounds
