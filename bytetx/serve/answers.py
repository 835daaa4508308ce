"""Answers of endpoints: JSON bodies with TEI's timing headers."""

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from bytetx.serve.calls import Call, ModelFacts, Outcome
from bytetx.serve.errors import ServeError
from bytetx.serve.gateway import Exchange, WhileConnected

_OPTIONS = orjson.OPT_SERIALIZE_NUMPY
# orjson holds Python's lock: so many numbers or fields take about a millisecond.
_SLICE_VALUES = 1 << 13
# An answer of more values than this is written in a thread, and sent as it is written.
_MAX_INLINE_VALUES = 1 << 15
_PART_BYTES = 1 << 18
# Characters of /rerank, where the query counts once for each text, for each token of the queue.
_CHARACTERS_PER_TOKEN = 8
# The answer to a token of /tokenize takes some 70 bytes and 300 while it is made.
_TOKENIZE_PART = 4
_ENTRY_BYTES = 512  # an entity is the largest entry of a result's rows


def _num_bytes(outcome: Outcome) -> int:
    """About what a result takes."""
    size = sum(array.nbytes for array in outcome.arrays)
    for row in outcome.rows or ():
        is_list = isinstance(row, list | tuple | dict)
        size += len(row) if isinstance(row, str) else _ENTRY_BYTES * (len(row) if is_list else 1)
    return size


async def run(
    exchange: Exchange, facts: ModelFacts, task: str, inputs: Any, /, **options: Any
) -> Outcome:
    """Runs a task on a model; notes its timings for headers and the record."""
    exchange.facts = facts
    backend = exchange.site.ready_backend()
    outcome = await backend.run(Call(facts.name, task, inputs, options, exchange.priority))
    exchange.result_bytes += _num_bytes(outcome)
    earlier = exchange.timings
    exchange.timings = outcome.timings if earlier is None else outcome.timings.added(earlier)
    return outcome


def json_answer(exchange: Exchange, content: Any, *, num_characters: int | None = None) -> Response:
    """content: what orjson takes, contiguous numpy arrays among it; an Iterator in place of a list
    is read in a thread.

    num_characters: of the texts; with it, the answer has TEI's headers.
    """
    if _num_values(content) <= _MAX_INLINE_VALUES:
        body = orjson.dumps(content, option=_OPTIONS)
        response = Response(body, media_type="application/json")
    else:
        response = LongJson(exchange, json_slices(content))
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


class LongJson(Response):
    """JSON that is made slice by slice, in a thread, while it is sent: neither another request nor
    the memory of the whole waits for it."""

    media_type = "application/json"

    def __init__(self, exchange: Exchange, slices: Iterator[bytes]):
        self._exchange, self.slices = exchange, slices
        self.status_code = 200
        self.init_headers()
        self.raw_headers = [pair for pair in self.raw_headers if pair[0] != b"content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        in_thread = self._exchange.site.in_thread
        async with WhileConnected(receive):
            part = await in_thread(self._next_part)
            if scope.get("http_version") == "1.0":  # which knows no chunks
                while more := await in_thread(self._next_part):
                    part += more
                self.raw_headers.append((b"content-length", b"%d" % len(part)))
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(start)
            while part:
                await send({"type": "http.response.body", "body": part, "more_body": True})
                part = await in_thread(self._next_part)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _next_part(self) -> bytes:
        parts, size = [], 0
        for one in self.slices:
            parts.append(one)
            size += len(one)
            if size >= _PART_BYTES:
                break
        return b"".join(parts)


def joined_answers(exchange: Exchange, answers: Sequence[Response], *, key: str) -> Response:
    """An object with one list, of what the answers hold."""

    def slices() -> Iterator[bytes]:
        yield b"{" + _dumps(key) + b":["
        for place, answer in enumerate(answers):
            if place:
                yield b","
            yield from answer.slices if isinstance(answer, LongJson) else (bytes(answer.body),)
        yield b"]}"

    if any(isinstance(answer, LongJson) for answer in answers):
        return LongJson(exchange, slices())
    return Response(b"".join(slices()), media_type="application/json")


def json_slices(content: Any) -> Iterator[bytes]:
    """The JSON of a document in pieces of about _SLICE_VALUES numbers or fields."""
    if isinstance(content, Iterator):
        yield from _array_slices(content)
    elif _num_values(content) <= _SLICE_VALUES:
        yield _dumps(content)
    elif isinstance(content, dict):
        for place, (key, value) in enumerate(content.items()):
            yield (b"," if place else b"{") + _dumps(key) + b":"
            yield from json_slices(value)
        yield b"}"
    elif isinstance(content, np.ndarray) and content.ndim > 0:
        step = max(_SLICE_VALUES * len(content) // content.size, 1)
        rows = (content[i : i + step] for i in range(0, len(content), step))
        yield from _joined(_dumps(some)[1:-1] for some in rows)
    elif isinstance(content, list | tuple):
        yield from _array_slices(iter(content))
    else:
        yield _dumps(content)


def _array_slices(items: Iterator[Any]) -> Iterator[bytes]:
    """A JSON array: small items are written together, a large one in slices of its own."""
    group: list[Any] = []
    num_values, before = 0, b"["
    for item in items:
        size = _SLICE_VALUES + 1 if isinstance(item, Iterator) else _num_values(item)
        is_large = size > _SLICE_VALUES
        if not is_large:
            group.append(item)
            num_values += size
        if group and (is_large or num_values > _SLICE_VALUES):
            yield before + _dumps(group)[1:-1]
            group, num_values, before = [], 0, b","
        if is_large:
            yield before
            yield from json_slices(item)
            before = b","
    if group:
        yield before + _dumps(group)[1:-1]
        before = b","
    yield b"[]" if before == b"[" else b"]"


def _joined(parts: Iterable[bytes]) -> Iterator[bytes]:
    before = b"["
    for part in parts:
        yield before + part
        before = b","
    yield b"]"


def _dumps(content: Any) -> bytes:
    return orjson.dumps(content, option=_OPTIONS)


def _num_values(content: Any) -> int:
    """About how many numbers and fields a document has; it is not counted beyond a long list's."""
    if isinstance(content, np.ndarray):
        return content.size
    if isinstance(content, str):
        return 1 + len(content) // 64
    if isinstance(content, dict):
        return 1 + sum(map(_num_values, content.values()))
    if isinstance(content, list | tuple):
        if len(content) > _SLICE_VALUES:
            return _MAX_INLINE_VALUES + 1
        return 1 + sum(map(_num_values, content))
    return _MAX_INLINE_VALUES + 1 if isinstance(content, Iterator) else 1


def check_characters(exchange: Exchange, count: int, *, field: str, shared: str = "query") -> None:
    """Raises ServeError where a query and the texts that it is read with are too much work.

    count: characters, those of the query once for each text.  shared: what stands for the query.
    """
    settings = exchange.site.settings
    most = max(settings.max_queued_tokens * _CHARACTERS_PER_TOKEN, settings.payload_limit_bytes)
    if count > most:
        raise ServeError(
            "too_large",
            f"{field} and the {shared}, read once for each of them, have {count} characters "
            f"in all; the most is {most}, {_CHARACTERS_PER_TOKEN} for each of --max-queued-tokens",
            param=field,
        )


def check_tokenize(exchange: Exchange, count: int, *, field: str, unit: str) -> None:
    """Raises ServeError where texts have more characters, or lists more ids, than may be asked for
    at once."""
    most = max(exchange.site.settings.max_queued_tokens // _TOKENIZE_PART, 1)
    if count > most:
        raise ServeError(
            "too_large",
            f"{field} has {count} {unit}, the most is {most}, a quarter of --max-queued-tokens; "
            "send it in parts",
            param=field,
        )


def count_characters(inputs: Iterable[Any]) -> int:
    """Count the characters of strings and pairs; token ids have none."""
    count = 0
    for item in inputs:
        if isinstance(item, str):
            count += len(item)
        elif item and isinstance(item[0], str):
            count += sum(map(len, item))
    return count


def count_read_characters(texts: Sequence[str], shared: Iterable[str | None]) -> int:
    """Count what a model reads that reads the shared texts with each of the others."""
    return count_characters(filter(None, shared)) * len(texts) + count_characters(texts)


def check_batch(exchange: Exchange, inputs: list[Any], *, field: str) -> None:
    """Raises ServeError for an empty list and for one above --max-client-batch-size."""
    if not inputs:
        raise ServeError("empty", f"{field} must not be empty", param=field)
    most = exchange.site.settings.max_client_batch_size
    if len(inputs) > most:
        raise ServeError(
            "limit",
            f"{field} has {len(inputs)} entries, the most is {most} (--max-client-batch-size)",
            param=field,
        )


def _milliseconds(seconds: float) -> bytes:
    return b"%d" % round(seconds * 1000)
