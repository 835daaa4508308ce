"""Suite `serve`: embeddings over HTTP under load, against infinity-emb, vLLM and Model.embed.

Every server runs in a process of its own, and so does the load generator (serve_load.py), on the
cores of this machine. All get the same requests, one server after the other.
"""

import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch

import bytetx
from benchmarks.measure import cosine_distance, device_name
from benchmarks.rivals import versions
from benchmarks.serve_load import LoadResult, Plan, Stream, StreamResult, merged, percentile
from benchmarks.serve_servers import (
    Command,
    Server,
    ServerError,
    bytetx_server,
    infinity_server,
    package_version,
    request_body,
    running,
    vllm_server,
)
from benchmarks.suite import Case, Measurement, Suite, rounded, select
from benchmarks.texts import PROFILES
from bytetx.checkpoint.demo import demo_checkpoint
from bytetx.cli.passages import PASSAGE_TEXTS, Lognormal, english_passages
from bytetx.errors import BytetxError, OptionError

DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
YARDSTICK = "Model.embed"  # among the rivals: what the engine alone does, without a server
LENGTHS = {
    "real": PASSAGE_TEXTS,
    "ln128": PROFILES["ln128"][0][1],
    "query": PROFILES["query"][0][1],
}
_QUERIES = Lognormal(10, 0.1, 8, 12)
_DOCUMENTS = Lognormal(512, 0.01, 505, 520)  # the models of the suite cut at their own length
_NUM_TEXTS = 2048  # different ones; then they come again
_NUM_DOCUMENTS = 64
_NUM_CHECKED = 16
_MAX_COSINE_DISTANCE = {"fp32": 1e-4, "fp16": 1e-3, "bf16": 2e-2}
_QUERIES_PER_S = 20.0
_PART_OF_SATURATION = 0.5
_FEWEST_ANSWERS = 100  # that a p99 is read from
_ROUNDS = 6  # answers of each caller at the speed of Model.embed: a slower rival has fewer
_LONGEST = 6.0  # times the seconds asked for, that a case may take for so many
_KEPT_UP = 0.95  # of the arrivals answered in time; below, latencies say how long the queue grew


@dataclass(frozen=True, slots=True)
class Settings:
    """Seconds of load per case and server, and where rivals are installed.

    rates: requests of one text a second, of cases of their own.
    num_generators: processes that send; one is enough for some thousand requests a second.
    frontends, replicas: of `bytetx serve`.
    """

    device: str
    dtype: str = "fp32"
    seconds: float = 10.0
    warm_up_s: float = 2.0
    rates: Sequence[float] = ()
    num_generators: int = 1
    frontends: int = 1
    replicas: int = 1
    checkpoint: Path | None = None
    infinity_python: Path | None = None
    vllm_python: Path | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """One case: texts of these lengths, one per request or `texts_per_request`.

    callers: so many ask in turn; None: requests arrive at random, rate a second, or, with None, at
    half of what the same server answers to 64 callers.
    """

    name: str
    lengths: str
    texts_per_request: int = 1
    callers: int | None = None
    rate: float | None = None


def suite(
    *,
    patterns: list[str],
    rate: list[float] | None,
    generators: int,
    model: Path | None,
    **given: Any,
) -> Suite:
    """given: more fields of Settings."""
    settings = Settings(**given, rates=rate or (), num_generators=generators, checkpoint=model)
    return suite_of(settings, patterns=patterns)


def suite_of(settings: Settings, *, patterns: list[str]) -> Suite:
    """The suite's selected cases.  patterns: parts or globs of case names; empty means all.

    Raises OptionError where no case fits or an option is wrong, BytetxError where a rival named is
    not installed.
    """
    if settings.dtype not in DTYPES:
        raise OptionError(f"--dtype must be one of {', '.join(DTYPES)}, got {settings.dtype!r}")
    model = settings.checkpoint.resolve().name if settings.checkpoint else "minilm"
    found = versions(())
    rivals = {"infinity-emb": settings.infinity_python, "vllm": settings.vllm_python}
    for package, python in rivals.items():
        if python is not None:
            found[package] = _needed_version(python, package)
    mixed = f"{model}-queries-beside-documents"
    loads = {load.name: load for load in _loads(model, settings.rates)}
    chosen = select([*loads, mixed], patterns, name=str)

    def cases() -> Iterator[Case]:
        with ExitStack() as stack:
            contest = Contest(settings, stack)
            for name in chosen:
                if name == mixed:
                    yield Case(name, "ms", settings.dtype, contest.queries_beside_documents)
                    continue
                load = loads[name]
                is_rate = load.callers is not None and load.callers > 1
                unit = "us/text" if is_rate else "ms"
                yield Case(name, unit, settings.dtype, partial(contest.measure, load))

    return Suite("serve", _device_name(settings.device), found, cases())


def _loads(model: str, rates: Sequence[float]) -> Iterator[Load]:
    for lengths in LENGTHS:
        name = f"{model}-{lengths}"
        yield Load(f"{name}-64x1", lengths, callers=64)
        yield Load(f"{name}-16x32", lengths, texts_per_request=32, callers=16)
        yield Load(f"{name}-1x1", lengths, callers=1)
        yield Load(f"{name}-half", lengths)
        for rate in rates:
            yield Load(f"{name}-rate-{rate:g}", lengths, rate=rate)


class Contest:
    """Ours and the rivals on one checkpoint; each server is started when it is first measured."""

    def __init__(self, settings: Settings, stack: ExitStack):
        """stack: stops the servers when it is closed."""
        self._settings, self._stack = settings, stack
        self._checkpoint = settings.checkpoint or demo_checkpoint()
        self._saturation: dict[tuple[str, str], float] = {}

    @cached_property
    def model(self) -> "bytetx.Model":
        dtype = getattr(torch, DTYPES[self._settings.dtype])
        return bytetx.load(self._checkpoint, device=self._settings.device, dtype=dtype)

    @cached_property
    def servers(self) -> tuple[list[Server], list[str]]:
        """Ours first, then the rivals whose vectors are ours; and notes on those left out."""
        texts = self._texts("real")[:_NUM_CHECKED]
        expected = self.model.embed(texts, truncate=True).vectors
        servers, notes = [], list[str]()
        for command in self._commands():
            try:
                server = self._stack.enter_context(running(command))
                distance = cosine_distance(expected, server.embed(texts))
                if distance > _MAX_COSINE_DISTANCE[self._settings.dtype]:
                    raise ServerError(f"cosine distance to Model.embed is {distance:.1e}")
            except ServerError as error:
                if command.name == "bytetx":
                    raise
                notes.append(f"{command.name} left out: {error}")
                continue
            servers.append(server)
        return servers, notes

    def measure(self, load: Load) -> Measurement:
        """Time a text of callers' loads; of one caller the median, of arrivals the p99 latency."""
        is_throughput = load.callers is not None and load.callers > 1
        values: dict[str, float] = {}
        shape: dict[str, int | float | str] = {"texts_per_request": load.texts_per_request}
        servers, notes = self.servers
        notes = list(notes)
        for server in servers:
            stream = self._stream(server, load)
            found = self._run(server, [stream])
            result = found.streams[stream.name]
            if is_throughput:
                per_second = found.texts_per_second(stream.name)
                values[server.name] = 1e6 / per_second if per_second else math.inf
                if load.texts_per_request == 1:
                    self._saturation[server.name, load.lengths] = per_second
            else:
                percent = 50 if load.callers == 1 else 99
                values[server.name] = percentile(result.latencies_ms, percent)
            shape |= _shape(server.name, stream, found)
            notes += _complaints(server.name, stream, result)
        if is_throughput:
            values[YARDSTICK] = self._embed_us(load.lengths)
        elif load.callers == 1:
            values[YARDSTICK] = self._embed_one_ms(load.lengths)
        return self._measurement(values, shape, notes)

    def queries_beside_documents(self) -> Measurement:
        """p99 of queries of 10 tokens while documents of 512 arrive, half of what bytetx serve can.

        The shape has their p99 without documents, and the ratio of both.
        """
        values: dict[str, float] = {}
        shape: dict[str, int | float | str] = {}
        servers, notes = self.servers
        notes = list(notes)
        rate = _PART_OF_SATURATION * self._saturation_of(servers[0], "documents")
        queries = [request_body([text]) for text in english_passages(512, lengths=_QUERIES, seed=1)]
        bodies = [request_body([text]) for text in self._texts("documents")]
        for server in servers:
            asked = Stream("queries", server.path, queries, rate=_QUERIES_PER_S)
            beside = Stream("documents", server.path, bodies, rate=rate)
            alone = self._run(server, [asked]).streams["queries"]
            found = self._run(server, [asked, beside])
            mixed = found.streams["queries"]
            values[server.name] = percentile(mixed.latencies_ms, 99)
            alone_ms = percentile(alone.latencies_ms, 99)
            shape |= _shape(server.name, asked, found)
            shape[f"{server.name}_alone_p99_ms"] = rounded(alone_ms)
            shape[f"{server.name}_ratio"] = rounded(values[server.name] / alone_ms)
            notes.append(f"{server.name}: p99 {values[server.name] / alone_ms:.2f}x of that alone")
            notes += _complaints(server.name, asked, mixed)
            notes += _complaints(server.name, beside, found.streams["documents"])
        shape |= {"queries_per_s": _QUERIES_PER_S, "documents_per_s": rounded(rate)}
        return self._measurement(values, shape, notes)

    def _measurement(
        self,
        values: dict[str, float],
        shape: dict[str, int | float | str],
        notes: list[str],
    ) -> Measurement:
        ours = values.pop("bytetx")
        if not math.isfinite(ours):
            raise BytetxError(f"bytetx serve answered nothing within the case; {'; '.join(notes)}")
        shape |= {"frontends": self._settings.frontends, "replicas": self._settings.replicas}
        rivals = {name: value for name, value in values.items() if math.isfinite(value)}
        return Measurement(ours, rivals, None, shape, tuple(notes))

    def _commands(self) -> Iterator[Command]:
        settings, dtype = self._settings, DTYPES[self._settings.dtype]
        yield bytetx_server(
            self._checkpoint,
            device=settings.device,
            dtype=dtype,
            frontends=settings.frontends,
            replicas=settings.replicas,
        )
        if settings.infinity_python is not None:
            yield infinity_server(
                settings.infinity_python, self._checkpoint, device=settings.device, dtype=dtype
            )
        if settings.vllm_python is not None:
            yield vllm_server(settings.vllm_python, self._checkpoint, dtype=dtype)

    def _stream(self, server: Server, load: Load) -> Stream:
        texts, size = self._texts(load.lengths), load.texts_per_request
        bodies = [request_body(texts[i : i + size]) for i in range(0, len(texts), size)]
        rate = load.rate
        if load.callers is None and rate is None:
            rate = _PART_OF_SATURATION * self._saturation_of(server, load.lengths)
        return Stream(load.name, server.path, bodies, size, load.callers, rate)

    def _saturation_of(self, server: Server, lengths: str) -> float:
        """Requests of one text a second that 64 callers get; measured where no case has yet."""
        key = (server.name, lengths)
        if key not in self._saturation:
            load = Load("saturation", lengths, callers=64)
            found = self._run(server, [self._stream(server, load)])
            self._saturation[key] = found.texts_per_second("saturation")
        if not self._saturation[key]:
            raise BytetxError(f"{server.name} answered none of 64 callers within the time")
        return self._saturation[key]

    def _run(self, server: Server, streams: Sequence[Stream]) -> LoadResult:
        settings = self._settings
        enough = [
            _FEWEST_ANSWERS / stream.rate
            if stream.rate is not None
            else _ROUNDS * (stream.callers or 0) * stream.texts_per_request * self._text_seconds
            for stream in streams
        ]
        seconds = max(settings.seconds, min(max(enough), _LONGEST * settings.seconds))
        plan = Plan(server.port, streams, seconds, settings.warm_up_s)
        return generate_load(plan, settings.num_generators)

    def _texts(self, lengths: str) -> list[str]:
        if lengths == "documents":
            return english_passages(_NUM_DOCUMENTS, lengths=_DOCUMENTS)
        return english_passages(_NUM_TEXTS, lengths=LENGTHS[lengths])

    def _embed_us(self, lengths: str) -> float:
        """Time Model.embed per text, all given at once: no server that runs it can beat that."""
        texts = self._texts(lengths)[: 256 if self._settings.device == "cpu" else None]
        return _median_seconds(partial(self.model.embed, texts, truncate=True)) / len(texts) * 1e6

    @cached_property
    def _text_seconds(self) -> float:
        return self._embed_us("real") / 1e6

    def _embed_one_ms(self, lengths: str) -> float:
        texts = iter(cycle(self._texts(lengths)))
        times = []
        for text in islice(texts, 64):
            began = time.perf_counter()
            self.model.embed([text], truncate=True)
            times.append((time.perf_counter() - began) * 1e3)
        return percentile(times, 50)


def generate_load(plan: Plan, num_processes: int = 1) -> LoadResult:
    """Runs the plan in processes of its own that share callers and arrivals among them.

    Raises BytetxError where one fails.
    """
    command = [sys.executable, "-m", "benchmarks.serve_load"]
    processes = []
    for i in range(num_processes):
        content = json.dumps(asdict(plan.share(i, num_processes)))
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append((process, content))
    assert all(process.stdin is not None for process, _ in processes)
    for process, content in processes:  # each begins when it has read its plan
        assert process.stdin is not None
        process.stdin.write(content)
        process.stdin.close()
        process.stdin = None
    results = []
    for process, _ in processes:
        output, complaint = process.communicate()
        if process.returncode:
            last = complaint.strip().splitlines()[-1:] or ["it said nothing"]
            raise BytetxError(f"the load generator failed: {last[0]}")
        results.append(LoadResult.from_json(output))
    return merged(results)


def _shape(name: str, stream: Stream, found: LoadResult) -> dict[str, int | float | str]:
    """A server's latencies and rates, for the record; the keys begin with its name."""
    result = found.streams[stream.name]
    shape: dict[str, int | float | str] = {
        f"{name}_p{percent}_ms": rounded(percentile(result.latencies_ms, percent))
        for percent in (50, 95, 99)
        if result.latencies_ms
    }
    shape[f"{name}_texts_per_s"] = rounded(found.texts_per_second(stream.name))
    shape[f"{name}_seconds"] = round(found.seconds, 1)
    shape[f"{name}_failed"] = sum(result.failures.values())
    shape[f"{name}_generator_cpu"] = round(found.cpu_share, 3)
    if stream.rate is not None:
        shape[f"{name}_requests_per_s"] = rounded(stream.rate)
    return shape


def _complaints(name: str, stream: Stream, result: StreamResult) -> Iterator[str]:
    """Return notes on failures, and on arrivals that were not kept up with."""
    for kind, count in sorted(result.failures.items()):
        yield f"{name}: {count} of {result.offered} {stream.name} failed ({kind})"
    answered = result.answered / stream.texts_per_request
    if stream.rate is not None and answered < _KEPT_UP * result.offered:
        part = answered / result.offered
        yield f"{name} did not keep up with {stream.name}: {part:.0%} answered within the time"


def _needed_version(python: Path, package: str) -> str:
    try:
        version = package_version(python, package)
    except OSError as error:
        raise OptionError(f"{python} cannot be run: {error.strerror}") from error
    if version is None:
        raise BytetxError(f"{python} has no {package}; run: {python} -m pip install {package}")
    return version


def _median_seconds(run: Callable[[], object]) -> float:
    times = []
    for _ in range(3):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return sorted(times)[1]


def _device_name(device: str) -> str:
    return device_name() if device == "cpu" else torch.cuda.get_device_name()
