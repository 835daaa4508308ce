"""The native WordPiece gives the ids of the library tokenizers, or leaves a text to it."""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from paths import TESTS
from tiny import one_thread  # noqa: F401  (autouse)
from tokenizers import models, normalizers, pre_tokenizers, processors

from bytetx.checkpoint import word_pieces
from bytetx.checkpoint.tokenizer import Tokenizer
from bytetx.checkpoint.word_pieces import WordPieces
from bytetx.ops import host


@pytest.fixture(autouse=True, scope="module")
def at_once() -> Iterator[None]:
    """The first texts are read natively as well."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(word_pieces, "_LEAST_CHARACTERS", 0)
        yield


VOCABULARY = (TESTS / "vocabularies" / "wordpiece.txt").read_text().split("\n")[:-1]
SPECIAL = VOCABULARY[:5]


def bert(
    *, added: Sequence[str | tokenizers.AddedToken] = SPECIAL, frame: bool = True, **options: object
) -> tokenizers.Tokenizer:
    """BERT's tokenizer.  options: of its normalizer, and max_input_chars_per_word."""
    most = options.pop("max_input_chars_per_word", 12)
    ids = {token: place for place, token in enumerate(VOCABULARY)}
    model = models.WordPiece(ids, unk_token="[UNK]", max_input_chars_per_word=most)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.BertNormalizer(**options)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.add_special_tokens(list(added))
    if frame:
        backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return backend


def rows(backend: tokenizers.Tokenizer, texts: Sequence[str], max_tokens: int) -> list[list[int]]:
    """The library's ids, an empty list for the texts that the native core leaves to it."""
    found = WordPieces(backend).read(texts, max_tokens=max_tokens)
    assert found is not None
    ids = np.split(found.token_ids, np.cumsum(found.seqlens)[:-1])
    backend.no_truncation()
    num_tokens = [len(encoding) for encoding in backend.encode_batch_fast(texts)]
    backend.enable_truncation(max_tokens)
    for place, encoding in enumerate(backend.encode_batch_fast(texts)):
        if place in found.unread:
            assert not len(ids[place])
            continue
        assert ids[place].tolist() == encoding.ids
        assert found.is_truncated[place] == (num_tokens[place] > max_tokens)
    return [row.tolist() for row in ids]


BACKENDS = {
    "uncased": bert(),
    "cased": bert(lowercase=False),
    "accents": bert(strip_accents=False),
    "plain": bert(lowercase=False, handle_chinese_chars=False, clean_text=False),
    "short words": bert(max_input_chars_per_word=3),
    "no frame": bert(frame=False),
    "no added tokens": bert(added=[]),
}
_PIECES = st.sampled_from(
    [
        *"abzAZ09 中日가한éЖאا本語",
        *" \t\n\r\x00\x07\u00a0\u200b\u200d\ufeff\u3000\u2581\ufffd\u00ad",
        *["\u0301", "\u0345", "\u1100", "\u11a8", "\u0600", "\u0d4e", "\ufb01", "\ufdfa", "Σ", "İ"],
        *[
            "🙂",
            "👩‍👩‍👧",
            "🇩🇪",
            "it's",
            "...",
            "!?",
            "##a",
            "  ",
            "the token",
            "3rd",
            "\u0915\u094d\u0937",
        ],
        *["[SEP]", "[MASK]", "[CLS] ", "[sep]", "[SEP", "[", "#", "\U0001d15e", "\u0378", "ǅ", "ß"],
    ]
)
_TEXTS = st.lists(_PIECES, max_size=40).map("".join) | st.text(max_size=40)


@pytest.mark.parametrize("name", BACKENDS)
@settings(max_examples=60, deadline=None)
@given(texts=st.lists(_TEXTS, min_size=1, max_size=4), max_tokens=st.integers(3, 40))
@example(texts=[""], max_tokens=3)
@example(texts=["the" * 40, "the token " * 40, "\x00\x07", "\u0301"], max_tokens=9)
def test_ids_are_the_librarys(name: str, texts: list[str], max_tokens: int) -> None:
    rows(BACKENDS[name], texts, max_tokens)


@pytest.mark.parametrize("name", BACKENDS)
def test_each_character_is_read_as_the_library_reads_it(name: str) -> None:
    """In words, so that what is dropped, split and kept shows; a block of code points a text."""
    points = [point for point in range(0x3100) if not 0xD800 <= point < 0xE000]
    points += range(0x1F5F0, 0x1F650)
    read = rows(BACKENDS[name], [f"the{chr(point)}token" for point in points], 20)
    # ASCII and what most texts have beside it is never left to the library.
    assert all(read[:0x180])


def test_plain_texts_are_not_left_to_the_library() -> None:
    texts = ["", "The token!", "naïve — “token”", "日本 token", "a\tb\r\n", "x" * 1000]
    found = WordPieces(bert()).read(texts, max_tokens=64)
    assert found is not None and not found.unread and not found.is_truncated.any()


def test_the_native_reader_is_made_once_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word_pieces, "_LEAST_CHARACTERS", 30)
    reader, texts = WordPieces(bert()), ["the token"]
    read = [reader.read(texts, max_tokens=9) for _ in range(5)]
    assert [found is None for found in read] == [True, True, True, False, False]


def test_an_added_token_in_a_text_leaves_it_to_the_library() -> None:
    texts = ["the [MASK] token", "the [mask] token", "[MASK", "a[SEP]"]
    found = WordPieces(bert()).read(texts, max_tokens=64)
    assert found is not None and found.unread == [0, 3]


def test_a_tokenizer_puts_both_together_in_order() -> None:
    tokenizer = Tokenizer(bert(), max_tokens=8, config={})
    texts = ["[MASK]", "the token", "", "the [MASK] " * 9, "a token " * 9, "[SEP]", "[CLS]"]
    encodings = tokenizer.backend.encode_batch(texts)
    tokens = tokenizer.encode_ids(texts)
    assert tokens.token_ids.tolist() == [i for encoding in encodings for i in encoding.ids]
    assert tokens.seqlens.tolist() == list(map(len, encodings))
    assert tokens.is_truncated.tolist() == [bool(each.overflowing) for each in encodings]
    assert not len(tokenizer.encode_ids([]).seqlens)
    for limit in (5, 3, 2):  # with 2 there is no room beside the frame
        short = tokenizer.limited(limit)
        cut = short.backend.encode_batch(texts)
        assert short.encode_ids(texts).token_ids.tolist() == [i for e in cut for i in e.ids]
    whole = tokenizer.untruncated()
    assert whole.encode_ids(texts).token_ids.tolist() == [
        i for encoding in whole.backend.encode_batch(texts) for i in encoding.ids
    ]


def test_no_more_of_a_text_is_read_than_its_first_tokens() -> None:
    """Text that follows them would leave the text to the library, were it read."""
    found = WordPieces(bert()).read(["the token " * 100_000 + "[MASK]"], max_tokens=10)
    assert found is not None and not found.unread
    assert found.seqlens.tolist() == [10] and found.is_truncated.tolist() == [True]


def test_a_word_of_a_million_characters_is_unknown() -> None:
    assert rows(bert(), ["a" * 1_000_000, "é" * 1_000_000], 10) == [[2, 1, 3]] * 2


def test_threads_read_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"the {'token ' * (i % 9)} {chr(0x100 + i)}!" for i in range(500)]
    alone = rows(bert(), texts, 16)
    monkeypatch.setattr(word_pieces, "_CHARACTERS_PER_THREAD", 1)
    monkeypatch.setattr(word_pieces, "_num_cores", lambda: 4)
    assert rows(bert(), texts, 16) == alone


def test_only_so_many_characters_are_learnt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word_pieces, "_MAX_CHARACTERS", 2)
    found = WordPieces(bert()).read(["é", "ä the", "ö", "a", "ü"], max_tokens=9)
    assert found is not None and len(found.unread) == 2 and 3 not in found.unread


def _other(kind: str) -> tokenizers.Tokenizer:
    backend = bert()
    if kind == "words":
        backend.pre_tokenizer = pre_tokenizers.Whitespace()
    elif kind == "normalizer":
        backend.normalizer = normalizers.NFKC()
    elif kind == "added":
        backend = bert(added=[*SPECIAL, tokenizers.AddedToken("token", normalized=True)])
    elif kind == "side":
        backend.enable_truncation(9, direction="left")
    elif kind == "unknown":
        backend.model = models.WordPiece({"the": 0, "[UNK]": 1}, unk_token="[OTHER]")
        backend.add_special_tokens(["[OTHER]"])
    elif kind == "large":
        ids = {"the": 0, "[UNK]": (1 << 31)}
        backend.model = models.WordPiece(ids, unk_token="[UNK]")
    elif kind == "model":
        backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
        backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return backend


@pytest.mark.parametrize(
    "kind", ["words", "normalizer", "added", "side", "unknown", "large", "model"]
)
def test_other_tokenizers_are_left_to_the_library(kind: str) -> None:
    assert WordPieces(_other(kind)).read(["the token"], max_tokens=9) is None


def test_without_the_native_core_ids_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["the token", "日本", ""]
    ids = Tokenizer(bert(), max_tokens=9, config={}).encode_ids(texts).token_ids
    monkeypatch.setattr(host, "word_piece", lambda: None)
    tokenizer = Tokenizer(bert(), max_tokens=9, config={})
    assert WordPieces(tokenizer.backend).read(texts, max_tokens=9) is None
    assert tokenizer.encode_ids(texts).token_ids.tolist() == ids.tolist()


def test_what_is_no_string_is_refused() -> None:
    with pytest.raises(TypeError, match="texts must be str, got <class 'list'>"):
        WordPieces(bert()).read(["a", ["b"]], max_tokens=9)  # type: ignore[list-item]
