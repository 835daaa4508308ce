"""Cohere's embeddings."""

from collections.abc import Iterable
from typing import Any

from starlette.responses import Response

from bytetx.serve.answers import check_batch, count_characters, json_answer, run
from bytetx.serve.calls import ModelFacts
from bytetx.serve.errors import ServeError
from bytetx.serve.gateway import Exchange
from bytetx.serve.routes_openai import find_model
from bytetx.serve.routes_tei import left_option, normalize_option, prompt_options
from bytetx.serve.schemas_pooling import CohereEmbedRequest
from bytetx.serve.vector_types import VectorType, as_type

# The names that checkpoints have for Cohere's input types, of prompts and of tasks with adapters.
_NAMES = {
    "search_query": ("query", "retrieval.query", "retrieval"),
    "search_document": (
        *("document", "passage", "corpus"),
        *("retrieval.passage", "retrieval.document", "retrieval"),
    ),
    "clustering": ("clustering", "separation"),
}


async def embed_v1(body: CohereEmbedRequest, exchange: Exchange) -> Response:
    """One vector of length 1 for each text, in each of embedding_types; floats where none is."""
    return await _embed(body, exchange, version="1")


async def embed_v2(body: CohereEmbedRequest, exchange: Exchange) -> Response:
    """As /v1/embed, where Cohere's second client looks for it; the answer has the types' names."""
    return await _embed(body, exchange, version="2")


async def _embed(body: CohereEmbedRequest, exchange: Exchange, *, version: str) -> Response:
    facts = find_model(exchange, body.model, "embed")
    texts = _texts(body)
    check_batch(exchange, texts, field="texts" if body.inputs is None else "inputs")
    outcome = await run(
        exchange,
        facts,
        "embed",
        texts,
        normalize=normalize_option(facts, True),
        dimensions=body.output_dimension,
        pooling=exchange.site.settings.pooling,
        truncate=body.truncate != "NONE",
        **left_option(body.truncate == "START"),
        **_input_options(body.input_type, facts, exchange),
    )
    vectors = outcome.arrays[0]
    is_plain = version == "1" and body.embedding_types is None
    types: Iterable[VectorType] = dict.fromkeys(body.embedding_types or ["float"])  # each once
    content = {
        "id": exchange.request_id,
        "response_type": "embeddings_floats" if is_plain else "embeddings_by_type",
        "embeddings": vectors if is_plain else {kind: as_type(vectors, kind) for kind in types},
        "texts": texts,
        "meta": {
            "api_version": {"version": version},
            "billed_units": {"input_tokens": outcome.timings.num_tokens},
        },
    }
    return json_answer(exchange, content, num_characters=count_characters(texts))


def _texts(body: CohereEmbedRequest) -> list[str]:
    if (body.texts is None) == (body.inputs is None):
        raise ServeError("validation", "give texts or inputs, and not both", param="texts")
    if body.texts is not None:
        return list(body.texts)
    return ["\n".join(part.text for part in one.content) for one in body.inputs or ()]


def _input_options(name: str | None, facts: ModelFacts, exchange: Exchange) -> dict[str, Any]:
    """The prompt or the task of an input type; of one without either, no prompt.

    Where the model's name has a task, that one stays, with its prompt.
    """
    if name is None:
        return prompt_options(exchange, facts, None)
    if any(facts.name == f"{facts.parent}:{task}" for task in facts.info["embedding_tasks"]):
        return {}
    names = _NAMES.get(name, (name,))
    for option, known in (
        ("task", facts.info["embedding_tasks"]),
        ("prompt_name", facts.info["prompts"]),
    ):
        found = next((one for one in names if one in known), None)
        if found is not None:
            return {option: found}
    return {"prompt": ""}
