"""Metrics and status of all replicas of a port, from any one of them."""

import asyncio
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import orjson

from bytetx.serve.records import Finished, Recorder

_WAIT_S = 2.0  # for the numbers of another replica; one that is busy starting is left out
_MOST_STEPS = 120
_PERCENTILES = ("p50", "p95", "p99")
_SUMMED = ("queue", "rates", "totals")


class ReplicaRecorder:
    """A Recorder that keeps its replica's records, and shows those of every replica."""

    def __init__(self, own: Recorder, *, index: int, folder: Path):
        """folder: where each replica has a socket, INDEX.sock."""
        self._own, self._index, self._folder = own, index, folder

    async def listen(self) -> None:
        """Gives this replica's numbers to the others from now on."""
        path = self._folder / f"{self._index}.sock"
        path.unlink(missing_ok=True)  # a replica that died leaves it
        self._server = await asyncio.start_unix_server(self._answer, path)

    async def aclose(self) -> None:
        """Gives no more numbers."""
        self._server.close()
        await self._server.wait_closed()

    def record(self, finished: Finished) -> None:
        self._own.record(finished)

    async def metrics_page(self) -> bytes:
        """Prometheus' text: every sample of every replica, with the label `replica`."""
        pages = await self._every("metrics")
        return merge_pages({index: page.decode() for index, page in pages.items()}).encode()

    async def stats(self) -> bytes:
        """JSON, for the status page; see merge_stats()."""
        every = await self._every("stats")
        return orjson.dumps(merge_stats([orjson.loads(one) for one in every.values()]))

    async def _every(self, what: str) -> dict[int, bytes]:
        """By replica; this one's own, and those of the others that answer in time."""
        others = [path for path in self._folder.glob("*.sock") if path.stem != str(self._index)]
        found = await asyncio.gather(self._own_answer(what), *(_ask(path, what) for path in others))
        indices = [self._index, *(int(path.stem) for path in others)]
        answers = dict(zip(indices, found, strict=True))
        return {index: answers[index] for index in sorted(answers) if answers[index]}

    async def _own_answer(self, what: str) -> bytes:
        return await (self._own.metrics_page() if what == "metrics" else self._own.stats())

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            writer.write(await self._own_answer((await reader.readline()).decode().strip()))
            await writer.drain()
        finally:
            writer.close()


async def _ask(path: Path, what: str) -> bytes:
    """Empty where the replica is dead or too slow."""
    try:
        async with asyncio.timeout(_WAIT_S):
            reader, writer = await asyncio.open_unix_connection(path)
            try:
                writer.write(what.encode() + b"\n")
                return await reader.read()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return b""


def merge_pages(pages: Mapping[int, str]) -> str:
    """One page of Prometheus' text of several: each sample gets the label `replica`."""
    headers: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for index, page in pages.items():
        family = ""
        for line in page.splitlines():
            if line.startswith("# "):
                family = line.split(" ", 3)[2]
                if line not in headers.setdefault(family, []):
                    headers[family].append(line)
            elif line:
                samples.setdefault(family, []).append(_labelled(line, index))
    return "".join(
        f"{line}\n" for family in headers for line in headers[family] + samples.get(family, [])
    )


def _labelled(sample: str, index: int) -> str:
    """name value, or name{labels} value, with one label more."""
    name, brace, rest = sample.partition("{")
    label = f'replica="{index}"'
    if brace and " " not in name:
        return f"{name}{{{label},{rest}"
    name, _, value = sample.partition(" ")
    return f"{name}{{{label}}} {value}"


def merge_stats(every: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """One document of GET /stats.json of those of several replicas of the same models.

    Counts and rates are sums. A latency is that of the slowest replica, which no percentile of all
    requests together exceeds.
    """
    documents = list(every)
    merged: dict[str, Any] = {
        "models": documents[0]["models"],
        "replicas": len(documents),
        "uptime_s": max(one["uptime_s"] for one in documents),
    }
    for part in _SUMMED:
        merged[part] = {
            key: round(sum(one[part][key] for one in documents), 2) for key in documents[0][part]
        }
    merged["latency_ms"] = _slowest([one["latency_ms"] for one in documents])
    routes: dict[str, list[Mapping[str, Any]]] = {}
    for row in (row for one in documents for row in one["routes"]):
        routes.setdefault(row["route"], []).append(row)
    merged["routes"] = [
        {"route": route, "requests": sum(row["requests"] for row in rows)}
        | _slowest([{key: row[key] for key in _PERCENTILES} for row in rows])
        for route, rows in sorted(routes.items())
    ]
    steps = sorted((step for one in documents for step in one["steps"]), key=lambda step: step["t"])
    return merged | {"steps": steps[-_MOST_STEPS:]}


def _slowest(latencies: list[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        key: max((one[key] for one in latencies if one[key]), default=None) for key in latencies[0]
    }
