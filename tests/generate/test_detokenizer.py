"""Text of tokens as they come: whole characters, nothing taken back, all of it in the end."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

import bytetx.checkpoint.tokenizer
from bytetx.checkpoint.byte_level import token_bytes, token_pieces
from bytetx.generate.build import detokenizer_factory
from bytetx.generate.output_processor import ByteDetokenizer, Detokenizer, WindowDetokenizer


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


def check_stream(tokenizer: Tokenizer, ids: list[int], stream: Detokenizer) -> None:
    """Every piece goes on from the last; together they are the text decoded at once."""
    expected, shown = tokenizer.decode(ids), ""
    for token in ids:
        shown += stream.feed([token])
        assert expected.startswith(shown) and "\ufffd" not in shown
    assert shown + stream.flush() == expected


@pytest.mark.feature("Generation", "streamed text in whole characters")
@given(st.text("aé你😀 ", max_size=20), st.lists(st.integers(0, 60), max_size=40))
def test_byte_level_text_streams_whole_characters(text: str, cuts: list[int]) -> None:
    data = text.encode()
    bounds = sorted({0, len(data), *(c for c in cuts if c < len(data))})
    chunks = [data[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]
    known = sorted(set(chunks))
    tokenizer, ids = byte_level(known), [known.index(chunk) for chunk in chunks]
    check_stream(tokenizer, ids, WindowDetokenizer(tokenizer.decode))
    check_stream(tokenizer, ids, ByteDetokenizer(token_bytes(tokenizer)))


@given(st.lists(st.binary(min_size=1, max_size=3), min_size=1, max_size=12))
def test_bytes_that_are_no_text_become_what_the_tokenizer_makes_of_them(
    chunks: list[bytes],
) -> None:
    known = sorted(set(chunks))
    tokenizer, ids = byte_level(known), [known.index(chunk) for chunk in chunks]
    stream = ByteDetokenizer(token_bytes(tokenizer))
    shown = "".join(stream.feed([token]) for token in ids) + stream.flush()
    assert shown == tokenizer.decode(ids)


def test_added_tokens_are_text_and_special_ones_are_not() -> None:
    tokenizer = byte_level([b" a", b"b"])
    tokenizer.add_tokens(["new word", "\u0120"])
    tokenizer.add_special_tokens(["<|end|>"])
    ids = [0, 2, 3, 4, 1]
    stream = ByteDetokenizer(token_bytes(tokenizer))
    assert stream.feed(ids) == tokenizer.decode(ids) == " anew word b"
    assert token_bytes(byte_fallback()) is None


def test_a_character_goes_on_where_the_prompt_ends() -> None:
    tokenizer = byte_level([b"\xe4\xbd", b"\xa0"])
    assert ByteDetokenizer(token_bytes(tokenizer), context=[0]).feed([1]) == "\u4f60"


@given(st.lists(st.sampled_from(["hi", "you", "x", "é", "你", "😀"]), max_size=12))
def test_byte_fallback_streams_whole_characters_and_spaces(words: list[str]) -> None:
    tokenizer, ids = byte_fallback(), []
    for word in words:
        known = tokenizer.token_to_id(f"\u2581{word}") or tokenizer.token_to_id(word)
        ids += [known] if known is not None else list(word.encode())
    check_stream(tokenizer, ids, WindowDetokenizer(tokenizer.decode))
    check_stream(
        tokenizer, ids, WindowDetokenizer(tokenizer.decode, pieces=token_pieces(tokenizer))
    )


@given(st.lists(st.sampled_from([0x41, 0xC3, 0xA9, 256, 257, 258, 259, 260]), max_size=60))
def test_known_pieces_give_the_decoders_text(ids: list[int]) -> None:
    """Words, spaces, special tokens and bytes, of which some are no text."""
    tokenizer = byte_fallback()
    tokenizer.add_tokens(["\u2581"])
    tokenizer.add_special_tokens(["</s>"])
    plain, known = WindowDetokenizer(tokenizer.decode), token_pieces(tokenizer)
    joined = WindowDetokenizer(tokenizer.decode, pieces=known)
    for token in ids:
        assert joined.feed([token]) == plain.feed([token])
    assert joined.flush() == plain.flush()
    assert known[259] == "" and known[0xC3] is None and token_pieces(byte_level([b"a"])) is None


@pytest.mark.parametrize("head", [[], [256], [*"你".encode()]])
def test_bytes_that_are_no_text_do_not_stop_the_stream(head: list[int]) -> None:
    tokenizer = byte_fallback()
    stream, shown = WindowDetokenizer(tokenizer.decode), ""
    for token in [*head, *[0xE4] * 20, 257, 256]:
        shown += stream.feed([token])
    shown += stream.flush()
    assert shown.endswith("\ufffd you hi") and shown.count("\ufffd") >= 20


def test_the_first_word_keeps_its_space_behind_a_prompt() -> None:
    tokenizer = byte_fallback()
    assert WindowDetokenizer(tokenizer.decode, context=[256]).feed([257]) == " you"
    assert WindowDetokenizer(tokenizer.decode).feed([257]) == "you"


@pytest.mark.parametrize("tokenizer", [byte_fallback(), byte_level([b" a", b"b"])])
def test_an_engines_streams_take_ids_beyond_the_tokenizers(tokenizer: Tokenizer) -> None:
    own = bytetx.checkpoint.tokenizer.Tokenizer(tokenizer, max_tokens=300, config={})
    checkpoint = SimpleNamespace(tokenizer=own, spec=SimpleNamespace(vocab_size=300))
    last = tokenizer.get_vocab_size() - 1
    stream = detokenizer_factory(checkpoint)([last - 1])
    pieces = [stream.feed([token]) for token in (last, 299, last)]
    assert pieces[0] == pieces[2] and pieces[1] == ""
    assert "".join(pieces) + stream.flush() == tokenizer.decode([last, last])
