"""Files and batches by OpenAI's client: results, bad lines, kills, cancelling, expiry, limits."""

import asyncio
import io
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import openai
import pytest
from serving import KEY, InProcess, Server, start_server

from bytetx.errors import OptionError
from bytetx.serve import batch_lines, routes_batches
from bytetx.serve.app import ROUTES
from bytetx.serve.batch_lines import count_lines, read_lines
from bytetx.serve.batch_runner import BatchRunner
from bytetx.serve.batch_store import BatchStore
from bytetx.serve.records import BATCH_LINE
from bytetx.serve.routes_batches import ENDPOINTS

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog"]


def texts(count: int) -> list[str]:
    return [" ".join(WORDS[i % 9 :] + WORDS[: i % 5]) + f" {i % 7}" for i in range(count)]


def lines(bodies: Sequence[Any], url: str = "/v1/embeddings") -> bytes:
    """The input file of a batch; custom ids are c0, c1, ..."""
    rows = [
        {"custom_id": f"c{i}", "method": "POST", "url": url, "body": body}
        for i, body in enumerate(bodies)
    ]
    return "\n".join(map(json.dumps, rows)).encode()


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)


def start(client: openai.OpenAI, content: bytes, endpoint: Any = "/v1/embeddings") -> str:
    file = client.files.create(file=("in.jsonl", io.BytesIO(content)), purpose="batch")
    made = client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", metadata={"a": "b"}
    )
    assert made.status == "validating" and made.metadata == {"a": "b"}
    return made.id


def wait(client: openai.OpenAI, name: str, *, until: Sequence[str] = ()) -> Any:
    ends = until or ("completed", "failed", "expired", "cancelled")
    deadline = time.monotonic() + 120
    while (batch := client.batches.retrieve(name)).status not in ends:
        assert time.monotonic() < deadline, batch
        time.sleep(0.05)
    return batch


def records(client: openai.OpenAI, file: str | None) -> dict[str, Any]:
    assert file is not None
    rows = [json.loads(line) for line in client.files.content(file).text.splitlines()]
    found = {row["custom_id"]: row for row in rows}
    assert len(found) == len(rows)
    return found


@pytest.fixture(scope="module")
def batch_server(
    checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("batches")
    options = ["--batch-dir", str(folder / "made" / "here"), "--api-key", KEY]
    models = [f"{name}={checkpoints[name]}" for name in ("embedder", "writer")]
    named = [part for model in models for part in ("--model", model)]
    with start_server([*named, *options], log=folder / "log") as running:
        yield running


@pytest.mark.feature("Server", "routes of OpenAI: files and batches, at low priority")
def test_a_batch_gives_what_its_lines_give_alone(batch_server: Server) -> None:
    client = client_of(batch_server)
    given = texts(40)
    name = start(client, lines([{"model": "embedder", "input": text} for text in given]))
    batch = wait(client, name)
    assert batch.status == "completed" and batch.error_file_id is None
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (40, 40, 0)
    found = records(client, batch.output_file_id)
    assert set(found) == {f"c{i}" for i in range(40)}
    for i, text in enumerate(given):
        alone = client.embeddings.create(model="embedder", input=text, encoding_format="float")
        response = found[f"c{i}"]["response"]
        assert response["status_code"] == 200 and found[f"c{i}"]["error"] is None
        np.testing.assert_allclose(
            response["body"]["data"][0]["embedding"], alone.data[0].embedding, atol=1e-5
        )
    file = client.files.retrieve(batch.output_file_id)
    assert (file.purpose, file.bytes) == (
        "batch_output",
        len(client.files.content(file.id).content),
    )


def test_chats_and_completions_of_a_batch_are_those_of_their_routes(batch_server: Server) -> None:
    client = client_of(batch_server)
    options = {"model": "writer", "temperature": 0, "max_tokens": 6}
    chats = [options | {"messages": [{"role": "user", "content": text}]} for text in texts(6)]
    prompts = [options | {"prompt": text, "n": 1} for text in texts(6)]
    first = start(client, lines(chats, "/v1/chat/completions"), "/v1/chat/completions")
    second = start(client, lines(prompts, "/v1/completions"), "/v1/completions")
    found = records(client, wait(client, first).output_file_id)
    for i, body in enumerate(chats):
        alone: Any = client.chat.completions.create(**body)
        message = found[f"c{i}"]["response"]["body"]["choices"][0]["message"]
        assert message["content"] == alone.choices[0].message.content
    found = records(client, wait(client, second).output_file_id)
    for i, body in enumerate(prompts):
        alone = client.completions.create(**body)
        assert found[f"c{i}"]["response"]["body"]["choices"][0]["text"] == alone.choices[0].text


def test_a_bad_line_costs_that_line_only(batch_server: Server) -> None:
    client = client_of(batch_server)
    good = {"model": "embedder", "input": "a fox"}
    rows = lines(
        [
            good,
            {"model": "nothing", "input": "a"},
            {"model": "embedder", "input": []},
            {"model": "embedder"},
            good | {"stream": True},
            good,
        ]
    ).split(b"\n")
    deep = b'{"a":' * 500 + b"1" + b"}" * 500
    rows += [
        b"{no json",
        b"",
        b'{"custom_id":"c0","method":"POST","url":"/v1/embeddings","body":{"input":"a"}}',
        b'{"custom_id":"url","method":"POST","url":"/embed","body":{"inputs":"a"}}',
        b'{"custom_id":7,"method":"POST","url":"/v1/embeddings","body":{}}',
        b'{"custom_id":"get","method":"GET","url":"/v1/embeddings","body":{}}',
        b'{"custom_id":"deep","method":"POST","url":"/v1/embeddings","body":' + deep + b"}",
        b'{"custom_id":"more","method":"POST","url":"/v1/embeddings","body":{},"x":1}',
        b'{"custom_id":"long","method":"POST","url":"/v1/embeddings","body":{"input":"'
        + b"a" * 3_000_000
        + b'"}}',
        b"[]",
    ]
    batch = wait(client, start(client, b"\r\n".join(rows)))
    assert batch.status == "completed"
    assert set(records(client, batch.output_file_id)) == {"c0", "c5"}
    text = client.files.content(batch.error_file_id).text
    failed = [json.loads(line) for line in text.splitlines()]
    statuses = {
        row["custom_id"]: row["response"]["status_code"] for row in failed if row["response"]
    }
    assert statuses == {"c1": 404, "c2": 400, "c3": 400, "c4": 400}
    body = next(row for row in failed if row["custom_id"] == "c1")["response"]["body"]
    assert body["error"]["code"] == "model_not_found"
    codes = sorted(
        (row["error"]["code"], row["custom_id"])
        for row in failed
        if row["custom_id"] and row["error"]
    )
    assert codes == [("duplicate_custom_id", "c0")] + [
        ("invalid_line", name) for name in ("deep", "get", "more", "url")
    ]
    nameless = [row["error"]["message"] for row in failed if row["custom_id"] is None]
    assert len(nameless) == 4 and any("line 7: it is no JSON" in one for one in nameless)
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (15, 2, 13)


def test_files_and_batches_are_listed_and_deleted(batch_server: Server) -> None:
    client = client_of(batch_server)
    content = lines([{"model": "embedder", "input": "a"}])
    names = [start(client, content) for _ in range(3)]
    for name in names:
        wait(client, name)
    found = [batch.id for batch in client.batches.list(limit=2)]  # pages follow each other
    assert found[:3] == names[::-1] and len(set(found)) == len(found)
    page = client.batches.list(limit=1, after=names[2])
    assert [batch.id for batch in page.data] == [names[1]] and page.has_more
    ids = [file.id for file in client.files.list(purpose="batch", limit=2)]
    assert ids == sorted(ids, reverse=True) and len(ids) >= 3
    assert [f.id for f in client.files.list(purpose="batch", order="asc")] == ids[::-1]
    file = client.files.retrieve(ids[0])
    assert (file.filename, file.bytes) == ("in.jsonl", len(content))
    assert client.files.content(ids[0]).content == content
    assert client.files.delete(ids[0]).deleted
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            call(ids[0])
    with pytest.raises(openai.BadRequestError, match="is completed"):
        client.batches.cancel(names[0])


def test_requests_are_checked_and_ids_are_no_paths(batch_server: Server) -> None:
    client = client_of(batch_server)
    stranger = openai.OpenAI(base_url=f"{batch_server.url}/v1", api_key="no", max_retries=0)
    for listed in (stranger.files.list, stranger.batches.list):
        with pytest.raises(openai.AuthenticationError):
            listed()
    with pytest.raises(openai.AuthenticationError):
        stranger.files.create(file=("a", b"a"), purpose="batch")
    with pytest.raises(openai.BadRequestError, match="purpose must be batch"):
        client.files.create(file=("a", b"a"), purpose="assistants")
    file = client.files.create(file=("../../a", b""), purpose="batch")
    assert (
        wait(
            client,
            client.batches.create(
                input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h"
            ).id,
        )
        .errors.data[0]
        .code
        == "empty_file"
    )
    with batch_server.client() as http:
        for path in ("/v1/files/..%2F..%2Flock", "/v1/files/../lock", "/v1/files/file-1/content"):
            assert http.get(path).status_code == 404
        for id_ in ("../lock", "/etc/passwd", "file-" + "0" * 40, "file-" + "g" * 40, "\0"):
            body = {"input_file_id": id_, "endpoint": "/v1/embeddings"}
            assert http.post("/v1/batches", json=body).status_code == 404
        for change, message in (
            ({"endpoint": "/v1/files"}, "endpoint must be one of"),
            ({"completion_window": "200h"}, "1h to 168h"),
            ({"completion_window": "soon"}, "completion_window"),
            ({"metadata": {"a": 1}}, "metadata"),
            ({"output_expires_after": {"seconds": 1}}, "not supported"),
        ):
            body = {"input_file_id": file.id, "endpoint": "/v1/embeddings"} | change
            answer = http.post("/v1/batches", json=body)
            assert answer.status_code == 400 and message in answer.text
        for limit in ("0", "101", "x", "0000000010000", ""):
            path = f"/v1/batches?limit={limit}"
            assert http.get(path).status_code == 400
        assert http.get("/v1/files?order=up").status_code == 400
        answer = http.post("/v1/files", files={"file": b"a"}, data={"purpose": "batch", "x": "y"})
        assert answer.status_code == 400 and "x" in answer.json()["error"]["message"]
        assert http.post("/v1/files", json={}).status_code == 400
        assert http.post("/v1/files").status_code == 400
        assert http.put("/v1/files/" + file.id).status_code == 405


@pytest.mark.feature("Server", "batches go on after a server is killed")
def test_a_killed_server_goes_on_where_it_was(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Killed in the middle of a batch, twice; a second server on the folder waits for its turn."""
    options = ["--model", f"embedder={checkpoints['embedder']}", "--api-key", KEY]
    options += ["--batch-dir", str(tmp_path / "batches"), "--max-batch-tokens", "64"]
    bodies = [{"input": text} for text in texts(1500)]
    name, done = "", 0
    for attempt in range(2):
        with start_server(options, log=tmp_path / f"log{attempt}") as server:
            client = client_of(server)
            name = name or start(client, lines(bodies))
            while (batch := client.batches.retrieve(name)).request_counts.completed <= done:
                time.sleep(0.02)
            done = batch.request_counts.completed
            assert batch.status == "in_progress", batch
            assert server.stop(number=signal.SIGKILL) == -signal.SIGKILL
    with (
        start_server(options, log=tmp_path / "log2") as server,
        start_server(options, log=tmp_path / "log3") as other,
    ):
        batch = wait(client_of(other), name)  # any server answers, one of them runs batches
        found = records(client_of(server), batch.output_file_id)
    assert batch.status == "completed" and batch.request_counts.completed == 1500
    assert set(found) == {f"c{i}" for i in range(1500)}


def test_a_process_is_killed_at_each_of_its_writes(tmp_path: Path) -> None:
    program = Path(__file__).with_name("batch_kills.py")
    command = [sys.executable, str(program), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout) >= 30


@pytest.mark.feature("Server", "batches of a server with front-ends")
def test_front_ends_share_the_batches(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    options = ["--model", f"embedder={checkpoints['embedder']}", "--frontends", "2"]
    options += ["--batch-dir", str(tmp_path / "batches"), "--api-key", KEY]
    with start_server(options, log=tmp_path / "log") as server:
        names = [
            start(client_of(server), lines([{"input": text} for text in texts(30)]))
            for _ in range(3)
        ]
        for name in names:
            batch = wait(client_of(server), name)
            assert batch.request_counts.completed == 30
            assert len(records(client_of(server), batch.output_file_id)) == 30
        assert server.stop() == 0


class Bench:
    """An application with batches in this process, whose runner runs while `run` does."""

    def __init__(self, app: InProcess, folder: Path, **settings: Any):
        self.app = app.with_settings(only="embedder", batch_dir=folder, **settings)
        found = self.app.site.batches
        assert found is not None
        self.store: BatchStore = found

    def add(self, content: bytes, *, seconds: int = 3600) -> str:
        file = self.store.add_file(io.BytesIO(content), "a", "batch")
        fields = {"endpoint": "/v1/embeddings", "input_file_id": file["id"]}
        made: str = self.store.add_batch(fields, seconds=seconds)["id"]
        return made

    async def until_ended(self, name: str) -> dict[str, Any]:
        runner = BatchRunner(self.app.site, self.store, ROUTES)
        task = asyncio.create_task(runner.run())
        try:
            async with asyncio.timeout(60):
                while self.store.open_batches():
                    assert not task.done()
                    await asyncio.sleep(0.01)
        finally:
            task.cancel()
            await asyncio.wait((task,))
        return self.store.batch(name)

    def failures(self, batch: dict[str, Any]) -> list[dict[str, Any]]:
        content = self.store.content_path(batch["error_file_id"]).read_bytes()
        return [json.loads(line) for line in content.splitlines()]


@pytest.fixture
def bench(in_process: InProcess, tmp_path: Path) -> Bench:
    return Bench(in_process, tmp_path / "batches")


def test_every_endpoint_of_a_batch_is_a_route_with_a_body() -> None:
    assert all(ROUTES["POST", path].body is not None for path in ENDPOINTS)
    assert len(set(ENDPOINTS)) == len(ENDPOINTS)


def test_requests_are_answered_while_a_batch_runs_and_come_first(bench: Bench) -> None:
    """Equal answers of both; no step has more of the batch than half of a step, and texts of
    requests are in the queue's better class."""
    given = texts(300)
    name = bench.add(lines([{"input": text} for text in given]))
    expected = bench.app.model("embedder").embed(given).vectors
    seen: list[int] = []
    backend: Any = bench.app.site.backend
    run_call = backend.run

    async def run(call: Any) -> Any:
        seen.append(call.priority)
        return await run_call(call)

    backend.run = run

    async def main() -> tuple[dict[str, Any], list[Any]]:
        async with bench.app.client() as client:
            ended = asyncio.create_task(bench.until_ended(name))
            answers = []
            for text in given[:50]:
                answers.append(await client.post("/embed", json={"inputs": text}))
            return await ended, answers

    batch, answers = asyncio.run(main())
    assert batch["request_counts"] == {"total": 300, "completed": 300, "failed": 0}
    vectors = np.array([answer.json()[0] for answer in answers])
    np.testing.assert_allclose(vectors, expected[:50], atol=1e-5)
    content = bench.store.content_path(batch["output_file_id"]).read_bytes()
    for record in map(json.loads, content.splitlines()):
        row = record["response"]["body"]["data"][0]["embedding"]
        np.testing.assert_allclose(row, expected[int(record["custom_id"][1:])], atol=1e-5)
    assert sorted(seen) == [0] * 50 + [1] * 300
    page = bench.app.get("/metrics").text
    assert f'route="{BATCH_LINE}/v1/embeddings",status="200"' in page
    assert "bytetx_request_duration_seconds_count 50.0" in page  # nobody waited for the others


def test_a_cancelled_batch_has_the_results_so_far(bench: Bench) -> None:
    name = bench.add(lines([{"input": text} for text in texts(400)]))

    async def main() -> dict[str, Any]:
        ended = asyncio.create_task(bench.until_ended(name))
        while bench.store.batch(name)["status"] == "validating":
            await asyncio.sleep(0.01)
        assert bench.store.cancel(name)["status"] == "cancelling"
        return await ended

    batch = asyncio.run(main())
    counts = batch["request_counts"]
    assert batch["status"] == "cancelled" and batch["cancelled_at"] >= batch["cancelling_at"]
    assert counts["completed"] + counts["failed"] == 400 and counts["failed"] > 0
    failures = bench.failures(batch)
    assert {one["error"]["code"] for one in failures} == {"batch_cancelled"}
    assert len({one["custom_id"] for one in failures}) == counts["failed"]


def test_a_batch_that_is_late_expires(bench: Bench) -> None:
    name = bench.add(lines([{"input": "a"}] * 3), seconds=-1)
    batch = asyncio.run(bench.until_ended(name))
    assert batch["status"] == "expired" and batch["output_file_id"] is None
    assert [one["error"]["code"] for one in bench.failures(batch)] == ["batch_expired"] * 3


def test_a_line_waits_where_the_server_is_busy_or_starts(bench: Bench) -> None:
    """A refusal that asks for a retry is no result."""
    backend: Any = bench.app.site.backend
    run_call, refusals = backend.run, iter(("overloaded", "unhealthy", "overloaded"))

    async def run(call: Any) -> Any:
        kind = next(refusals, None)
        if kind is not None:
            raise routes_batches.ServeError(kind, "later", retry_after_s=0.01)
        return await run_call(call)

    backend.run = run
    batch = asyncio.run(bench.until_ended(bench.add(lines([{"input": "a"}] * 5))))
    assert batch["request_counts"] == {"total": 5, "completed": 5, "failed": 0}


@pytest.mark.parametrize("end", ["completed", "cancelled"])
def test_a_batch_that_is_refused_holds_no_other_one_up(
    in_process: InProcess, tmp_path: Path, end: str
) -> None:
    bench = Bench(in_process, tmp_path, max_concurrent_requests=8)  # two lines at a time
    refused = bench.add(lines([{"input": "no room"}] * 6))
    other = bench.add(lines([{"input": "a"}] * 6))
    backend: Any = bench.app.site.backend
    run_call, num_refused = backend.run, 0

    async def run(call: Any) -> Any:
        nonlocal num_refused
        if call.inputs == ["no room"] and bench.store.batch(other)["status"] != "completed":
            num_refused += 1
            raise routes_batches.ServeError("unhealthy", "no room", retry_after_s=0.05)
        if end == "cancelled" and call.inputs == ["no room"]:
            if not bench.store.is_cancelled(refused):
                bench.store.cancel(refused)
            raise routes_batches.ServeError("unhealthy", "no room", retry_after_s=5)
        return await run_call(call)

    backend.run = run
    batch = asyncio.run(bench.until_ended(refused))
    assert num_refused and batch["status"] == end
    assert bench.store.batch(other)["request_counts"]["completed"] == 6
    number = batch["request_counts"]["completed" if end == "completed" else "failed"]
    assert number == 6


def test_lines_in_flight_have_at_most_a_share_of_a_step(bench: Bench) -> None:
    """A fault of the server fails its line; a line larger than the share runs alone."""
    bodies = [{"input": "fox " * (1 + 400 * (i % 10 == 0))} for i in range(60)]
    runner = BatchRunner(bench.app.site, bench.store, ROUTES)
    budget = bench.app.site.models()[0].info["token_budget"]
    most: list[tuple[int, int]] = []
    backend: Any = bench.app.site.backend
    run_call = backend.run

    async def run(call: Any) -> Any:
        most.append((runner._num_lines, runner._num_tokens))
        if len(most) == 7:
            raise RuntimeError("a fault")
        await asyncio.sleep(0.001)
        return await run_call(call)

    backend.run = run
    name = bench.add(lines(bodies))

    async def main() -> None:
        task = asyncio.create_task(runner.run())
        while bench.store.open_batches():
            await asyncio.sleep(0.01)
        task.cancel()

    asyncio.run(main())
    batch = bench.store.batch(name)
    assert batch["request_counts"] == {"total": 60, "completed": 59, "failed": 1}
    assert [one["response"]["status_code"] for one in bench.failures(batch)] == [500]
    assert all(lines == 1 or tokens <= budget // 2 for lines, tokens in most)
    assert max(lines for lines, _ in most) > 1
    assert (runner._num_lines, runner._num_tokens) == (0, 0)


def test_a_full_disk_loses_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    write, calls = batch_lines.os.write, []

    def full(file: int, data: Any) -> int:
        calls.append(len(data))
        if len(calls) == 3:
            write(file, bytes(data)[:10])
            raise OSError(28, "No space left on device")
        return write(file, data)

    monkeypatch.setattr("bytetx.serve.batch_runner._FAULT_S", 0.01)
    monkeypatch.setattr(
        batch_lines, "os", SimpleNamespace(**vars(batch_lines.os) | {"write": full})
    )
    batch = asyncio.run(bench.until_ended(bench.add(lines([{"input": "a"}] * 8))))
    assert batch["request_counts"] == {"total": 8, "completed": 8, "failed": 0}
    content = bench.store.content_path(batch["output_file_id"]).read_bytes()
    assert sorted(json.loads(one)["custom_id"] for one in content.splitlines()) == [
        f"c{i}" for i in range(8)
    ]


@pytest.mark.parametrize("status", ["validating", "in_progress"])
def test_a_batch_whose_file_is_gone_fails(bench: Bench, status: str) -> None:
    name = bench.add(lines([{"input": "a"}]))
    batch = bench.store.batch(name)
    bench.store.save_batch(batch | {"status": status})
    bench.store.content_path(batch["input_file_id"]).unlink()
    batch = asyncio.run(bench.until_ended(name))
    assert batch["status"] == "failed" and batch["failed_at"]
    assert batch["errors"]["data"][0]["code"] == "invalid_input_file"


def test_limits_are_said(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bytetx.serve.routes_batches.MAX_FILE_BYTES", 10)
    monkeypatch.setattr("bytetx.serve.routes_batches._FORM_BYTES", 500)
    files = {"file": b"a" * 1000}
    answer = bench.app.request("POST", "/v1/files", files=files, data={"purpose": "batch"})
    assert answer.status_code == 413 and "10 bytes" in answer.text
    monkeypatch.setattr("bytetx.serve.batch_store.MAX_FILES", 0)
    small = {"file": b"a"}
    answer = bench.app.request("POST", "/v1/files", files=small, data={"purpose": "batch"})
    assert answer.status_code == 400 and "delete some" in answer.text
    monkeypatch.setattr("bytetx.serve.batch_store.MAX_FILES", 10)
    name = bench.add(b"{}")
    file = bench.store.batch(name)["input_file_id"]
    answer = bench.app.request("DELETE", f"/v1/files/{file}")
    assert answer.status_code == 400 and f"the batch {name} reads" in answer.text
    monkeypatch.setattr("bytetx.serve.batch_store.MAX_BATCHES", 1)
    body = {"input_file_id": file, "endpoint": "/v1/embeddings"}
    assert bench.app.post("/v1/batches", body).status_code == 400
    monkeypatch.setattr("bytetx.serve.batch_runner.MAX_LINES", 1)
    other = bench.store.add_file(io.BytesIO(lines([{}] * 3)), "a", "batch")["id"]
    monkeypatch.setattr("bytetx.serve.batch_store.MAX_BATCHES", 9)
    made = bench.app.post("/v1/batches", body | {"input_file_id": other}).json()["id"]
    batch = asyncio.run(bench.until_ended(made))
    assert batch["status"] == "failed" and batch["errors"]["data"][0]["code"] == "too_many_lines"


def test_without_a_folder_the_routes_say_how(in_process: InProcess) -> None:
    for method, path in (
        ("GET", "/v1/files"),
        ("POST", "/v1/files"),
        ("GET", "/v1/batches/batch_1"),
        ("POST", "/v1/batches/batch_1/cancel"),
    ):
        answer = in_process.request(method, path)
        assert answer.status_code == 404 and "--batch-dir" in answer.json()["error"]["message"]
    body = {"input_file_id": "file-1", "endpoint": "/v1/embeddings"}
    assert in_process.post("/v1/batches", body).status_code == 404


def test_what_was_left_behind_is_swept_away(tmp_path: Path) -> None:
    store = BatchStore(tmp_path)
    kept = store.add_file(io.BytesIO(b"a"), "a", "batch")["id"]
    (tmp_path / "files" / f"file-{'0' * 40}.jsonl").write_bytes(b"of an upload that was killed")
    (tmp_path / "files" / "a.json.1.tmp").write_bytes(b"")
    store.sweep()
    assert len(list((tmp_path / "files").iterdir())) == 4  # they may be written right now
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bytetx.serve.batch_store._ABANDONED_S", -9)
        store.sweep()
    assert {path.stem for path in (tmp_path / "files").iterdir()} == {kept}
    lock = store.take_lock()
    assert lock is not None and store.take_lock() is None


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OptionError, match="name a folder"):
        BatchStore(tmp_path / "file")


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_lines_are_counted_as_they_are_read(tmp_path: Path, end: bytes) -> None:
    path = tmp_path / "in"
    long = b'{"custom_id":"x","body":"' + b"a" * 9000 + b'"}'
    path.write_bytes(b"\n".join([b"{}", b"", b"  \r", long, b"[]"]) + end)
    options: Any = {"endpoint": "/embed", "max_body_bytes": 100, "done": frozenset({1})}
    found = [line for part in read_lines(path, **options) for line in part]
    assert [line.number for line in found] == [4, 5] and count_lines(path) == 3
    assert all(line.problem for line in found)
