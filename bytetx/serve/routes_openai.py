"""OpenAI's embeddings and models, and reranking as Cohere and Jina name it."""

from typing import Any

import numpy as np
from starlette.responses import Response

from bytetx.serve import routes_tei
from bytetx.serve.answers import (
    check_batch,
    check_characters,
    count_characters,
    count_read_characters,
    json_answer,
    run,
)
from bytetx.serve.calls import ModelFacts, Outcome
from bytetx.serve.errors import ServeError
from bytetx.serve.gateway import Exchange
from bytetx.serve.routes_tei import (
    input_options,
    left_option,
    normalize_option,
    prompt_options,
    truncates,
)
from bytetx.serve.schemas import OpenAIRerankRequest, RerankRequest
from bytetx.serve.schemas_pooling import EmbeddingsRequest
from bytetx.serve.site import need_task
from bytetx.serve.vector_types import as_base64, as_type


async def embeddings(body: EmbeddingsRequest, exchange: Exchange) -> Response:
    """One vector of length 1 for each input; base64 is of little-endian float32."""
    facts = find_model(exchange, body.model, "embed")
    check_batch(exchange, body.input, field="input")
    options = {
        "normalize": normalize_option(facts, body.normalize),
        "dimensions": body.dimensions,
        "pooling": exchange.site.settings.pooling,
        **_reading_options(body, facts, exchange),
    }
    if body.late_chunking or body.spans is not None:
        outcome = await _embed_spans(body, facts, exchange, options)
    else:
        outcome = await run(exchange, facts, "embed", body.input, **options)
    vectors = as_type(outcome.arrays[0], body.output_dtype)
    is_bytes = body.encoding_format == "base64" and body.output_dtype != "base64"
    rows = as_base64(vectors) if is_bytes else vectors
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


def _reading_options(
    body: EmbeddingsRequest, facts: ModelFacts, exchange: Exchange
) -> dict[str, Any]:
    """Options for the prompts of texts and for those that are too long."""
    if body.input_type is None:
        options = prompt_options(exchange, facts, body.prompt_name, task=body.task)
    elif body.prompt_name is None and body.task is None:
        options = input_options(exchange, facts, body.input_type)
    else:
        raise ServeError(
            "validation", "give one of input_type, prompt_name and task", param="input_type"
        )
    if body.overflow is None and not body.stride:
        is_cut = truncates(exchange, body.truncates)
        return options | {"truncate": is_cut} | left_option(body.cuts_left)
    if body.truncates or body.cuts_left:
        raise ServeError(
            "validation", "truncation and overflow exclude each other", param="overflow"
        )
    return options | {"overflow": body.overflow, "stride": body.stride}


async def _embed_spans(
    body: EmbeddingsRequest, facts: ModelFacts, exchange: Exchange, options: dict[str, Any]
) -> Outcome:
    """A vector for each span of the inputs, or for each input of one document."""
    texts, spans = list(body.input), body.spans
    name = "late_chunking" if spans is None else "spans"
    if any(not isinstance(text, str) for text in texts):
        raise ServeError("validation", f"{name} is for texts, not for token ids", param="input")
    if "overflow" in options or options.get("left"):
        raise ServeError("validation", f"{name} reads the beginning of each text", param=name)
    if spans is None:
        blank = next((i for i, text in enumerate(texts) if not text.strip()), None)
        if blank is not None:  # it would have a vector of zeros
            raise ServeError(
                "validation", f"input[{blank}] is blank; leave it out of the parts", param="input"
            )
        ends = np.cumsum([len(text) + 1 for text in texts]).tolist()
        spans = [[[end - 1 - len(text), end - 1] for text, end in zip(texts, ends, strict=True)]]
        texts = [" ".join(texts)]
    elif body.late_chunking:
        raise ServeError("validation", "late_chunking and spans exclude each other", param=name)
    check_batch(exchange, [span for of_text in spans for span in of_text], field=name)
    # A part that is cut off would have a vector of zeros: only where the caller asks for it.
    options |= {"truncate": bool(body.truncates), "pooling": options["pooling"] or "mean"}
    return await run(exchange, facts, "embed_spans", [texts, spans], **options)


async def rerank(body: RerankRequest, exchange: Exchange) -> Response:
    """The texts by how well they answer the query, best first; of documents as /v1/rerank."""
    if body.documents is None:
        if body.top_n is not None or body.return_documents is not None:
            raise ServeError("validation", "top_n and return_documents go with documents")
        return await routes_tei.rerank(body, exchange)
    if body.texts is not None or body.return_text:
        raise ServeError("validation", "give texts or documents, and not both", param="documents")
    given = OpenAIRerankRequest(
        query=body.query,
        documents=body.documents,
        model=body.model,
        top_n=body.top_n,
        return_documents=bool(body.return_documents),
        raw_scores=body.raw_scores,
        instruction=body.instruction,
        truncate=body.truncate,
        truncate_prompt_tokens=None,
        truncation_side="left" if body.cuts_left else None,
    )
    return await _rerank(given, exchange)


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
            "api_version": {"version": "2" if exchange.route == "/v2/rerank" else "1"},
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
    is_loaded = {} if facts.is_loaded is None else {"is_loaded": facts.is_loaded}
    return {
        "id": facts.name,
        "object": "model",
        "created": facts.created,
        "owned_by": "bytetx",
        "max_model_len": facts.max_tokens,
        **parent,
        **is_loaded,
    }


def find_model(exchange: Exchange, name: str | None, task: str) -> ModelFacts:
    facts = exchange.site.find_model(exchange.model_name or name)
    need_task(facts, task, kind="validation")
    return facts
