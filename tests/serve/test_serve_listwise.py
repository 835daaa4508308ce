"""A listwise reranker behind the server's routes and the command line."""

import asyncio
from collections.abc import Iterator

import pytest
from listwise_rerankers import save_reranker
from serving import InProcess

from bytetx.serve.loading import close_models, load_models
from bytetx.serve.settings import ServeSettings, model_sources

QUERY, DOCUMENTS = "which animal is quick", ["a fox", "the lazy dog", "liquor jugs", ""]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcess]:
    folder = save_reranker(tmp_path_factory.mktemp("listwise") / "v35", "v3.5")
    settings = ServeSettings(model_sources([f"ranker={folder}"]), device="cpu")
    models = load_models(settings)
    yield InProcess(settings, models)
    asyncio.run(close_models(models))


def wanted(served: InProcess, **options: object) -> list[tuple[int, float]]:
    hits = served.model("ranker").rerank(QUERY, DOCUMENTS, **options)
    return [(hit.index, pytest.approx(hit.score, abs=1e-5)) for hit in hits]


@pytest.mark.parametrize("instruction", [None, "prefer drinks"])
def test_routes(instruction: str | None, served: InProcess) -> None:
    own = {} if instruction is None else {"instruction": instruction}
    right = wanted(served, **own)
    body = {"query": QUERY, "texts": DOCUMENTS, **own}
    for path in ("/rerank", "/"):
        found = served.post(path, body).json()
        assert [(one["index"], one["score"]) for one in found] == right
    body = {"query": QUERY, "documents": DOCUMENTS, "top_n": 2, "return_documents": True, **own}
    for path in ("/v1/rerank", "/v2/rerank"):
        answer = served.post(path, body).json()
        found = [(one["index"], one["relevance_score"]) for one in answer["results"]]
        assert found == right[:2]
        assert answer["results"][0]["document"]["text"] == DOCUMENTS[right[0][0]]
        assert answer["usage"]["total_tokens"] > 100


def test_refusals(served: InProcess) -> None:
    body = {"query": QUERY, "texts": ["<|embed_" * 20 + "token|>" * 20]}
    assert served.post("/rerank", body).status_code == 422
    left = {"query": QUERY, "texts": ["a"], "truncate": True, "truncation_direction": "Left"}
    assert "truncation_direction Left" in served.post("/rerank", left).text
    assert served.post("/embed", {"inputs": "a"}).status_code == 424
    assert served.get("/info").json()["model_type"].keys() == {"reranker"}
