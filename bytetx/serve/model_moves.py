"""Metrics of models that come into memory and leave it."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from bytetx.serve.calls import ModelFacts

ListedModel = tuple[ModelFacts, Iterable[str]]  # a model, and the names of its adapters


class PoolCounts(Protocol):
    """Counts of models that come and go, by their names.

    load_seconds: sums over its loads.  num_bytes: of its weights; expected until the first load.
    """

    loads: Counter[str]
    failed_loads: Counter[str]
    unloads: Counter[str]
    load_seconds: dict[str, float]

    def base_models(self) -> Sequence[ModelFacts]:
        """The models without their adapters."""
        ...

    def listed_models(self) -> Sequence[ListedModel]: ...

    def num_bytes(self) -> Mapping[str, int]: ...


class ModelMoves:
    """Numbers of models that come into memory and leave it."""

    def __init__(self, pool: PoolCounts):
        self._pool = pool

    def collect(self) -> Iterator[Metric]:
        """prometheus_client's interface of a collector."""
        pool, models = self._pool, self._pool.base_models()
        is_loaded = {facts.name: int(bool(facts.is_loaded)) for facts in models}
        gauges: Sequence[tuple[str, str, Mapping[str, float]]] = (
            ("bytetx_model_loaded", "1 where the model is in memory.", is_loaded),
            ("bytetx_model_bytes", "Weights of the model in memory.", pool.num_bytes()),
        )
        counters: Sequence[tuple[str, str, Mapping[str, float]]] = (
            ("bytetx_model_loads", "Times that it was loaded.", pool.loads),
            ("bytetx_model_failed_loads", "Loads that failed.", pool.failed_loads),
            ("bytetx_model_unloads", "Times that it left the memory.", pool.unloads),
            ("bytetx_model_load_seconds", "Sum over its loads.", pool.load_seconds),
        )
        for kind, rows in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, text, values in rows:
                family = kind(name, text, labels=["model"])
                for facts in models:
                    family.add_metric([facts.name], values.get(facts.name, 0))
                yield family
