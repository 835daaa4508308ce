"""Requests of many callers to a running server: python tests/serve/serve_soak.py --minutes 15.

Starts `bytetx serve` with small random models and sends it a mix of requests, 30 % of which leave
before they are answered. Fails where an answer differs from Model's, a request that stayed gets no
answer, one that left stays in the server, resident memory of the server's processes grows by
2 % or more over the last half, or the 99th percentile of GET /health is 0.1 s or more. With
--minutes, slow clients and the largest bodies run beside the mix. --requests 10000 is a storm of
that many instead.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import httpx
import numpy as np
from checkpoints import save_causal, save_checkpoint, texts
from largest_bodies import largest_bodies
from other_processes import resident_mib
from serving import KEY, Server, raw_request, start_server

import bytetx
from bytetx import SamplingParams

CALLERS = 64
LEAVE = 0.3
MAX_GROWTH = 0.02  # of the last half
_WAIT_S = 60.0  # for an answer
_NUM_TEXTS = 512
_NEW_TOKENS = 8
MAX_HEALTH_S = 0.1  # the 99th percentile
_LARGEST_BYTES = 1_900_000  # below --payload-limit's default
_NUM_SLOW, _SLOW_S, _HEALTH_EVERY_S = 50, 60.0, 0.05
_LONGEST_STAY_S = 0.05  # of a client that leaves


@dataclass(frozen=True, slots=True)
class Ask:
    """A request and what is wrong with its answer: check raises AssertionError."""

    kind: str
    path: str
    body: bytes
    check: Callable[[httpx.Response], None]


class Traffic:
    """Random requests with the answers of models in this process."""

    def __init__(self, embedder: bytetx.Model, classifier: bytetx.Model, writer: bytetx.Model):
        self.rng = np.random.default_rng(0)
        self.inputs = texts(_NUM_TEXTS, max_words=60)
        self.vectors = embedder.embed(self.inputs, truncate=True, normalize=True).vectors
        self.labels = classifier.classify(self.inputs, truncate=True)
        params = SamplingParams(max_tokens=_NEW_TOKENS, temperature=0)
        self.prompts = [text for text in self.inputs[:64] if 0 < len(text) < 60]
        self.outputs = [one.text for one in writer.generate(self.prompts, params)]

    def draw(self) -> Ask:
        kinds = (self._embed, self._batch, self._openai, self._predict, self._bad, self._complete)
        return kinds[self.rng.choice(len(kinds), p=(0.5, 0.1, 0.15, 0.1, 0.1, 0.05))]()

    def _some(self, count: int) -> list[int]:
        return self.rng.integers(0, len(self.inputs), count).tolist()

    def _embed(self, count: int = 1) -> Ask:
        chosen = self._some(count)
        given = [self.inputs[index] for index in chosen]

        def check(answer: httpx.Response) -> None:
            assert answer.status_code == 200, answer.text
            np.testing.assert_allclose(answer.json(), self.vectors[chosen], atol=1e-4)

        return _ask("embed", "/embed", {"model": "embedder", "inputs": given}, check)

    def _batch(self) -> Ask:
        return self._embed(32)

    def _openai(self) -> Ask:
        (index,) = self._some(1)

        def check(answer: httpx.Response) -> None:
            assert answer.status_code == 200, answer.text
            vector = answer.json()["data"][0]["embedding"]
            np.testing.assert_allclose(vector, self.vectors[index], atol=1e-4)

        body = {"model": "embedder", "input": self.inputs[index] or "a"}
        return _ask("openai", "/v1/embeddings", body, check if self.inputs[index] else _is_answer)

    def _predict(self) -> Ask:
        (index,) = self._some(1)

        def check(answer: httpx.Response) -> None:
            assert answer.status_code == 200, answer.text
            found = {one["label"]: one["score"] for one in answer.json()}
            for label in self.labels[index]:
                assert abs(found[label.label] - label.score) < 1e-4

        body = {"model": "classifier", "inputs": self.inputs[index]}
        return _ask("predict", "/predict", body, check)

    def _complete(self) -> Ask:
        index = int(self.rng.integers(len(self.prompts)))

        def check(answer: httpx.Response) -> None:
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["text"] == self.outputs[index]

        options = {"max_tokens": _NEW_TOKENS, "temperature": 0}
        body = {"model": "writer", "prompt": self.prompts[index], **options}
        return _ask("complete", "/v1/completions", body, check)

    def _bad(self) -> Ask:
        body = (b'{"inputs": ', b'{"inputs": 3}', b'{"inputs": []}')[int(self.rng.integers(3))]

        def check(answer: httpx.Response) -> None:
            assert 400 <= answer.status_code < 500, answer.text

        return Ask("bad", "/embed", body, check)


def _is_answer(answer: httpx.Response) -> None:
    assert answer.status_code == 200, answer.text


def _ask(kind: str, path: str, body: Any, check: Callable[[httpx.Response], None]) -> Ask:
    return Ask(kind, path, json.dumps({**body, "truncate": True}).encode(), check)


async def send(url: str, traffic: Traffic, *, until: Callable[[int], bool]) -> Counter[str]:
    """CALLERS callers send requests until(number sent); how many of each kind were answered."""
    counts: Counter[str] = Counter()
    num_sent = 0
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    limits = httpx.Limits(max_connections=CALLERS, max_keepalive_connections=CALLERS)

    async def caller(client: httpx.AsyncClient) -> None:
        nonlocal num_sent
        while not until(num_sent):
            num_sent += 1
            ask, leaves = traffic.draw(), traffic.rng.random() < LEAVE
            if not leaves:
                ask.check(await client.post(ask.path, content=ask.body))
                counts[ask.kind] += 1
                continue
            await leave(url, ask, float(traffic.rng.random()) * _LONGEST_STAY_S)
            counts["left"] += 1

    async with (
        httpx.AsyncClient(base_url=url, headers=headers, timeout=_WAIT_S, limits=limits) as client,
        asyncio.TaskGroup() as group,
    ):
        for _ in range(CALLERS):
            group.create_task(caller(client))
    return counts


async def send_largest(url: str, seconds: float) -> Counter[str]:
    """One caller sends the largest bodies that /embed, /predict, /tokenize and / admit."""
    counts, end = Counter[str](), time.monotonic() + seconds
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=5 * _WAIT_S) as client:
        while time.monotonic() < end:
            for path in ("/embed", "/predict", "/tokenize", "/"):
                for body in largest_bodies(path, size=_LARGEST_BYTES):
                    if time.monotonic() < end:
                        answer = await client.post(path, content=body)
                        assert answer.status_code < 500, answer.text[:300]
                        counts[f"largest {answer.status_code}"] += 1
    return counts


async def send_slowly(url: str, seconds: float) -> None:
    """Keeps clients that send half a head or half a body, and that do not read."""
    host, port = url.removeprefix("http://").split(":")
    end = time.monotonic() + seconds
    parts = (b"GET /health HTTP/1.1\r\nHost: a", raw_request(b'{"inputs": ', length=1000))

    async def one(number: int) -> None:
        while time.monotonic() < end:
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(parts[number % 2])
            await asyncio.sleep(min(_SLOW_S, max(end - time.monotonic(), 0)))
            writer.close()

    await asyncio.gather(*(one(number) for number in range(_NUM_SLOW)))


def watch_health(url: str, seconds: float) -> list[float]:
    """Seconds that each GET /health took."""
    waits: list[float] = []
    end = time.monotonic() + seconds
    with httpx.Client(base_url=url, timeout=_WAIT_S) as client:
        while time.monotonic() < end:
            start = time.perf_counter()
            assert client.get("/health").status_code == 200
            waits.append(time.perf_counter() - start)
            time.sleep(_HEALTH_EVERY_S)
    return waits


async def leave(url: str, ask: Ask, seconds: float) -> None:
    """Sends a request and closes the connection after some seconds, whatever has come."""
    host, port = url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        raw_request(ask.body, path=ask.path, more_headers="Content-Type: application/json\r\n")
    )
    await writer.drain()
    await asyncio.sleep(seconds)
    writer.close()


def total_resident_mib(pid: int) -> float:
    """Return the resident memory of a process and its descendants, MiB."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return resident_mib(pid) + sum(map(total_resident_mib, map(int, children)))


async def watched(
    server: Server, traffic: Traffic, seconds: float
) -> tuple[Counter[str], float, float]:
    """Sends for that long, largest bodies and slow clients beside the mix.

    (counts, growth of memory in the last half, 99th percentile of /health in seconds)
    """
    end = time.monotonic() + seconds
    readings: list[float] = []
    sending = asyncio.create_task(
        send(server.url, traffic, until=lambda _: time.monotonic() >= end)
    )
    url = server.url
    # A process of its own: the callers' work, in this one, delays no reading.
    watcher = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
    health = asyncio.wrap_future(watcher.submit(watch_health, url, seconds))
    largest = asyncio.create_task(send_largest(url, seconds))
    slow = asyncio.create_task(send_slowly(url, seconds))
    while not sending.done():
        readings.append(total_resident_mib(server.process.pid))
        await asyncio.wait((sending,), timeout=seconds / 200)
    counts, tenth = await sending, max(len(readings) // 10, 1)
    middle, last = (
        median(readings[at : at + tenth]) for at in (len(readings) // 2, len(readings) - tenth)
    )
    print(json.dumps({"start_mib": readings[0], "middle_mib": middle, "end_mib": last}))
    counts += await largest
    await slow
    p99 = float(np.percentile(await health, 99))
    watcher.shutdown()
    return counts, last / middle - 1, p99


def serve_models(folder: Path) -> tuple[list[str], Traffic]:
    """(arguments of the server, requests to it)"""
    paths = {
        "embedder": save_checkpoint(folder / "embedder"),
        "classifier": save_checkpoint(folder / "classifier", head="ForSequenceClassification"),
        "writer": save_causal(folder / "writer", "gpt2"),
    }
    models = [bytetx.load(path, device="cpu") for path in paths.values()]
    arguments = [part for name, path in paths.items() for part in ("--model", f"{name}={path}")]
    return [*arguments, "--api-key", KEY], Traffic(*models)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--minutes", type=float)
    size.add_argument("--requests", type=int)
    parser.add_argument("--frontends", default="1")
    parser.add_argument("--log", type=Path, help="keep the server's log there")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        arguments, traffic = serve_models(Path(name))
        log = options.log or Path(name) / "log"
        arguments += ["--frontends", options.frontends]
        with start_server(arguments, log=log, ends_with_us=True) as server:
            growth = health = 0.0
            if options.requests is not None:
                most = options.requests
                counts = asyncio.run(send(server.url, traffic, until=lambda sent: sent >= most))
            else:
                counts, growth, health = asyncio.run(watched(server, traffic, 60 * options.minutes))
            server.wait_until_idle()
            assert server.stop() == 0
            assert "Traceback" not in server.read_log()
    print(json.dumps({"num_requests": counts.total(), **counts, "growth_of_last_half": growth}))
    print(json.dumps({"health_p99_s": health}))
    return int(growth >= MAX_GROWTH or health >= MAX_HEALTH_S)


if __name__ == "__main__":
    sys.exit(main())
