"""Checkpoints whose last module is a SparseAutoEncoder (CSR), against SparseEncoder."""

import copy
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import SENTENCES, edit_json, save_checkpoint, texts
from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules import Dense, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from sentence_transformers.sparse_encoder.modules import SparseAutoEncoder
from tiny import one_thread, randomize  # noqa: F401  (a fixture)

import bytetx
from bytetx.errors import CheckpointError, InputError
from bytetx.tasks.vectors import SparseEmbeddings

INPUTS = SENTENCES + texts(12, max_words=5)
HIDDEN = 80


def save_auto_encoder(folder: Path, *, dense: bool = False, **options: object) -> Path:
    base = save_checkpoint(folder / "base")
    modules: list[torch.nn.Module] = [Transformer(str(base)), Pooling(48, "mean")]
    if dense:
        modules.append(Dense(48, 24))
    modules.append(SparseAutoEncoder(24 if dense else 48, HIDDEN, **options))
    for module in modules[2:]:
        randomize(module)
    SparseEncoder(modules=modules, device="cpu").save_pretrained(str(folder / "model"))
    return folder / "model"


def rows(embeddings: SparseEmbeddings) -> np.ndarray:
    return embeddings.to_scipy().toarray()


@pytest.mark.feature("Tasks", "`embed_sparse`: sparse auto-encoders")
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("dense", [False, True])
def test_latents_are_those_of_sparse_encoder(dense: bool, normalize: bool, tmp_path: Path) -> None:
    folder = save_auto_encoder(tmp_path, dense=dense, k=7, normalize=normalize)
    stock, model = SparseEncoder(str(folder), device="cpu"), bytetx.load(folder)
    for most in (None, 3, 30):
        wanted = stock.encode(INPUTS, max_active_dims=most).to_dense().numpy()
        found = model.embed_sparse(INPUTS, max_active_dims=most)
        assert found.shape == (len(INPUTS), HIDDEN)
        np.testing.assert_allclose(rows(found), wanted, atol=1e-5)
        assert (found.values > 0).all()
        assert (np.diff(found[0].indices) > 0).all()
    assert model.similarity_function == stock.similarity_fn_name
    with pytest.raises(InputError, match=r"SparseAutoEncoder.*use embed_sparse"):
        model.embed(INPUTS)


def test_wrap_keeps_working(tmp_path: Path) -> None:
    stock = SparseEncoder(str(save_auto_encoder(tmp_path, k=7)), device="cpu")
    wrapped = bytetx.wrap(copy.deepcopy(stock))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, wanted = (model.encode(INPUTS).to_dense().numpy() for model in (wrapped, stock))
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_damaged_auto_encoders(tmp_path: Path) -> None:
    folder = save_auto_encoder(tmp_path, k=7)
    config = next(folder.glob("*SparseAutoEncoder")) / "config.json"
    edit_json(config, hidden_dim=81)
    with pytest.raises(CheckpointError, match=r"weight of shape \(81, 48\)"):
        bytetx.load(folder)
    edit_json(config, hidden_dim=HIDDEN, k="many")
    with pytest.raises(CheckpointError, match="k "):
        bytetx.load(folder)
