"""Measures and prints the speed of engines in this process, and of a server over HTTP."""

import http.client
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from bytetx.checkpoint.demo import demo_checkpoint
from bytetx.checkpoint.files import resolve_checkpoint
from bytetx.checkpoint.names import checkpoint_name
from bytetx.cli.passages import english_passages
from bytetx.errors import BytetxError

_MODEL = "model"  # the name that requests ask for
_PATH = "/v1/embeddings"
_SINGLES = 32  # texts that are embedded one by one
_MIN_ROUNDS = 3
_WARM_UP_S = 1.0
_START_S, _STOP_S = 300.0, 20.0  # a large checkpoint takes a while to load
_LOG_LINES = 5


@dataclass(frozen=True, slots=True)
class _Speed:
    """Speed of an engine: many texts given at once, and one text at a time."""

    texts_per_second: float
    tokens_per_second: float
    one_text_ms: float


def embedding_speed(
    model: str | None, device: str, dtype: str, num_texts: int, seconds: float
) -> dict[str, Any]:
    """Measure bytetx and sentence-transformers on the same texts, in turn."""
    from bytetx.model import load  # it imports torch

    folder = _checkpoint(model)
    passages = english_passages(num_texts)
    loaded = load(folder, device=device, dtype=dtype)
    tokens = loaded.embed(passages, truncate=True).stats.num_tokens  # it warms up, too
    engines: dict[str, Callable[[list[str]], object]] = {
        "bytetx": lambda texts: loaded.embed(texts, truncate=True)
    }
    if find_spec("sentence_transformers") is not None:
        engines["sentence-transformers"] = _sentence_transformers(
            folder, device, loaded.checkpoint.dtype
        )
    many = _medians({n: partial(run, passages) for n, run in engines.items()}, seconds)
    single = {n: partial(_one_by_one, run, passages[:_SINGLES]) for n, run in engines.items()}
    one = {n: took / min(_SINGLES, num_texts) for n, took in _medians(single, seconds / 5).items()}
    speeds = {
        name: asdict(_Speed(num_texts / many[name], tokens / many[name], one[name] * 1e3))
        for name in engines
    }
    return {
        "model": checkpoint_name(folder),
        "device": str(loaded.checkpoint.device),
        "dtype": str(loaded.checkpoint.dtype).removeprefix("torch."),
        "texts": num_texts,
        "tokens": tokens,
        "speeds": speeds,
    }


def _one_by_one(embed: Callable[[list[str]], object], texts: list[str]) -> None:
    for text in texts:
        embed([text])


def _checkpoint(model: str | None) -> Path:
    return demo_checkpoint() if model is None else resolve_checkpoint(model)


def _sentence_transformers(folder: Path, device: str, dtype: Any) -> Callable[[list[str]], object]:
    from sentence_transformers import SentenceTransformer

    options = {"dtype": dtype}
    rival = SentenceTransformer(
        str(folder), device=device, model_kwargs=options, trust_remote_code=False
    )
    return lambda texts: rival.encode(texts, batch_size=32, show_progress_bar=False)


def _medians(runs: Mapping[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Median seconds of each run; all take turns, so that a drift of the clock hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    end = time.perf_counter() + seconds
    while len(next(iter(times.values()))) < _MIN_ROUNDS or time.perf_counter() < end:
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - began)
    return {name: statistics.median(found) for name, found in times.items()}


def print_embedding(found: Mapping[str, Any], *, note: str, as_json: bool) -> None:
    if as_json:
        print(json.dumps(found))
        return
    table = Table(box=box.SIMPLE_HEAD)
    for head in ("", "texts/s", "tokens/s", "one text, ms"):
        table.add_column(head, justify="right" if head else "left")
    for name, speed in found["speeds"].items():
        rates = (f"{speed[key]:,.0f}" for key in ("texts_per_second", "tokens_per_second"))
        table.add_row(name, *rates, f"{speed['one_text_ms']:.2f}")
    console = Console(highlight=False)
    device, dtype = found["device"], found["dtype"]
    console.print(f"{found['model']} on {device} in {dtype}, {found['texts']} texts")
    console.print(table)
    if len(found["speeds"]) == 1:
        console.print("sentence-transformers, to compare with, is not installed", style="dim")
    console.print(note, style="dim")


def serving_speed(
    model: str | None,
    device: str,
    dtype: str,
    *,
    callers: int,
    texts_per_request: int,
    seconds: float,
) -> dict[str, Any]:
    """Texts per second and latencies of `bytetx serve`, asked by `callers` threads."""
    passages = english_passages(64 * texts_per_request)
    bodies = [
        json.dumps({"model": _MODEL, "input": passages[i : i + texts_per_request]})
        for i in range(0, len(passages), texts_per_request)
    ]
    folder = _checkpoint(model)
    with _server(folder, device, dtype) as port:
        _answers(port, bodies, callers, _WARM_UP_S)
        began = time.perf_counter()
        latencies = sorted(_answers(port, bodies, callers, seconds))
        took = time.perf_counter() - began
    if not latencies:
        raise BytetxError(f"bytetx serve answered nothing within {took:.0f} s")
    return {
        "model": checkpoint_name(folder),
        "callers": callers,
        "texts_per_request": texts_per_request,
        "requests": len(latencies),
        "texts_per_second": len(latencies) * texts_per_request / took,
        "p50_ms": _percentile(latencies, 50) * 1e3,
        "p99_ms": _percentile(latencies, 99) * 1e3,
    }


def print_serving(found: Mapping[str, Any], *, note: str, as_json: bool) -> None:
    if as_json:
        print(json.dumps(found))
        return
    console = Console(highlight=False)
    console.print(
        f"{found['texts_per_second']:,.0f} texts/s to {found['callers']} callers; latency "
        f"{found['p50_ms']:.2f} ms (p50), {found['p99_ms']:.2f} ms (p99)"
    )
    console.print(note, style="dim")


@contextmanager
def _server(folder: Path, device: str, dtype: str) -> Iterator[int]:
    """The port of a `bytetx serve` that ends with the block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    command = [sys.executable, "-m", "bytetx", "serve", "--model", f"{_MODEL}={folder}"]
    command += ["--port", str(port), "--device", device, "--dtype", dtype]
    command += ["--auto-truncate"]
    with tempfile.TemporaryFile(mode="w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            end = time.monotonic() + _START_S
            while not _is_ready(port):
                if process.poll() is not None or time.monotonic() > end:
                    log.seek(0)
                    last = " | ".join(line.strip() for line in log.readlines()[-_LOG_LINES:])
                    raise BytetxError(f"bytetx serve did not start; its last lines: {last}")
                time.sleep(0.1)
            yield port
        finally:
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    with suppress(OSError, http.client.HTTPException):
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    return False


def _answers(port: int, bodies: list[str], callers: int, seconds: float) -> list[float]:
    """Seconds of each request that callers sent in turn within `seconds`."""
    end = time.perf_counter() + seconds

    def ask(caller: int) -> list[float]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        taken = []
        for turn in count(caller):
            began = time.perf_counter()
            if began > end:
                break
            headers = {"Content-Type": "application/json"}
            connection.request("POST", _PATH, bodies[turn % len(bodies)], headers)
            answer = connection.getresponse()
            content = answer.read()
            if answer.status != 200:
                said = content[:300].decode(errors="replace")
                raise BytetxError(f"bytetx serve answers {answer.status}: {said}")
            taken.append(time.perf_counter() - began)
        connection.close()
        return taken

    with ThreadPoolExecutor(callers) as pool:
        return [taken for each in pool.map(ask, range(callers)) for taken in each]


def _percentile(ordered: list[float], percent: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]
