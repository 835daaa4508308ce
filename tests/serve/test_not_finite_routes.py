"""Results that are not finite over HTTP: 424 for their request on every route, and for no other."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import numpy as np
import pytest
from serving import InProcess

WORD = "zaphod"


@contextmanager
def poisoned(model: Any) -> Iterator[None]:
    """The tokens of WORD alone are NaN."""
    word = model.checkpoint.transformer.embeddings.word
    ids = [set(model.tokenizer.encode([text])[0].ids) for text in (f"a {WORD}", "a dog", "fine")]
    tokens = sorted(ids[0] - ids[1] - ids[2])
    kept = word[tokens].clone()
    word[tokens] = float("nan")
    try:
        yield
    finally:
        word[tokens] = kept


def tei(value: Any, **options: Any) -> dict[str, Any]:
    return {"inputs": value, **options}


def openai(model: str, value: Any, **options: Any) -> dict[str, Any]:
    return {"model": model, "input": value, **options}


def body(text: str) -> dict[str, Any]:
    return {"query": "a", "texts": ["fine", text]}


# route: (model, body of a text)
ROUTES: dict[str, tuple[str, str, Any]] = {
    "embed": ("embedder", "/embed", lambda t: tei(t)),
    "embed batch": ("embedder", "/embed", lambda t: tei(["fine", t, "a dog"])),
    "embed_all": ("embedder", "/embed_all", lambda t: tei(["fine", t])),
    "similarity": (
        "embedder",
        "/similarity",
        lambda t: {"inputs": {"source_sentence": "fine", "sentences": ["a dog", t]}},
    ),
    "embeddings": ("embedder", "/v1/embeddings", lambda t: openai("embedder", ["fine", t])),
    "base64": (
        "embedder",
        "/v1/embeddings",
        lambda t: openai("embedder", t, encoding_format="base64", dimensions=16),
    ),
    "embed_sparse": ("sparse", "/embed_sparse", lambda t: tei(["fine", t])),
    "predict": ("classifier", "/predict", lambda t: tei(t)),
    "predict batch": ("classifier", "/predict", lambda t: tei([["fine"], [t]])),
    "predict tokens": ("tagger", "/predict_tokens", lambda t: tei(t)),
    "rerank": ("reranker", "/rerank", body),
    "rerank raw": ("reranker", "/rerank", lambda t: body(t) | {"raw_scores": True}),
    "v1 rerank": (
        "reranker",
        "/v1/rerank",
        lambda t: {"model": "reranker", "query": "a", "documents": ["fine", t]},
    ),
    "v2 rerank": (
        "reranker",
        "/v2/rerank",
        lambda t: {"model": "reranker", "query": t, "documents": ["fine", "a dog"]},
    ),
    "completions": (
        "writer",
        "/v1/completions",
        lambda t: {"model": "writer", "prompt": t, "max_tokens": 3, "temperature": 0},
    ),
    "completions logprobs": (
        "writer",
        "/v1/completions",
        lambda t: {"model": "writer", "prompt": t, "max_tokens": 3, "logprobs": 2, "seed": 1},
    ),
    "chat": (
        "writer",
        "/v1/chat/completions",
        lambda t: {
            "model": "writer",
            "messages": [{"role": "user", "content": t}],
            "max_tokens": 3,
            "temperature": 0,
        },
    ),
}


def answers_of(response: httpx.Response) -> Any:
    """Without what differs from call to call."""
    found = response.json()
    return (
        {k: v for k, v in found.items() if k not in ("id", "created")}
        if isinstance(found, dict)
        else found
    )


@pytest.mark.parametrize("name", ROUTES)
def test_every_route_answers_424_and_others_are_answered(in_process: InProcess, name: str) -> None:
    model, path, make = ROUTES[name]
    one = in_process.with_settings(only=model)
    good = make("a dog")
    wanted = one.post(path, good)
    assert wanted.status_code == 200, wanted.text

    async def both() -> list[httpx.Response]:
        async with one.client() as client:
            bodies = (make(f"a {WORD}"), good, make(WORD))
            return await asyncio.gather(*(client.post(path, json=each) for each in bodies))

    with poisoned(one.model(model)):
        first, fine, second = asyncio.run(both())
    for bad in (first, second):
        assert bad.status_code == 424, bad.text
        assert "finite" in bad.text or "NaN" in bad.text
        is_openai = path.startswith("/v")
        found = bad.json()
        assert (found["error"]["type"] if is_openai else found["error_type"]).startswith("backend")
    assert fine.status_code == 200 and answers_of(fine) == answers_of(wanted)
    again = one.post(path, make(WORD))
    assert again.status_code == 200 and np.isfinite(len(again.text))


def test_a_stream_ends_with_the_error(in_process: InProcess) -> None:
    one = in_process.with_settings(only="writer")
    request = {"model": "writer", "prompt": WORD, "max_tokens": 3, "stream": True}
    with poisoned(one.model("writer")):
        bad = one.post("/v1/completions", request)
    assert bad.status_code == 424 or '"backend_error"' in bad.text
