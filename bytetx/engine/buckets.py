"""Buckets: the few sizes that batches are padded to, so that one captured graph serves many."""

from dataclasses import dataclass

# Below this a step's time hardly depends on its rows (a GEMM tile has 64 or 128 of them), so that
# coarse buckets cost nothing; from _WIDE_TOKENS on time follows the rows, and buckets are finest.
_SMALL_TOKENS = 64
_SMALL_STEP = 32
_MIN_STEP = 16
_WIDE_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Bucket:
    """Sizes of a padded batch: rows of tokens, and places for sequences."""

    total_tokens: int
    batch_size: int


def bucket_of(total_tokens: int, batch_size: int, *, max_tokens: int) -> Bucket | None:
    """The smallest bucket that holds the batch; None where it exceeds the bucket of max_tokens.

    Rows are padded by at most 1/8 from 128 on and 1/16 from 2048 on. Places for sequences go in
    powers of two: an empty sequence costs 4 bytes and a row of the pooled output.
    """
    tokens = round_tokens(total_tokens)
    if tokens > round_tokens(max_tokens):
        return None
    return Bucket(tokens, _power_of_two(batch_size))


def round_tokens(total_tokens: int) -> int:
    """The rows of the smallest bucket that holds this many tokens."""
    if total_tokens <= _SMALL_TOKENS:
        return _round_up(max(total_tokens, 1), _SMALL_STEP)
    octave = _power_of_two(total_tokens) // 2  # octave < total_tokens <= 2 * octave
    parts = 16 if octave >= _WIDE_TOKENS else 8
    return _round_up(total_tokens, max(octave // parts, _MIN_STEP))


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def _round_up(n: int, step: int) -> int:
    return -(-n // step) * step
