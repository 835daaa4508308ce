"""Front-ends that share a port, and the engine process: killed, it comes back."""

import asyncio
import contextlib
import gc
import json
import random
import re
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import httpx
import numpy as np
import pytest
from other_processes import child_processes
from serving import KEY, InProcess, Server, start_server

from bytetx import SamplingParams
from bytetx.errors import OptionError
from bytetx.serve.calls import Call
from bytetx.serve.engine import LocalBackend
from bytetx.serve.engine_process import EngineCalls
from bytetx.serve.errors import ServeError
from bytetx.serve.metrics import Metrics
from bytetx.serve.remote import EngineClient
from bytetx.serve.settings import ServeSettings, model_sources, read_settings, settings_line
from bytetx.serve.supervisor import _listeners
from bytetx.serve.wire import FrameProtocol, decode_frame, encode_frame


@pytest.fixture(scope="module")
def split_server(
    model_options: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("split") / "log"
    arguments = [*model_options, "--frontends", "2", "--api-key", "sesame"]
    arguments += ["--max-queued-tokens", "65536"]
    with start_server(arguments, log=log) as running:
        yield running


def children(server: Server) -> dict[str, list[int]]:
    """Process ids of the server's processes, by what they do."""
    found: dict[str, list[int]] = {}
    for pid in child_processes(server.process.pid):
        command = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        if "bytetx.serve.child" in command:
            found.setdefault(command[command.index("bytetx.serve.child") + 1], []).append(pid)
    return found


def test_answers_are_models(split_server: Server, in_process: InProcess) -> None:
    """Every kind of result crosses the processes as it is."""
    with split_server.client() as client:
        for path, body in (
            ("/embed", {"inputs": ["the fox", "a"]}),
            ("/embed_all", {"inputs": ["the fox", "a"]}),
            ("/embed_sparse", {"inputs": ["the fox", "a"], "model": "sparse"}),
            ("/predict", {"inputs": [["the fox"], ["a", "dog"]], "model": "classifier"}),
            ("/predict_tokens", {"inputs": "Angela Merkel", "model": "tagger"}),
            ("/rerank", {"query": "a", "texts": ["b", "the fox"], "model": "reranker"}),
            ("/similarity", {"inputs": {"source_sentence": "a", "sentences": ["b", "c"]}}),
            ("/tokenize", {"inputs": "the fox"}),
            ("/decode", {"ids": [30, 31]}),
            ("/predict", {"inputs": "a"}),
            ("/embed", {"inputs": "a", "prompt_name": "none"}),
        ):
            answer, expected = client.post(path, json=body), in_process.post(path, body)
            assert answer.status_code == expected.status_code
            assert close(answer.json(), expected.json()), path
        options = {"model": "writer", "prompt": "The quick", "max_tokens": 12, "temperature": 0}
        params = SamplingParams(max_tokens=12, temperature=0)
        text = in_process.model("writer").generate(["The quick"], params)[0].text
        whole = client.post("/v1/completions", json=options).json()
        assert whole["choices"][0]["text"] == text
        streamed = client.post("/v1/completions", json=options | {"stream": True}).text
        assert streamed.count("data: ") > 3 and streamed.endswith("data: [DONE]\n\n")
        refused = client.post("/v1/completions", json=options | {"temperature": 7})
        assert refused.status_code == 400 and "temperature" in refused.text


def close(given: object, expected: object) -> bool:
    """Equal, with numbers to 1e-5."""
    if isinstance(given, dict) and isinstance(expected, dict):
        return given.keys() == expected.keys() and all(
            close(given[key], expected[key]) for key in given
        )
    if isinstance(given, list) and isinstance(expected, list):
        return len(given) == len(expected) and all(map(close, given, expected))
    if isinstance(given, float) and isinstance(expected, float):
        return abs(given - expected) < 1e-5
    return given == expected


def test_numbers_of_all_frontends_are_added_up(split_server: Server) -> None:
    """Whichever front-end answers: connections are spread over both."""

    def count(text: str) -> float:
        found = re.search(r'bytetx_requests_total{route="/tokenize",status="200"} ([\d.]+)', text)
        return 0.0 if found is None else float(found.group(1))

    with split_server.client() as client:
        before = count(client.get("/metrics").text)
    for _ in range(12):
        with split_server.client() as client:  # a connection of its own
            assert client.post("/tokenize", json={"inputs": "a"}).status_code == 200
    with split_server.client() as client:
        while count(client.get("/metrics").text) < before + 12:
            pass  # the others' records come within a quarter of a second
        assert client.get("/stats.json").json()["totals"]["requests"] >= 12


def test_ready_is_said_once_every_process_answers(split_server: Server) -> None:
    """Connections of their own reach both front-ends; none refuses."""
    assert split_server.read_log().count("INFO ready") == 1
    for _ in range(16):
        with split_server.client() as client:
            assert client.get("/health").status_code == 200


def test_an_integer_of_more_than_64_bits_is_refused(split_server: Server) -> None:
    huge = 99999999999999999999
    with split_server.client() as client:
        for path, body in (("/embed", {"inputs": [huge]}), ("/decode", {"ids": [huge]})):
            answer = client.post(path, content=json.dumps(body))
            assert answer.status_code == 422 and answer.json()["error_type"] == "validation"
        body = {"model": "writer", "prompt": "a", "max_tokens": huge}
        assert client.post("/v1/completions", content=json.dumps(body)).status_code == 400


def test_a_request_above_the_whole_queue_is_413(split_server: Server) -> None:
    prompts = {"prompt": [[5] * 20] * 30, "n": 120, "max_tokens": 1, "model": "writer"}
    with split_server.client() as client:
        for path, body in (("/embed", {"inputs": "fox " * 80_000}), ("/v1/completions", prompts)):
            answer = client.post(path, json=body)
            assert answer.status_code == 413 and "--max-queued-tokens" in answer.text, answer.text


async def storm(
    server: Server, texts: Sequence[str], *, num_requests: int, clients_leave: bool = False
) -> list[tuple[list[str], httpx.Response | None]]:
    """(texts, answer, None where there is none) of requests over connections of their own."""
    numbers = random.Random(0)
    found: list[tuple[list[str], httpx.Response | None]] = []

    async def ask(client: httpx.AsyncClient) -> None:
        own = numbers.sample(texts, numbers.choice((1, 1, 1, 2, 16)))
        try:
            async with asyncio.timeout(0.002 if clients_leave and numbers.random() < 0.3 else 60):
                answer = await client.post("/embed", json={"inputs": own})
        except (httpx.TransportError, TimeoutError):
            found.append((own, None))
        else:
            found.append((own, answer))

    headers = {"Authorization": f"Bearer {KEY}"}
    limits = httpx.Limits(max_connections=32, max_keepalive_connections=16)
    async with httpx.AsyncClient(
        base_url=server.url, headers=headers, timeout=60, limits=limits
    ) as client:
        await asyncio.gather(*(ask(client) for _ in range(num_requests)))
    return found


def check_answers(
    found: Sequence[tuple[list[str], httpx.Response | None]], expected: dict[str, np.ndarray]
) -> int:
    """How many requests were answered; each answer has the texts' own vectors."""
    good = 0
    for texts, answer in found:
        if answer is None or answer.status_code == 503:
            continue
        assert answer.status_code == 200, answer.text
        good += 1
        for text, row in zip(texts, answer.json(), strict=True):
            np.testing.assert_allclose(row, expected[text], atol=1e-5)
    return good


WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog"]


@pytest.fixture(scope="module")
def vectors(in_process: InProcess) -> dict[str, np.ndarray]:
    """Model.embed's vector of each of 200 texts."""
    numbers = random.Random(1)
    texts = [" ".join(numbers.choices(WORDS, k=numbers.randint(1, 20))) for _ in range(200)]
    found = in_process.model("embedder").embed(texts, normalize=True, truncate=True)
    return dict(zip(texts, found, strict=True))


def test_a_storm_with_clients_that_leave(
    split_server: Server, vectors: dict[str, np.ndarray]
) -> None:
    for clients_leave in (False, True):
        found = asyncio.run(
            storm(split_server, list(vectors), num_requests=300, clients_leave=clients_leave)
        )
        assert check_answers(found, vectors) >= (100 if clients_leave else 300)
    split_server.wait_until_idle()
    with split_server.client() as client:
        steps = client.get("/stats.json").json()["queue"]
        assert (steps["requests"], steps["running"]) == (0, 0)


@pytest.mark.parametrize("victim", ["frontend", "engine"])
def test_a_process_that_is_killed_in_a_storm(
    split_server: Server, vectors: dict[str, np.ndarray], victim: str
) -> None:
    """Every answer is right, the rest is 503 or a closed connection; then all is as
    before."""

    async def main() -> list[tuple[list[str], httpx.Response | None]]:
        running = asyncio.create_task(storm(split_server, list(vectors), num_requests=300))
        await asyncio.sleep(0.2)
        subprocess.run(["kill", "-KILL", str(children(split_server)[victim][0])], check=True)
        return await running

    check_answers(asyncio.run(main()), vectors)
    split_server.wait_for(r"(front-end|engine process)[^\n]*ended with -9")
    wait_until_healthy(split_server)
    found = asyncio.run(storm(split_server, list(vectors), num_requests=200))
    assert check_answers(found, vectors) == 200


def wait_until_healthy(server: Server) -> None:
    """All processes answer again."""
    good = 0
    while good < 20:
        assert server.process.poll() is None
        with contextlib.suppress(httpx.TransportError), server.client() as client:
            is_good = client.get("/health").status_code == 200
            good = good + 1 if is_good else 0


@pytest.mark.feature("Server", "front-ends before one engine")
def test_a_killed_engine_comes_back(split_server: Server) -> None:
    with split_server.client() as client:
        (pid,) = children(split_server)["engine"]
        subprocess.run(["kill", "-KILL", str(pid)], check=True)
        while (lost := client.get("/health")).status_code == 200:
            pass
        assert lost.status_code == 503
        answer = client.post("/embed", json={"inputs": "a"})
        assert answer.status_code == 503 and answer.json()["error_type"] == "unhealthy"
        assert int(answer.headers["retry-after"]) >= 1
        split_server.wait_for(rf"engine process \(pid {pid}\) ended with -9")
        split_server.wait_for(r"(?s)ended with -9.*INFO ready")
        while client.get("/health").status_code != 200:
            assert split_server.process.poll() is None
        assert client.post("/embed", json={"inputs": "a"}).status_code == 200


def test_a_killed_frontend_comes_back(split_server: Server) -> None:
    for pid in children(split_server)["frontend"]:
        subprocess.run(["kill", "-KILL", str(pid)], check=True)
    split_server.wait_for(r"front-end 0 \(pid \d+\) ended with -9")
    with split_server.client() as client:  # the port stays open meanwhile
        while True:
            try:
                if client.get("/health").status_code == 200:
                    break
            except httpx.TransportError:
                continue


def test_sigterm_ends_all(split_server: Server) -> None:
    """The last of this module's tests of the server."""
    pids = [pid for group in children(split_server).values() for pid in group]
    assert len(pids) == 3
    assert split_server.stop(number=signal.SIGTERM) == 0
    for pid in pids:
        assert not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("processes", ["--frontends", "--replicas"])
def test_a_second_signal_ends_all_at_once(
    checkpoints: dict[str, Path], tmp_path: Path, processes: str
) -> None:
    arguments = ["--model", str(checkpoints["writer"]), processes, "2"]
    body = {"prompt": ["the"] * 32, "n": 100, "max_tokens": 90, "ignore_eos": True, "stream": True}
    with (
        start_server([*arguments, "--shutdown-timeout", "300"], log=tmp_path / "log") as running,
        running.client() as client,
        client.stream("POST", "/v1/completions", json=body) as answer,
    ):
        parts = answer.iter_raw()  # the connection is open while it is
        next(parts)
        running.process.terminate()
        running.wait_for("shutting down: 1 requests")
        for _ in range(100):  # what runs goes on
            next(parts)
        assert running.process.poll() is None
        assert running.stop() == 0


def test_a_port_that_another_server_shares_is_refused() -> None:
    settings = ServeSettings(model_sources(["a"]), port=0, frontends=2)
    first, second = _listeners(settings)
    with first, second:
        port = first.getsockname()[1]
        assert second.getsockname()[1] == port
        with pytest.raises(OptionError, match=f":{port}: Address already in use"):
            _listeners(replace(settings, port=port))


def test_an_engine_that_cannot_start_ends_the_server(tmp_path: Path) -> None:
    ended = None
    try:
        with start_server(
            ["--model", "/no/such/folder", "--frontends", "2"],
            log=tmp_path / "log",
            waits_for="no such log line",
        ):
            pass
    except AssertionError as error:
        ended = str(error)
    assert ended is not None and "ended with 1" in ended
    assert "error: " in ended and "/no/such/folder" in ended and "Traceback" not in ended


def test_an_integer_of_more_than_64_bits_is_refused_and_leaves_nothing() -> None:
    client = EngineClient("/no/such/socket")
    protocol = client._protocol = FrameProtocol(lambda *_: None, lambda _: None)
    protocol.transport = asyncio.Transport()

    async def main() -> None:
        call = Call("m", "decode", [[2**70]])
        with pytest.raises(ServeError, match="64-bit range") as raised:
            await client.run(call)
        assert raised.value.kind == "validation"
        with pytest.raises(ServeError, match="64-bit range"):
            await anext(client.generate(call))

    asyncio.run(main())
    assert not client._waiting and not client._streams


def test_frames() -> None:
    """In pieces of any size; arrays of any shape; nothing but numbers."""
    arrays = (
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.empty((0, 4), dtype=np.int64),
        np.array([7], dtype=np.uint8),
    )
    frames = encode_frame({"id": 1, "text": "ü"}, arrays) + encode_frame({"id": 2})
    for size in (1, 7, 64, len(frames)):
        got: list[tuple[dict, tuple]] = []
        protocol = FrameProtocol(lambda _, *frame, got=got: got.append(frame), lambda _: None)
        for start in range(0, len(frames), size):
            protocol.data_received(frames[start : start + size])
        (first, given), (second, none) = got
        assert (first["id"], first["text"], second["id"], none) == (1, "ü", 2, ())
        for one, other in zip(given, arrays, strict=True):
            np.testing.assert_array_equal(one, other)
            assert one.dtype == other.dtype and one.shape == other.shape
    with pytest.raises(ValueError, match="object"):
        decode_frame(memoryview(encode_frame({"arrays": [["object", [1]]]})[4:]))


def test_frames_of_one_turn_arrive_in_order_and_before_the_end(tmp_path: Path) -> None:
    """They are written together, later than they are sent; closing writes them first."""
    got: list[int] = []
    answered = asyncio.Event()

    def on_frame(protocol: FrameProtocol, header: dict, arrays: tuple) -> None:
        got.append(header["id"])

    async def main() -> None:
        loop = asyncio.get_running_loop()
        path = str(tmp_path / "socket")
        receiver = FrameProtocol(on_frame, lambda _: answered.set())
        server = await loop.create_unix_server(lambda: receiver, path)
        sender = FrameProtocol(on_frame, lambda _: None)
        await loop.create_unix_connection(lambda: sender, path)
        sender.send({"id": 0})
        await asyncio.sleep(0)
        for number in range(1, 100):
            sender.send({"id": number}, [np.zeros(1000 * (number % 3), dtype=np.float32)])
        sender.close()
        sender.send({"id": 100})
        await answered.wait()
        server.close()

    asyncio.run(main())
    assert got == list(range(100))


def test_settings_cross_a_process(tmp_path: Path) -> None:
    settings = ServeSettings(
        model_sources(["a=b", "c"]),
        api_keys=("k",),
        uds_path=tmp_path,
        batch_dir=tmp_path / "b",
        max_batch_tokens=5,
        metrics_names=("te",),
    )
    again = read_settings(settings_line(settings))
    assert list(again.models) == list(settings.models) and again.uds_path == tmp_path
    assert (list(again.api_keys), again.max_batch_tokens) == (["k"], 5)
    assert (
        again.batch_dir == settings.batch_dir
        and read_settings(settings_line(replace(settings, batch_dir=None))).batch_dir is None
    )


def test_a_call_that_is_cancelled_before_it_starts_leaves_no_coroutine(
    in_process: InProcess, recwarn: pytest.WarningsRecorder
) -> None:
    async def main() -> None:
        backend = cast(LocalBackend, in_process.site.backend)
        calls = EngineCalls(backend, Metrics(in_process.settings))
        protocol = calls.protocol()
        for number, op in enumerate(("run", "generate", "metrics")):
            call = ["writer", "tokenize", ["a"], {}]
            calls._on_frame(protocol, {"id": number, "op": op, "call": call}, ())
        calls.close()

    asyncio.run(main())
    gc.collect()
    assert [str(one.message) for one in recwarn if "never awaited" in str(one.message)] == []
