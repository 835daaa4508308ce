"""Answers of endpoints: JSON bodies with TEI's timing headers."""

import time
from collections.abc import Iterable
from typing import Any

import orjson
from starlette.responses import Response

from bytetx.serve.calls import Call, ModelFacts, Outcome
from bytetx.serve.errors import ServeError
from bytetx.serve.gateway import Exchange

_OPTIONS = orjson.OPT_SERIALIZE_NUMPY


async def run(
    exchange: Exchange, facts: ModelFacts, task: str, inputs: Any, **options: Any
) -> Outcome:
    """Runs a task on a model; notes its timings for headers and the record."""
    exchange.facts = facts
    backend = exchange.site.ready_backend()
    outcome = await backend.run(Call(facts.name, task, inputs, options))
    exchange.timings = outcome.timings
    return outcome


def json_answer(exchange: Exchange, content: Any, *, num_characters: int | None = None) -> Response:
    """content: what orjson takes, contiguous numpy arrays among it.

    num_characters: of the texts; with it, the answer has TEI's headers.
    """
    response = Response(orjson.dumps(content, option=_OPTIONS), media_type="application/json")
    timings = exchange.timings
    if num_characters is not None and timings is not None:
        seconds = time.perf_counter() - exchange.started
        device = "" if exchange.facts is None else str(exchange.facts.info["device"])
        kind = b"cpu" if device.startswith("cpu") else b"gpu+optimized"
        headers = (
            (b"x-compute-type", kind),
            (b"x-compute-time", _milliseconds(seconds)),
            (b"x-compute-characters", b"%d" % num_characters),
            (b"x-compute-tokens", b"%d" % timings.num_tokens),
            (b"x-total-time", _milliseconds(seconds)),
            (b"x-tokenization-time", _milliseconds(timings.tokenize_seconds)),
            (b"x-queue-time", _milliseconds(timings.queue_seconds)),
            (b"x-inference-time", _milliseconds(timings.compute_seconds)),
        )
        response.raw_headers.extend(headers)
    return response


def count_characters(inputs: Iterable[Any]) -> int:
    """Of strings and pairs; token ids have none."""
    count = 0
    for item in inputs:
        if isinstance(item, str):
            count += len(item)
        elif item and isinstance(item[0], str):
            count += sum(map(len, item))
    return count


def check_batch(exchange: Exchange, inputs: list[Any], *, field: str) -> None:
    """Raises ServeError for an empty list and for one above --max-client-batch-size."""
    if not inputs:
        raise ServeError("empty", f"{field} must not be empty", param=field)
    most = exchange.site.settings.max_client_batch_size
    if len(inputs) > most:
        raise ServeError(
            "validation",
            f"{field} has {len(inputs)} entries, the most is {most} (--max-client-batch-size)",
            param=field,
        )


def _milliseconds(seconds: float) -> bytes:
    return b"%d" % round(seconds * 1000)
