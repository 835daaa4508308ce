"""Prometheus metrics bytetx_*, and the same numbers under TEI's names te_*.

StatusWindow has the numbers of the status page: rates and latencies of the last minutes.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import orjson
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from bytetx.encode.request import StepStats
from bytetx.serve.calls import Timings
from bytetx.serve.engine import ServedModel
from bytetx.serve.records import Finished
from bytetx.serve.settings import ServeSettings
from bytetx.tasks.async_stats import AsyncStats

WINDOW_S = 120.0
_MOST_ANSWERS = 20_000  # in the window; above that, the latest ones
_MOST_STEPS = 120


class _AnswerTime(NamedTuple):
    time: float
    seconds: float
    num_tokens: int


class StatusWindow:
    """Counts of the answers of the last WINDOW_S seconds, and totals since the start."""

    def __init__(self) -> None:
        self._start = time.time()
        self._answers: deque[_AnswerTime] = deque(maxlen=_MOST_ANSWERS)
        self._requests = self._tokens = self._truncated = self._errors = 0

    def add_request(self, seconds: float, *, error: bool) -> None:
        """A request that asked for no model, or failed before it did."""
        if error:
            self._requests += 1
            self._errors += 1

    def add_answer(self, seconds: float, timings: Timings, *, error: bool) -> None:
        self._answers.append(_AnswerTime(time.time(), seconds, timings.num_tokens))
        self._requests += 1
        self._errors += error
        self._tokens += timings.num_tokens
        self._truncated += timings.num_truncated

    def json(self, served: Sequence[ServedModel], stats: AsyncStats) -> bytes:
        """The document of GET /stats.json; docs/serving.md describes it."""
        now = time.time()
        recent = [answer for answer in self._answers if answer.time > now - WINDOW_S]
        seconds = max(1.0, min(WINDOW_S, now - self._start))
        if len(recent) == _MOST_ANSWERS:  # the window reaches back less far
            seconds = max(0.001, now - recent[0].time)
        percentiles: list[float | None] = [None, None, None]
        if recent:
            latencies = [answer.seconds * 1000 for answer in recent]
            percentiles = np.percentile(latencies, (50, 95, 99)).round(3).tolist()
        return orjson.dumps(
            {
                "models": [_model(one) for one in served],
                "uptime_s": round(now - self._start, 1),
                "queue": {
                    "requests": stats.num_queued,
                    "tokens": stats.queued_tokens,
                    "running": stats.num_running + stats.num_generating,
                },
                "rates": {
                    "requests_per_s": round(len(recent) / seconds, 2),
                    "tokens_per_s": round(sum(a.num_tokens for a in recent) / seconds, 1),
                },
                "latency_ms": dict(zip(("p50", "p95", "p99"), percentiles, strict=True)),
                "totals": {
                    "requests": self._requests,
                    "tokens": self._tokens,
                    "padding_saved_tokens": max(0, stats.padded_tokens - stats.total_tokens),
                    "truncated": self._truncated,
                    "errors": self._errors,
                },
                "steps": [
                    {
                        "t": step.time,
                        "sequences": step.num_sequences,
                        "tokens": step.total_tokens,
                        "computed_tokens": step.computed_tokens,
                        "padded_tokens": step.padded_tokens,
                        "seconds": step.seconds,
                    }
                    for step in list(stats.recent)[-_MOST_STEPS:]
                ],
            }
        )


def _model(one: ServedModel) -> dict[str, object]:
    info = one.facts.info
    return {
        "name": one.facts.name,
        "family": info["family"],
        "dtype": info["dtype"],
        "device": info["device"],
        "parameters": info["num_parameters"],
        "max_tokens": info["max_tokens"],
        "tasks": list(one.facts.tasks),
    }


_SECONDS = (
    *(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05),
    *(0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0),
)
_SIZES = tuple(float(1 << power) for power in range(18))
# TEI's name, and ours whose samples it takes: histograms, then plain numbers.
_TE_HISTOGRAMS = {
    "te_request_duration": "bytetx_request_duration_seconds",
    "te_request_tokenization_duration": "bytetx_request_tokenization_duration_seconds",
    "te_request_queue_duration": "bytetx_request_queue_duration_seconds",
    "te_request_inference_duration": "bytetx_request_inference_duration_seconds",
    "te_request_input_length": "bytetx_request_input_tokens",
    "te_batch_next_size": "bytetx_batch_sequences",
    "te_batch_next_tokens": "bytetx_batch_tokens",
}
# TEI's method of a route.
_TE_METHODS = {
    "/embed": "single",
    "/v1/embeddings": "batch",
}


class Metrics:
    """Counts finished requests; queue and batches are read from the models when it is scraped."""

    def __init__(self, settings: ServeSettings):
        disable_created_metrics()  # a sample more for each counter, which nothing here reads
        self._te = "te" in settings.metrics_names
        self._served: Sequence[ServedModel] = ()
        self.window = StatusWindow()
        registry = self._registry = CollectorRegistry()
        self._requests = Counter(
            "bytetx_requests",
            "Requests that were answered, by route and HTTP status (499: the client left first).",
            ["route", "status"],
            registry=registry,
        )
        self._failures = Counter(
            "bytetx_request_failures",
            "Requests with an error, by its kind.",
            ["err"],
            registry=registry,
        )
        self._ignored = Counter(
            "bytetx_ignored_fields",
            "Fields of requests that are not known and were passed over, by route.",
            ["route"],
            registry=registry,
        )
        self._duration = self._histogram(
            "bytetx_request_duration_seconds",
            "From the request to the end of its answer.",
            _SECONDS,
        )
        self._tokenize = self._histogram(
            "bytetx_request_tokenization_duration_seconds", "From the call to token ids.", _SECONDS
        )
        self._queue = self._histogram(
            "bytetx_request_queue_duration_seconds", "From token ids to the forward pass.", _SECONDS
        )
        self._inference = self._histogram(
            "bytetx_request_inference_duration_seconds", "The forward pass.", _SECONDS
        )
        self._first_token = self._histogram(
            "bytetx_time_to_first_token_seconds", "Of a streamed generation.", _SECONDS
        )
        self._next_token = self._histogram(
            "bytetx_inter_token_latency_seconds", "Mean of a streamed generation.", _SECONDS
        )
        self._input_tokens = self._histogram(
            "bytetx_request_input_tokens", "Tokens of a text, mean of its request.", _SIZES
        )
        self._inputs = Counter(
            "bytetx_inputs", "Texts of answered requests.", ["model"], registry=registry
        )
        self._tokens = Counter(
            "bytetx_input_tokens", "Tokens of answered requests.", ["model"], registry=registry
        )
        self._truncated = Counter(
            "bytetx_truncated_inputs",
            "Texts that were cut to the tokens that the model takes.",
            ["model"],
            registry=registry,
        )
        self._running = Gauge(
            "bytetx_concurrent_requests", "Requests that are being answered.", registry=registry
        )
        self._batches = _Batches(registry)
        self._children: dict[tuple[Counter, tuple[str, ...]], Counter] = {}

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, text, buckets=buckets, registry=self._registry)

    def attach(self, served: Sequence[ServedModel]) -> None:
        """The models, once they are warm: what they have run until then does not count."""
        self._served = served
        self._batches.attach(served)

    def count_running(self, count: Callable[[], int]) -> None:
        """count: gives the requests that are being answered."""
        self._running.set_function(count)

    def record(self, finished: Finished) -> None:
        self._child(self._requests, finished.route, str(finished.status)).inc()
        if finished.num_ignored_fields:
            self._child(self._ignored, finished.route).inc(finished.num_ignored_fields)
        if finished.error:
            self._child(self._failures, finished.error).inc()
        timings = finished.timings
        if timings is None:
            self.window.add_request(0.0, error=finished.status >= 400)
            return
        self._duration.observe(finished.seconds)
        self._tokenize.observe(timings.tokenize_seconds)
        self._queue.observe(timings.queue_seconds)
        self._inference.observe(timings.compute_seconds)
        self._child(self._inputs, finished.model).inc(timings.num_texts)
        self._child(self._tokens, finished.model).inc(timings.num_tokens)
        if timings.num_texts:
            self._input_tokens.observe(timings.num_tokens / timings.num_texts)
        if timings.num_truncated:
            self._child(self._truncated, finished.model).inc(timings.num_truncated)
        if finished.first_token_seconds is not None:
            self._first_token.observe(finished.first_token_seconds)
        if finished.token_seconds is not None:
            self._next_token.observe(finished.token_seconds)
        self.window.add_answer(finished.seconds, timings, error=finished.status >= 400)

    def _child(self, counter: Counter, *labels: str) -> Counter:
        """counter.labels(*labels), which costs more than all else of a record."""
        child = self._children.get((counter, labels))
        if child is None:
            child = self._children[counter, labels] = counter.labels(*labels)
        return child

    def page(self) -> bytes:
        """All metrics as Prometheus' text."""
        self._batches.read()
        page = generate_latest(self._registry)
        if not self._te:
            return page
        families = list(self._registry.collect())
        return page + "".join(_te_lines(families)).encode()

    async def metrics_page(self) -> bytes:
        return self.page()

    async def stats(self) -> bytes:
        self._batches.read()
        return self.window.json(self._served, self._batches.totals())


class _Batches:
    """Numbers of the queue and of forward passes, from AsyncModel.stats()."""

    def __init__(self, registry: CollectorRegistry):
        self._served: list[tuple[ServedModel, AsyncStats]] = []  # and its stats at the start
        self._seen: dict[str, float] = {}  # the time of the last forward pass that was counted
        self._sequences = Histogram(
            "bytetx_batch_sequences", "Texts of a forward pass.", buckets=_SIZES, registry=registry
        )
        self._tokens = Histogram(
            "bytetx_batch_tokens",
            "Tokens that a forward pass computes.",
            buckets=_SIZES,
            registry=registry,
        )
        registry.register(self)

    def attach(self, served: Sequence[ServedModel]) -> None:
        self._served = [(one, one.model.stats()) for one in served]

    def stats(self) -> list[tuple[str, AsyncStats]]:
        return [(one.facts.name, one.model.stats().since(start)) for one, start in self._served]

    def totals(self) -> AsyncStats:
        """Sums over the models."""
        return AsyncStats.total([stats for _, stats in self.stats()])

    def read(self) -> None:
        """Counts the forward passes since the last call, as far as the models remember them."""
        for name, stats in self.stats():
            for step in self._unseen(name, stats.recent):
                self._sequences.observe(step.num_sequences)
                self._tokens.observe(step.computed_tokens)

    def _unseen(self, name: str, recent: Iterable[StepStats]) -> Iterator[StepStats]:
        seen = self._seen.get(name, 0.0)
        for step in recent:
            if step.time > seen:
                self._seen[name] = step.time
                yield step

    def collect(self) -> Iterator[Metric]:
        """prometheus_client's interface of a collector."""
        gauges = {
            "bytetx_queue_requests": ("Texts that wait.", "num_queued"),
            "bytetx_queue_tokens": ("Tokens that wait.", "queued_tokens"),
            "bytetx_running_texts": ("Texts in forward passes.", "num_running"),
            "bytetx_generating_prompts": ("Prompts that are being continued.", "num_generating"),
            "bytetx_prefix_cache_bytes": ("Of prefixes that are kept.", "prefix_cache_bytes"),
        }
        counters = {
            "bytetx_steps": ("Forward passes.", "num_steps"),
            "bytetx_step_tokens": ("Tokens that forward passes computed.", "computed_tokens"),
            "bytetx_step_text_tokens": (
                "Tokens of the texts of forward passes, common prefixes in each text.",
                "total_tokens",
            ),
            "bytetx_prefix_saved_tokens": (
                "Tokens that forward passes took from the cache of prefixes.",
                "prefix_saved_tokens",
            ),
            "bytetx_refused_calls": ("Calls that the full queue refused.", "num_refused"),
            "bytetx_dropped_texts": ("Texts that were cancelled or late.", "num_dropped"),
            "bytetx_spec_decode_num_draft_tokens": (
                "Tokens that were drafted for generations.",
                "num_draft_tokens",
            ),
            "bytetx_spec_decode_num_accepted_tokens": (
                "Drafted tokens that the model chose, too.",
                "num_accepted_tokens",
            ),
        }
        every = self.stats()
        for name, (text, attribute) in gauges.items():
            gauge = GaugeMetricFamily(name, text, labels=["model"])
            for model, stats in every:
                gauge.add_metric([model], getattr(stats, attribute))
            yield gauge
        for name, (text, attribute) in counters.items():
            counter = CounterMetricFamily(name, text, labels=["model"])
            for model, stats in every:
                counter.add_metric([model], getattr(stats, attribute))
            yield counter
        adapters = GaugeMetricFamily(
            "bytetx_adapters", "Adapters that are loaded.", labels=["model"]
        )
        adapter_bytes = GaugeMetricFamily(
            "bytetx_adapter_bytes", "Memory of the adapters that are loaded.", labels=["model"]
        )
        for one, _ in self._served:
            loaded = one.model.model.loras
            adapters.add_metric([one.facts.name], len(loaded.folders))
            adapter_bytes.add_metric([one.facts.name], loaded.num_bytes)
        yield adapters
        yield adapter_bytes
        saved = CounterMetricFamily(
            "bytetx_padding_saved_tokens",
            "Pad tokens that the same batches, padded to their longest text, would have computed.",
            labels=["model"],
        )
        for model, stats in every:
            saved.add_metric([model], max(0, stats.padded_tokens - stats.total_tokens))
        yield saved


def _te_lines(families: Sequence[Metric]) -> Iterator[str]:
    """TEI's metrics: samples of ours under its names, which have no unit and no _total."""
    by_name = {family.name: family for family in families}
    for te_name, name in _TE_HISTOGRAMS.items():
        yield f"# TYPE {te_name} histogram\n"
        for sample in by_name[name].samples:
            suffix = sample.name.removeprefix(name)
            yield _line(te_name + suffix, sample.labels, sample.value)
    queued = sum(sample.value for sample in by_name["bytetx_queue_requests"].samples)
    yield "# TYPE te_queue_size gauge\n"
    yield _line("te_queue_size", {}, queued)
    requests: dict[str, float] = {}
    successes: dict[str, float] = {}
    for sample in by_name["bytetx_requests"].samples:
        method = _TE_METHODS.get(sample.labels["route"], sample.labels["route"].strip("/"))
        requests[method] = requests.get(method, 0) + sample.value
        if sample.labels["status"].startswith("2"):
            successes[method] = successes.get(method, 0) + sample.value
    for name, counts in (("te_request_count", requests), ("te_request_success", successes)):
        yield f"# TYPE {name} counter\n"
        for method, count in counts.items():
            yield _line(name, {"method": method}, count)
    yield "# TYPE te_request_failure counter\n"
    for sample in by_name["bytetx_request_failures"].samples:
        yield _line("te_request_failure", sample.labels, sample.value)


def _line(name: str, labels: dict[str, str], value: float) -> str:
    inside = ",".join(f'{key}="{text}"' for key, text in labels.items())
    return (
        f"{name}{{{inside}}} {floatToGoString(value)}\n"
        if labels
        else (f"{name} {floatToGoString(value)}\n")
    )
