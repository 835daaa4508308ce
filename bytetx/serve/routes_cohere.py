"""Cohere's embeddings."""

from collections.abc import Iterable

from starlette.responses import Response

from bytetx.serve.answers import check_batch, count_characters, json_answer, run
from bytetx.serve.errors import ServeError
from bytetx.serve.gateway import Exchange
from bytetx.serve.routes_openai import find_model
from bytetx.serve.routes_tei import input_options, left_option, normalize_option
from bytetx.serve.schemas_pooling import CohereEmbedRequest
from bytetx.serve.vector_types import VectorType, as_type


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
        **input_options(exchange, facts, body.input_type),
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
