"""BertJapanese with MeCab and PhoBERT: ids of transformers' own classes, and places in the text."""

import json
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from checkpoints import edit_json
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import one_thread, randomize  # noqa: F401  (autouse)

import bytetx
from bytetx.checkpoint.tokenizer import Tokenizer, load_tokenizer
from bytetx.errors import CheckpointError, TooLongError

pytest.importorskip("fugashi")
pytest.importorskip("unidic_lite")

JAPANESE = [
    "吾輩は猫である。名前はまだ無い。",
    "東京都に住んでいるＡＢＣ株式会社の ﾃｽﾄ と ｶﾞｷﾞｸﾞ!",
    "Hello World を 2回 言う [MASK] です",
    "",
    "   \t\n",
    "未知語𠮷野家 🍣 zzz",
    "[CLS]文頭[SEP]文末",
    "国際連合教育科学文化機関 " * 3,
]
VIETNAMESE = [
    "Tôi là sinh_viên trường đại_học Công_nghệ .",
    "Hà_Nội là thủ_đô của Việt_Nam",
    "",
    "  \n xin\nchào\n\n bạn ",
    "a b <mask> c</s> 日本 🍣 %% @@ x@@ y",
    "sinh_viênsinh_viên " * 6,
]


def save_japanese(folder: Path, *, parts: str = "wordpiece", **options: Any) -> Path:
    """A small BERT with a vocabulary of characters and words. options: of tokenizer_config.json."""
    folder.mkdir(parents=True)
    text = "".join(JAPANESE)
    words = ["吾輩", "猫", "東京", "都", "住ん", "株式", "会社", "連合", "教育", "である"]
    letters = sorted({char for char in text if not char.isspace()} - set("𠮷zW"))
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words, *letters]
    vocab += ["##" + letter for letter in letters] + ["hello", "test", "abc"]
    (folder / "vocab.txt").write_text("\n".join(dict.fromkeys(vocab)) + "\n", encoding="utf-8")
    given = {"tokenizer_class": "BertJapaneseTokenizer", "word_tokenizer_type": "mecab"}
    given |= {"subword_tokenizer_type": parts, "do_lower_case": False, **options}
    (folder / "tokenizer_config.json").write_text(json.dumps(given))
    config = transformers.BertConfig(
        vocab_size=len(dict.fromkeys(vocab)),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    _save(folder, transformers.BertForTokenClassification(config))
    return folder


def save_phobert(folder: Path) -> Path:
    """A small RoBERTa, and merges that make intermediate parts which the vocabulary lacks."""
    folder.mkdir(parents=True)
    words = [word for text in VIETNAMESE for word in text.split()]
    symbols = [[*word[:-1], word[-1] + "</w>"] for word in words]
    merges: list[tuple[str, str]] = []
    for _ in range(60):
        counts: dict[tuple[str, str], int] = {}
        for symbol in symbols:
            for pair in zip(symbol, symbol[1:], strict=False):
                counts[pair] = counts.get(pair, 0) + 1
        best = max(counts, key=counts.__getitem__)
        merges.append(best)
        for symbol in symbols:
            place = 0
            while place < len(symbol) - 1:
                if (symbol[place], symbol[place + 1]) == best:
                    symbol[place : place + 2] = ["".join(best)]
                place += 1
    lines = [f"{first} {second} {9}" for first, second in merges]
    (folder / "bpe.codes").write_text("\n".join(lines) + "\n", encoding="utf-8")
    found = [
        part.removesuffix("</w>") if part.endswith("</w>") else part + "@@"
        for symbol in symbols
        for part in symbol
    ]
    vocab = [token for token in dict.fromkeys(found) if len(token) % 5]
    lines = [f"{token} 7" for token in vocab]
    (folder / "vocab.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    config = transformers.RobertaConfig(
        vocab_size=len(vocab) + 5,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=34,
        type_vocab_size=1,
        pad_token_id=1,
        tokenizer_class="PhobertTokenizer",
    )
    _save(folder, transformers.RobertaForTokenClassification(config))
    return folder


def _save(folder: Path, model: Any) -> None:
    randomize(model)
    model.eval().save_pretrained(folder)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"parts": "character"},
    {"do_lower_case": True},
    {"mecab_kwargs": {"mecab_dic": "unidic_lite", "normalize_text": False}},
    {"do_subword_tokenize": False},
    {"do_lower_case": True, "parts": "character", "never_split": ["Hello"]},
]
CASES = [
    *((save_japanese, options, JAPANESE) for options in OPTIONS),
    (save_phobert, {}, VIETNAMESE),
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0].__name__} {case[1]}")
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, Any, list[str]]:
    save, options, texts = request.param
    folder = save(tmp_path_factory.mktemp("python") / "model", **options)
    ours = load_tokenizer(folder, max_positions=1 << 20)
    assert ours is not None
    return ours, transformers.AutoTokenizer.from_pretrained(folder), texts


@pytest.mark.feature("Checkpoints", "tokenizers of BertJapanese (MeCab) and PhoBERT")
def test_ids(pair: tuple[Tokenizer, Any, list[str]]) -> None:
    ours, theirs, texts = pair
    texts = texts + random_texts(texts)
    wanted = [theirs(text)["input_ids"] for text in texts]
    assert [one.ids for one in ours.encode(texts)] == wanted
    assert ours.encode_ids(texts).token_ids.tolist() == sum(wanted, [])
    both = list(zip(texts, texts[1:], strict=False))
    for one, given_pair in zip(ours.encode(both), both, strict=True):
        right = theirs(*given_pair)
        assert one.ids == right["input_ids"]
        if "token_type_ids" in right:
            assert one.type_ids == right["token_type_ids"]
    assert ours.encode_all_plain(texts) == [
        theirs(text, add_special_tokens=False)["input_ids"] for text in texts
    ]
    assert ours.mask_token_id == theirs.mask_token_id and ours.pad_token_id == theirs.pad_token_id
    limited = ours.limited(7)
    cut = theirs(texts, truncation=True, max_length=7)["input_ids"]
    assert [one.ids for one in limited.encode(texts)] == cut
    assert limited.encode_ids(texts).is_truncated.tolist() == [len(ids) > 7 for ids in wanted]


def random_texts(texts: list[str]) -> list[str]:
    generator = random.Random(0)
    letters = "".join(texts)
    return ["".join(generator.choices(letters, k=generator.randrange(60))) for _ in range(60)]


@settings(max_examples=150, deadline=None)
@given(text=st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=40))
def test_any_text(pair: tuple[Tokenizer, Any, list[str]], text: str) -> None:
    ours, theirs, _ = pair
    assert ours.encode([text])[0].ids == theirs(text)["input_ids"]


def test_tokens_and_their_places(pair: tuple[Tokenizer, Any, list[str]]) -> None:
    """The characters of a token are those of it, where the vocabulary has them."""
    ours, theirs, texts = pair
    for text in texts:
        encoding = ours.encode([text], with_offsets=True)[0]
        columns = (encoding.ids, encoding.offsets, encoding.special_tokens_mask)
        own = [row[:2] for row in zip(*columns, strict=True) if not row[2]]
        assert [place for _, place in own] == sorted(place for _, place in own)
        for token_id, (start, stop) in own:
            assert 0 <= start < stop <= len(text)
            token = theirs.convert_ids_to_tokens(token_id)
            if token not in theirs.all_special_tokens and text.isascii():
                assert token.strip("#@") in (text[start:stop], text[start:stop].lower())
        ids = theirs(text)["input_ids"]
        assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


def test_threads_give_the_same(pair: tuple[Tokenizer, Any, list[str]]) -> None:
    """MeCab's tagger is one for all of them."""
    ours, _, texts = pair
    texts = [*texts, *random_texts(texts)]
    wanted = [one.ids for one in ours.encode(texts)]
    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(lambda _: [one.ids for one in ours.encode(texts)], range(16)):
            assert found == wanted


def test_a_long_word_takes_no_square_of_its_time(tmp_path: Path) -> None:
    """PhoBERT's class needs minutes for it."""
    ours = load_tokenizer(save_phobert(tmp_path / "model"), max_positions=1 << 20)
    assert ours is not None
    assert len(ours.encode(["sinh_viên" * 20_000])[0]) > 1000


@pytest.mark.parametrize("save", [save_japanese, save_phobert])
def test_models(save: Any, tmp_path: Path) -> None:
    """Hidden states, tags and batch mates; what is too long is cut or refused."""
    folder, texts = save(tmp_path / "model"), (JAPANESE if save is save_japanese else VIETNAMESE)
    texts = [text for text in texts if text.strip()]
    model, tokenizer = bytetx.load(folder), transformers.AutoTokenizer.from_pretrained(folder)
    theirs = transformers.AutoModelForTokenClassification.from_pretrained(folder).eval()
    limit = model.spec.max_positions
    states = model.hidden_states(texts, truncate=True)
    for text, state in zip(texts, states, strict=True):
        ids = tokenizer(text, truncation=True, max_length=limit, return_tensors="pt")
        base = getattr(theirs, theirs.base_model_prefix)
        right = base(**ids).last_hidden_state.detach()
        torch.testing.assert_close(torch.from_numpy(state), right, atol=1e-4, rtol=0)
    alone = [model.hidden_states([text], truncate=True)[0] for text in texts]
    for one, state in zip(alone, states, strict=True):
        np.testing.assert_allclose(one, state, atol=1e-5)
    for text, tags in zip(texts, model.tag(texts, aggregation="none", truncate=True), strict=True):
        assert all(0 <= tag.start < tag.end <= len(text) for tag in tags)
    with pytest.raises(TooLongError):
        model.embed(["猫 sinh_viên " * 100])
    wrapped = bytetx.wrap(theirs)
    batch = tokenizer(texts, padding=True, truncation=True, max_length=limit, return_tensors="pt")
    with torch.no_grad():
        found = wrapped(**batch).logits
        right = bytetx.unwrap(wrapped)(**batch).logits
    kept = batch["attention_mask"].bool()
    torch.testing.assert_close(found[kept], right[kept], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"word_tokenizer_type": "sudachi"}, "'sudachi'.*bytetx runs mecab"),
        ({"word_tokenizer_type": "jumanpp"}, "'jumanpp'.*bytetx runs mecab"),
        ({"word_tokenizer_type": "basic"}, "'basic'.*bytetx runs mecab"),
        ({"subword_tokenizer_type": "sentencepiece"}, "'sentencepiece'.*wordpiece and character"),
        ({"mecab_kwargs": {"mecab_option": "-o /tmp/out"}}, "mecab_option"),
        ({"mecab_kwargs": {"mecab_dic": "/etc"}}, "mecab_dic must be one of"),
        ({"mecab_kwargs": 3}, "mecab_kwargs must be a table"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = save_japanese(tmp_path / "model")
    edit_json(folder / "tokenizer_config.json", **options)
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer(folder, max_positions=512)


def test_packages_that_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_japanese(tmp_path / "model")
    monkeypatch.setitem(sys.modules, "fugashi", None)
    with pytest.raises(CheckpointError, match=r"pip install 'bytetx\[japanese\]'"):
        load_tokenizer(folder, max_positions=512)


def test_tokenizer_json_beside_them_is_not_read(tmp_path: Path) -> None:
    """As in transformers: the class is Python code, whatever another tokenizer.json says."""
    folder = save_phobert(tmp_path / "model")
    plain = load_tokenizer(folder, max_positions=512)
    assert plain is not None
    other = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    other.save(str(folder / "tokenizer.json"))
    again = load_tokenizer(folder, max_positions=512)
    assert again is not None
    assert again.encode(VIETNAMESE)[0].ids == plain.encode(VIETNAMESE)[0].ids
