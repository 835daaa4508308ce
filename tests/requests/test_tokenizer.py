"""Tokenizer and InputReader against transformers' own tokenizers; bad input is named."""

import gc
import json
import shutil
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from checkpoints import (
    MAX_POSITIONS,
    SENTENCES,
    TOKENIZERS,
    edit_json,
    make_tokenizer,
    save_checkpoint,
    texts,
)
from hypothesis import given
from hypothesis import strategies as st
from tiny import one_thread  # noqa: F401  (autouse)

import bytetx
from bytetx.checkpoint.tokenizer import load_tokenizer
from bytetx.errors import CheckpointError, InputError, TooLongError

KINDS = ["wordpiece", "bpe", "unigram"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("max_tokens", [5, 11, 17])
def test_truncation_equals_transformers(
    kind: str, side: str, max_tokens: int, tmp_path: Path
) -> None:
    make_tokenizer(kind, max_tokens=max_tokens).save_pretrained(tmp_path)
    edit_json(tmp_path / "tokenizer_config.json", truncation_side=side)
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = load_tokenizer(tmp_path, max_positions=MAX_POSITIONS)
    singles = SENTENCES + texts(30, max_words=8)
    pairs = list(zip(singles, reversed(singles), strict=True))
    for items in (singles, pairs):
        expected = reference(items, truncation=True, return_token_type_ids=True)
        whole = reference(items)["input_ids"]
        for i, encoding in enumerate(ours.encode(items)):
            assert encoding.ids == expected["input_ids"][i]
            assert encoding.type_ids == expected["token_type_ids"][i]
            assert bool(encoding.overflowing) == (len(whole[i]) > max_tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_offsets_are_characters(kind: str, tmp_path: Path) -> None:
    make_tokenizer(kind).save_pretrained(tmp_path)
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = load_tokenizer(tmp_path, max_positions=200)
    for text, encoding in zip(SENTENCES, ours.encode(SENTENCES, with_offsets=True), strict=True):
        expected = reference(text, truncation=True, return_offsets_mapping=True)
        assert encoding.offsets == expected["offset_mapping"]


def test_saved_padding_and_truncation_are_ignored(tmp_path: Path) -> None:
    reference = make_tokenizer("wordpiece")
    reference.backend_tokenizer.enable_padding(length=30)
    reference.backend_tokenizer.enable_truncation(4)
    reference.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    ours = load_tokenizer(tmp_path, max_positions=20)
    lengths = [len(encoding.ids) for encoding in ours.encode(["a", "a dog " * 4])]
    assert lengths[0] == 3 and lengths[1] > 4


def test_the_smallest_limit_counts(tmp_path: Path) -> None:
    make_tokenizer("wordpiece", max_tokens=30).save_pretrained(tmp_path)
    limits = [(None, 512, 30), (None, 20, 20), (50, 512, 50), (10, 512, 10), (50, 40, 40)]
    for max_seq_length, max_positions, expected in limits:
        tokenizer = load_tokenizer(
            tmp_path, max_positions=max_positions, max_seq_length=max_seq_length
        )
        assert tokenizer.max_tokens == expected


def test_vocabulary_without_tokenizer_json_is_converted(tmp_path: Path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "dog", "##s"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    shutil.copy(save_checkpoint(tmp_path / "other") / "config.json", tmp_path)
    tokenizer = load_tokenizer(tmp_path, max_positions=20)
    assert tokenizer.encode(["The dogs"])[0].ids == [2, 5, 6, 7, 3]


def test_a_sentencepiece_model_alone_says_what_is_needed(tmp_path: Path) -> None:
    """Texts were refused as if the checkpoint had no tokenizer at all."""
    (tmp_path / "tokenizer.model").write_bytes(b"no model that any library reads")
    shutil.copy(save_checkpoint(tmp_path / "other") / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match="no tokenizer.json.*pip install sentencepiece"):
        load_tokenizer(tmp_path, max_positions=20)


def test_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(CheckpointError, match="tokenizer.json cannot be used as a tokenizer"):
        load_tokenizer(tmp_path, max_positions=20)


def test_a_post_processor_that_names_unknown_tokens(tmp_path: Path) -> None:
    """It made tokenizers panic at the first text, with an exception that is no Exception."""
    folder = save_checkpoint(tmp_path)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    del content["post_processor"]["special_tokens"]["[SEP]"]
    path.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="tokenizer.json cannot be used as a tokenizer"):
        bytetx.load(folder)


@pytest.mark.parametrize("prefix", ["x" * 9, "é" * 3])
def test_a_prefix_that_merges_lack_aborts_the_process(prefix: str, tmp_path: Path) -> None:
    make_tokenizer("bpe").save_pretrained(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["continuing_subword_prefix"] = prefix
    path.write_text(json.dumps(content, ensure_ascii=False))
    with pytest.raises(CheckpointError, match="lacks the continuing_subword_prefix"):
        load_tokenizer(tmp_path, max_positions=20)


def test_a_prefix_that_merges_have(tmp_path: Path) -> None:
    """The vocabulary of a BPE model whose continued pieces are marked."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(continuing_subword_prefix="##"))
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=60, continuing_subword_prefix="##")
    backend.train_from_iterator(["dogs", "dog", "foxes", "fox"] * 5, trainer)
    backend.save(str(tmp_path / "tokenizer.json"))
    ours = load_tokenizer(tmp_path, max_positions=20)
    assert ours.encode(["dogs"])[0].ids == backend.encode("dogs").ids


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> bytetx.Model:
    return bytetx.load(save_checkpoint(tmp_path_factory.mktemp("bert")))


BAD_INPUTS = [
    ("half a pair \ud83d", r"texts\[1\] holds half a surrogate pair at character 12"),
    (("good", "\udc00"), r"texts\[1\] holds half a surrogate pair at character 0"),
    (None, r"texts\[1\] is NoneType; give a str"),
    (7, r"texts\[1\] is int; give a str"),
    (np.array(7), r"texts\[1\] is ndarray; give a str"),
    (torch.tensor(7), r"texts\[1\] is Tensor; give a str"),
    (b"bytes", r"texts\[1\] is bytes; give a str"),
    (["a", "b", "c"], r"texts\[1\] is list; give a str"),
    ([1.5, 2.5], r"texts\[1\] is list; give a str"),
    ([[1, 2], [3, 4]], r"texts\[1\] is list; give a str"),
    ([[1, 2], [3]], r"texts\[1\] is list; give a str"),
    ([], r"texts\[1\] has no tokens"),
    ([2, -1], r"texts\[1\] holds token id -1; ids of this model lie between 0 and"),
    ([2, 10**6], r"texts\[1\] holds token id 1000000"),
    ([2, 2**40], r"texts\[1\] holds token id 1099511627776"),
    ([2, 2**70], r"texts\[1\] holds token id 1180591620717411303424"),
    (np.zeros(3), r"texts\[1\] is ndarray; give a str"),
    (np.full(MAX_POSITIONS + 1, 5), r"texts\[1\] has 41 token ids, the model takes at most 40"),
    ("dog " * 99, r"texts\[1\] has more than the 40 tokens this model takes; .* truncate=True"),
]


@pytest.mark.parametrize(("bad", "message"), BAD_INPUTS)
def test_bad_input_is_named_and_costs_no_other(
    bad: object, message: str, model: bytetx.Model
) -> None:
    with pytest.raises(InputError, match=message):
        model.embed(["good", bad, "fine"])
    result = model.embed(["good", bad, "fine"], on_error="return")
    assert list(result.errors) == [1] and result.stats.num_errors == 1
    assert np.isnan(result[1]).all()
    np.testing.assert_array_equal(result[[0, 2]], model.embed(["good", "fine"]))
    streamed = list(model.embed(["good", bad, "fine"], on_error="return", stream=True))
    assert isinstance(streamed[1], InputError)
    np.testing.assert_array_equal(streamed[2], result[2])


def test_too_long_is_its_own_error_and_truncation_is_counted(model: bytetx.Model) -> None:
    long_ids, long_text = np.full(MAX_POSITIONS + 9, 5), "dog " * 99
    for item in (long_ids, long_text):
        with pytest.raises(TooLongError):
            model.embed([item])
    result = model.hidden_states([long_ids, "a", long_text], truncate=True)
    assert [len(states[0]) for states in result] == [MAX_POSITIONS, 3, MAX_POSITIONS]
    assert result.stats.num_truncated == 2


def test_one_text_instead_of_a_list_is_named(model: bytetx.Model) -> None:
    with pytest.raises(InputError, match="texts must be an iterable of texts, got one (str|bytes)"):
        model.embed("hello")


def test_token_ids_of_every_integer_kind(model: bytetx.Model) -> None:
    ids = [2, 9, 17, 3]
    kinds = [
        ids,
        tuple(ids),
        np.array(ids),
        np.array(ids, np.uint8),
        torch.tensor(ids),
        range(2, 6),
    ]
    vectors = model.embed(kinds).vectors
    assert (vectors[:5] == vectors[0]).all()
    assert not (vectors[5] == vectors[0]).all()


def test_text_equals_its_token_ids(model: bytetx.Model) -> None:
    ids = [encoding.ids for encoding in model.tokenizer.encode(SENTENCES)]
    np.testing.assert_array_equal(model.embed(ids), model.embed(SENTENCES, truncate=True))


def test_empty_list_and_empty_text(model: bytetx.Model) -> None:
    assert model.embed([]).vectors.shape == (0, 48)
    assert model.embed(iter([])).vectors.shape == (0, 48)
    assert model.hidden_states([]) == []
    assert np.isfinite(model.embed([""]).vectors).all()


def test_text_without_a_tokenizer(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path)
    (folder / "tokenizer.json").unlink()
    model = bytetx.load(folder)
    assert model.embed([[2, 5, 3]]).shape == (1, 48)
    with pytest.raises(InputError, match="the checkpoint has no tokenizer; give token ids"):
        model.embed(["a"])


def test_tokenizer_larger_than_the_model(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, vocab_size=30)
    with pytest.raises(InputError, match=r"texts\[0\] holds token id .* between 0 and 29"):
        bytetx.load(folder).embed(["unbelievable!"])


def test_a_gap_in_the_tokenizers_ids(tmp_path: Path) -> None:
    """No more tokens than the model has, and one whose id is beyond its table."""
    folder = save_checkpoint(tmp_path)
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    word = next(word for word in vocabulary if word.isalpha() and len(word) > 2)
    vocabulary[word] = 512
    (folder / "tokenizer.json").write_text(json.dumps(content))
    result = bytetx.load(folder).embed([word, "a"], on_error="return")
    assert "holds token id 512" in str(result.errors[0]) and list(result.errors) == [0]


@given(st.text(max_size=40))
def test_any_text_embeds_or_is_named(model: bytetx.Model, text: str) -> None:
    result = model.embed([text, "a"], truncate=True, on_error="return")
    assert np.isfinite(result[1]).all()
    assert np.isfinite(result[0]).all() or 0 in result.errors


@pytest.mark.parametrize("family", TOKENIZERS)
def test_first_position_past_the_end_is_refused(family: str, tmp_path: Path) -> None:
    model = bytetx.load(save_checkpoint(tmp_path, family))
    assert model.embed([[5] * MAX_POSITIONS]).shape == (1, 48)
    with pytest.raises(TooLongError):
        model.embed([[5] * (MAX_POSITIONS + 1)])


def test_model_max_length_absurd_values_are_capped(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path)
    edit_json(folder / "tokenizer_config.json", model_max_length=int(1e30))
    assert bytetx.load(folder).max_tokens == MAX_POSITIONS


def test_tokenizers_of_many_strides_are_not_all_kept(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save_checkpoint(tmp_path), max_positions=MAX_POSITIONS)
    assert tokenizer is not None
    text = " ".join(SENTENCES)

    def chunks(stride: int) -> list[list[int]]:
        first = tokenizer.limited(60, stride=stride).encode([text])[0]
        return [first.ids, *(encoding.ids for encoding in first.overflowing)]

    strides = list(range(35))
    wanted = [chunks(stride) for stride in strides]
    assert len({str(ids) for ids in wanted}) == len(strides)
    made = [weakref.ref(tokenizer.limited(20, stride=stride % 17)) for stride in range(50)]
    gc.collect()
    assert len({id(each()) for each in made if each() is not None}) <= 4
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(chunks, strides * 2)) == wanted * 2
    assert tokenizer.untruncated() is tokenizer.untruncated()
    assert tokenizer.limited(9).untruncated() is tokenizer.untruncated()


def test_long_pairs_are_cut_to_the_tokens_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both long, one long, equal ones: a cut beginning changes neither ids nor offsets."""
    tokenizer = bytetx.load(save_checkpoint(tmp_path), device="cpu").tokenizer
    monkeypatch.setattr(tokenizer._prefixes, "most_characters", 300)
    monkeypatch.setattr(tokenizer._prefixes, "_num_characters", 150)
    rng = np.random.default_rng(0)
    words = ["fox ", "!", "the ", "quick", "brown\u4e2d", "a a ", "\u00e9\u0301", "  "]
    texts = ["".join(rng.choice(words, size)) for size in (0, 3, 40, 90, 90, 200, 200, 500)]
    for pair in [(one, other) for one in texts for other in texts]:
        (got,) = tokenizer.encode_beginnings([pair], with_offsets=True)
        (whole,) = tokenizer.encode([pair], with_offsets=True)
        assert (got.ids, got.offsets, got.type_ids) == (whole.ids, whole.offsets, whole.type_ids)
        assert bool(got.overflowing) == bool(whole.overflowing)


def test_pairs_of_two_long_texts_are_read_in_no_time_of_their_square(tmp_path: Path) -> None:
    """Each part of one text that is cut off would make an object with each part of the other."""
    tokenizer = bytetx.load(save_checkpoint(tmp_path), device="cpu").tokenizer
    (found,) = tokenizer.encode_beginnings([("!" * 100_000, "! " * 50_000)])
    assert len(found) == tokenizer.max_tokens and len(found.overflowing) < 100
