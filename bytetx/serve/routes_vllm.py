"""vLLM's routes for models that do not generate: /score, /classify and /pooling."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from starlette.responses import Response

from bytetx.serve.answers import (
    check_batch,
    check_characters,
    count_characters,
    json_answer,
    run,
)
from bytetx.serve.calls import ModelFacts, Outcome
from bytetx.serve.errors import ServeError
from bytetx.serve.gateway import Exchange
from bytetx.serve.routes_tei import normalize_option, prompt_options, truncates
from bytetx.serve.schemas_pooling import ClassifyRequest, PoolRequest, ScoreRequest
from bytetx.serve.site import need_task
from bytetx.serve.vector_types import as_type

# The task of the engine for each of /pooling's.
_TASKS = {"embed": "embed", "token_embed": "embed_tokens", "classify": "classify"}


async def score(body: ScoreRequest, exchange: Exchange) -> Response:
    """How well texts fit each other: a reranker's score of each pair, else the similarity of the
    vectors.

    text_1: one text for all of text_2, or one for each.
    """
    facts = exchange.site.find_model(exchange.model_name or body.model)
    task = "rerank" if "rerank" in facts.tasks else "embed"
    need_task(facts, task, kind="backend")
    lefts, rights = list(body.text_1), list(body.text_2)
    check_batch(exchange, lefts, field="text_1")
    check_batch(exchange, rights, field="text_2")
    if len(lefts) not in (1, len(rights)):
        raise ServeError(
            "validation",
            f"text_1 must have one entry, or as many as text_2, got {len(lefts)} and {len(rights)}",
            param="text_1",
        )
    pairs = list(zip(lefts * (len(rights) // len(lefts)), rights, strict=True))
    characters = count_characters(pairs)
    check_characters(exchange, characters, field="text_2", shared="text_1")
    of_left: dict[str, list[int]] = {}
    for index, (left, _) in enumerate(pairs):
        of_left.setdefault(left, []).append(index)
    calls = [
        _scores(exchange, facts, task, left, [rights[index] for index in own], body.truncate)
        for left, own in of_left.items()
    ]
    # The others end too before an error is answered.
    found = await asyncio.gather(*calls, return_exceptions=True)
    values = [0.0] * len(pairs)
    for own, scores in zip(of_left.values(), found, strict=True):
        if isinstance(scores, BaseException):
            raise scores
        for index, value in zip(own, scores, strict=True):
            values[index] = value
    data = [
        {"index": index, "object": "score", "score": value} for index, value in enumerate(values)
    ]
    return _answer(exchange, facts, data, characters)


async def _scores(
    exchange: Exchange,
    facts: ModelFacts,
    task: str,
    left: str,
    rights: Sequence[str],
    truncate: bool | None,
) -> list[float]:
    """The score of each right text, in their order."""
    options: dict[str, Any] = {"truncate": truncates(exchange, truncate)}
    if task == "embed":
        options |= {"pooling": exchange.site.settings.pooling, **prompt_options(exchange, None)}
        outcome = await run(exchange, facts, "similarity", [left, *rights], **options)
        return list(outcome.rows)
    outcome = await run(exchange, facts, "rerank", [left, list(rights)], **options)
    return [value for _, value in sorted(outcome.rows)]


async def classify(body: ClassifyRequest, exchange: Exchange) -> Response:
    """The best label of each text, and the probabilities of all, in the checkpoint's order."""
    facts = exchange.site.find_model(exchange.model_name or body.model)
    outcome = await _classified(body.input, facts, body.truncate, exchange)
    labels = facts.info["labels"]
    data = []
    for index, row in enumerate(outcome.rows):
        label, _ = row[0]
        probs = _in_order(row, labels)
        one = {"index": index, "label": label, "probs": probs, "num_classes": len(probs)}
        data.append(one)
    return _answer(exchange, facts, data, count_characters(body.input))


async def _classified(
    inputs: list[Any], facts: ModelFacts, truncate: bool | None, exchange: Exchange
) -> Outcome:
    need_task(facts, "classify", kind="backend")
    check_batch(exchange, inputs, field="input")
    truncate = truncates(exchange, truncate)
    return await run(exchange, facts, "classify", list(inputs), raw_scores=False, truncate=truncate)


def _in_order(row: Sequence[tuple[str, float]], labels: Sequence[str]) -> list[float]:
    """A text's scores by label, best first, in the order of the labels."""
    places = {label: place for place, label in enumerate(labels)}
    return [value for _, value in sorted(row, key=lambda one: places.get(one[0], len(places)))]


async def pooling(body: PoolRequest, exchange: Exchange) -> Response:
    """A vector of each text, one of each of its tokens, or its probabilities."""
    facts = exchange.site.find_model(exchange.model_name or body.model)
    task = body.task or _main_task(facts)
    if task == "classify":
        outcome = await _classified(body.input, facts, body.truncate, exchange)
        rows: Any = [_in_order(row, facts.info["labels"]) for row in outcome.rows]
        return _answer(exchange, facts, _pooled(rows), count_characters(body.input))
    need_task(facts, _TASKS[task], kind="backend")
    check_batch(exchange, body.input, field="input")
    options = {"truncate": truncates(exchange, body.truncate), **prompt_options(exchange, None)}
    if task == "embed":
        options |= {
            "normalize": normalize_option(facts, True),
            "dimensions": body.dimensions,
            "pooling": exchange.site.settings.pooling,
        }
    outcome = await run(exchange, facts, _TASKS[task], body.input, **options)
    vectors = outcome.arrays[0]
    if task == "token_embed":
        bounds = outcome.arrays[1].tolist()
        rows = [vectors[start:end] for start, end in zip(bounds, bounds[1:], strict=False)]
        if body.encoding_format == "base64":
            rows = [as_type(row.reshape(1, -1), "base64")[0] for row in rows]
    else:
        rows = as_type(vectors, body.encoding_format)
    return _answer(exchange, facts, _pooled(rows), count_characters(body.input))


def _main_task(facts: ModelFacts) -> str:
    if facts.gives_token_vectors:
        return "token_embed"
    return "embed" if "embed" in facts.tasks else "classify"


def _pooled(rows: Sequence[Any]) -> list[dict[str, Any]]:
    return [{"index": index, "object": "pooling", "data": row} for index, row in enumerate(rows)]


def _answer(
    exchange: Exchange, facts: ModelFacts, data: list[dict[str, Any]], num_characters: int
) -> Response:
    num_tokens = 0 if exchange.timings is None else exchange.timings.num_tokens
    content = {
        "id": exchange.request_id,
        "object": "list",
        "created": int(time.time()),
        "model": facts.name,
        "data": data,
        "usage": {
            "prompt_tokens": num_tokens,
            "total_tokens": num_tokens,
            "completion_tokens": 0,
        },
    }
    return json_answer(exchange, content, num_characters=num_characters)
