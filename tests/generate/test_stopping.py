"""Ends of answers: stop strings in any pieces, stop ids, limits."""

import pytest
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


@pytest.mark.feature("Generation", "stop strings")
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


Parts = list[tuple[str, bool]]  # text, and whether it is a special token's, which is hidden
parts = st.lists(st.tuples(st.text("ab<|>", min_size=1, max_size=3), st.booleans()), max_size=10)


def cut_hidden(given: Parts, stops: list[str]) -> tuple[str, str | None]:
    """The definition: character by character, in the whole text and in the shown one."""
    whole = [(character, is_hidden) for text, is_hidden in given for character in text]
    for end in range(1, len(whole) + 1):
        shown = [place for place in range(end) if not whole[place][1]]
        streams = [list(range(end))] if whole[end - 1][1] else [list(range(end)), shown]
        matches = [
            (len(stop), -places[-len(stop)], stop)
            for places in streams
            for stop in stops
            if "".join(whole[place][0] for place in places).endswith(stop)
        ]
        if matches:
            longest = max(length for length, _, _ in matches)
            kept = {
                ("".join(c for c, hidden in whole[:-start] if not hidden) if start else "", stop)
                for length, start, stop in matches
                if length == longest
            }
            return min(kept, key=lambda one: len(one[0]))
    return "".join(character for character, is_hidden in whole if not is_hidden), None


@given(parts, st.lists(st.text("ab<|>", min_size=1, max_size=5), min_size=1, max_size=3))
def test_stop_strings_see_hidden_text_and_the_shown_text_alone(
    given_parts: Parts, stops: list[str]
) -> None:
    expected, matched = cut_hidden(given_parts, stops)
    for keeps_stop in (False, True):
        stop_strings = StopStrings(stops, keeps_stop)
        shown = ""
        for text, is_hidden in given_parts:
            shown += stop_strings.feed(text, is_hidden=is_hidden)
            assert keeps_stop or expected.startswith(shown)
        shown += stop_strings.flush()
        wanted = expected + (matched or "") * keeps_stop
        assert (shown, stop_strings.matched) == (wanted, matched)


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
