"""Kills a process that runs a batch before each of its writes, and in the middle of it.

A program of its own, without torch, so that it may fork: `python batch_kills.py FOLDER` prints how
many kills there were, or fails where a result is lost or computed twice.
"""

import asyncio
import io
import os
import signal
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import orjson
from starlette.responses import Response

from bytetx.serve import batch_store
from bytetx.serve.batch_lines import Journal
from bytetx.serve.batch_runner import BatchRunner
from bytetx.serve.batch_store import ENDED, BatchStore
from bytetx.serve.gateway import Exchange, Route
from bytetx.serve.schemas_pooling import EmbeddingsRequest
from bytetx.serve.settings import ModelSource, ServeSettings
from bytetx.serve.site import Site

NUM_LINES = 7
BAD = 3  # a line that is no JSON


@dataclass
class Killer:
    """Kills the process before write number `at`, or in its middle."""

    at: int
    in_middle: bool
    count: int = 0

    def wrap(self, function: Any) -> Any:
        def counted(*given: Any, **options: Any) -> Any:
            self.count += 1
            if self.count == self.at:
                if self.in_middle and function is WRITE:
                    WRITE(given[0], bytes(given[1])[: len(given[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*given, **options)

        return counted


WRITE = os.write


def run_batches(folder: Path, *, killer: Killer | None) -> None:
    """Runs until every batch has ended; FOLDER/calls has a line for each answer."""
    calls = os.open(folder / "calls", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    async def answer(body: EmbeddingsRequest, exchange: Exchange) -> Response:
        text = body.input[0]
        WRITE(calls, f"{text}\n".encode())
        return Response(orjson.dumps({"text": text, "priority": exchange.priority}))

    settings = ServeSettings([ModelSource("m", "m")], batch_dir=folder / "batches")
    site = Site(settings, cast(Any, SimpleNamespace(record=lambda finished: None)))
    facts = SimpleNamespace(name="m", info={"token_budget": 16})  # few lines at a time
    site.backend = cast(Any, SimpleNamespace(models=(facts,), is_healthy=True))
    site.phase = "ready"
    assert site.batches is not None
    route = Route("/v1/embeddings", answer, EmbeddingsRequest)

    async def main(store: BatchStore) -> None:
        task = asyncio.create_task(
            BatchRunner(site, store, {("POST", "/v1/embeddings"): route}).run()
        )
        while store.open_batches():
            await asyncio.sleep(0.01)
            assert not task.done()
        task.cancel()

    if killer is not None:
        for name in ("write", "fsync", "ftruncate"):
            setattr(os, name, killer.wrap(getattr(os, name)))
        Path.replace = killer.wrap(Path.replace)  # type: ignore[method-assign]
    asyncio.run(main(site.batches))


def in_child(folder: Path, killer: Killer | None) -> bool:
    """Whether a process of its own ran to its end; False where it was killed."""
    child = os.fork()
    if not child:
        try:
            run_batches(folder, killer=killer)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), status
    return status == 0


def check(folder: Path, *, at: int, in_middle: bool) -> bool:
    """One kill; False where the batch ends before it."""
    lines = [
        {
            "custom_id": f"c{n}",
            "method": "POST",
            "url": "/v1/embeddings",
            "body": {"input": f"t{n}"},
        }
        for n in range(1, NUM_LINES + 1)
    ]
    content = [orjson.dumps(line) for line in lines]
    content[BAD - 1] = b"{"
    store = BatchStore(folder / "batches")
    file = store.add_file(io.BytesIO(b"\n".join(content)), "a.jsonl", "batch")
    fields = {"endpoint": "/v1/embeddings", "input_file_id": file["id"]}
    batch = store.add_batch(fields, seconds=3600)
    was_killed = not in_child(folder, Killer(at, in_middle))
    made = Counter((folder / "calls").read_text().split())
    is_written = Journal(store, batch["id"]).done
    assert in_child(folder, None) or store.batch(batch["id"])["status"] in ENDED
    found = store.batch(batch["id"])
    assert found["status"] == "completed", found
    assert found["request_counts"] == {"total": 7, "completed": 6, "failed": 1}, found
    records = [
        orjson.loads(line)
        for line in store.content_path(found["output_file_id"]).read_bytes().splitlines()
    ]
    expected = {f"c{n}": f"t{n}" for n in range(1, NUM_LINES + 1) if n != BAD}
    assert {one["custom_id"]: one["response"]["body"]["text"] for one in records} == expected
    assert len(records) == len(expected)
    assert {one["response"]["body"]["priority"] for one in records} == {1}
    assert len(store.content_path(found["error_file_id"]).read_bytes().splitlines()) == 1
    calls = Counter((folder / "calls").read_text().split())
    for number in is_written - {BAD}:
        assert calls[f"t{number}"] == made[f"t{number}"] == 1, (number, calls)
    assert max(calls.values()) <= 2
    assert {
        one["purpose"] for one in store.files(purpose=None, after=None, limit=9, newest_first=True)
    } == {
        "batch",
        "batch_output",
    }
    store.close()
    return was_killed


def main() -> None:
    root = Path(sys.argv[1])
    batch_store._NUM_THREADS = 1
    num_kills = 0
    for in_middle in (False, True):
        at = 1
        while True:
            folder = root / f"{at}{in_middle}"
            folder.mkdir()
            if not check(folder, at=at, in_middle=in_middle):
                break
            at, num_kills = at + 1, num_kills + 1
    print(num_kills)


if __name__ == "__main__":
    main()
