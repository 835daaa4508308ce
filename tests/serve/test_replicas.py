"""bytetx serve --replicas: servers that share a port, one that is killed, and their numbers."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from checkpoints import SENTENCES, save_sentence_model
from other_processes import child_processes

import bytetx
from bytetx.errors import OptionError
from bytetx.serve.http_server import bind_tcp
from bytetx.serve.ports import reserve_port
from bytetx.serve.records import Finished
from bytetx.serve.replica_records import ReplicaRecorder, merge_pages, merge_stats
from bytetx.serve.replicas import replica_devices, serve_replicas, share_gpus
from bytetx.serve.settings import ServeSettings, model_sources

TEXTS = [text for text in SENTENCES if text][:5]
SETTINGS = ServeSettings(model_sources(["m=/m", "n=/n"]), device="cpu", api_keys=("a", "b"))


@dataclass
class Supervisor:
    """`bytetx serve --replicas 2`, and what it says."""

    process: subprocess.Popen[str]
    seen: str = ""

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Reads lines until one more than those read has the pattern."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.seen += line
            if found := re.search(pattern, line):
                return found
        raise AssertionError(f"no {pattern!r} in: {self.seen}")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling

    folder = tmp_path_factory.mktemp("models") / "e"
    return save_sentence_model(folder, [Pooling(48, "mean"), Normalize()])


@pytest.fixture
def supervisor(checkpoint: Path) -> Iterator[Supervisor]:
    command = [sys.executable, "-m", "bytetx", "serve", "--model", str(checkpoint)]
    command += ["--replicas", "2", "--port", "0", "--device", "cpu", "--threads", "1"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    yield Supervisor(process)
    if process.poll() is None:
        process.kill()
    process.wait()
    assert process.stderr is not None
    process.stderr.close()


def post(url: str, texts: list[str]) -> np.ndarray:
    request = urllib.request.Request(
        f"{url}/embed", json.dumps({"inputs": texts}).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return np.array(json.load(answer), np.float32)


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return str(answer.read().decode())


def counts(url: str) -> dict[str, int]:
    """Answered requests of /embed, by replica."""
    pattern = r'bytetx_requests_total\{replica="(\d)",route="/embed",status="200"\} (\d+)'
    return {index: int(number) for index, number in re.findall(pattern, get(f"{url}/metrics"))}


@pytest.mark.feature("Server", "replicas behind one port")
def test_two_replicas_answer_one_dies_and_both_drain(
    supervisor: Supervisor, checkpoint: Path
) -> None:
    url = supervisor.wait_for(r"listening on (http://[^\s]+)").group(1)
    supervisor.wait_for(r"\(2 of 2\)")
    expected = bytetx.load(checkpoint, device="cpu").embed(TEXTS).vectors
    for _ in range(24):  # a new connection each: 2^-23 is the chance that one replica gets all
        np.testing.assert_allclose(post(url, TEXTS), expected, rtol=0, atol=1e-6)
    by_replica = counts(url)
    assert set(by_replica) == {"0", "1"} and sum(by_replica.values()) == 24
    stats = json.loads(get(f"{url}/stats.json"))
    assert stats["replicas"] == 2 and stats["totals"]["requests"] >= 24
    dead = child_processes(supervisor.process.pid)[0]
    os.kill(dead, signal.SIGKILL)
    supervisor.wait_for(r"replica \d \(pid \d+\) ended with -9; it is started again")
    for _ in range(8):  # the one that is left gets every connection
        np.testing.assert_allclose(post(url, TEXTS), expected, rtol=0, atol=1e-6)
    supervisor.wait_for(r"replica \d is ready")
    assert dead not in child_processes(supervisor.process.pid)
    assert len(child_processes(supervisor.process.pid)) == 2
    supervisor.process.send_signal(signal.SIGTERM)
    supervisor.wait_for("ended$")
    assert supervisor.process.wait(60) == 0
    with pytest.raises(urllib.error.URLError):
        get(f"{url}/health")


def test_a_checkpoint_that_cannot_be_loaded_ends_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bytetx", "serve", "--model", str(tmp_path), "--port", "0"]
    command += ["--replicas", "2", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "config.json" in done.stderr
    assert re.search(r"error: replica \d ended with 1 before it was ready", done.stderr)


def test_each_replica_has_gpus_of_its_own() -> None:
    assert share_gpus(["0", "1", "2"], 3, tp=1) == ["0", "1", "2"]
    assert share_gpus(["4", "5", "6", "7"], 2, tp=2) == ["4,5", "6,7"]
    with pytest.raises(OptionError, match="--replicas 2 of 2 GPUs each need 4 GPUs, there are 3"):
        share_gpus(["0", "1", "2"], 2, tp=2)


def test_replicas_share_the_gpu_that_is_named() -> None:
    settings = replace(SETTINGS, device="cuda:1")
    assert replica_devices(settings, 3, None) == ["1", "1", "1"]
    assert replica_devices(settings, 2, "4,6") == ["6", "6"]
    with pytest.raises(OptionError, match="--device cuda:1: there is no such GPU"):
        replica_devices(settings, 2, "4")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "cuda:1", "tp": 2}, "--device cuda:1 is one GPU"),
        ({"device": "cuda:x"}, "--device cuda:x: there is no such GPU"),
        ({"uds_path": Path("s")}, "drop one of them"),
        ({"frontends": 2}, "exclude each other"),
    ],
)
def test_options_that_replicas_cannot_share(changes: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        serve_replicas(replace(SETTINGS, **changes), 2)


def test_a_port_on_which_others_listen_is_refused() -> None:
    """Even one that shares it: half of its connections would come here."""
    with reserve_port("127.0.0.1", 0) as kept:
        port = kept.getsockname()[1]
        with socket.socket() as client:  # nobody listens: the connection waits nowhere
            assert client.connect_ex(("127.0.0.1", port)) != 0
        with bind_tcp("127.0.0.1", port, shares_port=True):
            message = f"cannot listen on 127.0.0.1:{port}: Address already in use; choose another"
            with pytest.raises(OptionError, match=message):
                reserve_port("127.0.0.1", port)


def test_pages_of_replicas_are_one_page() -> None:
    pages = {
        0: '# HELP a_total Of a.\n# TYPE a_total counter\na_total{x="1 2"} 3.0\n'
        "# HELP b Of b.\n# TYPE b gauge\nb 1.0\n",
        2: '# HELP a_total Of a.\n# TYPE a_total counter\na_total{x="1 2"} 4.0\n',
    }
    assert merge_pages(pages).splitlines() == [
        "# HELP a_total Of a.",
        "# TYPE a_total counter",
        'a_total{replica="0",x="1 2"} 3.0',
        'a_total{replica="2",x="1 2"} 4.0',
        "# HELP b Of b.",
        "# TYPE b gauge",
        'b{replica="0"} 1.0',
    ]


def stats_of(requests: int, p99: float | None, times: list[float]) -> dict[str, object]:
    return {
        "models": ["m"],
        "uptime_s": 5.0 * requests,
        "queue": {"requests": requests},
        "rates": {"requests_per_s": requests / 10},
        "latency_ms": {"p99": p99},
        "routes": [
            {"route": route, "requests": requests, "p50": 1.0, "p95": p99, "p99": p99}
            for route in ("/embed", f"/{requests}")
        ],
        "totals": {"errors": 0, "requests": requests},
        "steps": [{"t": time} for time in times],
    }


def test_numbers_of_replicas_are_sums_and_the_slowest_latency() -> None:
    merged = merge_stats([stats_of(1, 8.0, [1.0, 4.0]), stats_of(3, None, [2.0])])
    assert merged == {
        "models": ["m"],
        "replicas": 2,
        "uptime_s": 15.0,
        "queue": {"requests": 4},
        "rates": {"requests_per_s": 0.4},
        "latency_ms": {"p99": 8.0},
        "routes": [
            {"route": "/1", "requests": 1, "p50": 1.0, "p95": 8.0, "p99": 8.0},
            {"route": "/3", "requests": 3, "p50": 1.0, "p95": None, "p99": None},
            {"route": "/embed", "requests": 4, "p50": 1.0, "p95": 8.0, "p99": 8.0},
        ],
        "totals": {"errors": 0, "requests": 4},
        "steps": [{"t": 1.0}, {"t": 2.0}, {"t": 4.0}],
    }
    assert merge_stats([stats_of(0, None, [])])["latency_ms"] == {"p99": None}


class Fixed:
    """A Recorder with one page."""

    def __init__(self, index: int):
        self.index = index
        self.records: list[Finished] = []

    def record(self, finished: Finished) -> None:
        self.records.append(finished)

    async def metrics_page(self) -> bytes:
        return b"# TYPE a counter\na %d\n" % self.index

    async def stats(self) -> bytes:
        return json.dumps(stats_of(self.index, None, [])).encode()


def test_a_replica_shows_the_numbers_of_those_that_answer(tmp_path: Path) -> None:
    async def pages() -> tuple[bytes, bytes]:
        recorders = [ReplicaRecorder(Fixed(i), index=i, folder=tmp_path) for i in range(3)]
        for recorder in recorders:
            await recorder.listen()
        await recorders[2].aclose()  # its socket stays, as that of a dead replica
        return await recorders[1].metrics_page(), await recorders[1].stats()

    page, stats = asyncio.run(pages())
    assert page == b'# TYPE a counter\na{replica="0"} 0\na{replica="1"} 1\n'
    assert json.loads(stats)["totals"]["requests"] == 1 and json.loads(stats)["replicas"] == 2
