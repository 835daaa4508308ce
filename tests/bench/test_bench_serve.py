"""The suite serve: the load generator against a small server, shares, percentiles, the suite."""

import asyncio
import json
import math
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks import serve
from benchmarks.cli import app
from benchmarks.serve import Contest, Load, Settings, generate_load, suite_of
from benchmarks.serve_load import Plan, Stream, arrivals, merged, percentile, run
from benchmarks.serve_servers import Command, Server, ServerError, request_body, running
from bytetx.errors import OptionError


@dataclass
class Peer:
    """A server of one thread; seen: every body, in the order of arrival.

    statuses: by body; others are answered 200.   holds: answers wait until so many have arrived.
    chunked: send answers in chunks.   closes: end the connection after each answer.
    """

    statuses: dict[str, int] = field(default_factory=dict)
    holds: int = 0
    chunked: bool = False
    closes: bool = False
    seen: list[str] = field(default_factory=list)
    port: int = 0
    most_waiting: int = 0

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
                body = (await reader.readexactly(length)).decode()
                self.seen.append(body)
                self._waiting += 1
                self.most_waiting = max(self.most_waiting, self._waiting)
                async with self._arrived:
                    self._arrived.notify_all()
                    await self._arrived.wait_for(lambda: len(self.seen) >= self.holds)
                self._waiting -= 1
                status = self.statuses.get(body, 200)
                if status == 0:
                    return
                writer.write(self._answer(status))
                if self.closes:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()

    def _answer(self, status: int) -> bytes:
        content = json.dumps({"data": [{"index": 0, "embedding": [1.0, 0.0]}]}).encode()
        head = f"HTTP/1.1 {status} X\r\n" + ("Connection: close\r\n" if self.closes else "")
        if not self.chunked:
            return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content
        pieces = b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in (content[:9], content[9:]))
        return f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + pieces + b"0\r\n\r\n"

    @contextmanager
    def open(self) -> Iterator["Peer"]:
        loop, ready = asyncio.new_event_loop(), threading.Event()
        self._waiting = 0

        async def serve_until_stopped() -> None:
            self._arrived, self._stop = asyncio.Condition(), asyncio.Event()
            server = await asyncio.start_server(self.talk, "127.0.0.1", 0)
            self.port = server.sockets[0].getsockname()[1]
            ready.set()
            await self._stop.wait()
            server.close()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()

        thread = threading.Thread(target=loop.run_until_complete, args=(serve_until_stopped(),))
        thread.start()
        ready.wait()
        try:
            yield self
        finally:
            loop.call_soon_threadsafe(self._stop.set)
            thread.join()
            loop.close()


def plan_of(peer: Peer, *streams: Stream, seconds: float = 0.2, **options: float) -> Plan:
    return Plan(peer.port, streams, seconds, warm_up_s=0.0, **options)


@pytest.mark.parametrize("chunked", [False, True])
def test_callers_send_all_bodies_in_turn_and_count_their_answers(chunked: bool) -> None:
    bodies = [f'"{i}"' for i in range(7)]
    with Peer(chunked=chunked, holds=4).open() as peer:
        stream = Stream("texts", "/x", bodies, texts_per_request=32, callers=4)
        result = run(plan_of(peer, stream)).streams["texts"]
    assert peer.seen == [bodies[i % 7] for i in range(len(peer.seen))]
    assert peer.most_waiting == 4  # each caller has one request under way
    assert result.answered == 32 * len(result.latencies_ms) and not result.failures
    # The answers of the last requests of the four come after the time is over.
    assert len(peer.seen) - 4 <= len(result.latencies_ms) <= len(peer.seen)


def test_failures_are_counted_by_kind_and_have_no_latency() -> None:
    with Peer(statuses={"1": 429, "2": 0}).open() as peer:
        stream = Stream("texts", "/x", ["0", "1", "2"], callers=1)
        result = run(plan_of(peer, stream)).streams["texts"]
    sent = Counter(peer.seen)
    assert result.failures["429"] in (sent["1"], sent["1"] - 1) and result.failures["429"] > 0
    assert result.failures["connection"] in (sent["2"], sent["2"] - 1)
    assert len(result.latencies_ms) == result.answered <= sent["0"]


def test_arrivals_do_not_wait_for_answers() -> None:
    """The server answers nobody until all have arrived: a caller in turn would wait for ever."""
    moments = arrivals(200.0, 0.2, seed=5)
    with Peer(holds=len(moments)).open() as peer:
        stream = Stream("texts", "/x", ["0", "1"], rate=200.0)
        result = run(plan_of(peer, stream, seed=5)).streams["texts"]
    assert peer.most_waiting == len(moments) == result.offered == len(result.latencies_ms)


def test_latency_counts_the_wait_for_a_connection() -> None:
    """With one connection every request waits for those before it, and none is left out."""
    moments = arrivals(300.0, 0.2, seed=0)
    with Peer(closes=True).open() as peer:
        stream = Stream("texts", "/x", ["0"], rate=300.0)
        found = run(plan_of(peer, stream, max_connections=1)).streams["texts"]
    assert len(found.latencies_ms) == len(moments) == len(peer.seen) and not found.failures
    assert peer.most_waiting == 1


def test_what_is_never_answered_is_counted() -> None:
    moments = arrivals(100.0, 0.1, seed=0)
    with Peer(holds=1000).open() as peer:
        streams = (Stream("a", "/x", ["0"], rate=100.0), Stream("b", "/x", ["1"], callers=3))
        found = run(plan_of(peer, *streams, seconds=0.1, drain_s=0.1)).streams
    assert found["a"].failures == {"unanswered": len(moments)}
    assert found["b"].failures == {"unanswered": 3}
    assert found["a"].answered == found["b"].answered == 0


def test_nobody_listens() -> None:
    with Peer().open() as peer:
        pass
    streams = (Stream("a", "/x", ["0"], rate=100.0), Stream("b", "/x", ["1"], callers=1))
    found = run(plan_of(peer, *streams, seconds=0.1)).streams
    assert set(found["a"].failures) == set(found["b"].failures) == {"connection"}


def test_arrivals_are_poisson() -> None:
    moments = np.array(arrivals(1000.0, 20.0, seed=0))
    gaps = np.diff(moments)
    # Of 20 000 exponential gaps: three standard errors of the mean and of the deviation.
    assert abs(gaps.mean() * 1000 - 1) < 3 / math.sqrt(20_000)
    assert abs(gaps.std() * 1000 - 1) < 3 * math.sqrt(2 / 20_000)
    assert (np.sort(moments) == moments).all() and moments[-1] < 20.0


def test_percentiles_are_the_nearest_rank() -> None:
    values = [float(i) for i in range(100, 0, -1)]
    assert [percentile(values, p) for p in (50, 95, 99, 100)] == [50, 95, 99, 100]
    assert percentile([3.0], 99) == 3.0 and math.isnan(percentile([], 50))


def test_shares_of_a_plan_are_the_whole_plan() -> None:
    bodies = [str(i) for i in range(5)]
    streams = (Stream("a", "/x", bodies, callers=7), Stream("b", "/x", bodies, rate=90.0))
    plan = Plan(1, streams, 1.0)
    shares = [plan.share(i, 3) for i in range(3)]
    assert [share.streams[0].callers for share in shares] == [3, 2, 2]
    assert [share.streams[1].rate for share in shares] == [30.0] * 3
    assert [share.streams[0].bodies[0] for share in shares] == ["0", "1", "3"]
    assert all(sorted(share.streams[1].bodies) == bodies for share in shares)
    seeds = {share.seed + i for share in shares for i in range(2)}
    assert len(seeds) == 6


def test_generators_in_processes_of_their_own_are_one_result() -> None:
    with Peer(statuses={"1": 500}).open() as peer:
        stream = Stream("texts", "/x", ["0", "1"], callers=2)
        found = generate_load(plan_of(peer, stream), 2)
    result = found.streams["texts"]
    assert len(peer.seen) - 2 <= len(result.latencies_ms) + result.failures["500"]
    assert result.offered <= len(peer.seen) and 0 < found.cpu_share <= 2.1
    assert result.answered == len(result.latencies_ms) > 0
    assert merged([found, found]).streams["texts"].answered == 2 * result.answered


class FakeModel:
    """Vectors of two dimensions, as the peer's answers."""

    def embed(self, texts: list[str], *, truncate: bool = False) -> "FakeModel":
        self.vectors = np.tile(np.array([[1.0, 0.0]], np.float32), (len(texts), 1))
        return self


def test_cases_measure_every_server_and_record_what_they_saw(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = Settings("cpu", seconds=0.2, warm_up_s=0.0)
    with Peer().open() as ours, Peer(statuses={}).open() as other, ExitStack() as stack:
        contest = Contest(settings, stack)
        contest.__dict__["model"] = FakeModel()
        servers = [Server("bytetx", ours.port, "/e"), Server("infinity", other.port, "/e")]
        contest.__dict__["servers"] = (servers, ["a note"])
        single = contest.measure(Load("single", "query", callers=2))
        many = contest.measure(Load("many", "query", texts_per_request=32, callers=2))
        one = contest.measure(Load("one", "query", callers=1))
        half = contest.measure(Load("half", "query", rate=100.0))
        monkeypatch.setattr(serve, "_FEWEST_ANSWERS", 4)
        contest._saturation["bytetx", "documents"] = 100.0
        mixed = contest.queries_beside_documents()
    # Half of a server's load is half of its single texts, whatever ran last.
    saturation = contest._saturation["bytetx", "query"]
    assert saturation == pytest.approx(single.shape["bytetx_texts_per_s"], rel=1e-3)
    assert {len(json.loads(body)["input"]) for body in ours.seen} == {1, 32}
    assert json.loads(other.seen[0])["model"] == "model"
    assert set(many.rivals) == {"infinity", "Model.embed"} and many.notes[0] == "a note"
    # 1e6 microseconds over the texts a second that are recorded beside it, of four digits.
    assert many.ours == pytest.approx(1e6 / many.shape["bytetx_texts_per_s"], rel=1e-3)
    assert one.ours == pytest.approx(one.shape["bytetx_p50_ms"], rel=1e-3)
    assert half.ours == pytest.approx(half.shape["bytetx_p99_ms"], rel=1e-3)
    assert half.shape["infinity_requests_per_s"] == 100 and set(half.rivals) == {"infinity"}
    ratio = mixed.ours / mixed.shape["bytetx_alone_p99_ms"]
    assert mixed.shape["bytetx_ratio"] == pytest.approx(ratio, rel=2e-3)
    assert mixed.shape["documents_per_s"] == 50
    assert not any("failed" in note for m in (many, one, half, mixed) for note in m.notes)


def test_a_server_that_ends_says_why() -> None:
    code = "import sys; print('no such model', file=sys.stderr); sys.exit(3)"
    command = Command("rival", [sys.executable, "-c", code], "/e")
    with pytest.raises(ServerError, match="exit code 3.*no such model"), running(command):
        pass
    missing = Command("rival", ["/nowhere/program"], "/e")
    with pytest.raises(ServerError, match="exit code 127.*/nowhere/program"), running(missing):
        pass


def test_a_server_is_ready_when_it_says_so_and_is_stopped(tmp_path: Path) -> None:
    program = tmp_path / "server.py"
    program.write_text(
        "import json, sys, threading\n"
        "from pathlib import Path\n"
        "from http.server import BaseHTTPRequestHandler, HTTPServer\n"
        "class Handler(BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n"
        "        self.send_response(200); self.end_headers()\n"
        "    def do_POST(self):\n"
        "        size = int(self.headers['Content-Length'])\n"
        "        texts = json.loads(self.rfile.read(size))['input']\n"
        "        rows = [{'index': i, 'embedding': [len(t), 1]} for i, t in enumerate(texts)]\n"
        "        self.send_response(200 if texts != ['bad'] else 422); self.end_headers()\n"
        "        self.wfile.write(json.dumps({'data': rows[::-1]}).encode())\n"
        "def say():\n"
        "    Path(sys.argv[2]).touch(); print('replica 1 is ready (2 of 2)', flush=True)\n"
        "threading.Timer(0.5, say).start()\n"
        "HTTPServer(('127.0.0.1', int(sys.argv[1])), Handler).serve_forever()\n"
    )
    said = tmp_path / "said"
    arguments = [sys.executable, str(program), "{port}", str(said)]
    command = Command("rival", arguments, "/e", ("A=1",))
    with running(replace(command, ready_text="(2 of 2)")):
        assert said.exists()
    with running(command) as server:
        assert server.embed(["a", "bcd"]).tolist() == [[1, 1], [3, 1]]
        with pytest.raises(ServerError, match="rival answers 422"):
            server.embed(["bad"])
    with pytest.raises(ServerError, match="rival gave no embeddings"):
        server.embed(["a"])


def test_options_are_checked_before_anything_starts(tmp_path: Path) -> None:
    settings = Settings("cpu")
    with pytest.raises(OptionError, match="fp32, fp16, bf16, got 'int3'"):
        suite_of(replace(settings, dtype="int3"), patterns=[])
    with pytest.raises(OptionError, match="minilm-real-64x1.*minilm-queries-beside-documents"):
        suite_of(settings, patterns=["no-such-case"])
    with pytest.raises(OptionError, match="cannot be run: No such file"):
        suite_of(replace(settings, infinity_python=tmp_path / "python"), patterns=[])
    names = [
        case.name for case in suite_of(replace(settings, rates=(5.0,)), patterns=["rate"]).cases
    ]
    assert names == ["minilm-real-rate-5", "minilm-ln128-rate-5", "minilm-query-rate-5"]
    answer = CliRunner().invoke(app, ["serve", "--case", "nothing"])
    assert answer.exit_code == 2 and "no case fits nothing" in answer.output


def test_every_server_gets_the_same_request() -> None:
    assert json.loads(request_body(["a", "b"])) == {
        "model": "model",
        "input": ["a", "b"],
        "encoding_format": "float",
    }
