"""Cohere's embeddings by its own clients, and vLLM's routes for models that do not generate."""

import base64

import numpy as np
import pytest
from cohere import Client, ClientV2
from cohere.core.api_error import ApiError
from cohere.types import EmbedInput, TextEmbedContent
from serving import InProcess, Server

from bytetx.serve.vector_types import as_type

TEXTS = ["The quick brown fox", "jumps over the lazy dog", "a"]


@pytest.mark.feature("Server", "routes of Cohere: embeddings")
def test_cohere_embeds(server: Server, in_process: InProcess) -> None:
    """Both clients: floats, every type, the prompt of queries, and none for documents."""
    model = in_process.model("embedder")
    expected = model.embed(TEXTS).vectors
    queries = model.embed(TEXTS, prompt_name="query").vectors
    first = Client(api_key="sesame", base_url=server.url)
    plain = first.embed(texts=TEXTS, model="embedder", input_type="search_document")
    np.testing.assert_allclose(plain.embeddings, expected, atol=1e-6)
    assert plain.response_type == "embeddings_floats" and plain.texts == TEXTS
    second = ClientV2(api_key="sesame", base_url=server.url)
    kinds = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
    found = second.embed(
        texts=TEXTS, model="embedder", input_type="search_query", embedding_types=kinds
    )
    given = found.embeddings
    np.testing.assert_allclose(given.float_, queries, atol=1e-6)
    np.testing.assert_array_equal(given.int8, as_type(queries, "int8"))
    np.testing.assert_array_equal(np.array(given.uint8) - 128, given.int8)
    np.testing.assert_array_equal(np.array(given.ubinary) - 128, given.binary)
    np.testing.assert_array_equal(np.unpackbits(np.uint8(given.ubinary), axis=1), queries > 0)
    packed = np.stack([np.frombuffer(base64.b64decode(row), "<f4") for row in given.base64])
    np.testing.assert_allclose(packed, queries, atol=1e-6)
    assert found.meta.billed_units.input_tokens > 0
    parts = EmbedInput(content=[TextEmbedContent(text=TEXTS[0])])
    short = second.embed(
        inputs=[parts], model="embedder", input_type="clustering", output_dimension=8
    )
    right = model.embed(TEXTS[:1], dimensions=8).vectors
    np.testing.assert_allclose(short.embeddings.float_, right, atol=1e-6)


def test_cohere_errors(server: Server) -> None:
    client = ClientV2(api_key="sesame", base_url=server.url)
    with pytest.raises(ApiError, match="texts must not be empty"):
        client.embed(texts=[], model="embedder", input_type="search_query")
    long = "fox " * 2000
    options = {"model": "embedder", "input_type": "search_query"}
    with pytest.raises(ApiError, match="tokens"):
        client.embed(texts=[long], truncate="NONE", **options)
    for truncate in ("END", "START"):
        assert len(client.embed(texts=[long], truncate=truncate, **options).embeddings.float_) == 1
    with pytest.raises(ApiError, match="give texts or inputs"):
        client.embed(**options)
    with pytest.raises(ApiError, match="images is not supported"):
        client.embed(images=["data:image/png;base64,AA=="], **options)


def test_types_of_vectors() -> None:
    """int8 keeps directions; whole numbers and zeros stay as they are."""
    rows = np.random.default_rng(0).normal(size=(5, 40)).astype(np.float32)
    found = as_type(rows, "int8")
    assert found.dtype == np.int8 and (np.abs(found).max(axis=1) == 127).all()
    cosines = (rows * found).sum(1) / np.linalg.norm(rows, axis=1)
    assert (cosines / np.linalg.norm(found.astype(np.float32), axis=1) > 0.9999).all()
    whole = np.array([[3, -127, 0], [0, 0, 0]], dtype=np.float32)
    assert as_type(whole, "int8").tolist() == whole.tolist()
    assert as_type(whole, "uint8").tolist() == (whole + 128).tolist()
    assert as_type(rows[:0], "int8").shape == (0, 40)


@pytest.mark.feature("Server", "routes of vLLM: score, classify, pooling")
def test_score(in_process: InProcess) -> None:
    documents = ["New York is big.", "the lazy dog", "a"]
    reranker = in_process.model("reranker")
    right = [0.0] * 3
    for hit in reranker.rerank("a big town", documents):
        right[hit.index] = hit.score
    body = {"model": "reranker", "text_1": "a big town", "text_2": documents}
    answer = in_process.post("/score", body).json()
    assert [one["score"] for one in answer["data"]] == pytest.approx(right, abs=1e-6)
    assert [one["index"] for one in answer["data"]] == [0, 1, 2]
    queries = ["a big town", "dog", "a big town"]
    found = in_process.post("/v1/score", body | {"text_1": queries}).json()["data"]
    assert [found[i]["score"] for i in (0, 2)] == pytest.approx([right[0], right[2]], abs=1e-6)
    assert found[1]["score"] == pytest.approx(
        reranker.rerank("dog", documents[1:2])[0].score, abs=1e-6
    )
    embedder = in_process.model("embedder")
    body = {"model": "embedder", "text_1": "a big town", "text_2": documents[1]}
    near = in_process.post("/score", body).json()["data"][0]["score"]
    vectors = embedder.embed(["a big town", documents[1]])
    assert near == pytest.approx(float(vectors[0] @ vectors[1]), abs=1e-5)
    wrong = in_process.post("/score", body | {"text_1": ["a", "b"]})
    assert wrong.status_code == 400 and "text_1 must have one entry" in wrong.text


def test_classify_and_pooling(in_process: InProcess) -> None:
    classifier, embedder = in_process.model("classifier"), in_process.model("embedder")
    names = classifier.info()["labels"]
    rows = classifier.classify(TEXTS)
    data = in_process.post("/classify", {"model": "classifier", "input": TEXTS}).json()["data"]
    pooled = in_process.post("/pooling", {"model": "classifier", "input": TEXTS}).json()["data"]
    for one, probs, labels in zip(data, pooled, rows, strict=True):
        score_of = {label.label: label.score for label in labels}
        right = pytest.approx([score_of[name] for name in names], abs=1e-6)
        assert one["probs"] == right == probs["data"]
        assert one["label"] == labels[0].label and one["num_classes"] == len(names)
    body = {"model": "embedder", "input": TEXTS}
    vectors = embedder.embed(TEXTS).vectors
    found = in_process.post("/pooling", body).json()["data"]
    np.testing.assert_allclose([one["data"] for one in found], vectors, atol=1e-6)
    found = in_process.post("/pooling", body | {"encoding_format": "base64"}).json()["data"]
    packed = [np.frombuffer(base64.b64decode(one["data"]), "<f4") for one in found]
    np.testing.assert_allclose(packed, vectors, atol=1e-6)
    found = in_process.post("/pooling", body | {"task": "token_embed"}).json()["data"]
    states = embedder.hidden_states(TEXTS)
    for one, state in zip(found, states, strict=True):
        np.testing.assert_allclose(one["data"], state[0], atol=1e-5)
    wrong = in_process.post("/classify", body)
    assert wrong.status_code == 424 and "classify" in wrong.json()["error"]["message"]
