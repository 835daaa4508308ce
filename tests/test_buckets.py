"""Buckets of padded batches: large enough, not too large, and few."""

from hypothesis import given
from hypothesis import strategies as st

from bytetx.buckets import FILLER_TOKENS, Bucket, bucket_of, round_tokens

SIZES = st.integers(1, 1 << 20)


@given(SIZES, st.integers(1, 5000))
def test_a_bucket_holds_its_batch(total_tokens: int, num_texts: int) -> None:
    bucket = bucket_of(total_tokens, num_texts, max_tokens=total_tokens)
    assert bucket is not None
    assert num_texts <= bucket.num_texts < 4 * num_texts
    assert 0 <= bucket.total_tokens - total_tokens <= bucket.num_fillers * FILLER_TOKENS


@given(st.integers(1, 1 << 14))
def test_a_bucket_has_no_more_fillers_than_it_can_need(total_tokens: int) -> None:
    bucket = bucket_of(total_tokens, 1, max_tokens=total_tokens)
    below = total_tokens - 1
    while below > 0 and round_tokens(below) == bucket.total_tokens:
        below -= 1
    most_filled = bucket.total_tokens - below - 1 if below else bucket.total_tokens
    assert (bucket.num_fillers - 1) * FILLER_TOKENS < most_filled


@given(SIZES)
def test_padding_is_bounded(total_tokens: int) -> None:
    padding = round_tokens(total_tokens) - total_tokens
    if total_tokens <= 64:
        assert padding < 32
    elif total_tokens <= 256:
        assert padding < 64
    else:
        assert padding <= total_tokens // (16 if total_tokens > 2048 else 8)


@given(SIZES, SIZES)
def test_rounding_rises_and_is_its_own_bucket(one: int, other: int) -> None:
    low, high = sorted((one, other))
    assert round_tokens(low) <= round_tokens(high)
    assert round_tokens(round_tokens(low)) == round_tokens(low)


@given(SIZES, SIZES)
def test_only_what_exceeds_the_largest_bucket_has_none(total_tokens: int, max_tokens: int) -> None:
    bucket = bucket_of(total_tokens, 1, max_tokens=max_tokens)
    assert (bucket is None) == (total_tokens > round_tokens(max_tokens))


def test_buckets_are_few_and_of_round_sizes() -> None:
    sizes = sorted({round_tokens(n) for n in range(1, 16385)})
    assert sizes[:8] == [32, 64, 128, 192, 256, 288, 320, 352]
    assert len(sizes) < 90
    assert all(size % 16 == 0 for size in sizes)
    assert all(size % 128 == 0 for size in sizes if size > 1024)


def test_a_batch_without_tokens_has_a_bucket() -> None:
    assert bucket_of(0, 3, max_tokens=64) == Bucket(32, num_texts=4, num_fillers=1)
