"""Ends of answers: stop strings in any pieces, stop ids, limits."""

from hypothesis import given
from hypothesis import strategies as st

from bytetx.generate.scheduler import SequenceState
from bytetx.generate.stopping import (
    StopStrings,
    finish_reason,
    forbidden_tokens,
    stop_token_ids,
)
from bytetx.sampling_params import SamplingParams

letters = st.text("abc", max_size=30)
stop_lists = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3)


def cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The definition: characters one by one, until one completes a stop string."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            longest = max(matches, key=len)
            return text[: end - len(longest)], longest
    return text, None


def pieces(text: str, cuts: list[int]) -> list[str]:
    bounds = [0, *sorted(min(c, len(text)) for c in cuts), len(text)]
    return [text[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]


@given(letters, stop_lists, st.lists(st.integers(0, 30)))
def test_stop_strings_cut_at_the_same_place_in_any_pieces(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    expected, matched = cut(text, stops)
    stop_strings = StopStrings(stops)
    shown = ""
    for piece in pieces(text, cuts):
        shown += stop_strings.feed(piece)
        assert expected.startswith(shown)
        if stop_strings.matched:
            break
    assert (shown + stop_strings.flush(), stop_strings.matched) == (expected, matched)


def test_stop_strings_that_begin_before_min_tokens_count_where_they_end() -> None:
    """As in vLLM: what is complete in early text is passed over, the rest of it is not."""
    stop_strings = StopStrings(["abc", "b", "xy"])
    assert [stop_strings.feed(piece, is_early=True) for piece in ("xyb", "a", "b")] == [
        "xyb",
        "",
        "",
    ]
    assert stop_strings.feed("d") == "abd" and stop_strings.matched is None
    stop_strings = StopStrings(["abc", "b", "xy"])
    assert stop_strings.feed("zab", is_early=True) == "z"
    assert stop_strings.feed("cb") == "" and stop_strings.matched == "abc"
    stop_strings = StopStrings(["aa"])
    assert stop_strings.feed("aa", is_early=True) == "a"
    assert stop_strings.feed("a") == "" and stop_strings.matched == "aa"


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    stop_strings = StopStrings(["###", "<end>"])
    assert [stop_strings.feed(piece) for piece in ("a#", "#b<", "en", "x")] == [
        "a",
        "##b",
        "",
        "<enx",
    ]


def test_finish_reasons() -> None:
    params = SamplingParams(stop_token_ids=[7], min_tokens=2)
    sequence = SequenceState([5], 4, params=params, stop_token_ids=stop_token_ids(params, [0]))
    reasons, forbidden = [], []
    for token in (7, 7, 7, 0, 3):
        forbidden.append(forbidden_tokens(sequence, sequence.num_output_tokens))
        sequence.token_ids.append(token)
        reasons.append(finish_reason(sequence))
    assert reasons == [None, None, "stop", "stop", "length"]
    assert forbidden == [{0, 7}, {0, 7}, frozenset(), frozenset(), frozenset()]
    assert stop_token_ids(SamplingParams(ignore_eos=True), [0]) == frozenset()


def test_min_tokens_forbids_end_of_text_tokens_that_ignore_eos_ignores() -> None:
    params = SamplingParams(stop_token_ids=[7], min_tokens=2, ignore_eos=True)
    ends = {"stop_token_ids": stop_token_ids(params, [0]), "eos_token_ids": frozenset([0])}
    sequence = SequenceState([5], 4, params=params, **ends)
    assert sequence.stop_token_ids == {7}
    assert [forbidden_tokens(sequence, place) for place in (0, 1, 2)] == [{0, 7}, {0, 7}, set()]
