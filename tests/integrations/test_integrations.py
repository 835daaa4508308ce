"""Embedders of LangChain, LlamaIndex and Haystack, with the packages themselves."""

import asyncio
import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
from checkpoints import SENTENCES, save_checkpoint, save_sentence_model
from jina_adapters import save_with_adapters
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling
from tiny import one_thread  # noqa: F401  (a fixture)

import bytetx
from bytetx.errors import TooLongError

TEXTS = [text for text in SENTENCES if text]
LONG = "fox " * 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    prompts = {"query": "fox: ", "passage": "dog: ", "other": "a "}
    modules = [Pooling(48, "mean"), Normalize()]
    return save_sentence_model(
        tmp_path_factory.mktemp("model"), modules, prompts=prompts, default_prompt_name="other"
    )


@pytest.fixture(scope="module")
def stock(folder: Path) -> SentenceTransformer:
    return SentenceTransformer(str(folder), device="cpu")


def same(found: object, wanted: object) -> bool:
    return np.allclose(np.asarray(found), np.asarray(wanted), atol=1e-5)


@pytest.mark.feature("Python", "LangChain, LlamaIndex and Haystack")
def test_langchain(folder: Path, stock: SentenceTransformer) -> None:
    from langchain_core.documents import Document
    from langchain_core.vectorstores import InMemoryVectorStore

    from bytetx.integrations.langchain import BytetxEmbeddings

    embeddings = BytetxEmbeddings(folder)
    query, documents = stock.encode_query(TEXTS[0]), stock.encode_document(TEXTS)
    assert same(embeddings.embed_query(TEXTS[0]), query)
    assert same(embeddings.embed_documents(TEXTS), documents)
    assert same(asyncio.run(embeddings.aembed_documents(TEXTS)), documents)
    assert type(embeddings.embed_documents(TEXTS)[0][0]) is float
    assert embeddings.embed_documents([]) == []
    store = InMemoryVectorStore(embeddings)
    store.add_documents([Document(text) for text in TEXTS])
    best = int((documents @ query).argmax())
    assert store.similarity_search(TEXTS[0], k=1)[0].page_content == TEXTS[best]


def test_queries_and_documents_of_a_model_with_tasks(tmp_path: Path) -> None:
    from bytetx.integrations.langchain import BytetxEmbeddings

    base = save_checkpoint(tmp_path / "base", "jina_embeddings_v3")
    model = bytetx.load(save_with_adapters(tmp_path / "jina", base), device="cpu")
    embeddings = BytetxEmbeddings(model)
    query = model.embed(["a fox"], task="retrieval.query").vectors[0]
    assert same(embeddings.embed_query("a fox"), query)
    documents = model.embed(["a fox", "a"], task="retrieval.passage").vectors
    assert same(embeddings.embed_documents(["a fox", "a"]), documents)
    plain = BytetxEmbeddings(model, query_prompt_name="separation").embed_query("a fox")
    assert same(plain, model.embed(["a fox"], task="retrieval.query", prompt="").vectors[0])


def test_prompts_and_long_texts(folder: Path, stock: SentenceTransformer) -> None:
    from bytetx.integrations.langchain import BytetxEmbeddings

    model = bytetx.load(folder, device="cpu")
    embeddings = BytetxEmbeddings(model, query_prompt_name="other", document_prompt_name="query")
    assert same(embeddings.embed_query("a fox"), stock.encode("a fox", prompt_name="other"))
    assert same(embeddings.embed_documents(["x"]), stock.encode(["x"], prompt_name="query"))
    with pytest.raises(TooLongError):
        embeddings.embed_query(LONG)
    cut = BytetxEmbeddings(model, overflow="truncate")
    assert same(cut.embed_query(LONG), stock.encode_query(LONG))


def test_a_checkpoint_without_prompts_of_its_own(tmp_path: Path) -> None:
    """Its default prompt is for other texts, as sentence-transformers has it."""
    from bytetx.integrations.langchain import BytetxEmbeddings

    folder = save_sentence_model(
        tmp_path, [Pooling(48, "mean")], prompts={"other": "a "}, default_prompt_name="other"
    )
    stock, embeddings = SentenceTransformer(str(folder), device="cpu"), BytetxEmbeddings(folder)
    assert same(embeddings.embed_query("a fox"), stock.encode_query("a fox"))
    assert same(embeddings.embed_documents(["a fox"]), stock.encode_document(["a fox"]))


def test_llama_index(folder: Path, stock: SentenceTransformer) -> None:
    pytest.importorskip("llama_index.core")
    from llama_index.core.schema import TextNode

    from bytetx.integrations.llama_index import BytetxEmbedding

    embedding = BytetxEmbedding(bytetx.load(folder, device="cpu"))
    query, documents = stock.encode_query(TEXTS[0]), stock.encode_document(TEXTS)
    assert embedding.model_name == "model"
    assert same(embedding.get_query_embedding(TEXTS[0]), query)
    assert same(embedding.get_text_embedding(TEXTS[1]), documents[1])
    assert same(embedding.get_text_embedding_batch(TEXTS), documents)
    assert same(asyncio.run(embedding.aget_query_embedding(TEXTS[0])), query)
    assert same(asyncio.run(embedding.aget_text_embedding_batch(TEXTS)), documents)
    nodes = embedding([TextNode(text=text) for text in TEXTS])
    assert same([node.embedding for node in nodes], documents)
    with pytest.raises(TooLongError):
        embedding.get_query_embedding(LONG)


def test_haystack(
    folder: Path, stock: SentenceTransformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HAYSTACK_TELEMETRY_ENABLED", "False")
    pytest.importorskip("haystack")
    from haystack import Document, Pipeline

    from bytetx.integrations.haystack import BytetxDocumentEmbedder, BytetxTextEmbedder

    pipeline = Pipeline()
    pipeline.add_component("query", BytetxTextEmbedder(str(folder), overflow="truncate"))
    pipeline.add_component("documents", BytetxDocumentEmbedder(model=str(folder)))
    pipeline = Pipeline.loads(pipeline.dumps(), allowed_modules=["bytetx.integrations.haystack"])
    given = [Document(content=text, meta={"n": n}) for n, text in enumerate(TEXTS)]
    result = pipeline.run({"query": {"text": LONG}, "documents": {"documents": given}})
    assert same(result["query"]["embedding"], stock.encode_query(LONG))
    found = result["documents"]["documents"]
    assert same([one.embedding for one in found], stock.encode_document(TEXTS))
    assert [(one.content, one.meta) for one in found] == [(one.content, one.meta) for one in given]
    assert all(one.embedding is None for one in given)


@pytest.mark.parametrize(
    ("module", "package", "install"),
    [
        ("langchain", "langchain_core.embeddings", "langchain-core"),
        ("llama_index", "llama_index.core.base.embeddings.base", "llama-index-core"),
        ("haystack", "haystack", "haystack-ai"),
    ],
)
def test_a_missing_package(
    module: str, package: str, install: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"bytetx.integrations.{module}", raising=False)
    with pytest.raises(ImportError, match=f"needs {install}: pip install {install}"):
        importlib.import_module(f"bytetx.integrations.{module}")
