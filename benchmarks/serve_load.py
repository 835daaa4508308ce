"""A load generator for HTTP servers, in a process of its own: Poisson arrivals or callers in turn.

    python -m benchmarks.serve_load < plan.json > result.json

It imports no torch and parses no answer: requests are bytes made beforehand, and of an answer only
the status and the length are read, so that it takes little of the cores that it shares with the
server. It reports its own part of them.
"""

import asyncio
import json
import math
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import cycle

_BROKEN = "connection"  # the failure of a request whose connection ended before its answer
_UNANSWERED = "unanswered"  # one without an answer when the run ended
_HEAD_END = b"\r\n\r\n"
_LAST_CHUNK = b"0\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Stream:
    """Requests of one kind, sent in turn from the first to the last and again.

    bodies: JSON.   texts_per_request: what counts as throughput.
    callers: so many wait for their answer each before they send again; or
    rate: requests a second arrive at random moments (Poisson), whether or not others are answered.
    """

    name: str
    path: str
    bodies: Sequence[str]
    texts_per_request: int = 1
    callers: int | None = None
    rate: float | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """Requests to send to 127.0.0.1:port.

    warm_up_s, seconds: of the time before, and of the time that is measured.
    drain_s: how long answers are waited for after that.
    max_connections: of a stream of arrivals; those beyond wait, which their latency shows.
    """

    port: int
    streams: Sequence[Stream]
    seconds: float
    warm_up_s: float = 1.0
    drain_s: float = 30.0
    max_connections: int = 1024
    seed: int = 0

    def share(self, index: int, count: int) -> "Plan":
        """Return the part of the plan for the process of this index; all do the whole of it."""
        streams = []
        for stream in self.streams:
            callers, rate = stream.callers, stream.rate
            if callers is not None:
                callers = callers // count + (index < callers % count)
            first = index * len(stream.bodies) // count
            bodies = [*stream.bodies[first:], *stream.bodies[:first]]
            rate = None if rate is None else rate / count
            streams.append(replace(stream, bodies=bodies, callers=callers, rate=rate))
        # Poisson processes of one seed would send at the same moments.
        return replace(self, streams=streams, seed=self.seed + index * len(streams))


@dataclass(slots=True)
class StreamResult:
    """Answers and failures of a stream within the measured time.

    latencies_ms: of the good answers, from the moment the request arrived (or was sent by a
        caller), waiting for a connection included.
    failures: requests by status or kind of failure.
    answered: texts of good answers that came within the measured time.
    offered: requests that arrived in it.
    """

    latencies_ms: list[float] = field(default_factory=list)
    failures: dict[str, int] = field(default_factory=dict)
    answered: int = 0
    offered: int = 0

    def count_failures(self, kind: str, count: int) -> None:
        self.failures[kind] = self.failures.get(kind, 0) + count


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Results by the streams' names; cpu_share: the part of a core that the generator took."""

    streams: dict[str, StreamResult]
    seconds: float
    cpu_share: float

    def texts_per_second(self, name: str) -> float:
        return self.streams[name].answered / self.seconds

    @staticmethod
    def from_json(text: str) -> "LoadResult":
        content = json.loads(text)
        streams = {name: StreamResult(**found) for name, found in content["streams"].items()}
        return LoadResult(streams, content["seconds"], content["cpu_share"])


def merged(results: Sequence[LoadResult]) -> LoadResult:
    """Merge the results of processes that ran shares of one plan at the same time."""
    streams: dict[str, StreamResult] = {}
    for found in results:
        for name, part in found.streams.items():
            whole = streams.setdefault(name, StreamResult())
            whole.latencies_ms += part.latencies_ms
            for kind, count in part.failures.items():
                whole.count_failures(kind, count)
            whole.answered += part.answered
            whole.offered += part.offered
    return LoadResult(streams, results[0].seconds, sum(found.cpu_share for found in results))


def percentile(values: Sequence[float], percent: float) -> float:
    """The least value that at least `percent` of all do not exceed; NaN of none."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def arrivals(rate: float, seconds: float, seed: int) -> list[float]:
    """Moments of a Poisson process, in seconds from its start."""
    rng = random.Random(seed)
    moments, now = [], rng.expovariate(rate)
    while now < seconds:
        moments.append(now)
        now += rng.expovariate(rate)
    return moments


def run(plan: Plan) -> LoadResult:
    """Sends the plan's requests and waits for their answers; blocks for the whole time."""
    began, own = time.perf_counter(), time.process_time()
    streams = asyncio.run(_run(plan))
    share = (time.process_time() - own) / (time.perf_counter() - began)
    return LoadResult(streams, plan.seconds, share)


def request_bytes(path: str, body: str) -> bytes:
    """A whole HTTP/1.1 request on a connection that is kept."""
    content = body.encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Accept: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


class Connection(asyncio.Protocol):
    """One request at a time; done(status) follows each, with a status or _BROKEN."""

    def __init__(self) -> None:
        self.done: Callable[[str], None] | None = None
        self.is_open = False
        self._transport: asyncio.Transport | None = None
        self._head = b""
        self._left: int | None = None  # bytes of the body still to come; None: chunks
        self._in_body = self._closes = False
        self._status, self._tail = "", b""

    def send(self, request: bytes, done: Callable[[str], None]) -> None:
        assert self._transport is not None and self.done is None
        self.done = done
        self._transport.write(request)

    def close(self) -> None:
        self.done = None
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self.is_open = transport, True

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self._finish(_BROKEN)

    def data_received(self, data: bytes) -> None:
        if not self._in_body:
            self._head += data
            end = self._head.find(_HEAD_END)
            if end < 0:
                return
            head, data = self._head[:end].lower(), self._head[end + len(_HEAD_END) :]
            self._start_body(head)
        if self._left is not None:
            self._left -= len(data)
            is_whole = self._left <= 0
        else:
            self._tail = (self._tail + data)[-len(_LAST_CHUNK) :]
            is_whole = self._tail == _LAST_CHUNK
        if is_whole:
            if self._closes:
                self.is_open = False
            self._finish(self._status)

    def _start_body(self, head: bytes) -> None:
        self._head, self._in_body, self._tail = b"", True, b""
        self._status = head[9:12].decode("ascii", "replace")
        self._closes = b"connection: close" in head
        _, name, rest = head.partition(b"\r\ncontent-length:")
        self._left = int(rest.partition(b"\r\n")[0]) if name else None

    def _finish(self, status: str) -> None:
        self._head, self._in_body = b"", False
        done, self.done = self.done, None
        if not self.is_open and self._transport is not None:
            self._transport.close()
        if done is not None:
            done(status)


class _Recorder:
    """Counts what falls into the measured time of one stream."""

    def __init__(self, begin: float, end: float, texts_per_request: int, by_arrival: bool):
        self.result = StreamResult()
        self._begin, self._end = begin, end
        self._texts, self._by_arrival = texts_per_request, by_arrival

    def add(self, start: float, now: float, status: str) -> None:
        """start: the arrival; latencies are of the requests that arrived in the measured time.

        Of callers they are of those that were answered in it: the last ones of each caller would
        be missing otherwise.
        """
        is_good, ends_inside = status == "200", self._begin <= now < self._end
        if is_good and ends_inside:
            self.result.answered += self._texts
        if not (self._begin <= start < self._end if self._by_arrival else ends_inside):
            return
        self.result.offered += 1
        if is_good:
            self.result.latencies_ms.append((now - start) * 1000)
        else:
            self.result.count_failures(status, 1)


async def _run(plan: Plan) -> dict[str, StreamResult]:
    origin = asyncio.get_running_loop().time()
    begin = origin + plan.warm_up_s
    end = begin + plan.seconds
    recorders, tasks = {}, []
    for i, stream in enumerate(plan.streams):
        recorder = _Recorder(begin, end, stream.texts_per_request, stream.rate is not None)
        recorders[stream.name] = recorder
        requests = [request_bytes(stream.path, body) for body in stream.bodies]
        if stream.rate is None:
            tasks.append(_callers(plan, stream, requests, recorder, end))
        else:
            moments = arrivals(stream.rate, plan.warm_up_s + plan.seconds, plan.seed + i)
            due = [origin + moment for moment in moments]
            tasks.append(_arrivals(plan, due, requests, recorder))
    await asyncio.gather(*tasks)
    return {name: recorder.result for name, recorder in recorders.items()}


async def _connect(port: int) -> Connection:
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(Connection, "127.0.0.1", port)
    return connection


async def _callers(
    plan: Plan, stream: Stream, requests: list[bytes], recorder: _Recorder, end: float
) -> None:
    loop, turn = asyncio.get_running_loop(), cycle(requests)

    async def caller() -> None:
        connection: Connection | None = None
        while (start := loop.time()) < end:
            answered: asyncio.Future[str] = loop.create_future()
            try:
                if connection is None or not connection.is_open:
                    connection = await _connect(plan.port)
                connection.send(next(turn), answered.set_result)
                async with asyncio.timeout_at(end + plan.drain_s):
                    status = await answered
            except TimeoutError:
                status = _UNANSWERED
            except OSError:
                status = _BROKEN
            now = loop.time()
            recorder.add(start, min(now, end - 1e-9) if status == _UNANSWERED else now, status)
            if status == _BROKEN:  # a server that refuses must not make this a busy loop
                await asyncio.sleep(0.01)
        if connection is not None:
            connection.close()

    assert stream.callers is not None
    await asyncio.gather(*(caller() for _ in range(stream.callers)))


async def _arrivals(
    plan: Plan, due: list[float], requests: list[bytes], recorder: _Recorder
) -> None:
    pool = _Pool(plan, recorder)
    loop, turn = asyncio.get_running_loop(), cycle(requests)
    for moment in due:
        wait = moment - loop.time()
        if wait > 0:
            await asyncio.sleep(wait)
        elif pool.is_due_to_yield():
            await asyncio.sleep(0)
        pool.submit(next(turn), moment)
    await pool.drain(plan.drain_s)


class _Pool:
    """Connections of a stream of arrivals: the latest idle one is taken, else another is opened."""

    def __init__(self, plan: Plan, recorder: _Recorder):
        self._plan, self._recorder = plan, recorder
        self._idle: list[Connection] = []
        self._waiting: deque[tuple[bytes, float]] = deque()
        self._open: set[Connection] = set()
        self._started: dict[int, float] = {}  # arrivals of the requests under way, by number
        self._number = self._since_yield = 0
        self._opening: set[asyncio.Task[None]] = set()

    def is_due_to_yield(self) -> bool:
        """Return whether so many arrivals in a row were late that answers must be read now."""
        self._since_yield = (self._since_yield + 1) % 16
        return self._since_yield == 0

    def submit(self, request: bytes, arrival: float) -> None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return self._send(connection, request, arrival)
            self._open.discard(connection)
        self._waiting.append((request, arrival))
        if len(self._open) + len(self._opening) < self._plan.max_connections:
            task = asyncio.ensure_future(self._grow())
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def drain(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while (self._started or self._waiting) and loop.time() < end:
            await asyncio.sleep(0.01)
        for arrival in (*self._started.values(), *(arrival for _, arrival in self._waiting)):
            self._recorder.add(arrival, float("inf"), _UNANSWERED)
        for task in self._opening:
            task.cancel()
        for connection in self._open:
            connection.close()

    async def _grow(self) -> None:
        try:
            connection = await _connect(self._plan.port)
        except OSError:
            if self._waiting:
                _, arrival = self._waiting.popleft()
                self._recorder.add(arrival, asyncio.get_running_loop().time(), _BROKEN)
            return
        self._open.add(connection)
        self._next(connection)

    def _next(self, connection: Connection) -> None:
        if not connection.is_open:
            self._open.discard(connection)
            if self._waiting:
                self.submit(*self._waiting.popleft())
        elif self._waiting:
            self._send(connection, *self._waiting.popleft())
        else:
            self._idle.append(connection)

    def _send(self, connection: Connection, request: bytes, arrival: float) -> None:
        self._number += 1
        number = self._number
        self._started[number] = arrival

        def done(status: str) -> None:
            del self._started[number]
            self._recorder.add(arrival, asyncio.get_running_loop().time(), status)
            self._next(connection)

        connection.send(request, done)


def main() -> None:
    content = json.load(sys.stdin)
    streams = [Stream(**stream) for stream in content.pop("streams")]
    json.dump(asdict(run(Plan(streams=streams, **content))), sys.stdout)


if __name__ == "__main__":
    main()
