"""OpenAI's embeddings and models, and reranking as Cohere and Jina name it."""

from typing import Any

from starlette.responses import Response

from bytetx.serve.answers import (
    check_batch,
    check_characters,
    count_characters,
    count_read_characters,
    json_answer,
    run,
)
from bytetx.serve.calls import ModelFacts
from bytetx.serve.gateway import Exchange
from bytetx.serve.routes_tei import left_option, normalize_option, prompt_options, truncates
from bytetx.serve.schemas import EmbeddingsRequest, OpenAIRerankRequest
from bytetx.serve.site import need_task
from bytetx.serve.vector_types import as_type


async def embeddings(body: EmbeddingsRequest, exchange: Exchange) -> Response:
    """One vector of length 1 for each input; base64 is of little-endian float32."""
    facts = find_model(exchange, body.model, "embed")
    check_batch(exchange, body.input, field="input")
    outcome = await run(
        exchange,
        facts,
        "embed",
        body.input,
        normalize=normalize_option(facts, True),
        dimensions=body.dimensions,
        pooling=exchange.site.settings.pooling,
        truncate=truncates(exchange, body.truncates),
        **prompt_options(exchange, facts, body.prompt_name, task=body.task),
        **left_option(body.cuts_left),
    )
    vectors = outcome.arrays[0]
    rows = as_type(vectors, body.encoding_format)
    num_tokens = outcome.timings.num_tokens
    content = {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": row}
            for index, row in enumerate(rows)
        ],
        "model": facts.name,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }
    return json_answer(exchange, content, num_characters=count_characters(body.input))


async def rerank_v1(body: OpenAIRerankRequest, exchange: Exchange) -> Response:
    """The documents by how well they answer the query, best first."""
    return await _rerank(body, exchange)


async def rerank_v2(body: OpenAIRerankRequest, exchange: Exchange) -> Response:
    """As /v1/rerank, where Cohere's second client looks for it."""
    return await _rerank(body, exchange)


async def _rerank(body: OpenAIRerankRequest, exchange: Exchange) -> Response:
    facts = find_model(exchange, body.model, "rerank")
    check_batch(exchange, body.documents, field="documents")
    characters = count_read_characters(body.documents, (body.query, body.instruction))
    check_characters(exchange, characters, field="documents")
    outcome = await run(
        exchange,
        facts,
        "rerank",
        [body.query, body.documents],
        top_k=body.top_n,
        raw_scores=body.raw_scores,
        instruction=body.instruction,
        truncate=truncates(exchange, body.truncates),
        **left_option(body.cuts_left),
    )
    results: list[dict[str, Any]] = [
        {"index": index, "relevance_score": score} for index, score in outcome.rows
    ]
    if body.return_documents:
        for result in results:
            result["document"] = {"text": body.documents[result["index"]]}
    num_tokens = outcome.timings.num_tokens
    content = {
        "id": exchange.request_id,
        "model": facts.name,
        "results": results,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        "meta": {
            "api_version": {"version": exchange.scope["path"].split("/")[-2].lstrip("v")},
            "billed_units": {"search_units": 1},
        },
    }
    return json_answer(exchange, content, num_characters=characters)


async def list_models(exchange: Exchange) -> Response:
    """The served models."""
    models = exchange.site.ready_backend().models
    return json_answer(exchange, {"object": "list", "data": [_model(facts) for facts in models]})


def _model(facts: ModelFacts) -> dict[str, Any]:
    parent = {} if facts.parent is None else {"parent": facts.parent}
    return {
        "id": facts.name,
        "object": "model",
        "created": facts.created,
        "owned_by": "bytetx",
        "max_model_len": facts.max_tokens,
        **parent,
    }


def find_model(exchange: Exchange, name: str | None, task: str) -> ModelFacts:
    facts = exchange.site.find_model(exchange.model_name or name)
    need_task(facts, task, kind="validation")
    return facts
