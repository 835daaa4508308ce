"""Requests of many callers to a running server: python tests/serve/serve_soak.py --minutes 15.

Starts `bytetx serve` with small random models and sends it a mix of requests, 30 % of which leave
before they are answered. Fails where an answer differs from Model's, or on other routes from the
server's own before the storm, a request that stayed gets no answer, one that left stays in the
server, resident memory of the server's processes grows by 2 % or more over the last half, or the
99th percentile of GET /health is 0.1 s or more. With --minutes, slow clients and the largest bodies
run beside the mix; with --kills and front-ends, the engine process is killed so many times, and
only requests that it held may then be answered 503. --requests 10000 is a storm of that many
instead.
"""

import argparse
import asyncio
import json
import os
import shlex
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import httpx
import numpy as np
import transformers
from checkpoints import SENTENCES, save_causal, save_checkpoint, texts
from decisions import save_decider
from extractors import save_extractor
from largest_bodies import largest_bodies
from lora_adapters import save_adapter
from other_processes import child_processes, resident_mib
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
_ADAPTERS = (
    ("embedder", "one", transformers.AutoModel),
    ("embedder", "two", transformers.AutoModel),
    ("writer", "one", transformers.AutoModelForCausalLM),
)
_LONGEST_STAY_S = 0.05  # of a client that leaves
_HEADERS = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}


@dataclass(frozen=True, slots=True)
class Ask:
    """A request and what is wrong with its answer: check raises AssertionError."""

    kind: str
    path: str
    body: bytes
    check: Callable[[httpx.Response], None]


class Traffic:
    """Random requests with the answers of models in this process, and those of other routes."""

    def __init__(self, embedder: bytetx.Model, classifier: bytetx.Model, writer: bytetx.Model):
        self.rng = np.random.default_rng(0)
        self.routes: list[Ask] = []  # learn() finds them
        self.is_killed = False  # whether the engine process is, now and then
        self.inputs = texts(_NUM_TEXTS, max_words=60)
        self.vectors = embedder.embed(self.inputs, truncate=True, normalize=True).vectors
        self.labels = classifier.classify(self.inputs, truncate=True)
        params = SamplingParams(max_tokens=_NEW_TOKENS, temperature=0)
        self.prompts = [text for text in self.inputs[:64] if 0 < len(text) < 60]
        self.outputs = [one.text for one in writer.generate(self.prompts, params)]

    def draw(self) -> Ask:
        kinds = (
            *(self._embed, self._batch, self._openai, self._predict),
            *(self._bad, self._complete, self._route),
        )
        return kinds[self.rng.choice(len(kinds), p=(0.4, 0.05, 0.1, 0.1, 0.1, 0.05, 0.2))]()

    def learn(self, url: str) -> None:
        """Asks every other route once, while nobody else asks."""
        with httpx.Client(base_url=url, headers=_HEADERS, timeout=_WAIT_S) as client:
            for path, body in route_bodies():
                answer = client.post(path, json=body)
                assert answer.status_code == 200, f"{path}: {answer.text}"
                check = partial(_is_close, wanted=answer.json())
                self.routes.append(Ask(path, path, json.dumps(body).encode(), check))

    def _route(self) -> Ask:
        return self.routes[int(self.rng.integers(len(self.routes)))]

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


def route_bodies() -> list[tuple[str, dict[str, Any]]]:
    """Requests whose answers do not change, to the routes that the mix leaves out."""
    words = SENTENCES[:4]
    write = {"model": "writer", "prompt": words[0][:30], "max_tokens": 24, "temperature": 0}
    pairs = {"text_1": words[0], "text_2": words[1:]}
    question = {"name": "q", "type": "predicate", "instructions": "Is it so?"}
    return [
        ("/embed", {"model": "embedder:one", "inputs": words}),
        ("/embed", {"model": "embedder:two", "inputs": words}),
        ("/embed_all", {"model": "embedder", "inputs": words[:2]}),
        ("/v1/embeddings", {"model": "embedder:two", "input": words, "output_dtype": "int8"}),
        ("/v1/embed", {"model": "embedder", "texts": words, "input_type": "search_query"}),
        ("/v2/embed", {"model": "embedder:one", "texts": words, "input_type": "clustering"}),
        ("/similarity", {"model": "embedder", "inputs": _source(words)}),
        ("/pooling", {"model": "embedder", "input": words[0], "task": "token_embed"}),
        ("/score", {"model": "ranker", **pairs}),
        ("/rerank", {"model": "ranker", "query": words[0], "texts": words}),
        ("/v1/rerank", {"model": "ranker", "query": words[0], "documents": words, "top_n": 2}),
        ("/classify", {"model": "classifier", "input": words}),
        ("/predict", {"model": "classifier", "inputs": words[0], "raw_scores": True}),
        ("/predict_tokens", {"model": "tagger", "inputs": words[0]}),
        ("/extract", {"model": "extractor", "texts": words, "labels": ["a", "b"]}),
        ("/tokenize", {"model": "embedder", "inputs": words}),
        ("/v1/completions", write),
        ("/v1/completions", {**write, "model": "writer:one"}),
        ("/v1/completions", {**write, "guided_choice": ["left", "right"]}),
        ("/v1/completions", {**write, "guided_regex": "[a-z]{2}( [a-z]{2}){3}"}),
        ("/v1/decisions", {"model": "decider", "input": words[0], "questions": [question]}),
    ]


def _source(words: Sequence[str]) -> dict[str, object]:
    return {"source_sentence": words[0], "sentences": words[1:]}


def _is_close(answer: httpx.Response, wanted: Any) -> None:
    assert answer.status_code == 200, answer.text
    assert_close(answer.json(), wanted)


def assert_close(found: Any, wanted: Any) -> None:
    """Equal but for identities and rounding."""
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for key in wanted.keys() - {"id", "created"}:
            assert_close(found[key], wanted[key])
    elif isinstance(wanted, list):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_close(one, other)
    elif isinstance(wanted, float):
        assert abs(found - wanted) < 1e-4 * max(abs(wanted), 1)
    else:
        assert found == wanted


def _is_answer(answer: httpx.Response) -> None:
    assert answer.status_code == 200, answer.text


def _ask(kind: str, path: str, body: Any, check: Callable[[httpx.Response], None]) -> Ask:
    return Ask(kind, path, json.dumps({**body, "truncate": True}).encode(), check)


async def send(url: str, traffic: Traffic, *, until: Callable[[int], bool]) -> Counter[str]:
    """CALLERS callers send requests until(number sent); how many of each kind were answered."""
    counts: Counter[str] = Counter()
    num_sent = 0
    limits = httpx.Limits(max_connections=CALLERS, max_keepalive_connections=CALLERS)

    async def caller(client: httpx.AsyncClient) -> None:
        nonlocal num_sent
        while not until(num_sent):
            num_sent += 1
            ask, leaves = traffic.draw(), traffic.rng.random() < LEAVE
            if not leaves:
                answer = await client.post(ask.path, content=ask.body)
                if answer.status_code == 503 and traffic.is_killed:
                    assert int(answer.headers["retry-after"]) >= 1
                    counts["unavailable"] += 1
                    continue
                ask.check(answer)
                counts[ask.kind] += 1
                continue
            await leave(url, ask, float(traffic.rng.random()) * _LONGEST_STAY_S)
            counts["left"] += 1

    async with (
        httpx.AsyncClient(base_url=url, headers=_HEADERS, timeout=_WAIT_S, limits=limits) as client,
        asyncio.TaskGroup() as group,
    ):
        for _ in range(CALLERS):
            group.create_task(caller(client))
    return counts


async def send_largest(url: str, seconds: float) -> Counter[str]:
    """One caller sends the largest bodies that /embed, /predict, /tokenize and / admit."""
    counts, end = Counter[str](), time.monotonic() + seconds
    async with httpx.AsyncClient(base_url=url, headers=_HEADERS, timeout=5 * _WAIT_S) as client:
        while time.monotonic() < end:
            for path in ("/embed", "/predict", "/tokenize", "/"):
                for body in largest_bodies(path, size=_LARGEST_BYTES):
                    if time.monotonic() < end:
                        answer = await client.post(path, content=body)
                        assert answer.status_code < 500 or answer.status_code == 503, answer.text
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
            assert client.get("/health").status_code in (200, 503)
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


async def kill_engines(server: Server, times: int, seconds: float) -> None:
    """Kills the engine process so many times, evenly over that long."""
    for _ in range(times):
        await asyncio.sleep(seconds / (times + 1))
        engine = next(
            pid
            for pid in child_processes(server.process.pid)
            if b"\0engine" in Path(f"/proc/{pid}/cmdline").read_bytes()
        )
        os.kill(engine, signal.SIGKILL)


async def watched(
    server: Server, traffic: Traffic, seconds: float, *, kills: int = 0
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
    killing = asyncio.create_task(kill_engines(server, kills, seconds))
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
    await killing
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
    others = {
        "ranker": save_checkpoint(
            folder / "ranker", head="ForSequenceClassification", num_labels=1
        ),
        "tagger": save_checkpoint(folder / "tagger", head="ForTokenClassification"),
        "extractor": save_extractor(folder / "extractor"),
        "decider": save_decider(folder / "decider"),
    }
    arguments += [part for name, path in others.items() for part in ("--model", f"{name}={path}")]
    for base, name, kind in _ADAPTERS:
        adapter = folder / f"{base}-{name}"
        save_adapter(paths[base], adapter, kind, seed=len(name), r=4, target_modules="all-linear")
        arguments += ["--adapter", f"{base}:{name}={adapter}"]
    return [*arguments, "--api-key", KEY], Traffic(*models)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--minutes", type=float)
    size.add_argument("--requests", type=int)
    parser.add_argument("--frontends", default="1")
    parser.add_argument("--kills", type=int, default=0, help="of the engine process")
    parser.add_argument("--serve", default="", help="more arguments of the server")
    parser.add_argument("--log", type=Path, help="keep the server's log there")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        arguments, traffic = serve_models(Path(name))
        log = options.log or Path(name) / "log"
        arguments += ["--frontends", options.frontends, *shlex.split(options.serve)]
        with start_server(arguments, log=log, ends_with_us=True) as server:
            growth = health = 0.0
            traffic.learn(server.url)
            traffic.is_killed = options.kills > 0
            if options.requests is not None:
                most = options.requests
                counts = asyncio.run(send(server.url, traffic, until=lambda sent: sent >= most))
            else:
                seconds = 60 * options.minutes
                counts, growth, health = asyncio.run(
                    watched(server, traffic, seconds, kills=options.kills)
                )
            server.wait_until_idle()
            assert server.stop() == 0
            assert "Traceback" not in server.read_log()
    print(json.dumps({"num_requests": counts.total(), **counts, "growth_of_last_half": growth}))
    print(json.dumps({"health_p99_s": health}))
    return int(growth >= MAX_GROWTH or health >= MAX_HEALTH_S)


if __name__ == "__main__":
    sys.exit(main())
