"""TEI's routes: /embed and its relatives, /predict, /rerank, /tokenize, /decode, POST /."""

from typing import Any

import orjson
from pydantic import ValidationError
from starlette.responses import Response

from bytetx.errors import shown
from bytetx.serve.answers import check_batch, count_characters, json_answer, run
from bytetx.serve.calls import ModelFacts, Outcome
from bytetx.serve.errors import ServeError
from bytetx.serve.gateway import Exchange, validation_error
from bytetx.serve.schemas import (
    DecodeRequest,
    EmbedAllRequest,
    EmbedRequest,
    EmbedSparseRequest,
    PredictRequest,
    PredictTokensRequest,
    RerankRequest,
    SimilarityRequest,
    TokenizeRequest,
)
from bytetx.serve.site import need_task


async def embed(body: EmbedRequest, exchange: Exchange) -> Response:
    """One vector for each input."""
    facts = _model(exchange, body.model, "embed")
    check_batch(exchange, body.inputs, field="inputs")
    outcome = await run(
        exchange,
        facts,
        "embed",
        body.inputs,
        normalize=normalize_option(facts, body.normalize),
        dimensions=body.dimensions,
        pooling=exchange.site.settings.pooling_mode,
        truncate=truncates(exchange, body.truncate),
        **prompt_options(exchange, body.prompt_name),
        **_left(body.cuts_left),
    )
    return json_answer(exchange, outcome.arrays[0], num_characters=count_characters(body.inputs))


async def embed_all(body: EmbedAllRequest, exchange: Exchange) -> Response:
    """A vector for each token of each input, from the last layer; ColBERT models project them."""
    facts = _model(exchange, body.model, "embed_tokens")
    check_batch(exchange, body.inputs, field="inputs")
    outcome = await run(
        exchange,
        facts,
        "embed_tokens",
        body.inputs,
        truncate=truncates(exchange, body.truncate),
        **prompt_options(exchange, body.prompt_name),
        **_left(body.cuts_left),
    )
    vectors, bounds = outcome.arrays[0], outcome.arrays[1].tolist()
    content = [vectors[bounds[i] : bounds[i + 1]] for i in range(len(bounds) - 1)]
    return json_answer(exchange, content, num_characters=count_characters(body.inputs))


async def embed_sparse(body: EmbedSparseRequest, exchange: Exchange) -> Response:
    """The weights of each input that are not 0: token ids and numbers."""
    facts = _model(exchange, body.model, "embed_sparse")
    check_batch(exchange, body.inputs, field="inputs")
    outcome = await run(
        exchange,
        facts,
        "embed_sparse",
        body.inputs,
        truncate=truncates(exchange, body.truncate),
        **prompt_options(exchange, body.prompt_name),
        **_left(body.cuts_left),
    )
    content = _sparse_rows(outcome)
    return json_answer(exchange, content, num_characters=count_characters(body.inputs))


def _sparse_rows(outcome: Outcome) -> list[list[dict[str, Any]]]:
    indices, values, indptr = outcome.arrays
    bounds = indptr.tolist()
    return [
        [
            {"index": index, "value": value}
            for index, value in zip(
                indices[start:end].tolist(), values[start:end].tolist(), strict=True
            )
        ]
        for start, end in zip(bounds, bounds[1:], strict=False)
    ]


async def predict(body: PredictRequest, exchange: Exchange) -> Response:
    """The labels of each text or pair with their scores, best first."""
    return await _predict(body, exchange, is_nested=not body.inputs.is_single)


async def _predict(body: PredictRequest, exchange: Exchange, *, is_nested: bool) -> Response:
    facts = _model(exchange, body.model, "classify")
    check_batch(exchange, body.inputs, field="inputs")
    outcome = await run(
        exchange,
        facts,
        "classify",
        list(body.inputs),
        raw_scores=body.raw_scores,
        top_k=body.top_k,
        truncate=truncates(exchange, body.truncate),
        **_left(body.cuts_left),
    )
    rows = [[{"score": score, "label": label} for label, score in row] for row in outcome.rows]
    content = rows if is_nested else rows[0]
    return json_answer(exchange, content, num_characters=count_characters(body.inputs))


async def predict_tokens(body: PredictTokensRequest, exchange: Exchange) -> Response:
    """The tagged entities of each text, as Hugging Face's token-classification pipeline."""
    facts = _model(exchange, body.model, "tag")
    check_batch(exchange, body.inputs, field="inputs")
    options: dict[str, Any] = {"truncate": truncates(exchange, body.truncate)}
    if body.stride is not None:
        options = {"overflow": "chunk", "stride": body.stride}
    if body.cuts_left:
        raise ServeError(
            "validation", "truncation_direction Left is not for /predict_tokens; use stride"
        )
    outcome = await run(
        exchange,
        facts,
        "tag",
        list(body.inputs),
        aggregation=body.aggregation_strategy,
        ignore_labels=body.ignore_labels,
        **options,
    )
    is_token = body.aggregation_strategy == "none"
    rows = [[_entity(entity, is_token=is_token) for entity in row] for row in outcome.rows]
    content = rows[0] if body.inputs.is_single else rows
    return json_answer(exchange, content, num_characters=count_characters(body.inputs))


def _entity(entity: dict[str, Any], *, is_token: bool) -> dict[str, Any]:
    """With the keys of Hugging Face's pipeline."""
    row = {
        "entity" if is_token else "entity_group": entity["entity"],
        "score": entity["score"],
        "word": entity["word"],
        "start": entity["start"],
        "end": entity["end"],
    }
    return row | ({"index": entity["index"]} if is_token else {})


async def rerank(body: RerankRequest, exchange: Exchange) -> Response:
    """The texts by how well they answer the query, best first."""
    facts = _model(exchange, body.model, "rerank")
    check_batch(exchange, body.texts, field="texts")
    if body.cuts_left:
        raise ServeError("validation", "truncation_direction Left is for single texts, not pairs")
    outcome = await run(
        exchange,
        facts,
        "rerank",
        [body.query, body.texts],
        raw_scores=body.raw_scores,
        truncate=truncates(exchange, body.truncate),
    )
    content = [
        {"index": index, "score": score} | ({"text": body.texts[index]} if body.return_text else {})
        for index, score in outcome.rows
    ]
    characters = len(body.query) * len(body.texts) + count_characters(body.texts)
    return json_answer(exchange, content, num_characters=characters)


async def similarity(body: SimilarityRequest, exchange: Exchange) -> Response:
    """How similar each sentence is to the source sentence, by the model's own function."""
    facts = _model(exchange, body.model, "embed")
    check_batch(exchange, body.inputs.sentences, field="inputs.sentences")
    given = body.parameters
    texts = [body.inputs.source_sentence, *body.inputs.sentences]
    outcome = await run(
        exchange,
        facts,
        "similarity",
        texts,
        pooling=exchange.site.settings.pooling_mode,
        truncate=truncates(exchange, None if given is None else given.truncate),
        **prompt_options(exchange, None if given is None else given.prompt_name),
        **_left(given is not None and given.cuts_left),
    )
    return json_answer(exchange, outcome.rows, num_characters=count_characters(texts))


async def tokenize(body: TokenizeRequest, exchange: Exchange) -> Response:
    """The tokens of each text: ids, the text that each stands for, and where it is."""
    facts = _model(exchange, body.model, "tokenize")
    check_batch(exchange, body.inputs, field="inputs")
    outcome = await run(
        exchange,
        facts,
        "tokenize",
        body.inputs,
        add_special_tokens=body.add_special_tokens,
        **prompt_options(exchange, body.prompt_name),
    )
    return json_answer(exchange, outcome.rows)


async def decode(body: DecodeRequest, exchange: Exchange) -> Response:
    """The text of each list of token ids."""
    facts = _model(exchange, body.model, "tokenize")
    check_batch(exchange, body.ids, field="ids")
    outcome = await run(
        exchange, facts, "decode", body.ids, skip_special_tokens=body.skip_special_tokens
    )
    return json_answer(exchange, outcome.rows)


async def main_task(exchange: Exchange) -> Response:
    """What the model is for: /similarity for its inputs, else /embed, /predict, /rerank or
    /predict_tokens, as TEI and Hugging Face's InferenceClient use this route."""
    raw = exchange.body_bytes
    try:
        given = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise ServeError("validation", f"the body is no JSON: {error}") from None
    if not isinstance(given, dict):
        raise ServeError("validation", "the body must be a JSON object")
    if isinstance(given.get("inputs"), dict):
        return await similarity(_parsed(SimilarityRequest, raw), exchange)
    parameters = given.get("parameters")
    is_hub_api = isinstance(parameters, dict)
    if isinstance(parameters, dict):
        raw = orjson.dumps(given | _hub_options(parameters))
    named = given.get("model")
    name = exchange.model_name or (named if isinstance(named, str) else None)
    task = exchange.site.find_model(name).main_task
    if task == "embed_sparse":
        return await embed_sparse(_parsed(EmbedSparseRequest, raw), exchange)
    if task == "rerank" and "query" in given:
        return await rerank(_parsed(RerankRequest, raw), exchange)
    if task in ("classify", "rerank"):
        body = _parsed(PredictRequest, raw)
        return await _predict(body, exchange, is_nested=is_hub_api or not body.inputs.is_single)
    if task == "tag":
        return await predict_tokens(_parsed(PredictTokensRequest, raw), exchange)
    return await embed(_parsed(EmbedRequest, raw), exchange)


def _hub_options(parameters: dict[str, Any]) -> dict[str, Any]:
    """The hub's names of options, as InferenceClient sends them, in TEI's."""
    options = dict(parameters)
    function = options.pop("function_to_apply", None)
    if function not in (None, "none"):
        raise ServeError(
            "validation",
            "function_to_apply must be none or left out, which is the model's own: "
            f"{shown(function)}",
        )
    return options | ({"raw_scores": True} if function == "none" else {})


def _parsed(model: Any, raw: bytes) -> Any:
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        raise validation_error(error) from None


def _model(exchange: Exchange, name: str | None, task: str) -> ModelFacts:
    facts = exchange.site.find_model(exchange.model_name or name)
    need_task(facts, task, kind="backend")
    return facts


def truncates(exchange: Exchange, given: bool | None) -> bool:
    return exchange.site.settings.auto_truncate if given is None else given


def normalize_option(facts: ModelFacts, given: bool | None) -> bool | None:
    """None where the checkpoint does so by itself: a second time would change the last bits."""
    return None if given and "Normalize" in facts.info["sentence_modules"] else given


def prompt_options(exchange: Exchange, prompt_name: str | None) -> dict[str, str]:
    """Options of Model.embed; the server's default where the request names no prompt."""
    settings = exchange.site.settings
    if prompt_name is not None:
        return {"prompt_name": prompt_name}
    if settings.default_prompt is not None:
        return {"prompt": settings.default_prompt}
    if settings.default_prompt_name is not None:
        return {"prompt_name": settings.default_prompt_name}
    return {}


def _left(cuts_left: bool) -> dict[str, bool]:
    return {"left": True} if cuts_left else {}
