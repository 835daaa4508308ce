"""Routes of operation: health, facts, metrics, the status page."""

from functools import cache
from importlib import resources
from typing import Any

from starlette.responses import Response

import bytetx
from bytetx.serve.answers import json_answer
from bytetx.serve.calls import ModelFacts
from bytetx.serve.gateway import Exchange
from bytetx.serve.records import METRICS_TYPE

_TEI_DTYPES = {"float32": "float32", "float16": "float16", "bfloat16": "bfloat16"}


async def health(exchange: Exchange) -> Response:
    """200 where requests are answered; 503 before the models are ready and while shutting down.

    Where models come and go, the body says which are loaded.
    """
    backend = exchange.site.ready_backend()
    assert backend.is_healthy
    if not exchange.site.settings.moves_models:
        return Response(status_code=200)
    models = (facts for facts in backend.models if facts.parent is None)
    content = {facts.name: "loaded" if facts.is_loaded else "unloaded" for facts in models}
    return json_answer(exchange, {"models": content})


async def metrics(exchange: Exchange) -> Response:
    """Prometheus' text."""
    page = await exchange.site.recorder.metrics_page()
    return Response(page, media_type=METRICS_TYPE)


async def stats(exchange: Exchange) -> Response:
    """Models, queue, rates and recent batches, for the status page."""
    return Response(await exchange.site.recorder.stats(), media_type="application/json")


async def page(exchange: Exchange) -> Response:
    """The status page."""
    return Response(_page(), media_type="text/html; charset=utf-8")


@cache
def _page() -> bytes:
    return resources.files("bytetx.serve").joinpath("static/index.html").read_bytes()


async def info(exchange: Exchange) -> Response:
    """The model's facts and the server's limits, with TEI's keys and some of bytetx."""
    settings = exchange.site.settings
    facts = exchange.site.find_model(exchange.model_name)
    models = exchange.site.models()
    content = {
        "model_id": facts.model_id,
        "model_sha": settings.revision,
        "model_dtype": _TEI_DTYPES.get(facts.info["dtype"], facts.info["dtype"]),
        "model_type": _model_type(facts),
        "served_model_name": facts.name,
        "max_concurrent_requests": settings.max_concurrent_requests,
        "max_input_length": facts.max_tokens,
        "max_batch_tokens": facts.info["token_budget"],
        "max_batch_requests": None,
        "max_client_batch_size": settings.max_client_batch_size,
        "max_queued_requests": settings.max_queued_requests,
        "max_queued_tokens": settings.max_queued_tokens,
        "payload_limit": settings.payload_limit_bytes,
        "auto_truncate": settings.auto_truncate,
        "prefix_cache_bytes": facts.info["prefix_cache_bytes"],
        "batch_invariant": facts.info["batch_invariant"],
        "tokenization_workers": settings.tokenization_workers,
        "version": bytetx.__version__,
        "sha": None,
        "docker_label": None,
        "tasks": list(facts.tasks),
        "models": [model.name for model in models],
    }
    if facts.is_loaded is not None:
        content["is_loaded"] = facts.is_loaded
    return json_answer(exchange, content)


def _model_type(facts: ModelFacts) -> dict[str, Any]:
    """As TEI has it: embedding, classifier or reranker; generation and tagging are bytetx's."""
    labels = facts.info["labels"]
    named = {
        "id2label": {str(index): label for index, label in enumerate(labels)},
        "label2id": {label: index for index, label in enumerate(labels)},
    }
    if facts.main_task == "rerank":
        return {"reranker": named}
    if facts.main_task == "classify":
        return {"classifier": named}
    if facts.main_task == "tag":
        return {"token_classifier": named}
    if facts.main_task == "extract":
        return {"extractor": {}}
    if facts.main_task == "generate":
        return {"generation": {}}
    pooling = "splade" if facts.main_task == "embed_sparse" else "+".join(facts.info["pooling"])
    return {"embedding": {"pooling": pooling}}
