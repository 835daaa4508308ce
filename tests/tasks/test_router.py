"""Checkpoints whose first module is a Router, dense and sparse, against sentence-transformers."""

import copy
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import ROUTER_PROMPTS as PROMPTS
from checkpoints import edit_json, save_asymmetric, save_checkpoint, texts
from sentence_transformers import SentenceTransformer, SparseEncoder
from sentence_transformers.base.modules import Router, Transformer
from sentence_transformers.sentence_transformer.modules import BoW, Pooling
from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding, SpladePooling
from tiny import one_thread, randomize  # noqa: F401  (a fixture)

import bytetx
from bytetx.errors import CheckpointError, InputError, OptionError
from bytetx.hf import FallbackWarning
from bytetx.tasks.vectors import SparseEmbeddings

INPUTS = ["a", "the the quick fox", *texts(12, max_words=5)]


def rows(embeddings: SparseEmbeddings) -> np.ndarray:
    return embeddings.to_scipy().toarray()


def save_static_queries(folder: Path, **options: object) -> Path:
    """Queries by weights of tokens, documents by SPLADE."""
    base = save_checkpoint(folder / "mlm", head="ForMaskedLM")
    encoder = Transformer(str(base), transformer_task="fill-mask")
    weight = torch.rand(len(encoder.tokenizer)) - 0.2
    weight[10:14] = 0
    static = SparseStaticEmbedding(encoder.tokenizer, weight=weight, frozen=True)
    router = Router.for_query_document([static], [encoder, SpladePooling("max")])
    model = SparseEncoder(modules=[router], device="cpu", **options)
    model.save_pretrained(str(folder / "model"))
    return folder / "model"


def test_static_queries_and_splade_documents(tmp_path: Path) -> None:
    folder = save_static_queries(tmp_path)
    stock, model = SparseEncoder(str(folder), device="cpu"), bytetx.load(folder)
    given = [*INPUTS, ""]
    queries = stock.encode_query(given).to_dense().numpy()
    np.testing.assert_allclose(rows(model.embed_sparse(given, task="query")), queries, atol=1e-6)
    few = stock.encode_query(given, max_active_dims=2).to_dense().numpy()
    found = model.embed_sparse(given, task="query", max_active_dims=2)
    np.testing.assert_allclose(rows(found), few, atol=1e-6)
    documents = stock.encode_document(INPUTS).to_dense().numpy()
    for task in ("document", None):
        found = model.embed_sparse(INPUTS, task=task)
        np.testing.assert_allclose(rows(found), documents, atol=1e-4)
    scores = model.similarity(
        model.embed_sparse(INPUTS, task="query"), model.embed_sparse(INPUTS, task="document")
    )
    wanted = stock.similarity(stock.encode_query(INPUTS), stock.encode_document(INPUTS))
    np.testing.assert_allclose(scores, wanted, atol=1e-3)
    with pytest.raises(InputError, match="name the task of another route"):
        model.hidden_states(INPUTS, task="query")
    assert model.hidden_states(INPUTS[:1], task="document")[0].ndim == 3
    with pytest.raises(InputError, match="use embed_sparse"):
        model.embed(INPUTS, task="query")
    with pytest.raises(InputError, match="use embed_sparse"):
        model.embed(INPUTS, task="document")


def test_a_stream_of_static_queries_and_their_prompt(tmp_path: Path) -> None:
    folder = save_static_queries(tmp_path, prompts=PROMPTS)
    stock, model = SparseEncoder(str(folder), device="cpu"), bytetx.load(folder)
    wanted = stock.encode_query(INPUTS).to_dense().numpy()
    found = list(model.embed_sparse(iter(INPUTS), task="query", stream=True))
    assert [sorted(v.indices.tolist()) for v in found] == [
        np.flatnonzero(row).tolist() for row in wanted
    ]


@pytest.mark.feature("Tasks", "routers of queries and documents")
@pytest.mark.parametrize("shared", [False, True])
def test_two_dense_encoders(shared: bool, tmp_path: Path) -> None:
    folder = save_asymmetric(tmp_path, shared=shared)
    stock, model = SentenceTransformer(str(folder), device="cpu"), bytetx.load(folder)
    queries, documents = stock.encode_query(INPUTS), stock.encode_document(INPUTS)
    assert np.abs(queries - documents).max() > 1e-2
    np.testing.assert_allclose(model.embed(INPUTS, task="query").vectors, queries, atol=1e-4)
    found = model.embed(INPUTS, task="document").vectors
    np.testing.assert_allclose(found, documents, atol=1e-4)
    np.testing.assert_allclose(model.embed(INPUTS).vectors, stock.encode(INPUTS), atol=1e-4)
    chunks = model.embed_chunks(INPUTS, task="query").vectors
    np.testing.assert_allclose(chunks, queries, atol=1e-4)
    transformers = {id(route.transformer) for route in model.checkpoint.routes.values()}
    assert len(transformers) == (1 if shared else 2)


def test_tasks_without_a_route(tmp_path: Path) -> None:
    folder = save_asymmetric(tmp_path, default_route=None, allow_empty_key=False)
    stock, model = SentenceTransformer(str(folder), device="cpu"), bytetx.load(folder)
    with pytest.raises(ValueError, match="Could not determine route"):
        stock.encode(INPUTS)
    for task in (None, "passage"):
        with pytest.raises(
            OptionError, match="'query', 'document' .this checkpoint's routes., got"
        ):
            model.embed(INPUTS, task=task)
    with pytest.raises(OptionError, match="one route of all texts of a call, got"):
        model.embed(INPUTS, task=["query"] * len(INPUTS))


def test_route_mappings(tmp_path: Path) -> None:
    modules = {
        name: [Transformer(str(save_checkpoint(tmp_path / name, name))), Pooling(48, "mean")]
        for name in ("bert", "mpnet")
    }
    mappings = {("search", "text"): "mpnet", ("index", None): "bert", (None, "image"): "bert"}
    router = Router(modules, default_route="bert", route_mappings=mappings)
    stock = SentenceTransformer(modules=[router], device="cpu")
    stock.save_pretrained(str(tmp_path / "model"))
    model = bytetx.load(tmp_path / "model")
    for task in ("search", "index", "bert", "mpnet", None):
        found = model.embed(INPUTS, task=task).vectors
        np.testing.assert_allclose(found, stock.encode(INPUTS, task=task), atol=1e-4)
    with pytest.raises(OptionError, match="'bert', 'mpnet', 'search', 'index'"):
        model.embed(INPUTS, task="query")


def test_modules_that_are_refused_are_named(tmp_path: Path) -> None:
    base = Transformer(str(save_checkpoint(tmp_path / "bert")))
    words = BoW(["fox", "dog"])
    router = Router.for_query_document([words], [base, Pooling(48)])
    SentenceTransformer(modules=[router], device="cpu").save_pretrained(str(tmp_path / "model"))
    with pytest.raises(CheckpointError, match=r"BoW' is not supported"):
        bytetx.load(tmp_path / "model")


DAMAGES = {
    "has no type": {"types": {}},
    "must have routes": {"structure": {}},
    "name no others": {"parameters": {"default_route": "image"}},
    "route_mappings has the key": {"parameters": {"route_mappings": {"query": "query"}}},
    "structure": {"structure": ["query"]},
}


@pytest.mark.parametrize("text", DAMAGES)
def test_damaged_routers(text: str, tmp_path: Path) -> None:
    folder = save_static_queries(tmp_path)
    path = next(folder.rglob("router_config.json"))
    edit_json(path, **DAMAGES[text])
    with pytest.raises(CheckpointError, match=text):
        bytetx.load(folder)
    path.unlink()
    with pytest.raises(CheckpointError, match="router_config.json is not in"):
        bytetx.load(folder)


def test_tp_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="Router does not run with tp"):
        bytetx.load(save_static_queries(tmp_path), tp=2, device="cpu")


def test_a_router_of_a_multi_vector_model_is_refused(tmp_path: Path) -> None:
    folder = save_asymmetric(tmp_path)
    edit_json(folder / "config_sentence_transformers.json", model_type="MultiVectorEncoder")
    with pytest.raises(CheckpointError, match=r"Router.* of a multi-vector model is not supported"):
        bytetx.load(folder)


def test_wrap_of_both_kinds(tmp_path: Path) -> None:
    sparse = SparseEncoder(str(save_static_queries(tmp_path / "sparse")), device="cpu")
    dense = SentenceTransformer(str(save_asymmetric(tmp_path / "dense")), device="cpu")
    for stock in (sparse, dense):
        wrapped = bytetx.wrap(copy.deepcopy(stock))
        for name in ("encode_query", "encode_document"):
            with warnings.catch_warnings():
                warnings.simplefilter("error", FallbackWarning)
                found = getattr(wrapped, name)(INPUTS, convert_to_tensor=True)
            wanted = getattr(stock, name)(INPUTS, convert_to_tensor=True)
            if stock is sparse:
                found, wanted = found.to_dense(), wanted.to_dense()
            np.testing.assert_allclose(found, wanted, atol=1e-4)
