"""Long texts are tokenised only as far as their first tokens need, and with the same ids."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import tokenizers
from checkpoints import SENTENCES, make_tokenizer
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny import one_thread  # noqa: F401  (autouse)
from tokenizers import Regex, models, normalizers, pre_tokenizers, trainers

from bytetx.checkpoint.text_prefix import encode_alike, find_boundary
from bytetx.checkpoint.tokenizer import Tokenizer, load_tokenizer

MAX_TOKENS = 12
KINDS = ["wordpiece", "bpe", "unigram"]


def _load(kind: str, folder: Path) -> Tokenizer:
    make_tokenizer(kind, max_tokens=MAX_TOKENS).save_pretrained(folder)
    tokenizer = load_tokenizer(folder, max_positions=MAX_TOKENS)
    assert tokenizer is not None
    return tokenizer


def _unigram_like_xlm_r() -> tokenizers.Tokenizer:
    """XLM-R's normalizer and words, as transformers converts them."""
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.normalizer = normalizers.Sequence(
        [
            normalizers.Nmt(),
            normalizers.NFKC(),
            normalizers.Strip(left=False, right=True),
            normalizers.Replace(Regex(" {2,}"), "\u2581"),
        ]
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=150, special_tokens=["<s>", "</s>", "<unk>", "<mask>"], unk_token="<unk>"
    )
    backend.train_from_iterator(SENTENCES[:5] * 3, trainer)
    mask = tokenizers.AddedToken("<mask>", lstrip=True, special=True)
    backend.add_special_tokens([mask])
    return backend


def _qwen2(*, digits: str = r"\p{N}") -> tokenizers.Tokenizer:
    """Qwen2's parts: NFC, its own pattern, bytes.  digits: in it, where Llama 3 differs."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        f"{digits}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator(SENTENCES[:5] * 3, trainer)
    return backend


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    found = {kind: _load(kind, tmp_path_factory.mktemp(kind)) for kind in KINDS}
    others = {
        "xlm-r": _unigram_like_xlm_r(),
        "qwen2": _qwen2(),
        "llama3": _qwen2(digits=r"\p{N}{1,3}"),
    }
    for name, backend in others.items():
        found[name] = Tokenizer(backend, max_tokens=MAX_TOKENS, config={})
    return found


def _assert_same(tokenizer: Tokenizer, text: str) -> None:
    """Ids, words and character offsets equal those of the whole text."""
    whole = tokenizer.encode([text], with_offsets=True)[0]
    cut = tokenizer.encode_beginnings([text], with_offsets=True)[0]
    assert cut.ids == whole.ids
    assert cut.offsets == whole.offsets
    assert cut.word_ids == whole.word_ids
    assert cut.special_tokens_mask == whole.special_tokens_mask
    assert bool(cut.overflowing) == bool(whole.overflowing)
    assert tokenizer.encode_ids([text]).token_ids.tolist() == whole.ids


# Pieces with whatever may join, split, vanish or be matched across a cut.
_PIECES = st.sampled_from(
    [
        *"abzAZ09 中日가한éЖאا",
        *" \t\n\r\x00\x07\u00a0\u200b\u200d\ufeff\u3000\u2581",
        *["\u0301", "\u0345", "\u1100", "\u11a8", "\u0600", "\u0d4e", "\ufb01", "\ufdfa", "Σ", "İ"],
        *["🙂", "👩‍👩‍👧", "🇩🇪", "it's", "'ll", "...", "!?", "##a", "  ", " a b ", "New York"],
        *["[SEP]", "[MASK]", "[CLS] ", "<s>", "</s>", " <mask> ", "<unk>", "[SEP", "mask>"],
    ]
)
_TEXTS = st.builds(
    lambda head, repeated, times, tail: head + repeated * times + tail,
    st.lists(_PIECES, max_size=30).map("".join),
    st.lists(_PIECES, min_size=1, max_size=12).map("".join),
    st.integers(1, 900),
    st.lists(_PIECES, max_size=30).map("".join),
)


@pytest.mark.parametrize("name", [*KINDS, "xlm-r", "qwen2", "llama3"])
@settings(max_examples=120, deadline=None)
@given(text=_TEXTS)
@example(text="a" * 20_000)
@example(text="word " * 4_000)
@example(text=" " * 20_000 + "end of it")
@example(text="é a\u0301 " * 4_000)
@example(text="中文" * 8_000)
@example(text="\x00\u200b" * 8_000 + "a b")
@example(text="a b [SEP] <mask> " * 2_000)
@example(text="🙂" * 20_000)
@example(text="abc" + " " * 30_000)
def test_any_text_has_the_ids_of_the_whole(
    name: str, text: str, loaded: dict[str, Tokenizer]
) -> None:
    _assert_same(loaded[name], text)


@pytest.mark.parametrize("name", [*KINDS, "xlm-r", "qwen2", "llama3"])
def test_every_boundary_is_one(name: str, loaded: dict[str, Tokenizer]) -> None:
    tokenizer = loaded[name]
    boundary = find_boundary(tokenizer.backend)
    assert boundary is not None
    whole = tokenizer.untruncated()
    text = "中 日x a\u0301b é ñ Ünï [MASK] don't 12 34. x <mask> y 中文日 z  w 한글 가 א ا Ж" * 2
    ids = whole.backend.encode(text, add_special_tokens=False).ids
    places = [found.start() for found in boundary.finditer(text)]
    assert len(places) > 10
    for place in places:
        begin = whole.backend.encode(text[:place], add_special_tokens=False).ids
        assert ids[: len(begin)] == begin


def _seen(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Characters of every text that is tokenised from now on."""
    seen: list[int] = []
    encode = tokenizer.encode

    def watched(texts: list[str], *, with_offsets: bool = False) -> list[tokenizers.Encoding]:
        seen.extend(map(len, texts))
        return encode(texts, with_offsets=with_offsets)

    monkeypatch.setattr(tokenizer, "encode", watched)
    return seen


@pytest.mark.parametrize("name", [*KINDS, "xlm-r", "qwen2", "llama3"])
def test_a_long_text_is_not_tokenised_whole(
    name: str, loaded: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = loaded[name]
    seen = _seen(tokenizer, monkeypatch)
    texts = ["the quick brown fox " * 50_000, "short"]
    tokens = tokenizer.tokens(tokenizer.encode_beginnings(texts))
    assert tokens.is_truncated.tolist() == [True, False]
    assert len(seen) == 2 and max(seen) <= 2048


def test_a_beginning_without_enough_tokens_grows(
    loaded: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = loaded["wordpiece"]
    text = "a b" + " " * 10_000 + "the quick brown fox " * 50_000
    expected = tokenizer.encode([text])[0].ids
    seen = _seen(tokenizer, monkeypatch)
    assert tokenizer.encode_beginnings([text])[0].ids == expected
    assert max(seen) < len(text) / 4


def _left(tokenizer: tokenizers.Tokenizer) -> None:
    tokenizer.enable_truncation(MAX_TOKENS, direction="left")


def _phrase(tokenizer: tokenizers.Tokenizer) -> None:
    tokenizer.add_tokens(["quick brown"])


def _no_words(tokenizer: tokenizers.Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=False)


def _other_split(tokenizer: tokenizers.Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\w+ \w+"), "isolated")


def _joins_words(tokenizer: tokenizers.Tokenizer) -> None:
    tokenizer.normalizer = normalizers.Replace(Regex("k b"), "kb")


@pytest.mark.parametrize("change", [_left, _phrase, _no_words, _other_split, _joins_words])
def test_what_could_cross_a_boundary_is_tokenised_whole(
    change: Callable[[tokenizers.Tokenizer], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = _load("wordpiece", tmp_path)
    change(tokenizer.backend)
    text = "the quick brown fox " * 1_000
    _assert_same(tokenizer, text)
    seen = _seen(tokenizer, monkeypatch)
    tokenizer.encode_ids([text])
    assert seen == [len(text)]


def _plain(tokenizer: Tokenizer) -> Callable[[Sequence[str]], list[list[int]]]:
    return tokenizer.untruncated().encode_all_plain


@pytest.mark.parametrize("name", [*KINDS, "xlm-r", "qwen2", "llama3"])
@settings(max_examples=40, deadline=None)
@given(
    groups=st.lists(
        st.tuples(_TEXTS, st.lists(st.lists(_PIECES, max_size=12).map("".join), max_size=6)),
        max_size=4,
    )
)
@example(groups=[("the quick brown fox " * 40, ["", "e", " e", "\u0301", "fox"])])
@example(groups=[("New York " * 40, ["a", "a", "a"]), ("", ["", ""]), ("a b " * 99, ["c"] * 3)])
def test_texts_that_begin_alike_have_the_ids_of_each_alone(
    name: str, groups: list[tuple[str, list[str]]], loaded: dict[str, Tokenizer]
) -> None:
    encode = _plain(loaded[name])
    texts = [common[:3_000] + own for common, owns in groups for own in owns]
    boundary = find_boundary(loaded[name].backend)
    assert boundary is not None
    assert encode_alike(texts, encode, boundary) == encode(texts)


@pytest.mark.parametrize("name", ["wordpiece", "qwen2"])
def test_a_common_beginning_is_tokenised_once(name: str, loaded: dict[str, Tokenizer]) -> None:
    encode, seen = _plain(loaded[name]), list[int]()

    def watched(texts: Sequence[str]) -> list[list[int]]:
        seen.extend(map(len, texts))
        return encode(texts)

    common = "the quick brown fox " * 100
    texts = ["before", *(f"{common} jumps {i}" for i in range(20)), "behind"]
    assert encode_alike(texts, watched, find_boundary(loaded[name].backend)) == encode(texts)
    assert sum(seen) < 3 * len(common)


def test_a_tokenizer_that_changes_the_start_of_a_text_has_its_ids(tmp_path: Path) -> None:
    tokenizer = _load("unigram", tmp_path)
    tokenizer.backend.normalizer = normalizers.Strip()
    tokenizer.backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encode = _plain(tokenizer)
    texts = ["the quick brown fox " * 40 + f"jumps {i}" for i in range(9)]
    assert encode_alike(texts, encode, find_boundary(tokenizer.backend)) == encode(texts)
    assert encode_alike(texts, encode, None) == encode(texts)
