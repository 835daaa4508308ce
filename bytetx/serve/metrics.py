"""Prometheus metrics bytetx_*, and the same numbers under TEI's names te_*.

StatusWindow has the numbers of the status page: rates and latencies of the last minutes.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import orjson
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.utils import floatToGoString

from bytetx.encode.request import StepStats
from bytetx.serve.calls import ModelFacts
from bytetx.serve.engine import ServedModel
from bytetx.serve.model_moves import ListedModel, ModelMoves, PoolCounts
from bytetx.serve.records import (
    BATCH_LINE,
    COMPUTE,
    ENDED,
    FIRST_TOKEN,
    IGNORED_FIELDS,
    NEXT_TOKEN,
    QUEUE,
    SECONDS,
    TEXTS,
    TOKENIZE,
    TOKENS,
    TRUNCATED,
    Finished,
    RecordKind,
    group_records,
)
from bytetx.serve.settings import ServeSettings
from bytetx.tasks.async_stats import AsyncStats

WINDOW_S = 120.0
_MOST_ANSWERS = 20_000  # in the window; above that, the latest ones
_MOST_STEPS = 120
_MOST_RECORDS = 1024  # that are counted at once, at the latest


class StatusWindow:
    """Counts of the answers of the last WINDOW_S seconds, and totals since the start."""

    def __init__(self) -> None:
        self._start = time.time()
        # Routes, and rows (time, seconds, tokens) of the latest answers, as they came.
        self._answers: deque[tuple[str, np.ndarray]] = deque()
        self._num_answers = 0
        self._requests = self._tokens = self._truncated = self._errors = 0

    def add(self, kind: RecordKind, rows: np.ndarray) -> None:
        """Counts records of one kind; not those that asked for no model and did not fail."""
        is_error = kind.status >= 400
        if not kind.is_timed and not is_error:
            return
        self._requests += len(rows)
        self._errors += len(rows) if is_error else 0
        if not kind.is_timed:
            return
        self._tokens += int(rows[:, TOKENS].sum())
        self._truncated += int(rows[:, TRUNCATED].sum())
        if kind.route.startswith(BATCH_LINE):
            return
        self._answers.append((kind.route, rows[:, [ENDED, SECONDS, TOKENS]]))
        self._num_answers += len(rows)
        while self._num_answers - len(self._answers[0][1]) >= _MOST_ANSWERS:
            self._num_answers -= len(self._answers.popleft()[1])

    def json(self, models: Sequence[ListedModel], stats: AsyncStats) -> bytes:
        """The document of GET /stats.json; docs/serving.md describes it.

        models: those that are no adapters.
        """
        now = time.time()
        routes: dict[str, list[np.ndarray]] = {}
        for route, rows in self._answers:
            found = rows[rows[:, 0] > now - WINDOW_S]
            if len(found):
                routes.setdefault(route, []).append(found)
        by_route = {route: np.concatenate(found) for route, found in routes.items()}
        recent = np.concatenate([np.empty((0, 3)), *by_route.values()])
        seconds = max(1.0, min(WINDOW_S, now - self._start))
        if len(recent) >= _MOST_ANSWERS:  # the window reaches back less far
            seconds = max(0.001, now - recent[:, 0].min())
        return orjson.dumps(
            {
                "models": [_model(facts, adapters) for facts, adapters in models],
                "uptime_s": round(now - self._start, 1),
                "queue": {
                    "requests": stats.num_queued,
                    "tokens": stats.queued_tokens,
                    "running": stats.num_running + stats.num_generating,
                },
                "rates": {
                    "requests_per_s": round(len(recent) / seconds, 2),
                    "tokens_per_s": round(float(recent[:, 2].sum()) / seconds, 1),
                },
                "latency_ms": _percentiles_ms(recent),
                "routes": [
                    {"route": route, "requests": len(rows), **_percentiles_ms(rows)}
                    for route, rows in sorted(by_route.items())
                ],
                "totals": {
                    "requests": self._requests,
                    "tokens": self._tokens,
                    "padding_saved_tokens": max(0, stats.padded_tokens - stats.total_tokens),
                    "text_tokens": stats.total_tokens,
                    "prefix_saved_tokens": stats.prefix_saved_tokens,
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


def _percentiles_ms(answers: np.ndarray) -> dict[str, float | None]:
    """The times of answers.  answers: f64 [num_answers, (time, seconds, tokens)]."""
    found: list[float | None] = [None, None, None]
    if len(answers):
        found = np.percentile(answers[:, 1] * 1000, (50, 95, 99)).round(3).tolist()
    return dict(zip(("p50", "p95", "p99"), found, strict=True))


def _model(facts: ModelFacts, adapters: Iterable[str]) -> dict[str, object]:
    info = facts.info
    is_loaded = {} if facts.is_loaded is None else {"is_loaded": facts.is_loaded}
    return {
        "name": facts.name,
        "family": info["family"],
        "dtype": info["dtype"],
        "device": info["device"],
        "parameters": info["num_parameters"],
        "max_tokens": info["max_tokens"],
        "tasks": list(facts.tasks),
        "adapters": list(adapters),
        **is_loaded,
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
        self._models: Callable[[], Sequence[ListedModel]] = tuple
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
        self._records: list[tuple[float, Finished]] = []  # that are not counted yet
        self._children: dict[tuple[Counter, tuple[str, ...]], Counter] = {}

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> "_Histogram":
        return _Histogram(name, text, buckets, self._registry)

    def attach(self, served: Sequence[ServedModel]) -> None:
        """The models, once they are warm: what they have run until then does not count."""
        self._models = lambda: [(one.facts, one.model.model.adapters) for one in served]
        for one in served:
            self._batches.add(one)

    def attach_pool(self, pool: PoolCounts) -> None:
        """Models that come and go: `add_model` and `remove_model` say which are there.

        pool: it counts that, and is counted from now on.
        """
        self._models = pool.listed_models
        self._batches.names = [facts.name for facts in pool.base_models()]
        self._registry.register(ModelMoves(pool))

    def add_model(self, served: ServedModel) -> None:
        """A model is in memory."""
        self._batches.add(served)

    def remove_model(self, served: ServedModel) -> None:
        """A model leaves the memory; what it has counted stays."""
        self._batches.remove(served)

    def count_running(self, count: Callable[[], int]) -> None:
        """count: gives the requests that are being answered."""
        self._running.set_function(count)

    def record(self, finished: Finished) -> None:
        self._records.append((time.time(), finished))
        if len(self._records) == _MOST_RECORDS:
            self._count_records()

    def add(self, kind: RecordKind, rows: np.ndarray) -> None:
        """Counts records of one kind.  rows: their columns, see group_records."""
        self._child(self._requests, kind.route, str(kind.status)).inc(len(rows))
        num_ignored = rows[:, IGNORED_FIELDS].sum()
        if num_ignored:
            self._child(self._ignored, kind.route).inc(num_ignored)
        if kind.error:
            self._child(self._failures, kind.error).inc(len(rows))
        self.window.add(kind, rows)
        if not kind.is_timed:
            return
        texts, tokens, truncated = rows[:, TEXTS], rows[:, TOKENS], rows[:, TRUNCATED].sum()
        self._child(self._inputs, kind.model).inc(texts.sum())
        self._child(self._tokens, kind.model).inc(tokens.sum())
        if truncated:
            self._child(self._truncated, kind.model).inc(truncated)
        has_texts = texts > 0
        self._input_tokens.observe(tokens[has_texts] / texts[has_texts])
        if kind.route.startswith(BATCH_LINE):
            return
        self._duration.observe(rows[:, SECONDS])
        self._tokenize.observe(rows[:, TOKENIZE])
        self._queue.observe(rows[:, QUEUE])
        self._inference.observe(rows[:, COMPUTE])
        self._first_token.observe(_given(rows[:, FIRST_TOKEN]))
        self._next_token.observe(_given(rows[:, NEXT_TOKEN]))

    def _count_records(self) -> None:
        records, self._records = self._records, []
        for kind, rows in group_records(records).items():
            self.add(kind, rows)

    def _child(self, counter: Counter, *labels: str) -> Counter:
        """counter.labels(*labels), which costs more than all else of a record."""
        child = self._children.get((counter, labels))
        if child is None:
            child = self._children[counter, labels] = counter.labels(*labels)
        return child

    def page(self) -> bytes:
        """All metrics as Prometheus' text."""
        self._count_records()
        self._batches.read()
        page = generate_latest(self._registry)
        if not self._te:
            return page
        families = list(self._registry.collect())
        return page + "".join(_te_lines(families)).encode()

    async def metrics_page(self) -> bytes:
        return self.page()

    async def stats(self) -> bytes:
        self._count_records()
        self._batches.read()
        return self.window.json(self._models(), self._batches.totals())


class _Histogram:
    """A histogram that counts arrays: one value at a time costs more than all else of a record."""

    def __init__(self, name: str, text: str, buckets: Sequence[float], registry: CollectorRegistry):
        self._name, self._text, self._bounds = name, text, np.array(buckets)
        self._counts, self._sum = np.zeros(len(buckets) + 1, dtype=np.int64), 0.0
        registry.register(self)

    def observe(self, values: np.ndarray) -> None:
        if len(values):
            places = np.searchsorted(self._bounds, values)
            self._counts += np.bincount(places, minlength=len(self._counts))
            self._sum += float(values.sum())

    def collect(self) -> Iterator[Metric]:
        """prometheus_client's interface of a collector."""
        names = [*map(floatToGoString, self._bounds.tolist()), "+Inf"]
        counts = np.cumsum(self._counts).tolist()
        buckets = list(zip(names, map(float, counts), strict=True))
        yield HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)


def _given(values: np.ndarray) -> np.ndarray:
    """Those of the records that have one."""
    given: np.ndarray = values[~np.isnan(values)]
    return given


class _Batches:
    """Numbers of the queue and of forward passes, from AsyncModel.stats()."""

    def __init__(self, registry: CollectorRegistry):
        self.names: list[str] = []  # also of models that are not in memory
        self._served: dict[str, tuple[ServedModel, AsyncStats]] = {}  # and its stats at the start
        self._past: dict[str, AsyncStats] = {}  # counts of models that have left the memory
        self._seen: dict[str, float] = {}  # the time of the last forward pass that was counted
        self._sequences = _Histogram(
            "bytetx_batch_sequences", "Texts of a forward pass.", _SIZES, registry
        )
        self._tokens = _Histogram(
            "bytetx_batch_tokens", "Tokens that a forward pass computes.", _SIZES, registry
        )
        registry.register(self)

    def add(self, served: ServedModel) -> None:
        name = served.facts.name
        if name not in self.names:
            self.names.append(name)
        self._served[name] = served, served.model.stats()

    def remove(self, served: ServedModel) -> None:
        self.read()
        name = served.facts.name
        self._past[name] = dict(self.stats())[name].counts_only()
        del self._served[name]

    def stats(self) -> list[tuple[str, AsyncStats]]:
        """The stats of every model, also of those that are not in memory."""
        return [(name, self._stats(name)) for name in self.names]

    def _stats(self, name: str) -> AsyncStats:
        past, found = self._past.get(name), self._served.get(name)
        if found is None:
            return past or AsyncStats()
        served, start = found
        stats = served.model.stats().since(start)
        return stats if past is None else AsyncStats.total([past, stats])

    def totals(self) -> AsyncStats:
        """Sums over the models."""
        return AsyncStats.total([stats for _, stats in self.stats()])

    def read(self) -> None:
        """Counts the forward passes since the last call, as far as the models remember them."""
        for name, stats in self.stats():
            steps = list(self._unseen(name, stats.recent))
            self._sequences.observe(np.array([step.num_sequences for step in steps]))
            self._tokens.observe(np.array([step.computed_tokens for step in steps]))

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
        for one, _ in self._served.values():
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
