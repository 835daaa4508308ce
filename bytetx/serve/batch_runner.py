"""Runs batches: the lines of their input files, at low priority, by the routes that they name.

Of the processes that share a folder the one that holds its lock runs all batches; where it ends,
another one goes on. A line is a call of its endpoint in this process, without a connection. All
lines in flight together have at most half of a step's tokens, or an eighth while this process
answers requests, and the engine takes them after everything else: no request waits for more than a
step because of them.
"""

import asyncio
import logging
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Message

from bytetx.serve.answers import LongJson
from bytetx.serve.batch_lines import MAX_LINES, BatchLine, Journal, count_lines, read_lines
from bytetx.serve.batch_store import BatchStore
from bytetx.serve.errors import ServeError, as_serve_error
from bytetx.serve.gateway import Exchange, Route, parse
from bytetx.serve.records import BATCH_LINE, Finished
from bytetx.serve.site import Site

logger = logging.getLogger("bytetx.serve")

_PRIORITY = 1  # requests have 0
_IDLE_SHARE, _BUSY_SHARE = 2, 8  # parts of a step's tokens that lines in flight may have
_LINE_SHARE = 4  # the part of --max-concurrent-requests that lines in flight may be
_MAX_RUNNING = 8  # batches at a time, which take turns
_POLL_S = 1.0  # for what other processes do, and for the progress that they see
_FAULT_S = 10.0  # before a batch is tried again whose files could not be read or written
_MOST_RETRY_S = 5.0
_SWEEP_S = 3600.0
_MISSING = "invalid_input_file", "the input file is not there any more"
_EMPTY = "empty_file", "the input file has no lines"
_TOO_LONG = (
    "too_many_lines",
    f"the input file has more than {MAX_LINES:,} lines; make several of it",
)
_STOPPED = {
    "batch_expired": "The line was not run before the completion window of its batch ended.",
    "batch_cancelled": "The line was not run before its batch was cancelled.",
}


@dataclass(eq=False, slots=True)
class _Run:
    """A batch that runs.  stop_code: of _STOPPED, once it runs no more lines.

    stopped: lines that were in flight then.  saving: held while its file is written.
    num_refused: lines that wait to be tried again; it starts no others meanwhile.
    """

    batch: dict[str, Any]
    stop_code: str | None = None
    lines: set["asyncio.Task[None]"] = field(default_factory=set)
    stopped: list[BatchLine] = field(default_factory=list)
    journal: Journal | None = None
    saving: asyncio.Lock = field(default_factory=asyncio.Lock)
    num_refused: int = 0
    goes_on: asyncio.Event = field(default_factory=asyncio.Event)

    def stop(self, code: str) -> None:
        self.stop_code = code
        for task in self.lines:
            task.cancel()


class BatchRunner:
    """routes: by (method, path), for the endpoints of batches."""

    def __init__(self, site: Site, store: BatchStore, routes: Mapping[tuple[str, str], Route]):
        self._site, self._store, self._routes = site, store, routes
        self._runs: dict[str, _Run] = {}
        self._ended: set[str] = set()  # ids of batches that are not looked at any more
        self._turn = asyncio.Lock()  # held by the line that waits for room
        self._has_room, self._is_changed = asyncio.Event(), asyncio.Event()
        self._num_lines = self._num_tokens = 0  # in flight

    async def run(self) -> None:
        """Runs until it is cancelled; lines in flight are then run again by the next one."""
        store, loop = self._store, asyncio.get_running_loop()
        try:
            while (lock := await store.in_thread(store.take_lock)) is None:
                await asyncio.sleep(_POLL_S)
        except OSError as error:
            logger.error("batches are not run: %s cannot be locked: %s", store.folder, error)
            return

        def on_change() -> None:
            loop.call_soon_threadsafe(self._is_changed.set)

        store.on_change = on_change
        tasks: dict[str, asyncio.Task[None]] = {}
        swept = -float("inf")
        try:
            while True:
                try:
                    if time.monotonic() - swept >= _SWEEP_S:
                        await store.in_thread(store.sweep)
                        swept = time.monotonic()
                    await self._tick(tasks)
                except OSError:
                    logger.exception("the folder of batches cannot be read or written")
                with suppress(TimeoutError):
                    async with asyncio.timeout(_POLL_S):
                        await self._is_changed.wait()
        finally:
            store.on_change = lambda: None
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
            os.close(lock)

    async def _tick(self, tasks: dict[str, "asyncio.Task[None]"]) -> None:
        """Starts batches, ends those that are to end, and writes how far they are."""
        store = self._store
        self._is_changed.clear()
        for name in [name for name, task in tasks.items() if task.done()]:
            del tasks[name]
        for batch in await store.in_thread(store.open_batches, self._ended):
            name = batch["id"]
            if name not in tasks and (len(tasks) < _MAX_RUNNING or self._is_over(batch)):
                tasks[name] = asyncio.create_task(self._guard(batch))
        for run in list(self._runs.values()):
            await self._look_at(run)

    def _is_over(self, batch: dict[str, Any]) -> bool:
        return time.time() >= batch["expires_at"] or self._store.is_cancelled(batch["id"])

    async def _look_at(self, run: _Run) -> None:
        """Ends a batch that was cancelled or is late, and writes how far it is."""
        if run.stop_code is None and run.journal is not None:
            if await self._store.in_thread(self._store.is_cancelled, run.batch["id"]):
                run.batch["cancelling_at"] = int(time.time())
                run.stop("batch_cancelled")
            elif time.time() >= run.batch["expires_at"]:
                run.stop("batch_expired")
        await self._save(run)

    async def _save(self, run: _Run, **changes: Any) -> None:
        async with run.saving:
            before = orjson.dumps(run.batch)
            run.batch |= changes
            if run.journal is not None:
                counts = run.journal.counts
                run.batch["request_counts"] |= {
                    "completed": counts["output"],
                    "failed": counts["error"],
                }
            if orjson.dumps(run.batch) != before:
                await self._store.in_thread(self._store.save_batch, run.batch)

    async def _guard(self, batch: dict[str, Any]) -> None:
        """A batch whose files cannot be read or written now is tried again; nothing is lost."""
        run = self._runs[batch["id"]] = _Run(batch)
        try:
            await self._run(run)
        except Exception:
            logger.exception("%s: it is tried again in %g s", batch["id"], _FAULT_S)
            await asyncio.sleep(_FAULT_S)
        finally:
            del self._runs[batch["id"]]
            if run.journal is not None:
                run.journal.close()

    async def _run(self, run: _Run) -> None:
        store, batch = self._store, run.batch
        path = store.content_path(batch["input_file_id"])
        if not path.exists():
            await self._fail(run, *_MISSING)
            return
        if batch["status"] == "validating":
            total = await store.in_thread(count_lines, path)
            if not 0 < total <= MAX_LINES:
                await self._fail(run, *(_TOO_LONG if total else _EMPTY))
                return
            counts = {"total": total, "completed": 0, "failed": 0}
            now = int(time.time())
            await self._save(run, status="in_progress", in_progress_at=now, request_counts=counts)
        run.journal = journal = await store.in_thread(Journal, store, batch["id"])
        limit = self._site.settings.payload_limit_bytes
        parts = read_lines(
            path, endpoint=batch["endpoint"], max_body_bytes=limit, done=frozenset(journal.done)
        )
        await self._look_at(run)
        async with asyncio.TaskGroup() as group:
            while part := await store.in_thread(next, parts, None):
                for line in part:
                    await self._start_line(run, line, group)
        for line in run.stopped:
            assert run.stop_code is not None
            journal.add_error(line, run.stop_code, _STOPPED[run.stop_code])
        await self._finish(run)

    async def _start_line(self, run: _Run, line: BatchLine, group: asyncio.TaskGroup) -> None:
        assert run.journal is not None
        if line.problem is None and run.stop_code is None:
            while run.num_refused:
                run.goes_on.clear()
                await run.goes_on.wait()
            await self._wait_for_room(line)
        if line.problem is not None:
            run.journal.add_error(line, *line.problem)
        elif run.stop_code is not None:
            run.journal.add_error(line, run.stop_code, _STOPPED[run.stop_code])
        else:
            self._take_room(line)
            task = group.create_task(self._answer_line(run, line))
            run.lines.add(task)
            task.add_done_callback(lambda done: self._end_line(run, line, done))

    async def _wait_for_room(self, line: BatchLine) -> None:
        """Lines of several batches take turns; one that is too large runs alone."""
        async with self._turn:
            while self._num_lines and not self._has_room_for(line):
                self._has_room.clear()
                await self._has_room.wait()

    def _has_room_for(self, line: BatchLine) -> bool:
        site = self._site
        models = {model.name: model for model in site.models()}
        model = models.get(line.model or "", next(iter(models.values()), None))
        budget = 0 if model is None else int(model.info["token_budget"])
        share = _BUSY_SHARE if site.num_running else _IDLE_SHARE
        most_lines = max(site.settings.max_concurrent_requests // _LINE_SHARE, 1)
        return self._num_lines < most_lines and self._num_tokens + line.tokens <= budget // share

    def _end_line(self, run: _Run, line: BatchLine, task: "asyncio.Task[None]") -> None:
        run.lines.discard(task)
        if task.cancelled():  # a task that has not begun runs none of its code then
            run.stopped.append(line)
        self._give_room(line)

    def _take_room(self, line: BatchLine) -> None:
        self._num_lines += 1
        self._num_tokens += line.tokens

    def _give_room(self, line: BatchLine) -> None:
        self._num_lines -= 1
        self._num_tokens -= line.tokens
        self._has_room.set()

    async def _stand_back(self, run: _Run, line: BatchLine, seconds: float) -> None:
        """A line that was refused waits without room, which lines of other batches may have."""
        run.num_refused += 1
        self._give_room(line)
        try:
            await asyncio.sleep(seconds)
            await self._wait_for_room(line)
        finally:
            self._take_room(line)
            run.num_refused -= 1
            if not run.num_refused:
                run.goes_on.set()

    async def _answer_line(self, run: _Run, line: BatchLine) -> None:
        assert run.journal is not None
        endpoint = run.batch["endpoint"]
        exchange = Exchange(
            {
                "type": "http",
                "method": "POST",
                "path": endpoint,
                "headers": [],
                "query_string": b"",
            },
            _never_receive,
        )
        exchange.site, exchange.route, exchange.priority = self._site, endpoint, _PRIORITY
        exchange.request_id, exchange.body_bytes = uuid.uuid4().hex, line.body
        status, kind, body = await self._answer(run, exchange, line)
        run.journal.add_response(line, status, exchange.request_id, body)
        self._site.recorder.record(
            Finished(
                route=BATCH_LINE + endpoint,
                status=status,
                model="" if exchange.facts is None else exchange.facts.name,
                seconds=time.perf_counter() - exchange.started,
                error=kind,
                timings=exchange.timings,
                num_ignored_fields=exchange.num_ignored_fields,
            )
        )

    async def _answer(
        self, run: _Run, exchange: Exchange, line: BatchLine
    ) -> tuple[int, str, bytes]:
        """(status, the kind of its error, the body); waits where the server has no room."""
        route = self._routes["POST", exchange.route]
        while True:
            exchange.started, exchange.timings = time.perf_counter(), None
            try:
                if line.streams:
                    raise ServeError("unsupported", "a batch has no streams", param="stream")
                self._site.ready_backend()
                assert route.body is not None
                body = await parse(exchange, route.body)
                return 200, "", await self._written(await route.endpoint(body, exchange))
            except Exception as error:
                found = as_serve_error(error)
                if found is None:
                    logger.error(
                        "%s %s: a fault", exchange.request_id, exchange.route, exc_info=error
                    )
                    message = f"the server failed; its log has request {exchange.request_id}"
                    content = ServeError("backend", message).body(exchange.style)
                    return 500, "internal", orjson.dumps(content)
                if found.kind not in ("overloaded", "unhealthy"):
                    status = found.status(exchange.style)
                    return status, found.kind, orjson.dumps(found.body(exchange.style))
            await self._stand_back(run, line, min(found.retry_after_s or 1.0, _MOST_RETRY_S))

    async def _written(self, response: Response) -> bytes:
        if isinstance(response, LongJson):
            return await self._site.in_thread(lambda: _joined(response.slices))
        return bytes(response.body)

    async def _finish(self, run: _Run) -> None:
        """Publishes the results: killed at any moment, the next one does the rest of it."""
        assert run.journal is not None
        if run.stop_code is None:
            await self._save(run, status="finalizing", finalizing_at=int(time.time()))
        ends = {None: "completed", "batch_expired": "expired", "batch_cancelled": "cancelled"}
        status = ends[run.stop_code]
        published = await self._store.in_thread(run.journal.publish)
        await self._save(run, status=status, **published, **{f"{status}_at": int(time.time())})
        logger.info("%s: %s, %s", run.batch["id"], status, run.batch["request_counts"])

    async def _fail(self, run: _Run, code: str, message: str) -> None:
        problem = {"code": code, "message": message, "param": "input_file_id", "line": None}
        errors = {"object": "list", "data": [problem]}
        await self._save(run, status="failed", errors=errors, failed_at=int(time.time()))


def _joined(slices: Iterator[bytes]) -> bytes:
    return b"".join(slices)


async def _never_receive() -> Message:
    """No client is there who could leave."""
    await asyncio.Event().wait()
    raise AssertionError
