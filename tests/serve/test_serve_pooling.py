"""Cohere's embeddings by its own clients, and vLLM's routes for models that do not generate."""

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import edit_json, save_checkpoint
from cohere import Client, ClientV2
from cohere.core.api_error import ApiError
from cohere.types import EmbedInput, TextEmbedContent
from jina_adapters import save_with_adapters
from multi_vectors import save_multi_vector
from sentence_transformers import MultiVectorEncoder
from serving import InProcess, Server
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from bytetx.serve import routes_cohere, routes_vllm
from bytetx.serve.loading import load_models
from bytetx.serve.settings import ServeSettings, model_sources
from bytetx.serve.vector_types import VectorType, as_type
from bytetx.tasks.classify import softmax

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


def test_a_type_that_comes_again_is_made_once(
    in_process: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body may name thousands, and each takes the event loop's time."""
    made: list[str] = []

    def counted(vectors: np.ndarray, kind: VectorType) -> Any:
        made.append(kind)
        return as_type(vectors, kind)

    monkeypatch.setattr(routes_cohere, "as_type", counted)
    body = {"texts": TEXTS, "embedding_types": ["int8", "binary"] * 5000}
    assert in_process.post("/v2/embed", body).json()["embeddings"].keys() == {"int8", "binary"}
    assert made == ["int8", "binary"]


def test_two_texts_are_no_pair(in_process: InProcess) -> None:
    """vLLM's input is texts or token ids, where two strings in TEI's inputs are one pair."""
    model = in_process.model("classifier")
    ids = [[5, 6, 7], [8]]
    for given in (TEXTS[:2], ids, TEXTS[:1], ids[0]):
        texts = [given] if type(given[0]) is int else given
        body = {"model": "classifier", "input": given}
        for path, key in (("/classify", "probs"), ("/pooling", "data")):
            data = in_process.post(path, body).json()["data"]
            assert len(data) == len(texts)
            for one, labels in zip(data, model.classify(texts), strict=True):
                assert max(one[key]) == pytest.approx(labels[0].score, abs=1e-6)


def test_names_of_both_sides(in_process: InProcess) -> None:
    """text_1 and text_2 have had other names in vLLM since."""
    first, second = "a big town", ["New York is big.", "a"]
    right = None
    for one in ("text_1", "queries", "data_1"):
        for two in ("text_2", "documents", "items", "data_2"):
            body = {"model": "reranker", one: first, two: second}
            data = in_process.post("/score", body).json()["data"]
            right = right or data
            assert data == right
    wrong = in_process.post("/score", {"queries": first, "documents": 7})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] in ("text_2", "documents")


def test_without_activation(in_process: InProcess) -> None:
    off = {"use_activation": False}
    labels = in_process.model("classifier").classify(TEXTS, raw_scores=True)
    for path, key in (("/classify", "probs"), ("/pooling", "data")):
        body = {"model": "classifier", "input": TEXTS, **off}
        for one, row in zip(in_process.post(path, body).json()["data"], labels, strict=True):
            assert sorted(one[key]) == pytest.approx(sorted(label.score for label in row), abs=1e-6)
    hits = in_process.model("reranker").rerank("a", TEXTS, raw_scores=True)
    body = {"model": "reranker", "text_1": "a", "text_2": TEXTS, **off}
    data = in_process.post("/score", body).json()["data"]
    assert [data[hit.index]["score"] for hit in hits] == pytest.approx([hit.score for hit in hits])
    vectors = in_process.model("sparse").embed(TEXTS, normalize=False).vectors
    data = in_process.post("/pooling", {"model": "sparse", "input": TEXTS, **off}).json()["data"]
    np.testing.assert_allclose([one["data"] for one in data], vectors, atol=1e-5)
    body = {"model": "reranker", "query": "a", "documents": TEXTS, **off}
    for path, given in (("/v1/rerank", body), ("/v1/embeddings", {"input": "a", **off})):
        assert "use_activation is not supported" in in_process.post(path, given).text
    for more in (off, {"dimensions": 8}):
        answer = in_process.post("/pooling", {"input": "a", "task": "token_embed"} | more)
        assert answer.status_code == 400 and answer.json()["error"]["param"] in more
    body = {"model": "classifier", "input": TEXTS, "encoding_format": "base64"}
    rows = [one["data"] for one in in_process.post("/pooling", body).json()["data"]]
    assert all(sum(np.frombuffer(base64.b64decode(row), "<f4")) == pytest.approx(1) for row in rows)


def test_vllms_truncation(in_process: InProcess) -> None:
    """truncate_prompt_tokens -1 cuts to the model's length, at truncation_side."""
    strict = in_process.with_settings(auto_truncate=False)
    long = "quick " + "fox " * 300 + "dog"
    cut = {"truncate_prompt_tokens": -1}
    for path, body in (
        ("/classify", {"model": "classifier", "input": long}),
        ("/pooling", {"input": long}),
        ("/pooling", {"input": long, "task": "token_embed"}),
        ("/score", {"text_1": long, "text_2": "a"}),
        ("/score", {"text_1": "a", "text_2": long, "model": "reranker"}),
        ("/v1/embeddings", {"input": long}),
        ("/v1/rerank", {"query": "a", "documents": [long], "model": "reranker"}),
    ):
        assert strict.post(path, body).status_code == 400
        key = "results" if path == "/v1/rerank" else "data"
        found = {}
        for side in (None, "right", "left"):
            answer = strict.post(path, body | cut | {"truncation_side": side})
            assert answer.status_code == 200, answer.text
            found[side] = answer.json()[key]
        assert found[None] == found["right"] != found["left"], path
        other = strict.post(path, body | {"truncate_prompt_tokens": 7})
        assert other.status_code == 400 and "truncate_prompt_tokens" in other.text
        assert strict.post(path, body | cut | {"truncate": False}).status_code == 400


def test_many_pairs(in_process: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls of one request leave room in the queue; vectors take one call, each text once."""
    lefts, rights = [f"fox {n % 50}" for n in range(70)], [f"dog {n}" for n in range(70)]
    calls: list[str] = []
    open_calls, most = 0, 0
    run = routes_vllm.run

    async def counted(exchange: Any, facts: Any, task: str, inputs: Any, /, **options: Any) -> Any:
        nonlocal open_calls, most
        calls.append(task)
        open_calls += 1
        most = max(most, open_calls)
        try:
            return await run(exchange, facts, task, inputs, **options)
        finally:
            open_calls -= 1

    monkeypatch.setattr(routes_vllm, "run", counted)
    monkeypatch.setattr(routes_vllm, "_MAX_CALLS", 8)
    wide = in_process.with_settings(max_client_batch_size=70)
    data = wide.post("/score", {"text_1": lefts, "text_2": rights}).json()
    model = in_process.model("embedder")
    first, second = model.embed(lefts).vectors, model.embed(rights).vectors
    right = (first * second).sum(axis=1)
    np.testing.assert_allclose([one["score"] for one in data["data"]], right, atol=1e-5)
    assert calls == ["similarity"]
    assert data["usage"]["prompt_tokens"] == model.embed(lefts[:50] + rights).stats.num_tokens
    body = {"model": "reranker", "text_1": lefts, "text_2": rights}
    data = wide.post("/score", body).json()["data"]
    assert calls == ["similarity"] + ["rerank"] * 50 and most == 8
    reranker = in_process.model("reranker")
    for place in (0, 19, 49, 69):
        hit = reranker.rerank(lefts[place], [rights[place]])[0]
        assert data[place]["score"] == pytest.approx(hit.score, abs=1e-5)
    calls.clear()
    long = [*lefts[:1], "fox " * 300, *lefts[2:]]
    answer = wide.post("/score", body | {"text_1": long, "truncate": False})
    assert answer.status_code == 400 and "tokens" in answer.text
    assert len(calls) < 50  # no others begin


def test_a_model_of_a_task_keeps_its_prompt(tmp_path: Path) -> None:
    """input_type is passed over where the model's name has a task."""
    base = save_checkpoint(tmp_path / "base", "jina_embeddings_v3")
    folder = save_with_adapters(tmp_path / "jina", base)
    settings = ServeSettings(model_sources([f"jina={folder}"]), device="cpu")
    one = InProcess(settings, load_models(settings))
    name = "retrieval.query"
    right = one.model("jina").embed(TEXTS, task=name, normalize=True).vectors
    for kind in (None, "search_query", "search_document", "classification", "other"):
        body = {"texts": TEXTS, "model": f"jina:{name}", "input_type": kind}
        found = one.post("/v1/embed", body).json()["embeddings"]
        np.testing.assert_allclose(found, right, atol=1e-5)


def test_late_interaction_scores(tmp_path: Path) -> None:
    """/score and /similarity of a ColBERT model are MaxSim, with its queries and documents."""
    folder = save_multi_vector(tmp_path, query_length=15, document_length=20)
    settings = ServeSettings(model_sources([f"late={folder}"]), device="cpu")
    one = InProcess(settings, load_models(settings))
    theirs = MultiVectorEncoder(str(folder), device="cpu")
    queries, documents = ["a big town", "dog", "a big town"], ["New York is big.", "dog", "a"]
    right = theirs.similarity(theirs.encode_query(queries), theirs.encode_document(documents))
    body = {"text_1": queries[0], "text_2": documents}
    answer = one.post("/score", body).json()
    assert [row["score"] for row in answer["data"]] == pytest.approx(right[0].tolist(), abs=1e-4)
    model = one.model("late")
    num_tokens = model.embed_tokens(queries[:1], task="query").stats.num_tokens
    num_tokens += model.embed_tokens(documents).stats.num_tokens
    assert answer["usage"]["prompt_tokens"] == num_tokens
    for pairs in (queries, queries[::-1]):
        data = one.post("/score", {"text_1": pairs, "text_2": documents}).json()["data"]
        rows = [queries.index(query) for query in pairs]
        wanted = [float(right[row, column]) for column, row in enumerate(rows)]
        assert [row["score"] for row in data] == pytest.approx(wanted, abs=1e-4)
    given = {"source_sentence": queries[1], "sentences": documents}
    scores = one.post("/similarity", {"inputs": given}).json()
    assert scores == pytest.approx(right[1].tolist(), abs=1e-4)
    for wrong in ({"task": "a"}, {"truncation_direction": "Left", "truncate": True}):
        answer = one.post("/similarity", {"inputs": given, "parameters": wrong})
        assert answer.status_code == 422 and "late interaction" in answer.text


def test_classes_of_one_name(tmp_path: Path) -> None:
    """The probabilities stay in the order of the classes, whichever is the best one."""
    folder = save_checkpoint(tmp_path, head="ForSequenceClassification", num_labels=3)
    edit_json(folder / "config.json", id2label={"0": "a", "1": "b", "2": "a"})
    settings = ServeSettings(model_sources([f"twins={folder}"]), device="cpu")
    one = InProcess(settings, load_models(settings))
    rows = [
        sorted(row, key=lambda label: label.index) for row in one.model("twins").classify(TEXTS)
    ]
    right = [[label.score for label in row] for row in rows]
    assert [label.label for label in rows[0]] == ["a", "b", "a"]
    data = one.post("/classify", {"input": TEXTS}).json()["data"]
    np.testing.assert_allclose([row["probs"] for row in data], right, atol=1e-6)
    theirs = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(TEXTS, return_tensors="pt", padding=True)
    logits = theirs(**batch).logits.detach().numpy()
    np.testing.assert_allclose(right, softmax(logits), atol=1e-5)


@pytest.mark.feature("Server", "routes of Jina: documents on /rerank")
def test_rerank_of_documents(in_process: InProcess) -> None:
    """/rerank takes the body of Jina and vLLM, and answers as /v1/rerank does."""
    body = {
        "query": "fox",
        "documents": ["the dog", {"text": "the fox"}, "a"],
        "model": "reranker",
        "top_n": 2,
        "return_documents": True,
    }
    found = in_process.post("/rerank", body).json()
    wanted = in_process.post("/v1/rerank", body).json()
    assert found["results"] == wanted["results"] and len(found["results"]) == 2
    assert found.keys() == wanted.keys() and found["usage"] == wanted["usage"]
    texts = {"query": "fox", "texts": ["the dog", "the fox", "a"], "model": "reranker"}
    rows = in_process.post("/rerank", texts).json()
    assert [row["index"] for row in rows[:2]] == [row["index"] for row in found["results"]]
    for wrong, said in (
        (body | {"texts": ["a"]}, "not both"),
        (texts | {"top_n": 1}, "go with documents"),
        ({"query": "fox", "model": "reranker"}, "texts"),
        (body | {"documents": []}, "must not be empty"),
        (body | {"documents": [7]}, "documents"),
    ):
        answer = in_process.post("/rerank", wrong)
        assert 400 <= answer.status_code < 500 and said in answer.text
