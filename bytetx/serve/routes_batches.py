"""OpenAI's files and batches: POST /v1/files, POST /v1/batches, and what is asked of them."""

import time
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect
from starlette.responses import FileResponse, Response

from bytetx.errors import shown
from bytetx.serve.answers import json_answer
from bytetx.serve.batch_store import MAX_FILE_BYTES, BatchStore
from bytetx.serve.connections import RENEW
from bytetx.serve.errors import ServeError
from bytetx.serve.gateway import ClientLeftError, Exchange
from bytetx.serve.schemas import BatchRequest

# Routes that a batch may name: those with a body that says all.
ENDPOINTS = (
    *("/v1/embeddings", "/v1/chat/completions", "/v1/completions", "/v1/rerank", "/v1/decisions"),
    *("/v1/systemone", "/v1/score", "/v2/embed", "/v2/rerank", "/embed", "/embed_all"),
    *("/embed_sparse", "/predict", "/predict_tokens", "/extract", "/fill_schema", "/rerank"),
    *("/similarity", "/classify", "/pooling", "/tasks"),
)
_FORM_BYTES = 1 << 16  # an upload may have beside its file
_MAX_UPLOADS = 4  # at a time, of a process: each has its bytes in a temporary file first
_LEAST_RATE = 100_000  # bytes a second of an upload that may take longer than other bodies
_MAX_FILENAME = 255
_MAX_HOURS = 168
_LIST_LIMITS = {"/v1/files": 10_000, "/v1/batches": 100}


async def create_file(exchange: Exchange) -> Response:
    """Keeps a file of lines for a batch: a form with the parts file and purpose, which is batch."""
    store = _store(exchange)
    if store.num_uploads >= _MAX_UPLOADS:
        raise ServeError(
            "overloaded", f"{_MAX_UPLOADS} files are being uploaded; try again", retry_after_s=1
        )
    store.num_uploads += 1
    try:
        parser = MultiPartParser(exchange.headers, _read(exchange), max_files=1, max_fields=4)
        form = await parser.parse()
    except (MultiPartException, KeyError) as error:
        reason = getattr(error, "message", "the body is no multipart/form-data")
        raise ServeError("validation", str(reason)) from None
    except ClientDisconnect:
        raise ClientLeftError from None
    finally:
        store.num_uploads -= 1
    try:
        file, purpose = form.get("file"), form.get("purpose")
        unknown = next((name for name in form if name not in ("file", "purpose")), None)
        if unknown is not None:
            raise ServeError("unsupported", f"{shown(unknown)} is not supported", param=unknown)
        if not isinstance(file, UploadFile):
            raise ServeError("validation", "file must be a file", param="file")
        if purpose != "batch":
            raise ServeError(
                "unsupported", f"purpose must be batch, got {shown(purpose)}", param="purpose"
            )
        name = (file.filename or "file")[:_MAX_FILENAME]
        made = await store.in_thread(store.add_file, file.file, name, "batch")
    finally:
        await form.close()
    return json_answer(exchange, made)


async def _read(exchange: Exchange) -> AsyncGenerator[bytes, None]:
    """The parts of an upload; ServeError where it is too long."""
    size, start = 0, time.monotonic()
    renew = (exchange.scope.get("extensions") or {}).get(RENEW)
    async for part in exchange.stream():
        size += len(part)
        if renew is not None and size > _LEAST_RATE * (time.monotonic() - start):
            renew()
        if size > MAX_FILE_BYTES + _FORM_BYTES:
            raise ServeError("too_large", f"a file may have {MAX_FILE_BYTES:,} bytes", param="file")
        yield part
    exchange.is_body_read = True


async def list_files(exchange: Exchange) -> Response:
    """The files: the newest first, unless `order` is asc; `after`, `limit`, `purpose`."""
    order = exchange.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise ServeError("validation", f"order must be asc or desc, got {shown(order)}")
    files = partial(
        _store(exchange).files,
        purpose=exchange.query_params.get("purpose"),
        newest_first=order == "desc",
    )
    return await _page(exchange, files)


async def get_file(exchange: Exchange) -> Response:
    """A file's size, name and purpose."""
    store = _store(exchange)
    return json_answer(exchange, await store.in_thread(store.file, _id(exchange)))


async def get_content(exchange: Exchange) -> Response:
    """A file's bytes."""
    store, name = _store(exchange), _id(exchange)
    await store.in_thread(store.file, name)
    return FileResponse(store.content_path(name), media_type="application/octet-stream")


async def delete_file(exchange: Exchange) -> Response:
    """Deletes a file that no batch reads any more."""
    store, name = _store(exchange), _id(exchange)
    await store.in_thread(store.delete_file, name)
    return json_answer(exchange, {"id": name, "object": "file", "deleted": True})


async def create_batch(body: BatchRequest, exchange: Exchange) -> Response:
    """Runs each line of a file as a request of the endpoint, after all that somebody waits for."""
    store = _store(exchange)
    if body.endpoint not in ENDPOINTS:
        raise ServeError(
            "validation",
            f"endpoint must be one of {', '.join(ENDPOINTS)}, got {shown(body.endpoint)}",
            param="endpoint",
        )
    hours = int(body.completion_window[:-1])
    if hours > _MAX_HOURS:
        raise ServeError(
            "validation",
            f"completion_window must be 1h to {_MAX_HOURS}h, got {body.completion_window}",
            param="completion_window",
        )
    file = await store.in_thread(store.file, body.input_file_id)
    if file["purpose"] != "batch":
        raise ServeError(
            "validation",
            f"the purpose of {body.input_file_id} is {file['purpose']}, not batch",
            param="input_file_id",
        )
    fields = {
        "endpoint": body.endpoint,
        "input_file_id": body.input_file_id,
        "completion_window": body.completion_window,
        "metadata": body.metadata,
    }
    made = await store.in_thread(partial(store.add_batch, fields, seconds=3600 * hours))
    return json_answer(exchange, made)


async def list_batches(exchange: Exchange) -> Response:
    """The batches, the newest first; `after`, `limit`."""
    return await _page(exchange, _store(exchange).batches)


async def get_batch(exchange: Exchange) -> Response:
    """How far a batch is."""
    store = _store(exchange)
    return json_answer(exchange, await store.in_thread(store.batch, _id(exchange)))


async def cancel_batch(exchange: Exchange) -> Response:
    """Runs no more lines of a batch; its files have those that were answered."""
    store = _store(exchange)
    return json_answer(exchange, await store.in_thread(store.cancel, _id(exchange)))


async def _page(exchange: Exchange, find: Any) -> Response:
    most, given = _LIST_LIMITS[exchange.route], exchange.query_params
    limit = given.get("limit", str(min(most, 20)) if exchange.route == "/v1/batches" else str(most))
    is_number = limit.isascii() and limit.isdigit() and len(limit) <= 9
    if not (is_number and 1 <= int(limit) <= most):
        raise ServeError("validation", f"limit must be 1 to {most:,}, got {shown(limit)}")
    asked = partial(find, after=given.get("after"), limit=int(limit) + 1)
    found = await _store(exchange).in_thread(asked)
    shown_ones = found[: int(limit)]
    content = {
        "object": "list",
        "data": shown_ones,
        "first_id": shown_ones[0]["id"] if shown_ones else None,
        "last_id": shown_ones[-1]["id"] if shown_ones else None,
        "has_more": len(found) > len(shown_ones),
    }
    return json_answer(exchange, content)


def _store(exchange: Exchange) -> BatchStore:
    store = exchange.site.batches
    if store is None:
        raise ServeError(
            "not_found", "files and batches are off; start the server with --batch-dir FOLDER"
        )
    return store


def _id(exchange: Exchange) -> str:
    name: str = exchange.path_params["id"]
    return name
