"""Drafts from n-grams against a search of the whole text."""

from hypothesis import given
from hypothesis import strategies as st

from bytetx.generate.ngram_drafter import NgramDrafter, num_accepted

texts = st.lists(st.integers(0, 2), max_size=60)  # few tokens: most n-grams come again


def searched(text: list[int], most: int) -> list[int]:
    """The definition: the latest place that agrees with the end in the most tokens, 3 to 8.

    Of the eight latest places that agree in three.
    """
    count = len(text)
    places = [end for end in range(count - 1, 2, -1) if text[end - 3 : end] == text[-3:]][:8]
    if count < 3 or not places:
        return []
    lengths = [
        next(
            (n for n in range(min(8, end), 2, -1) if text[end - n : end] == text[count - n :]),
            3,
        )
        for end in places
    ]
    end = places[lengths.index(max(lengths))]
    followed = list(text)
    while len(followed) < count + most:
        followed.append(followed[end + len(followed) - count])
    return followed[count:]


def drafted(text: list[int], most: int) -> list[int]:
    drafter = NgramDrafter()
    drafter.count(most, 0)  # so that the draft is as long as it may be
    return drafter.draft(text, most)


@given(texts, st.integers(1, 4))
def test_a_draft_is_what_a_search_finds(text: list[int], most: int) -> None:
    assert drafted(text, most) == searched(text, most)


@given(texts, st.lists(st.integers(1, 9), max_size=20), st.integers(1, 4))
def test_a_growing_text_gives_the_same_drafts(text: list[int], steps: list[int], most: int) -> None:
    drafter, count = NgramDrafter(), 0
    drafter.count(most, 0)  # so that drafts are as long as they may be
    for step in steps:
        count = min(count + step, len(text))
        assert drafter.draft(text[:count], most) == searched(text[:count], most)


def test_text_that_repeats_itself_goes_on() -> None:
    assert drafted([9, 7, 7, 7, 7], 4) == [7, 7, 7, 7]
    assert drafted([1, 2, 1, 2, 1, 2, 1], 4) == [2, 1, 2, 1]
    assert NgramDrafter().draft([1, 2, 1, 2], 4) == []  # three tokens must come again
    assert NgramDrafter().draft([], 4) == []


def test_drafts_grow_with_what_was_right() -> None:
    drafter, text = NgramDrafter(), [1, 2, 3] * 20
    assert len(drafter.draft(text, 32)) == 2
    for num_right, length in ((2, 7), (7, 22), (22, 32), (1, 4), (3, 10)):
        drafter.count(num_right, len(text))
        assert len(drafter.draft(text, 32)) == length
    assert len(drafter.draft(text, 2)) == 2


def test_wrong_drafts_pause_longer_and_longer() -> None:
    """1, 2, 4, ... 64, 64 tokens, and 1 again after a token that was right."""
    drafter, text, pauses = NgramDrafter(), [1, 2, 3] * 5, []
    for num_right in (*[0] * 8, 1, 0):
        drafter.count(num_right, len(text))
        waited = 0
        while not drafter.draft(text, 4):
            text.append(text[-3])
            waited += 1
        pauses.append(waited)
    assert pauses == [1, 2, 4, 8, 16, 32, 64, 64, 0, 1]


def test_the_right_start_is_accepted() -> None:
    assert num_accepted([], [5]) == 0
    assert num_accepted([5, 6, 7], [5, 6, 7, 8]) == 3
    assert num_accepted([5, 6, 7], [5, 9, 7, 8]) == 1
    assert num_accepted([5, 6], [4, 6, 7]) == 0
