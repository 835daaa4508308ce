"""Buckets: the few sizes that batches are padded to, so that one captured graph serves many.

The rows that fill a bucket up are fillers: short sequences of token 0 behind the real ones. To the
kernels they are ordinary texts, so that no row of a batch holds what some earlier work left in
memory; without them, rows of no sequence would carry that from layer to layer, infinities and
all, and kernels that take detours around those would give other bits.
"""

from dataclasses import dataclass

# Below this a step's time hardly depends on its rows (a GEMM tile has 64 or 128 of them), so that
# coarse buckets cost nothing; from _WIDE_TOKENS on time follows the rows, and buckets are finest.
_SMALL_TOKENS = 64
_SMALL_STEP = 32
_MIN_STEP = 16
_WIDE_TOKENS = 2048

FILLER_TOKENS = 64  # a tile of attention; longer ones would be work beside short texts


@dataclass(frozen=True, slots=True)
class Bucket:
    """Sizes of a batch that is padded for a CUDA graph: tokens, texts, and fillers behind them."""

    total_tokens: int
    num_texts: int
    num_fillers: int

    @property
    def batch_size(self) -> int:
        return self.num_texts + self.num_fillers


def bucket_of(total_tokens: int, num_texts: int, *, max_tokens: int) -> Bucket | None:
    """The smallest bucket that holds the batch; None where it exceeds the bucket of max_tokens.

    Rows are padded by at most 1/8 from 128 on and 1/16 from 2048 on. Places for texts go in powers
    of two: an empty one costs 4 bytes and a row of the pooled output.
    """
    tokens = round_tokens(total_tokens)
    if tokens > round_tokens(max_tokens):
        return None
    most_filled = _step(tokens) - (tokens > _SMALL_STEP)  # one row more would be a smaller bucket
    return Bucket(tokens, _power_of_two(num_texts), -(-most_filled // FILLER_TOKENS))


def round_tokens(total_tokens: int) -> int:
    """The rows of the smallest bucket that holds this many tokens."""
    total_tokens = max(total_tokens, 1)
    step = _step(total_tokens)
    return -(-total_tokens // step) * step


def _step(total_tokens: int) -> int:
    """From one bucket to the next around this size."""
    if total_tokens <= _SMALL_TOKENS:
        return _SMALL_STEP
    octave = _power_of_two(total_tokens) // 2  # octave < total_tokens <= 2 * octave
    return max(octave // (16 if octave >= _WIDE_TOKENS else 8), _MIN_STEP)


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
