"""Buckets: the few sizes that batches are padded to, so that one captured graph serves many.

The rows that fill a bucket up are fillers: short sequences of token 0 behind the real ones. To the
kernels they are ordinary texts, so that no row of a batch holds what some earlier work left in
memory; without them, rows of no sequence would carry that from layer to layer, infinities and
all, and kernels that take detours around those would give other bits.
"""

from dataclasses import dataclass

# Below _FEW_TOKENS a step's time hardly depends on its rows (it reads the weights, and a GEMM tile
# has 64 or 128 rows), so that coarse buckets cost nothing; from _WIDE_TOKENS on time follows the
# rows, and buckets are finest.
_FEWEST_TOKENS, _FEWEST_STEP = 64, 32
_FEW_TOKENS, _FEW_STEP = 256, 64
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

    Rows are padded by at most 1/8 from 256 on and 1/16 from 2048 on. Places for texts go in powers
    of four: an empty one costs 4 bytes and a row of the pooled output.
    """
    tokens = round_tokens(total_tokens)
    if tokens > round_tokens(max_tokens):
        return None
    most_filled = _step(tokens) - (tokens > _FEWEST_STEP)  # one row more would be a smaller bucket
    return Bucket(tokens, _power_of_four(num_texts), -(-most_filled // FILLER_TOKENS))


def round_tokens(total_tokens: int) -> int:
    """The rows of the smallest bucket that holds this many tokens."""
    total_tokens = max(total_tokens, 1)
    step = _step(total_tokens)
    return -(-total_tokens // step) * step


def _step(total_tokens: int) -> int:
    """From one bucket to the next around this size."""
    if total_tokens <= _FEW_TOKENS:
        return _FEWEST_STEP if total_tokens <= _FEWEST_TOKENS else _FEW_STEP
    octave = _power_of_two(total_tokens) // 2  # octave < total_tokens <= 2 * octave
    return octave // (16 if octave >= _WIDE_TOKENS else 8)


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def _power_of_four(n: int) -> int:
    return 1 << 2 * ((max(n - 1, 0).bit_length() + 1) // 2)
