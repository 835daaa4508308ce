"""Which heads a checkpoint has, and heads that are damaged; their numbers are in test_families."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import load, one_thread, random_ids, save, tiny_model  # noqa: F401

from bytetx.checkpoint.files import read_json
from bytetx.errors import CheckpointError
from bytetx.nn import heads
from bytetx.packed import pack


def edit_tensors(folder: Path, remove: str = "", **changes: torch.Tensor) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors.pop(remove, None)
    save_file(tensors | changes, path)


def edit_config(folder: Path, **changes: object) -> None:
    config = read_json(folder / "config.json") | changes
    (folder / "config.json").write_text(json.dumps(config))


def test_a_head_without_its_bias_names_what_is_missing(tmp_path: Path) -> None:
    save(tiny_model("bert", "ForTokenClassification"), tmp_path)
    edit_tensors(tmp_path, remove="classifier.bias")
    loaded = load(tmp_path)
    with pytest.raises(CheckpointError, match="lacks 1 tensors: classifier.bias"):
        heads.load_token_classification(loaded.spec, loaded.loader)


def test_a_masked_lm_head_lists_all_that_is_missing(tmp_path: Path) -> None:
    save(tiny_model("distilbert", "ForMaskedLM"), tmp_path)
    edit_tensors(tmp_path, remove="vocab_projector.bias")
    edit_tensors(tmp_path, remove="vocab_transform.bias")
    edit_config(tmp_path, tie_word_embeddings=False)
    loaded = load(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        heads.load_masked_lm(loaded.spec, loaded.loader)
    for name in ("vocab_transform.bias", "vocab_projector.weight", "vocab_projector.bias"):
        assert name in str(caught.value)


def test_more_labels_than_the_classifier_has(tmp_path: Path) -> None:
    save(tiny_model("bert", "ForSequenceClassification"), tmp_path)
    edit_config(tmp_path, id2label={str(i): "x" for i in range(5)})
    loaded = load(tmp_path)
    message = r"'classifier.weight' has shape \(3, 48\), config.json implies \(5, 48\)"
    with pytest.raises(CheckpointError, match=message):
        heads.load_sequence_classification(loaded.spec, loaded.loader)


def test_labels_with_a_hole(tmp_path: Path) -> None:
    save(tiny_model("bert", "ForSequenceClassification"), tmp_path)
    edit_config(tmp_path, id2label={"0": "a", "1": "b", "3": "d"})
    loaded = load(tmp_path)
    assert loaded.rows(random_ids([3]))  # other tasks do not care
    with pytest.raises(CheckpointError, match=r"classes 0 to 2 without a hole, got \[0, 1, 3\]"):
        heads.load_sequence_classification(loaded.spec, loaded.loader)


def test_old_files_name_the_decoder_bias_alone(tmp_path: Path) -> None:
    save(tiny_model("bert", "ForMaskedLM"), tmp_path)
    wanted = load(tmp_path)
    head = heads.load_masked_lm(wanted.spec, wanted.loader)
    rows = wanted.rows(random_ids([6]))[0]
    tensors = load_file(tmp_path / "model.safetensors")
    bias = tensors["cls.predictions.bias"]
    edit_tensors(tmp_path, "cls.predictions.bias", **{"cls.predictions.decoder.bias": bias})
    again = load(tmp_path)
    assert torch.equal(
        heads.load_masked_lm(again.spec, again.loader).forward(rows), head.forward(rows)
    )


def test_first_tokens() -> None:
    batch = pack([[1, 2], [3], [4, 5, 6]])
    assert heads.first_tokens(torch.arange(12.0).view(6, 2), batch)[:, 0].tolist() == [
        0.0,
        4.0,
        6.0,
    ]
