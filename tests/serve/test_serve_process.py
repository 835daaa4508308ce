"""The server as a process: signals, sockets, environment, bad clients."""

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import numpy as np
import pytest
from serving import InProcess, Server, raw_request, start_server

# Long enough to be running when the signal comes: a tiny model needs about a second for them.
MANY = [f"the quick brown fox jumps over the lazy dog {i}" for i in range(6000)]


def run_cli(*arguments: str, before: str = "") -> subprocess.CompletedProcess[str]:
    code = f"{before}\nfrom bytetx.cli.commands import main\nmain({list(arguments)!r})"
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )


def test_sigterm_drains(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Running requests are answered, health says 503, and the process ends with 0."""
    limits = ["--max-client-batch-size", "10000", "--payload-limit", "10000000"]
    arguments = ["--model", str(checkpoints["embedder"]), *limits]
    with start_server(arguments, log=tmp_path / "log") as running:
        answers: list[httpx.Response] = []

        def ask() -> None:
            with running.client() as client:
                answers.append(client.post("/embed", json={"inputs": MANY}))

        thread = threading.Thread(target=ask)
        thread.start()
        with running.client() as client:
            while "bytetx_concurrent_requests 1.0" not in client.get("/metrics").text:
                assert thread.is_alive()
            running.process.terminate()
            while (health := client.get("/health")).status_code == 200:
                assert not answers, "it ended before the signal was seen"
            assert health.status_code == 503
            refused = client.post("/embed", json={"inputs": "a"})
            assert refused.status_code == 503 and refused.headers["connection"] == "close"
        thread.join()
        assert answers[0].status_code == 200 and len(answers[0].json()) == len(MANY)
        assert running.process.wait(30) == 0
        assert "shutting down: 1 requests" in running.read_log()


def test_sigint_ends_an_idle_server(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """On a Unix socket, whose stale file is replaced."""
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    arguments = ["--model", str(checkpoints["embedder"]), "--uds-path", str(path)]
    with start_server(arguments, log=tmp_path / "log") as running:
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport, base_url="http://local") as client:
            assert client.post("/embed", json={"inputs": "a"}).status_code == 200
        running.process.send_signal(2)
        assert running.process.wait(30) == 0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_teis_environment(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """A deployment of TEI that is set up by variables alone; logs as JSON; a port for metrics."""
    metrics_port = free_port()
    environment = {
        "MODEL_ID": str(checkpoints["embedder"]),
        "SERVED_MODEL_NAME": "my-model",
        "API_KEY": "sesame",
        "MAX_CLIENT_BATCH_SIZE": "2",
        "PAYLOAD_LIMIT": "1000",
        "AUTO_TRUNCATE": "false",
        "POOLING": "cls",
        "JSON_OUTPUT": "true",
        "HOSTNAME": "no-such-host",  # which shells set, and which is not read
        "BYTETX_METRICS_NAMES": "te",
        "PROMETHEUS_PORT": str(metrics_port),
        "DTYPE": "float32",
    }
    log = tmp_path / "log"
    with start_server([], log=log, environment=environment) as running:
        with running.client() as client:
            info = client.get("/info").json()
            assert client.post("/embed", json={"inputs": ["a"] * 3}).status_code == 413
            assert client.post("/embed", json={"inputs": "a" * 1000}).status_code == 413
            assert client.post("/embed", json={"inputs": "a b " * 60}).status_code == 413
            named = client.post("/v1/embeddings", json={"input": "a", "model": "other"})
            assert named.status_code == 404
        with running.client(key=None) as stranger:
            assert stranger.get("/info").status_code == 401
        assert (info["served_model_name"], info["auto_truncate"]) == ("my-model", False)
        page = httpx.get(f"http://127.0.0.1:{metrics_port}/metrics").text
        assert 'te_request_count{method="single"} 3' in page
        assert running.stop() == 0
        entries = [json.loads(line) for line in running.read_log().splitlines()]
        assert all(entry.keys() >= {"timestamp", "level", "fields"} for entry in entries)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--model", "/no/such/folder"], 1, "/no/such/folder"),
        ([], 2, "--model"),
        (["--model", "a=x", "--model", "a=y"], 2, "'a'"),
        (["--model", "=x"], 2, "NAME=PATH"),
        (["--model", "x", "--served-model-name", "a", "--served-model-name", "b"], 2, "2 --served"),
        (["--model", "x", "--metrics-names", "vllm"], 2, "vllm"),
        (["--model", "x", "--hostname", "no.such.host.invalid"], 2, "--hostname"),
        (["--model", "x", "--default-prompt", "a", "--default-prompt-name", "b"], 2, "exclude"),
    ],
)
def test_what_cannot_be_served_is_one_line(
    arguments: list[str], code: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bytetx.cli.commands import main

    monkeypatch.setenv("MODEL_ID", "")
    errors: list[str] = []
    monkeypatch.setattr("bytetx.cli.commands._print_error", errors.append)
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--port", "0", "--offline", "--device", "cpu", *arguments])
    assert ended.value.code == code
    assert words in errors[0] and "\n" not in errors[0]


@pytest.mark.parametrize(
    ("environment", "arguments"),
    [
        ({"API_KEY": ""}, []),
        ({"API_KEY": " \n"}, []),
        ({"BYTETX_API_KEY": ""}, []),
        ({"BYTETX_API_KEY": "", "API_KEY": ""}, []),
        ({}, ["--api-key", ""]),
        ({}, ["--api-key", " "]),
        ({}, ["--api-key", "good", "--api-key", ""]),
        ({"API_KEY": "good"}, ["--api-key", "two words"]),
        ({}, ["--api-key", "schl\u00fcssel"]),
    ],
)
def test_a_blank_key_opened_the_server(
    environment: dict[str, str], arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A secret that was not filled in: the server refuses to start."""
    from bytetx.cli.commands import main

    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    errors: list[str] = []
    monkeypatch.setattr("bytetx.cli.commands._print_error", errors.append)
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--model", "/no/such/folder", "--device", "cpu", *arguments])
    assert ended.value.code == 2 and "key" in errors[0].lower()
    assert "\n" not in errors[0] and "/no/such/folder" not in errors[0]


def test_a_key_beside_a_blank_variable_is_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    from bytetx.cli import serve as command

    monkeypatch.setenv("API_KEY", "")
    command._check_api_key(["good"])


def test_a_busy_port_is_named() -> None:
    from bytetx.errors import OptionError
    from bytetx.serve.http_server import bind_tcp

    first = bind_tcp("127.0.0.1", 0)
    port = first.getsockname()[1]
    with pytest.raises(OptionError, match=f"127.0.0.1:{port}.*--port"):
        bind_tcp("127.0.0.1", port)
    first.close()


def test_the_extra_is_named_where_it_is_missing() -> None:
    ended = run_cli("serve", "--model", "x", before="import sys; sys.modules['fastapi'] = None")
    assert ended.returncode == 2
    assert 'pip install "bytetx[serve]"' in ended.stderr and "Traceback" not in ended.stderr


def connect(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=30)


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"GET\r\n\r\n",
        b"POST /embed HTTP/1.1\r\nHost: a\r\nContent-Length: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 600_000,
    ],
)
def test_malformed_requests_end_their_connection_alone(server: Server, sent: bytes) -> None:
    with connect(server.url) as client:
        try:
            client.sendall(sent)
            client.shutdown(socket.SHUT_WR)
            answer = client.recv(1000)
        except OSError:  # it closed the connection
            answer = b""
        assert answer == b"" or re.match(rb"HTTP/1.1 4\d\d ", answer)
    with server.client() as http:
        assert http.get("/health").status_code == 200


def test_a_body_that_never_ends_holds_nothing_up(server: Server) -> None:
    """Clients that send half a body, or leave in the middle, are no running requests."""
    waiting = [connect(server.url) for _ in range(8)]
    for client in waiting:
        client.sendall(raw_request(b'{"inputs": ', length=1000))
    with server.client() as http:
        assert http.post("/embed", json={"inputs": "a"}).status_code == 200
        assert "bytetx_concurrent_requests 0.0" in http.get("/metrics").text
        for client in waiting:
            client.close()
        assert http.get("/health").status_code == 200


def test_an_oversized_body_is_refused_before_it_is_sent(server: Server) -> None:
    with connect(server.url) as client:
        client.sendall(raw_request(b"", length=10**12))
        assert client.recv(1000).startswith(b"HTTP/1.1 413 ")


def test_a_client_that_does_not_read_holds_up_itself_alone(server: Server) -> None:
    body = json.dumps({"inputs": ["the quick brown fox jumps over the lazy dog"] * 32}).encode()
    lazy = [connect(server.url) for _ in range(4)]
    for client in lazy:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        for _ in range(20):  # pipelined: far more than the buffers of both ends hold
            client.sendall(raw_request(body, path="/embed_all"))
    with server.client() as http:
        for _ in range(3):
            assert http.post("/embed", json={"inputs": "a"}).status_code == 200
    for client in lazy:
        client.close()


def test_cancel_storm(server: Server, in_process: InProcess) -> None:
    """600 requests of 64 callers, 30 % of which leave at once: the others get their own answers."""
    rng = np.random.default_rng(7)
    texts = [f"the fox {i} " + "a dog " * int(rng.integers(0, 12)) for i in range(600)]
    leaves = rng.random(len(texts)) < 0.3
    expected = in_process.model("embedder").embed(texts, truncate=True).vectors
    host, port = server.url.removeprefix("http://").split(":")
    gate = asyncio.Semaphore(64)

    async def ask(index: int) -> None:
        async with gate:
            reader, writer = await asyncio.open_connection(host, int(port))
            body = json.dumps({"inputs": texts[index]}).encode()
            writer.write(raw_request(body, more_headers="Connection: close\r\n"))
            await writer.drain()
            if not leaves[index]:
                head, _, content = (await reader.read()).partition(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 200 ")
                np.testing.assert_allclose(json.loads(content)[0], expected[index], atol=1e-5)
            writer.close()

    async def storm() -> None:
        await asyncio.gather(*(ask(index) for index in range(len(texts))))

    asyncio.run(storm())
    server.wait_until_idle()
    with server.client() as client:
        assert client.post("/embed", json={"inputs": "a"}).status_code == 200
