"""HierarchicalTokenPooling of multi-vector checkpoints, against MultiVectorEncoder."""

import copy
import json
import string
import warnings
from pathlib import Path

import numpy as np
import pytest
from checkpoints import SENTENCES, edit_json, save_checkpoint, texts
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.multi_vector_encoder.modules import (
    HierarchicalTokenPooling,
    MultiVectorMask,
)
from sentence_transformers.util import quantize_embeddings
from tiny import one_thread, randomize  # noqa: F401  (a fixture)
from torch import nn

import bytetx
from bytetx.errors import CheckpointError, InputError
from bytetx.tasks import token_pooling
from bytetx.tasks.vectors import TokenEmbeddings

INPUTS = SENTENCES + texts(12, max_words=6)


def save_pooled(folder: Path, **options: object) -> Path:
    base = save_checkpoint(folder / "base")
    dense = Dense(48, 20, activation_function=nn.Identity(), module_input_name="token_embeddings")
    randomize(dense)
    modules = [
        Transformer(str(base)),
        dense,
        MultiVectorMask(skiplist_words=list(string.punctuation)),
        Normalize(module_input_name="token_embeddings"),
        HierarchicalTokenPooling(**options),
    ]
    model = MultiVectorEncoder(modules=modules, device="cpu")
    model.save_pretrained(str(folder / "model"))
    return folder / "model"


def assert_same(found: TokenEmbeddings, wanted: list[np.ndarray]) -> None:
    assert [len(matrix) for matrix in found] == [len(matrix) for matrix in wanted]
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


OPTIONS = [
    {"pool_factor": 2},
    {"pool_factor": 1.5, "num_protected_tokens": 0, "normalize_embeddings": False},
    {"pool_factor": 3, "num_protected_tokens": 4, "tasks": ["query", "document"]},
    {"pool_factor": 1},
    {"pool_factor": 4, "tasks": "query"},
]


@pytest.mark.feature("Tasks", "pooling of token vectors")
@pytest.mark.parametrize("options", OPTIONS)
def test_vectors_are_those_of_multi_vector_encoder(options: dict, tmp_path: Path) -> None:
    folder = save_pooled(tmp_path, **options)
    stock, model = MultiVectorEncoder(str(folder), device="cpu"), bytetx.load(folder)
    documents = stock.encode_document(INPUTS, convert_to_numpy=True)
    assert_same(model.embed_tokens(INPUTS, truncate=True), documents)
    queries = stock.encode_query(INPUTS, convert_to_numpy=True)
    assert_same(model.embed_tokens(INPUTS, task="query", truncate=True), queries)


def test_precision_is_that_of_the_pooled_vectors(tmp_path: Path) -> None:
    model = bytetx.load(save_pooled(tmp_path, pool_factor=2))
    floats = model.embed_tokens(INPUTS, truncate=True)
    bits = model.embed_tokens(INPUTS, truncate=True, precision="binary")
    np.testing.assert_array_equal(bits.vectors, quantize_embeddings(floats.vectors, "binary"))
    np.testing.assert_array_equal(bits.cu_seqlens, floats.cu_seqlens)


def test_a_config_of_before_the_option_to_normalise(tmp_path: Path) -> None:
    folder = save_pooled(tmp_path, pool_factor=2)
    config = next(folder.glob("*HierarchicalTokenPooling")) / "config.json"
    edit_json(config, normalize_embeddings=None, tasks=None, num_protected_tokens=None)
    pooling = bytetx.load(folder).checkpoint.sentence.multi_vector.token_pooling
    assert (pooling.normalizes, pooling.tasks, pooling.num_protected) == (False, ("document",), 1)
    edit_json(config, pool_factor=0.5)
    with pytest.raises(CheckpointError, match="pool_factor"):
        bytetx.load(folder)


def test_pooling_must_be_last_and_needs_scipy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_pooled(tmp_path, pool_factor=2)
    model = bytetx.load(folder)
    monkeypatch.setattr(token_pooling, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="pip install scipy"):
        model.embed_tokens(INPUTS)
    model.embed_tokens(INPUTS, task="query", truncate=True)
    modules = json.loads((folder / "modules.json").read_text())
    modules[-2:] = reversed(modules[-2:])
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(CheckpointError, match="must be the last module, got Normalize after it"):
        bytetx.load(folder)


def test_wrap_keeps_working(tmp_path: Path) -> None:
    stock = MultiVectorEncoder(str(save_pooled(tmp_path, pool_factor=2)), device="cpu")
    wrapped = bytetx.wrap(copy.deepcopy(stock))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, wanted = (m.encode_document(INPUTS, convert_to_numpy=True) for m in (wrapped, stock))
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
