"""Servers whose models come and go, as processes: front-ends, replicas, memory, a killed engine."""

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import SENTENCES, save_checkpoint
from serving import KEY, Server, start_server

import bytetx

TEXTS = [text for text in SENTENCES if text]


def options(models: dict[str, Path]) -> list[str]:
    return [part for name, path in models.items() for part in ("--model", f"{name}={path}")]


def right(models: dict[str, Path]) -> tuple[dict[str, np.ndarray], int]:
    """(vectors of each model, bytes of the largest)"""
    found, size = {}, 0
    for name, path in models.items():
        with bytetx.load(path, device="cpu") as model:
            found[name] = model.embed(TEXTS).vectors
            size = max(size, model.info()["held_bytes"])
    return found, size


def loaded(server: Server) -> dict[str, bool]:
    with server.client() as client:
        listed = client.get("/v1/models").json()["data"]
    return {one["id"]: one["is_loaded"] for one in listed}


def check(server: Server, name: str, vectors: np.ndarray) -> None:
    """Asks until there is room."""
    with server.client() as client:
        body: dict[str, Any] = {"inputs": TEXTS, "model": name, "normalize": False}
        while (answer := client.post("/embed", json=body)).status_code == 503:
            assert int(answer.headers["retry-after"]) >= 1
        np.testing.assert_allclose(answer.json(), vectors, atol=1e-5)


def storm(server: Server, vectors: dict[str, np.ndarray], *, num_requests: int) -> None:
    names = list(vectors) * (num_requests // len(vectors))
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda name: check(server, name, vectors[name]), names))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("lazy")
    return {name: save_checkpoint(root / name, name) for name in ("bert", "modernbert", "roberta")}


@pytest.mark.feature("Server", "many models in little memory before front-ends")
def test_frontends_and_a_killed_engine(models: dict[str, Path], tmp_path: Path) -> None:
    vectors, size = right(models)
    arguments = [*options(models), "--lazy", "--memory-budget", str(size), "--frontends", "2"]
    with start_server([*arguments, "--api-key", KEY], log=tmp_path / "log") as server:
        assert loaded(server) == dict.fromkeys(models, False)
        storm(server, vectors, num_requests=24)
        assert sum(loaded(server).values()) == 1
        server.wait_until_idle()
        found = subprocess.run(
            ["pgrep", "-P", str(server.process.pid), "-f", "bytetx.serve.child engine"],
            capture_output=True,
            text=True,
            check=True,
        )
        subprocess.run(["kill", "-KILL", found.stdout.split()[0]], check=True)
        server.wait_for(r"(?s)ended with -9.*connected to the engine process.*connected to the")
        storm(server, vectors, num_requests=6)
        assert server.stop() == 0


def test_replicas_have_models_of_their_own(models: dict[str, Path], tmp_path: Path) -> None:
    vectors, size = right(models)
    arguments = [*options(models), "--lazy", "--memory-budget", str(size), "--replicas", "2"]
    log = tmp_path / "log"
    with start_server([*arguments, "--api-key", KEY], log=log, waits_for="2 of 2") as server:
        storm(server, vectors, num_requests=12)
        with server.client() as client:
            answer = client.post("/models/load", json={"model": "bert"})
            assert answer.status_code == 400 and "one of several replicas" in answer.text
        assert server.stop() == 0


def test_an_error_of_a_lazy_model_ends_the_start(models: dict[str, Path], tmp_path: Path) -> None:
    command = ["bytetx", "serve", "--port", "0", "--device", "cpu", "--lazy"]
    python = [sys.executable, "-m", *command, *options(models)]
    ended = subprocess.run([*python, "--memory-budget", "1KB"], capture_output=True, text=True)
    assert ended.returncode != 0 and "--memory-budget is 1,000" in ended.stderr
    ended = subprocess.run([*python, "--memory-budget", "lots"], capture_output=True, text=True)
    assert ended.returncode != 0 and "such as 10GiB" in ended.stderr


def resident_bytes(server: Server) -> int:
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) << 10


def test_memory_returns_to_the_system(tmp_path: Path) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12}
    folder = save_checkpoint(tmp_path / "model", num_attention_heads=8, **sizes)
    with bytetx.load(folder, device="cpu") as model:
        held = model.info()["held_bytes"]
    assert held > 100 << 20
    arguments = ["--model", f"m={folder}", "--lazy", "--api-key", KEY]
    with start_server(arguments, log=tmp_path / "log") as server, server.client() as client:

        def turn() -> tuple[int, int]:
            """Resident bytes with the model and without it."""
            assert client.post("/embed", json={"inputs": TEXTS}).status_code == 200
            with_model = resident_bytes(server)
            assert client.post("/models/unload", json={}).status_code == 200
            return with_model, resident_bytes(server)

        turn()  # what stays of any model: code, threads, tables of kernels
        turns = [turn() for _ in range(3)]
        for with_model, without in turns:
            assert with_model - without > 0.9 * held
        assert turns[-1][1] - turns[0][1] < 0.1 * held
