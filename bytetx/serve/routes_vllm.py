"""vLLM's routes for models that do not generate: /score, /classify and /pooling."""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
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
from bytetx.serve.routes_tei import left_option, normalize_option, prompt_options, truncates
from bytetx.serve.schemas_pooling import ClassifyRequest, PoolRequest, ScoreRequest
from bytetx.serve.site import need_task
from bytetx.serve.vector_types import as_type

# The task of the engine for each of /pooling's.
_TASKS = {"embed": "embed", "token_embed": "embed_tokens", "classify": "classify"}
_MAX_CALLS = 256  # that a request has in the queue, which leaves room for others


async def score(body: ScoreRequest, exchange: Exchange) -> Response:
    """How well texts fit each other: a reranker's score of each pair, else the similarity of the
    vectors; of a model of late interaction MaxSim, with text_1 as the query.

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
    if task == "embed":
        values = await _similarities(exchange, facts, pairs, body)
    else:
        values = await _reranked(exchange, facts, pairs, body)
    data = [
        {"index": index, "object": "score", "score": value} for index, value in enumerate(values)
    ]
    return _answer(exchange, facts, data, characters)


async def _similarities(
    exchange: Exchange, facts: ModelFacts, pairs: Sequence[tuple[str, str]], body: ScoreRequest
) -> list[float]:
    """The similarity of each pair's vectors; a text that comes again is read once."""
    places: dict[str, int] = {}
    for text in chain.from_iterable(pairs):
        places.setdefault(text, len(places))
    outcome = await run(
        exchange,
        facts,
        "similarity",
        list(places),
        pairs=[[places[text] for text in side] for side in zip(*pairs, strict=True)],
        pooling=exchange.site.settings.pooling,
        truncate=truncates(exchange, body.truncates),
        **prompt_options(exchange, facts, None),
        **left_option(body.cuts_left),
    )
    return list(outcome.rows)


async def _reranked(
    exchange: Exchange, facts: ModelFacts, pairs: Sequence[tuple[str, str]], body: ScoreRequest
) -> list[float]:
    """The reranker's score of each pair: a call for each text of the left, some at a time."""
    of_left: dict[str, list[int]] = {}
    for index, (left, _) in enumerate(pairs):
        of_left.setdefault(left, []).append(index)
    waiting, values = deque(of_left.items()), [0.0] * len(pairs)
    options = {
        "raw_scores": not body.use_activation,
        "truncate": truncates(exchange, body.truncates),
        **left_option(body.cuts_left),
    }

    async def work() -> None:
        while waiting:
            left, own = waiting.popleft()
            inputs = [left, [pairs[index][1] for index in own]]
            try:
                outcome = await run(exchange, facts, "rerank", inputs, **options)
            except BaseException:
                waiting.clear()
                raise
            for place, value in outcome.rows:
                values[own[place]] = value

    calls = [work() for _ in range(min(_MAX_CALLS, len(of_left)))]
    # Those that run end too before an error is answered.
    for ended in await asyncio.gather(*calls, return_exceptions=True):
        if ended is not None:
            raise ended
    return values


async def classify(body: ClassifyRequest, exchange: Exchange) -> Response:
    """The best label of each text, and the probabilities of all, in the checkpoint's order.

    A list of strings is one of texts; /predict takes pairs.
    """
    facts = exchange.site.find_model(exchange.model_name or body.model)
    outcome = await _classified(body, facts, exchange)
    data = []
    for index, row in enumerate(outcome.rows):
        label, *_ = row[0]
        probs = _in_order(row)
        one = {"index": index, "label": label, "probs": probs, "num_classes": len(probs)}
        data.append(one)
    return _answer(exchange, facts, data, count_characters(body.input))


async def _classified(
    body: ClassifyRequest | PoolRequest, facts: ModelFacts, exchange: Exchange
) -> Outcome:
    need_task(facts, "classify", kind="backend")
    check_batch(exchange, body.input, field="input")
    return await run(
        exchange,
        facts,
        "classify",
        list(body.input),
        raw_scores=not body.use_activation,
        truncate=truncates(exchange, body.truncates),
        **left_option(body.cuts_left),
    )


def _in_order(row: Sequence[tuple[str, float, int]]) -> list[float]:
    """A text's scores, best first, by the numbers of their classes."""
    return [value for _, value, _ in sorted(row, key=lambda one: one[2])]


async def pooling(body: PoolRequest, exchange: Exchange) -> Response:
    """A vector of each text, one of each of its tokens, or its probabilities."""
    facts = exchange.site.find_model(exchange.model_name or body.model)
    task = body.task or _main_task(facts)
    _check_options(body, task)
    if task == "classify":
        outcome = await _classified(body, facts, exchange)
        rows: Any = [_in_order(row) for row in outcome.rows]
        if body.encoding_format == "base64":
            rows = as_type(np.array(rows, dtype=np.float32), "base64")
        return _answer(exchange, facts, _pooled(rows), count_characters(body.input))
    need_task(facts, _TASKS[task], kind="backend")
    check_batch(exchange, body.input, field="input")
    options = {
        "truncate": truncates(exchange, body.truncates),
        **prompt_options(exchange, facts, None),
        **left_option(body.cuts_left),
    }
    if task == "embed":
        options |= {
            "normalize": normalize_option(facts, body.use_activation),
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


def _check_options(body: PoolRequest, task: str) -> None:
    """Raises ServeError for an option that the task does not have."""
    is_refused = {
        "dimensions": body.dimensions is not None and task != "embed",
        "use_activation": not body.use_activation and task == "token_embed",
    }
    for name, refuses in is_refused.items():
        if refuses:
            raise ServeError(
                "unsupported",
                f"{name} is not supported for the task {task}; leave it out",
                param=name,
                code="unsupported_parameter",
            )


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
