"""Fields of /v1/embeddings beyond OpenAI's: types, prompts, chunks and spans of long texts."""

import base64
from typing import Any

import numpy as np
import pytest
from serving import InProcess

from bytetx.serve.vector_types import as_type

TEXTS = ["The quick brown fox", "jumps over the lazy dog", "a"]
LONG = " ".join(f"fox{i} jumps over dogs" for i in range(60))


def ask(one: InProcess, **fields: object) -> Any:
    body = {"input": TEXTS, "model": "embedder", **fields}
    return one.post("/v1/embeddings", body)


def vectors(answer: Any) -> np.ndarray:
    assert answer.status_code == 200, answer.text
    rows = answer.json()["data"]
    assert [row["index"] for row in rows] == list(range(len(rows)))
    return np.array([row["embedding"] for row in rows])


@pytest.mark.feature("Server", "/v1/embeddings: int8 and binary vectors, input types")
@pytest.mark.parametrize("kind", ["int8", "uint8", "binary", "ubinary"])
def test_vectors_of_few_bits(in_process: InProcess, kind: str) -> None:
    """By Voyage's and Jina's names, as numbers and as bytes."""
    expected = as_type(in_process.model("embedder").embed(TEXTS).vectors, kind)  # type: ignore[arg-type]
    for field in ({"output_dtype": kind}, {"embedding_type": kind}, {"embedding_type": [kind]}):
        np.testing.assert_array_equal(vectors(ask(in_process, **field)), expected)
    packed = ask(in_process, output_dtype=kind, encoding_format="base64").json()["data"]
    for row, wanted in zip(packed, expected, strict=True):
        assert base64.b64decode(row["embedding"]) == wanted.tobytes()
    plain = ask(in_process, embedding_type="base64").json()["data"]
    assert plain == ask(in_process, encoding_format="base64").json()["data"]


def test_other_names_of_options(in_process: InProcess) -> None:
    model = in_process.model("embedder")
    short = model.embed(TEXTS, dimensions=8).vectors
    np.testing.assert_allclose(vectors(ask(in_process, output_dimension=8)), short, atol=1e-6)
    raw = model.embed(TEXTS, normalize=False).vectors
    for name in ("normalize", "normalized"):
        np.testing.assert_allclose(vectors(ask(in_process, **{name: False})), raw, atol=1e-6)
    queries = model.embed(TEXTS, prompt_name="query").vectors
    found = vectors(ask(in_process, input_type="query"))
    np.testing.assert_allclose(found, queries, atol=1e-6)
    np.testing.assert_allclose(
        vectors(ask(in_process, input_type="passage")), model.embed(TEXTS).vectors, atol=1e-6
    )
    both = ask(in_process, input_type="query", prompt_name="query")
    assert both.status_code == 400 and "one of input_type" in both.text


@pytest.mark.feature("Server", "/v1/embeddings: chunks of long texts, spans, late chunking")
def test_chunks_of_long_texts(in_process: InProcess) -> None:
    texts = [LONG, "short"]
    expected = in_process.model("embedder").embed(texts, overflow="chunk", stride=3).vectors
    answer = ask(in_process, input=texts, overflow="chunk", stride=3)
    np.testing.assert_allclose(vectors(answer), expected, atol=1e-6)
    assert ask(in_process, input=texts, overflow="error").status_code == 400
    cut = vectors(ask(in_process, input=texts, overflow="truncate"))
    np.testing.assert_array_equal(cut, vectors(ask(in_process, input=texts, truncate=True)))
    for wrong in (
        {"stride": 3},
        {"overflow": "chunk", "truncate": True},
        {"overflow": "chunk", "stride": 10**9},
        {"overflow": "chunk", "late_chunking": True},
        {"overflow": "chunk", "truncation_side": "left"},
    ):
        assert ask(in_process, input=texts, **wrong).status_code in (400, 422), wrong


def test_late_chunking_reads_the_parts_as_one_document(in_process: InProcess) -> None:
    whole, model = " ".join(TEXTS), in_process.model("embedder")
    spans = [[(0, 19), (20, 43), (44, 45)]]
    assert [whole[start:end] for start, end in spans[0]] == TEXTS
    expected = model.embed_spans([whole], spans, normalize=True).vectors
    found = vectors(ask(in_process, late_chunking=True))
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert np.abs(found - model.embed(TEXTS).vectors).max() > 1e-3  # of their context
    np.testing.assert_allclose(
        vectors(ask(in_process, input=[whole], spans=spans)), expected, atol=1e-6
    )
    two = ask(in_process, input=[whole, "a"], spans=[[(0, 3)], [(0, 1), (0, 1)]])
    assert len(vectors(two)) == 3


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"input": [[5, 6]], "late_chunking": True}, "token ids"),
        ({"input": ["a", " "], "late_chunking": True}, "input[1] is blank"),
        ({"late_chunking": True, "spans": [[[0, 1]]] * 3}, "exclude each other"),
        ({"spans": [[[0, 1]]]}, "one list for each"),
        ({"input": "a", "spans": [[[0, 9]]]}, "characters of the text"),
        ({"input": "a", "spans": [[[0]]]}, "spans"),
        ({"input": "a", "spans": [[]]}, "must not be empty"),
        ({"input": "a", "spans": [[[0, 1]] * 100_000]}, "--max-client-batch-size"),
        ({"input": [LONG, LONG], "late_chunking": True}, "tokens"),
        ({"late_chunking": True, "stride": 3}, "beginning of each text"),
        ({"input": "a", "spans": [[[0, 1]]], "stride": 3}, "beginning of each text"),
        ({"output_dtype": "int4"}, "output_dtype"),
        ({"embedding_type": ["int8", "float"]}, "type"),
    ],
)
def test_what_is_refused(in_process: InProcess, fields: dict[str, Any], said: str) -> None:
    answer = ask(in_process, **fields)
    assert 400 <= answer.status_code < 500 and said in answer.text
