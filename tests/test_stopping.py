"""Ends of answers: stop strings in any pieces, stop ids, limits; and text that never changes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from bytetx.engine.detokenizer import Detokenizer
from bytetx.engine.sequence import SequenceState
from bytetx.engine.stopping import (
    StopStrings,
    finish_reason,
    forbidden_tokens,
    stop_token_ids,
)
from bytetx.sampling import SamplingParams

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
        forbidden.append(forbidden_tokens(sequence))
        sequence.token_ids.append(token)
        reasons.append(finish_reason(sequence))
    assert reasons == [None, None, "stop", "stop", "length"]
    assert forbidden == [{0, 7}, {0, 7}, frozenset(), frozenset(), frozenset()]
    assert stop_token_ids(SamplingParams(ignore_eos=True), [0]) == frozenset()


def byte_level(chunks: list[bytes]) -> Tokenizer:
    """Tokens of any bytes, in the alphabet that byte-level BPE writes them in."""
    tokens = ["".join(_BYTE_LETTERS[byte] for byte in chunk) for chunk in chunks]
    tokenizer = Tokenizer(models.WordLevel({t: i for i, t in enumerate(tokens)}, unk_token="?"))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_fallback() -> Tokenizer:
    """One token a byte, and words with a space in front that the start of a text drops."""
    tokens = [f"<0x{byte:02X}>" for byte in range(256)] + ["\u2581hi", "\u2581you", "x", "</s>"]
    tokenizer = Tokenizer(models.WordLevel({t: i for i, t in enumerate(tokens)}, unk_token="x"))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def _byte_letters() -> list[str]:
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = {byte: chr(byte) for byte in plain}
    letters |= {byte: chr(256 + place) for place, byte in enumerate(others)}
    return [letters[byte] for byte in range(256)]


_BYTE_LETTERS = _byte_letters()


def check_stream(tokenizer: Tokenizer, ids: list[int]) -> None:
    """Every piece goes on from the last; together they are the text decoded at once."""
    expected = tokenizer.decode(ids)
    stream, shown = Detokenizer(tokenizer.decode), ""
    for token in ids:
        shown += stream.feed([token])
        assert expected.startswith(shown) and "\ufffd" not in shown
    assert shown + stream.flush() == expected


@given(st.text("aé你😀 ", max_size=20), st.lists(st.integers(0, 60), max_size=40))
def test_byte_level_text_streams_whole_characters(text: str, cuts: list[int]) -> None:
    data = text.encode()
    bounds = sorted({0, len(data), *(c for c in cuts if c < len(data))})
    chunks = [data[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]
    known = sorted(set(chunks))
    check_stream(byte_level(known), [known.index(chunk) for chunk in chunks])


@given(st.lists(st.sampled_from(["hi", "you", "x", "é", "你", "😀"]), max_size=12))
def test_byte_fallback_streams_whole_characters_and_spaces(words: list[str]) -> None:
    tokenizer, ids = byte_fallback(), []
    for word in words:
        known = tokenizer.token_to_id(f"\u2581{word}") or tokenizer.token_to_id(word)
        ids += [known] if known is not None else list(word.encode())
    check_stream(tokenizer, ids)


@pytest.mark.parametrize("head", [[], [256], [*"你".encode()]])
def test_bytes_that_are_no_text_do_not_stop_the_stream(head: list[int]) -> None:
    tokenizer = byte_fallback()
    stream, shown = Detokenizer(tokenizer.decode), ""
    for token in [*head, *[0xE4] * 20, 257, 256]:
        shown += stream.feed([token])
    shown += stream.flush()
    assert shown.endswith("\ufffd you hi") and shown.count("\ufffd") >= 20


def test_the_first_word_keeps_its_space_behind_a_prompt() -> None:
    tokenizer = byte_fallback()
    assert Detokenizer(tokenizer.decode, context=[256]).feed([257]) == " you"
    assert Detokenizer(tokenizer.decode).feed([257]) == "you"
