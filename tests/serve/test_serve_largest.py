"""Every route with the largest bodies it admits: /health stays quick, and memory bounded."""

import threading
import time
from collections.abc import Iterator

import httpx
import pytest
from largest_bodies import CASES, REFUSES_ALL, largest_bodies
from other_processes import resident_mib
from serving import Server, start_server

from bytetx.serve.app import ROUTES

SIZE = 400_000  # of a body; more of it takes only longer
MAX_HEALTH_S = 1.0  # a hundred times what it takes; other programs may hold up this one
MAX_GROWTH_MIB = 600.0
ROUTES_WITH_BODY = sorted(path for (_, path), route in ROUTES.items() if route.is_limited)


@pytest.fixture(scope="module")
def small_server(
    model_options: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("largest") / "log"
    limits = ["--payload-limit", str(SIZE), "--max-queued-tokens", "65536", "--api-key", "sesame"]
    with start_server([*model_options, *limits], log=log) as running:
        yield running
        assert "Traceback" not in running.read_log()


def test_every_route_has_a_case() -> None:
    assert sorted(CASES) == ROUTES_WITH_BODY


@pytest.mark.parametrize("path", ROUTES_WITH_BODY)
def test_health_answers_while_the_largest_bodies_run(small_server: Server, path: str) -> None:
    statuses: list[int] = []

    def ask() -> None:
        with small_server.client() as client:
            for body in largest_bodies(path, size=SIZE):
                statuses.append(client.post(path, content=body, timeout=120).status_code)

    before, waits, peak = resident_mib(small_server.process.pid), [], 0.0
    asking = threading.Thread(target=ask)
    asking.start()
    with small_server.client() as client:
        while asking.is_alive() or not waits:
            start = time.perf_counter()
            assert client.get("/health").status_code == 200
            waits.append(time.perf_counter() - start)
            peak = max(peak, resident_mib(small_server.process.pid))
            asking.join(0.01)
    assert 200 in statuses or path in REFUSES_ALL, statuses
    allowed = {200, 400, 413, 422, 424, 429} | ({404} if path == "/v1/batches" else set())
    assert set(statuses) <= allowed, statuses
    assert peak - before < MAX_GROWTH_MIB
    assert sorted(waits)[-2:][0] < MAX_HEALTH_S, sorted(waits)[-5:]


def test_what_costs_too_much_is_refused_with_the_limits_name(small_server: Server) -> None:
    words = "the quick brown fox " * 18_000
    cases = [
        ("/predict_tokens", {"inputs": words, "stride": 37, "model": "tagger"}),
        ("/tokenize", {"inputs": words}),
        ("/decode", {"ids": [5] * 100_000}),
        ("/rerank", {"query": words, "texts": ["a"] * 32, "model": "reranker"}),
        ("/v1/rerank", {"query": words, "documents": ["a"] * 32, "model": "reranker"}),
    ]
    with small_server.client() as client:
        for path, body in cases:
            answer: httpx.Response = client.post(path, json=body)
            assert answer.status_code in (413, 422), (path, answer.text[:300])
            assert "--max-queued-tokens" in answer.text, (path, answer.text[:300])
