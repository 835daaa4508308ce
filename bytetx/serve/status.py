"""The numbers of the status page: rates and latencies of the last minutes, recent batches."""

import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import orjson

from bytetx.serve.calls import Timings
from bytetx.serve.engine import ServedModel
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
