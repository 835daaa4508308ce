"""`bytetx bench`: how fast this machine embeds, in this process and over HTTP.

The repository's benchmarks/ measure kernels, rivals and floors, and keep records; a wheel does not
hold them.
"""

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
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from typer.core import TyperGroup

from bytetx.checkpoint.demo import demo_checkpoint
from bytetx.checkpoint.files import resolve_checkpoint
from bytetx.checkpoint.names import checkpoint_name
from bytetx.cli.files.options import DTYPE_HELP
from bytetx.cli.passages import english_passages
from bytetx.errors import BytetxError, OptionError

_REPOSITORY = Path(__file__).resolve().parents[2]
_MODEL = "model"  # the name that requests ask for
_PATH = "/v1/embeddings"
_SINGLES = 32  # texts that are embedded one by one
_MIN_ROUNDS = 3
_WARM_UP_S = 1.0
_START_S, _STOP_S = 300.0, 20.0  # a large checkpoint takes a while to load
_LOG_LINES = 5


def _where_suites_are() -> str:
    """Say where the other suites are, or that they are not on this machine."""
    what = "Kernels, rivals, floors and records are measured by the repository's benchmarks/"
    if (_REPOSITORY / "benchmarks" / "__main__.py").is_file():
        return f"{what}: python -m benchmarks --help, in {_REPOSITORY}"
    return f"{what}, which are not in this installation: clone it, and run python -m benchmarks"


class _Suites(TyperGroup):
    """Sends who asks for a suite of the repository there."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # typer's click, or the real one
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            known = ", ".join(self.commands)
            raise OptionError(f"bench has {known}, not {args[0]!r}. {_where_suites_are()}")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="bench",
    cls=_Suites,
    help="Measure how fast this machine embeds, beside sentence-transformers if it is installed.",
    epilog=_where_suites_are(),
    no_args_is_help=True,
)
Model = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", help="Checkpoint folder or hub id of an encoder; all-MiniLM-L6-v2."
    ),
]
Dtype = Annotated[str, typer.Option(help=DTYPE_HELP)]
Texts = Annotated[int, typer.Option(min=1, help="English passages of about 90 tokens.")]
Seconds = Annotated[float, typer.Option(min=0.1, help="Of each measurement, about.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object, for programs.")]


@app.command()
def cpu(
    model: Model = None,
    dtype: Dtype = "auto",
    texts: Texts = 256,
    seconds: Seconds = 10.0,
    as_json: AsJson = False,
) -> None:
    """Strings to vectors on this machine's CPU: many texts at once, and one at a time."""
    _report(_embedding(model, "cpu", dtype, texts, seconds), as_json=as_json)


@app.command()
def gpu(
    model: Model = None,
    dtype: Dtype = "auto",
    texts: Texts = 4096,
    seconds: Seconds = 10.0,
    as_json: AsJson = False,
    device: Annotated[str, typer.Option(help="cuda or cuda:N.")] = "cuda",
) -> None:
    """Strings to vectors on a GPU: many texts at once, and one at a time."""
    if not device.startswith("cuda"):
        raise OptionError(f"--device must be cuda or cuda:N, got {device!r}")
    _report(_embedding(model, device, dtype, texts, seconds), as_json=as_json)


@app.command()
def serve(
    model: Model = None,
    dtype: Dtype = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    callers: Annotated[
        int, typer.Option(min=1, help="Connections that ask again as soon as they are answered.")
    ] = 16,
    texts_per_request: Annotated[int, typer.Option(min=1, help="English passages.")] = 1,
    seconds: Seconds = 10.0,
    as_json: AsJson = False,
) -> None:
    """`bytetx serve` on this machine under load: texts per second and latencies over HTTP.

    The callers are threads of this process and share the cores with the server.
    """
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
    found = {
        "model": checkpoint_name(folder),
        "callers": callers,
        "texts_per_request": texts_per_request,
        "requests": len(latencies),
        "texts_per_second": len(latencies) * texts_per_request / took,
        "p50_ms": _percentile(latencies, 50) * 1e3,
        "p99_ms": _percentile(latencies, 99) * 1e3,
    }
    if as_json:
        print(json.dumps(found))
        return
    console = Console(highlight=False)
    console.print(
        f"{found['texts_per_second']:,.0f} texts/s to {callers} callers; latency "
        f"{found['p50_ms']:.2f} ms (p50), {found['p99_ms']:.2f} ms (p99)"
    )
    console.print(_where_suites_are(), style="dim")


@dataclass(frozen=True, slots=True)
class _Speed:
    """Speed of an engine: many texts given at once, and one text at a time."""

    texts_per_second: float
    tokens_per_second: float
    one_text_ms: float


def _embedding(
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


def _report(found: dict[str, Any], *, as_json: bool) -> None:
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
    console.print(_where_suites_are(), style="dim")


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
