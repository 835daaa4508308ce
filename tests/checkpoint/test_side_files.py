"""Damaged files beside the weights: each is named, and none is an internal error."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from checkpoints import HIDDEN_SIZE, edit_json, make_tokenizer, save_checkpoint, save_sentence_model
from fuzz_side_files import Target, fuzz, mutations, targets, try_one
from sentence_transformers.sentence_transformer.modules import Pooling
from tiny import one_thread  # noqa: F401  (autouse)
from tiny_decoders import tiny_decoder

import bytetx
from bytetx.checkpoint.side_files import read_bytes, read_json, unique_keys
from bytetx.errors import CheckpointError, InputError

# What raised AttributeError, TypeError, OverflowError, PanicException and others, and what is told.
TOKENIZER = [
    ({"model_max_length": "x"}, "model_max_length must be a number from 1, got 'x'"),
    ({"model_max_length": -1}, "model_max_length must be a number from 1, got -1"),
    ({"model_max_length": float("nan")}, "model_max_length must be a number from 1, got nan"),
    ({"model_max_length": float("inf")}, "model_max_length must be a number from 1, got inf"),
    ({"model_max_length": True}, "model_max_length must be a number from 1, got True"),
    ({"truncation_side": "middle"}, "truncation_side must be one of left, right, got 'middle'"),
    ({"truncation_side": 1}, "truncation_side must be one of left, right, got 1"),
    ({"model_input_names": 5}, "model_input_names must be a list, each entry text, got 5"),
    ({"model_input_names": [1]}, r"model_input_names must be a list, each entry text, got \[1\]"),
    ({"pad_token": 3}, 'pad_token must be text or {"content": text}, got 3'),
    ({"mask_token": {"content": 3}}, 'mask_token must be text or {"content": text}, got'),
    ({"unk_token": ["a"]}, r'unk_token must be text or {"content": text}, got \[\'a\'\]'),
    ({"cls_token": "\ud800"}, "cls_token must be text"),
    ({"tokenizer_class": 1}, "tokenizer_class must be text, got 1"),
    ({"clean_up_tokenization_spaces": "no"}, "must be true or false, got 'no'"),
]
CONFIG = [
    ({"sentence_transformers": 1}, "sentence_transformers must be a table, got 1"),
    ({"sentence_transformers": {"activation_fn": 1}}, "activation_fn must be text, got 1"),
    ({"sbert_ce_default_activation_function": 1}, "activation_function must be text, got 1"),
    ({"eos_token_id": "x"}, "eos_token_id must be a token id or a list of token ids, got 'x'"),
    ({"eos_token_id": 2**70}, "eos_token_id must be a token id or a list"),
    ({"eos_token_id": [-1, 1.5]}, "eos_token_id must be a token id or a list"),
    ({"architectures": "BertModel"}, "architectures must be a list, each entry text"),
    ({"auto_map": 7}, "auto_map must be a table or a list"),
    ({"quantization_config": "int8"}, "quantization_config must be a table, got 'int8'"),
]
SENTENCE = [
    ("sentence_bert_config.json", {"max_seq_length": "x"}, "max_seq_length must be an integer"),
    ("sentence_bert_config.json", {"max_seq_length": -1}, "must be an integer from 1, got -1"),
    ("sentence_bert_config.json", {"max_seq_length": float("nan")}, "an integer from 1, got nan"),
    ("sentence_bert_config.json", {"max_seq_length": 2**40}, "must be an integer from 1"),
    ("sentence_bert_config.json", {"do_lower_case": "yes"}, "must be true or false, got 'yes'"),
    ("1_Pooling/config.json", {"pooling_mode": 5}, "pooling_mode must be text or a list"),
    ("1_Pooling/config.json", {"include_prompt": "no"}, "include_prompt must be true or false"),
    ("config_sentence_transformers.json", {"prompts": []}, r"prompts must be a table.*got \[\]"),
    ("config_sentence_transformers.json", {"prompts": {"a": 1}}, "prompts must be a table"),
    ("config_sentence_transformers.json", {"default_prompt_name": [1]}, "must be text, got"),
]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def sentence(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_sentence_model(tmp_path_factory.mktemp("sentence"), [Pooling(HIDDEN_SIZE)])


def refused(folder: Path, name: str, changes: dict[str, object], message: str) -> None:
    """Changes a file for the time of one load, whose error says where it is and what is wrong."""
    path = folder / name
    raw = path.read_text()
    try:
        edit_json(path, **changes)
        with pytest.raises(CheckpointError, match=message) as caught:
            bytetx.load(folder)
        assert name.rpartition("/")[2] in str(caught.value)
    finally:
        path.write_text(raw)


@pytest.mark.parametrize(("changes", "message"), TOKENIZER)
def test_a_damaged_tokenizer_config(changes: dict, message: str, encoder: Path) -> None:
    refused(encoder, "tokenizer_config.json", changes, message)


@pytest.mark.parametrize(("changes", "message"), CONFIG)
def test_a_damaged_config(changes: dict, message: str, encoder: Path) -> None:
    refused(encoder, "config.json", changes, message)


@pytest.mark.parametrize(("name", "changes", "message"), SENTENCE)
def test_damaged_files_of_sentence_transformers(
    name: str, changes: dict, message: str, sentence: Path
) -> None:
    refused(sentence, name, changes, message)


def test_a_prompt_name_of_a_wrong_type(sentence: Path) -> None:
    model = bytetx.load(sentence)
    for name in ([1], {}, 1, "x"):
        with pytest.raises(InputError, match="prompt_name .* is not in this checkpoint"):
            model.embed(["a"], prompt_name=name)


def test_null_counts_as_absent(encoder: Path) -> None:
    path = encoder / "tokenizer_config.json"
    raw = path.read_text()
    keys = ("model_max_length", "truncation_side", "mask_token", "model_input_names")
    try:
        edit_json(path, **dict.fromkeys(keys))
        assert bytetx.load(encoder).max_tokens == 40
    finally:
        path.write_text(raw)


def test_a_key_with_two_values_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"a": 1, "b": {"c": [1], "c": [1]}, "a": 1}')
    assert read_json(path) == {"a": 1, "b": {"c": [1]}}
    path.write_text('{"a": 1, "b": {"c": [1], "c": [2]}}')
    with pytest.raises(CheckpointError, match="config.json .* the key 'c' has two values"):
        read_json(path)
    with pytest.raises(ValueError, match="'a' has two values"):
        unique_keys([("a", 1), ("a", None)])


@pytest.mark.parametrize("depth", [65, 900, 100_000])
def test_a_file_that_nests_too_deep(depth: int, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"a": ' + "[" * depth + "]" * depth + "}")
    with pytest.raises(CheckpointError, match="config.json cannot be read as JSON"):
        read_json(path)
    path.write_text('{"a": ' + "[" * 60 + "]" * 60 + "}")
    assert "a" in read_json(path)


def test_files_that_are_none_or_too_large(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "config.json")  # whose reader would wait for a writer
    with pytest.raises(CheckpointError, match="cannot be read: there is no such file"):
        read_json(tmp_path / "config.json")
    with (tmp_path / "large.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(CheckpointError, match="has more than 16 MiB"):
        read_json(tmp_path / "large.json")
    with pytest.raises(CheckpointError, match="has more than 0 MiB"):
        read_bytes(tmp_path / "large.json", max_bytes=9)


def test_special_tokens_and_limits_are_read_as_before(tmp_path: Path) -> None:
    tokenizer = make_tokenizer("wordpiece", max_tokens=11)
    tokenizer.save_pretrained(tmp_path)
    tiny = save_checkpoint(tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tiny / name).write_bytes((tmp_path / name).read_bytes())
    edit_json(tiny / "tokenizer_config.json", mask_token={"content": "[MASK]", "lstrip": True})
    model = bytetx.load(tiny)
    assert model.max_tokens == 11
    assert model.tokenizer.mask_token_id == tokenizer.mask_token_id


def test_a_checkpoint_of_ids_with_holes_in_its_labels(encoder: Path) -> None:
    path = encoder / "config.json"
    raw = path.read_text()
    try:
        edit_json(path, id2label={"0": "a", "7": "b"})
        model = bytetx.load(encoder)
        assert model.info()["labels"] == []  # no head of this model has labels
        assert np.isfinite(model.embed(["a"]).vectors).all()
    finally:
        path.write_text(raw)


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> list[Target]:
    return list(targets(tmp_path_factory.mktemp("fuzzed")))


@pytest.mark.parametrize(
    "number", [0, 1, 2, 3, 4], ids=["encoder", "causal", "decider", "judge", "static"]
)
def test_random_damage_of_every_file(number: int, fuzzed: list[Target]) -> None:
    """A short run of fuzz_side_files.py: some mutations of each file of the five checkpoints."""
    target = fuzzed[number]
    target.run(target.folder, "tokenizer_config.json")  # as it is, it runs
    assert len(target.files()) >= (2 if number == 4 else 7)
    count = 4 if number in (2, 3) else 20  # each starts the process of a template
    assert fuzz(target, count=count, seed=1) == []


def test_the_fuzzer_finds_what_is_wrong(fuzzed: list[Target]) -> None:
    target = fuzzed[0]
    path = target.folder / "config.json"

    def broken(folder: Path, name: str) -> None:
        json.loads((folder / "config.json").read_text())["hidden_size"]

    raw = path.read_bytes()
    damaged = next(mutations(raw, random.Random(0)))
    assert damaged != raw
    error = try_one(Target(target.folder, broken), path, b"{}")
    assert isinstance(error, KeyError) and path.read_bytes() == raw


def test_a_causal_model_with_one_eos_of_minus_one(tmp_path: Path) -> None:
    tiny_decoder("llama").save_pretrained(tmp_path)
    edit_json(tmp_path / "generation_config.json", eos_token_id=-1)
    answer = bytetx.load(tmp_path).generate([[5, 6]], bytetx.SamplingParams(max_tokens=3))[0]
    assert len(answer.token_ids) == 3


def test_a_token_id_of_billions(tmp_path: Path) -> None:
    """The table of all ids below it took tens of GiB."""
    tokenizer = make_tokenizer("bpe")
    tiny_decoder("llama", vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"]["an unheard word"] = 4_000_000_000
    path.write_text(json.dumps(content))
    model = bytetx.load(tmp_path)
    with pytest.raises(CheckpointError, match="numbers a token 4000000000; ids are below"):
        model.generate(["the"], bytetx.SamplingParams(max_tokens=2))


@pytest.mark.parametrize("size", [2**31 - 1, 2**31, 2**63, 2**70])
@pytest.mark.parametrize("key", ["head_dim", "num_attention_heads", "intermediate_size"])
def test_a_size_beyond_all_models(key: str, size: int, tmp_path: Path) -> None:
    """A head of 2**63 features overflowed the size of the rotary tables."""
    tiny_decoder("llama").save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", **{key: size})
    with pytest.raises(CheckpointError):
        bytetx.load(tmp_path)
