"""Keys, limits, errors and headers of the application, in process."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from serving import InProcess

from bytetx.async_model import AsyncModel
from bytetx.errors import DeviceMemoryError, GroupError, QueueFullError
from bytetx.generate.sampler import SamplerOutput
from bytetx.generate.scheduler import Scheduler
from bytetx.serve import engine, gateway
from bytetx.serve.calls import Call
from bytetx.serve.engine import ServedModel
from bytetx.serve.errors import ServeError, as_serve_error
from bytetx.serve.loading import close_models, load_models
from bytetx.serve.settings import ServeSettings, model_sources

OK = {"inputs": "a"}


def tei_error(answer: httpx.Response, status: int, kind: str, *words: str) -> str:
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert body.keys() == {"error", "error_type"} and body["error_type"] == kind
    assert "\n" not in body["error"]
    for word in words:
        assert word in body["error"], body["error"]
    return body["error"]


def openai_error(answer: httpx.Response, status: int, *words: str) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    for word in words:
        assert word in error["message"], error["message"]
    return error


def test_timing_headers(in_process: InProcess) -> None:
    answer = in_process.post("/embed", {"inputs": ["a fox", "the"]})
    assert answer.headers["x-compute-type"] == "cpu"
    assert answer.headers["x-compute-characters"] == "8"
    tokens = in_process.model("embedder").embed(["a fox", "the"]).stats.num_tokens
    assert answer.headers["x-compute-tokens"] == str(tokens)
    for name in ("compute-time", "total-time", "tokenization-time", "queue-time", "inference-time"):
        assert answer.headers[f"x-{name}"].isdigit()
    for path, body in (
        ("/predict", {"inputs": "a", "model": "classifier"}),
        ("/rerank", {"query": "a", "texts": ["b"], "model": "reranker"}),
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/completions", {"prompt": "a", "model": "writer", "max_tokens": 1}),
    ):
        assert "x-inference-time" in in_process.post(path, body).headers


def test_request_ids(in_process: InProcess) -> None:
    named = in_process.post("/embed", OK, headers={"X-Request-Id": "abc-1"})
    assert named.headers["x-request-id"] == "abc-1"
    failed = in_process.post("/embed", {}, headers={"X-Request-Id": "abc-2"})
    assert failed.headers["x-request-id"] == "abc-2"
    made = in_process.post("/embed", OK, headers={"X-Request-Id": "no spaces here"})
    assert len(made.headers["x-request-id"]) == 32
    assert in_process.get("/health").headers["x-request-id"] != made.headers["x-request-id"]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/embed", b'{"inputs": 7}', ["inputs", "7"]),
        ("/embed", b'{"inputs": ["a", 7]}', ["inputs"]),
        ("/embed", b'{"inputs": {"a": 1}}', ["inputs"]),
        ("/embed", b"{}", ["inputs", "required"]),
        ("/embed", b"[]", ["body"]),
        ("/embed", b"", ["JSON"]),
        ("/embed", b'{"inputs": "a"', ["JSON"]),
        ("/embed", b'{"inputs": "\xff"}', ["JSON"]),
        ("/embed", b'{"inputs": "\\ud800"}', ["JSON"]),
        ("/embed", b'{"inputs": "a", "normalize": "yes"}', ["normalize"]),
        ("/embed", b'{"inputs": "a", "truncation_direction": "Up"}', ["truncation_direction"]),
        ("/embed", b'{"inputs": "a", "prompt_name": "none"}', ["prompt_name", "query"]),
        ("/embed", b'{"inputs": "a", "dimensions": 1000}', ["dimensions"]),
        ("/embed", b'{"inputs": "a", "dimensions": 99999999999999999999}', ["dimensions"]),
        ("/embed", b'{"inputs": [5, 99999]}', ["99999"]),
        ("/embed", b'{"inputs": [5, 99999999999999999999]}', ["99999999999999999999"]),
        ("/predict", b'{"inputs": ["a", "b", "c"]}', []),
        ("/rerank", b'{"query": "a", "texts": "b"}', ["texts"]),
        ("/decode", b'{"ids": "a"}', ["ids"]),
        ("/decode", b'{"ids": [-1]}', ["-1"]),
        ("/", b'{"inputs": ', ["JSON"]),
        ("/", b"7", ["object"]),
        ("/similarity", b'{"inputs": "a"}', ["inputs"]),
    ],
)
def test_what_is_wrong_is_named(
    in_process: InProcess, path: str, body: bytes, words: list[str]
) -> None:
    answer = in_process.request("POST", path, content=body)
    if path == "/predict":  # three strings are a batch of three
        assert answer.status_code == 424  # of a model that has no labels
        return
    tei_error(answer, 422, "validation", *words)


def test_wrong_requests_of_openai(in_process: InProcess) -> None:
    error = openai_error(in_process.post("/v1/embeddings", {"input": 7}), 400, "input")
    assert error["type"] == "invalid_request_error" and error["param"] == "input"
    unknown = openai_error(in_process.post("/v1/embeddings", {"input": "a", "model": "x"}), 404)
    assert unknown["code"] == "model_not_found" and unknown["param"] == "model"
    openai_error(in_process.post("/v1/nothing", {}), 404, "/v1/nothing")
    openai_error(in_process.get("/v1/embeddings"), 405, "POST")
    tei_error(in_process.get("/nothing"), 404, "validation", "/docs")
    tei_error(in_process.get("/embed"), 405, "validation", "POST")


def test_the_wrong_one_of_several_prompts_is_named(in_process: InProcess) -> None:
    body = {"model": "writer", "prompt": ["a", "b", "the quick fox " * 200], "max_tokens": 1}
    openai_error(in_process.post("/v1/completions", body), 400, "prompts[2]")


def test_a_model_that_cannot_do_it(in_process: InProcess) -> None:
    tei_error(in_process.post("/predict", OK), 424, "backend", "embedder", "cannot classify")
    body = {"prompt": "a", "model": "embedder"}
    openai_error(in_process.post("/v1/completions", body), 400, "cannot generate")


def test_one_model_takes_any_name(in_process: InProcess) -> None:
    one = in_process.with_settings(only="embedder", accepts_any_name=True)
    answer = one.post("/v1/embeddings", {"input": "a", "model": "text-embedding-3-small"})
    assert answer.status_code == 200 and answer.json()["model"] == "embedder"


def test_batches(in_process: InProcess) -> None:
    one = in_process.with_settings(max_client_batch_size=2)
    assert one.post("/embed", {"inputs": ["a", "b"]}).status_code == 200
    many = {"inputs": ["a"] * 3}
    tei_error(one.post("/embed", many), 413, "validation", "3", "2", "--max-client-batch-size")
    tei_error(one.post("/embed", {"inputs": []}), 400, "empty", "inputs")
    body = {"query": "a", "texts": ["a"] * 3, "model": "reranker"}
    tei_error(one.post("/rerank", body), 413, "validation", "texts")
    openai_error(one.post("/v1/embeddings", {"input": []}), 400, "input")
    prompts = {"prompt": ["a"] * 3, "model": "writer"}
    openai_error(one.post("/v1/completions", prompts), 400, "--max-client-batch-size")


def test_large_bodies(in_process: InProcess) -> None:
    one = in_process.with_settings(payload_limit_bytes=100)
    assert one.post("/embed", OK).status_code == 200
    large = {"inputs": "a" * 100}
    tei_error(one.post("/embed", large), 413, "validation", "100 bytes", "--payload-limit")
    openai_error(one.post("/v1/embeddings", {"input": "a" * 100}), 413, "--payload-limit")

    async def parts() -> Any:
        for _ in range(4):
            yield b" " * 40

    tei_error(one.request("POST", "/embed", content=parts()), 413, "validation")


@pytest.mark.parametrize("parts", [[], [b'{"inputs": ']])
def test_a_body_that_does_not_arrive_is_too_late(
    in_process: InProcess, monkeypatch: pytest.MonkeyPatch, parts: list[bytes]
) -> None:
    monkeypatch.setattr(gateway, "_BODY_SECONDS", 0.1)

    async def body() -> Any:
        for part in parts:
            yield part
        await asyncio.sleep(30)

    answer = in_process.request("POST", "/embed", content=body())
    tei_error(answer, 408, "backend", "within 0.1 s")


@pytest.mark.feature("Server", "several models")
def test_the_longest_name_of_a_path_is_the_model(in_process: InProcess) -> None:
    names = {"embedder": "org", "classifier": "org/m"}
    served = [
        replace(one, facts=replace(one.facts, name=names[one.facts.name]))
        for one in in_process.served
        if one.facts.name in names
    ]
    both = InProcess(in_process.settings, served)
    assert both.post("/models/org/m/predict", OK).status_code == 200
    assert both.post("/models/org/embed", OK).status_code == 200


@pytest.mark.feature("Server", "keys")
def test_keys(in_process: InProcess) -> None:
    one = in_process.with_settings(api_keys=("first", "second"))
    for key in ("first", "second"):
        good = one.post("/embed", OK, headers={"Authorization": f"Bearer {key}"})
        assert good.status_code == 200
    for header in ({}, {"Authorization": "Bearer third"}, {"Authorization": "Basic first"}):
        answer = one.post("/embed", OK, headers=header)
        tei_error(answer, 401, "unauthorized", "Bearer")
        assert answer.headers["www-authenticate"] == "Bearer"
        error = openai_error(one.get("/v1/models", headers=header), 401)
        assert error["code"] == "invalid_api_key"
        assert one.get("/info", headers=header).status_code == 401
        assert one.get("/stats.json", headers=header).status_code == 401
        for path in ("/health", "/ping", "/metrics", "/"):
            assert one.get(path, headers=header).status_code == 200


def test_before_and_after_it_is_ready(in_process: InProcess) -> None:
    one = in_process.with_settings()
    for phase, word in (("starting", "loading"), ("draining", "shutting down")):
        one.site.phase = phase
        for path in ("/health", "/ping", "/info"):
            assert tei_error(one.get(path), 503, "unhealthy", word)
        answer = one.post("/embed", OK)
        tei_error(answer, 503, "unhealthy", word)
        assert int(answer.headers["retry-after"]) >= 1
        openai_error(one.post("/v1/embeddings", {"input": "a"}), 503, word)
        assert one.get("/metrics").status_code == 200
    assert answer.headers["connection"] == "close"


def faulty(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Calls of embed with the text "bad" fail, those that run with others among them."""
    joined, embed = AsyncModel._joined, AsyncModel.embed

    def fail(own: AsyncModel, options: Any, texts: Sequence[str]) -> Any:
        if "bad" in texts:
            raise error
        return joined(own, options, texts)

    async def fail_alone(own: AsyncModel, texts: Sequence[str], **options: Any) -> Any:
        if "bad" in texts:
            raise error
        return await embed(own, texts, **options)

    monkeypatch.setattr(AsyncModel, "_joined", fail)
    monkeypatch.setattr(AsyncModel, "embed", fail_alone)


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (DeviceMemoryError("texts[0] does not fit"), 424, "backend"),
        (QueueFullError("the queue is full", retry_after_s=2.2), 429, "overloaded"),
        (GroupError("rank 1 ended"), 503, "unhealthy"),
    ],
)
def test_errors_of_the_engine(
    in_process: InProcess,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    status: int,
    kind: str,
) -> None:
    one = in_process.with_settings()
    faulty(monkeypatch, error)
    answer = one.post("/embed", {"inputs": "bad"})
    text = tei_error(answer, status, kind)
    assert "texts[" not in text
    is_lost = status == 503
    assert one.get("/health").status_code == (503 if is_lost else 200)
    assert one.num_lost == is_lost
    if status == 429:
        assert answer.headers["retry-after"] == "3"
        limited = openai_error(one.post("/v1/embeddings", {"input": "bad"}), 429)
        assert limited["code"] == "rate_limit_exceeded"
    if status != 503:
        assert one.post("/embed", OK).status_code == 200


class LostEvent:
    """A CUDA event of a device that no longer answers."""

    def synchronize(self) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def lose_device(output: SamplerOutput) -> SamplerOutput:
    output._is_done = LostEvent()
    return output


def fail(*_: Any) -> None:
    raise MemoryError


@pytest.mark.parametrize(
    ("owner", "name", "fault", "status"),
    [(SamplerOutput, "to_host", lose_device, 503), (Scheduler, "schedule", fail, 500)],
)
def test_a_generation_thread_that_is_lost_ends_the_server(
    checkpoints: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    name: str,
    fault: Callable[..., Any],
    status: int,
) -> None:
    settings = ServeSettings(model_sources([f"writer={checkpoints['writer']}"]), device="cpu")
    one = InProcess(settings, load_models(settings))
    body = {"prompt": "the", "max_tokens": 2}
    try:
        assert one.post("/v1/completions", body).status_code == 200
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fault)
            openai_error(one.post("/v1/completions", body), status)
        assert one.get("/health").status_code == 503
        openai_error(one.post("/v1/completions", body), 503)
        assert one.num_lost == 1
    finally:
        asyncio.run(close_models(one.served))


def test_generations_dropped_at_the_end_are_no_lost_device(checkpoints: dict[str, Path]) -> None:
    settings = ServeSettings(model_sources([f"writer={checkpoints['writer']}"]), device="cpu")
    one = InProcess(settings, load_models(settings))
    call = Call("writer", "generate", "the", {"n": 50, "ignore_eos": True, "max_tokens": 100})

    async def main() -> None:
        pieces = one.site.backend.generate(call)
        await anext(pieces)
        await close_models(one.served)
        with pytest.raises(ServeError, match="the engine was closed") as raised:
            async for _ in pieces:
                pass
        assert raised.value.kind == "unhealthy"

    asyncio.run(main())
    assert one.num_lost == 0


def test_a_fault_of_the_server_is_no_traceback(
    in_process: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty(monkeypatch, KeyError("secret"))
    answer = in_process.post("/embed", {"inputs": "bad"}, headers={"X-Request-Id": "r-7"})
    assert "secret" not in tei_error(answer, 500, "backend", "r-7")


def test_numbers_that_are_not_finite_fail_their_request_alone(in_process: InProcess) -> None:
    """The weights of one token are NaN: texts with it fail, all others are answered."""
    one = in_process.with_settings(only="embedder")
    model = one.model("embedder")
    weight = model.transformer.embeddings.word
    token = model.tokenizer.encode(["zaphod"])[0].ids[1]
    clean = one.post("/embed", OK).json()
    kept = weight[token].clone()
    weight[token] = float("nan")
    try:

        async def both() -> list[httpx.Response]:
            async with one.client() as client:
                bodies = ({"inputs": "zaphod"}, OK)
                return await asyncio.gather(*(client.post("/embed", json=b) for b in bodies))

        bad, good = asyncio.run(both())
    finally:
        weight[token] = kept
    tei_error(bad, 424, "backend", "not finite")
    assert good.json() == clean
    assert np.isfinite(one.post("/embed", {"inputs": "zaphod"}).json()).all()


def slow_embed(monkeypatch: pytest.MonkeyPatch) -> tuple[asyncio.Event, asyncio.Event, list[str]]:
    """(set when a call runs, set to let it end, what became of the calls)."""
    starts, ends, fates = asyncio.Event(), asyncio.Event(), []
    embed = engine.TASKS["embed"]

    async def wait(served: ServedModel, call: Call) -> Any:
        starts.set()
        try:
            await ends.wait()
        except asyncio.CancelledError:
            fates.append("cancelled")
            raise
        fates.append("done")
        return await embed(served, call)

    monkeypatch.setitem(engine.TASKS, "embed", wait)
    return starts, ends, fates


def test_concurrent_requests(in_process: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    one = in_process.with_settings(max_concurrent_requests=1)

    async def run() -> tuple[httpx.Response, httpx.Response]:
        starts, ends, _ = slow_embed(monkeypatch)
        async with one.client() as client:
            first = asyncio.create_task(client.post("/embed", json=OK))
            await starts.wait()
            second = await client.post("/embed", json=OK)
            assert one.site.num_running == 1
            ends.set()
            return await first, second

    first, second = asyncio.run(run())
    assert first.status_code == 200
    tei_error(second, 429, "overloaded", "--max-concurrent-requests")
    assert second.headers["retry-after"] == "1"
    assert one.site.num_running == 0
    assert one.post("/embed", OK).status_code == 200


@pytest.mark.feature("Server", "limits of queue and requests")
@pytest.mark.parametrize("limit, most", [("max_queued_requests", 8), ("max_queued_tokens", 24)])
def test_a_full_queue(checkpoints: dict[str, Path], limit: str, most: int) -> None:
    """More than the engine's queue takes: 429 and when to retry; the others are answered."""
    sources = model_sources([f"embedder={checkpoints['embedder']}"])
    settings = ServeSettings(sources, device="cpu", **{limit: most})
    one = InProcess(settings, load_models(settings))
    texts = [f"the quick brown fox {i}" for i in range(3)]
    expected = one.model("embedder").embed(texts)

    async def run() -> list[httpx.Response]:
        async with one.client() as client:
            posts = (client.post("/embed", json={"inputs": texts}) for _ in range(24))
            answers = await asyncio.gather(*posts)
        await close_models(one.served)
        return answers

    answers = asyncio.run(run())
    full = [answer for answer in answers if answer.status_code == 429]
    assert 0 < len(full) < len(answers)
    for answer in answers:
        if answer.status_code == 200:
            np.testing.assert_allclose(answer.json(), expected.vectors, atol=1e-6)
        else:
            tei_error(answer, 429, "overloaded", f"--{limit.replace('_', '-')}")
            assert int(answer.headers["retry-after"]) >= 1
    refused = f'bytetx_refused_calls_total{{model="embedder"}} {len(full)}.0'
    assert refused in one.get("/metrics").text


WORDS = "the quick brown fox " * 20
# Each costs more than 64 tokens by itself.
COSTLY: list[tuple[str, dict[str, Any]]] = [
    ("/embed", {"inputs": WORDS}),
    ("/embed", {"inputs": [[5] * 30] * 3}),
    ("/embed", {"inputs": [WORDS, WORDS], "truncation_direction": "Left"}),
    ("/embed_all", {"inputs": [WORDS[:200], WORDS[:200]]}),
    ("/embed_sparse", {"inputs": WORDS, "model": "sparse"}),
    ("/predict", {"inputs": WORDS, "model": "classifier"}),
    ("/predict", {"inputs": [["a", WORDS]], "model": "classifier"}),
    ("/predict_tokens", {"inputs": WORDS, "model": "tagger"}),
    ("/predict_tokens", {"inputs": WORDS, "stride": 4, "model": "tagger"}),
    ("/rerank", {"query": WORDS[:200], "texts": ["a", "b"], "model": "reranker"}),
    ("/similarity", {"inputs": {"source_sentence": "a", "sentences": [WORDS]}}),
    ("/tokenize", {"inputs": WORDS}),
    ("/decode", {"ids": [5] * 100}),
    ("/", {"inputs": WORDS}),
    ("/invocations", {"inputs": WORDS}),
    ("/vertex", {"instances": [{"inputs": WORDS}]}),
    ("/embeddings", {"input": WORDS}),
    ("/v1/embeddings", {"input": [WORDS]}),
    ("/v1/rerank", {"query": WORDS, "documents": ["a"], "model": "reranker"}),
    ("/v2/rerank", {"query": "a", "documents": [WORDS], "model": "reranker"}),
    ("/v1/completions", {"prompt": [5] * 70, "model": "writer"}),
    ("/v1/completions", {"prompt": "a quick fox", "n": 40, "model": "writer"}),
    ("/v1/completions", {"prompt": [[5] * 20] * 4, "model": "writer"}),
    ("/v1/completions", {"prompt": [[5] * 9] * 2, "n": 4, "model": "writer"}),
    ("/v1/completions", {"prompt": [5] * 70, "stream": True, "model": "writer"}),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "a fox"}], "n": 60, "model": "writer"},
    ),
]


def _limited(checkpoints: dict[str, Path], **limits: int) -> InProcess:
    given = [f"{name}={path}" for name, path in checkpoints.items()]
    settings = ServeSettings(model_sources(given), device="cpu", **limits)
    return InProcess(settings, load_models(settings))


def test_a_request_above_the_whole_queue_is_413_and_not_429(checkpoints: dict[str, Path]) -> None:
    """It would be refused whenever others wait, so that trying again is no advice."""
    one = _limited(checkpoints, max_queued_tokens=64)

    async def run() -> None:
        async with one.client() as client:
            for busy in (False, True):
                with contextlib.ExitStack() as waiting:
                    if busy:
                        for served in one.served:
                            waiting.enter_context(served.model.reserved(1, 60))
                    for path, body in COSTLY:
                        answer = await client.post(path, json=body)
                        assert answer.status_code == 413, (path, body, answer.text)
                        assert "--max-queued-tokens" in answer.text, (path, answer.text)
                        assert "retry-after" not in answer.headers
            answer = await client.post("/embed", json=OK)  # nothing was left behind
            assert answer.status_code == 200
            body = {"prompt": [[5] * 20] * 3, "model": "writer", "max_tokens": 1}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
        await close_models(one.served)

    asyncio.run(run())


def test_a_request_of_more_outputs_or_texts_than_may_wait_is_413(
    checkpoints: dict[str, Path],
) -> None:
    one = _limited(checkpoints, max_queued_requests=8)
    chat = {"messages": [{"role": "user", "content": "a"}], "model": "writer"}
    cases: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": "a", "n": 9, "model": "writer"}),
        ("/v1/completions", {"prompt": ["a"] * 3, "n": 3, "model": "writer"}),
        ("/v1/completions", {"prompt": ["a"] * 9, "model": "writer"}),
        ("/v1/chat/completions", chat | {"n": 9}),
        ("/tokenize", {"inputs": ["a"] * 9}),
        ("/decode", {"ids": [[5]] * 9}),
    ]
    for path, body in cases:
        answer = one.post(path, body)
        assert answer.status_code == 413, (path, answer.text)
        assert "--max-queued-requests" in answer.text, (path, answer.text)
    # Texts are queued window by window, so that a batch may be larger.
    assert one.post("/embed", {"inputs": ["a"] * 20}).status_code == 200
    body = {"prompt": ["a"] * 4, "n": 2, "model": "writer", "max_tokens": 1}
    assert one.post("/v1/completions", body).status_code == 200
    asyncio.run(close_models(one.served))


@pytest.mark.feature("Server", "work ends when the client leaves")
def test_work_is_cancelled_when_the_client_leaves(
    in_process: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = in_process.with_settings()

    async def run() -> list[str]:
        starts, _, fates = slow_embed(monkeypatch)
        leaves: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        body = {"type": "http.request", "body": b'{"inputs": "a"}', "more_body": False}
        leaves.put_nowait(body)
        sent: list[dict[str, Any]] = []

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/embed", "headers": []}
        task = asyncio.create_task(one.app(scope, leaves.get, send))
        await starts.wait()
        leaves.put_nowait({"type": "http.disconnect"})
        await task
        assert sent == [] and one.site.num_running == 0
        return fates

    assert asyncio.run(run()) == ["cancelled"]
    assert 'bytetx_requests_total{route="/embed",status="499"} 1.0' in one.get("/metrics").text


def test_default_prompts(in_process: InProcess) -> None:
    model = in_process.model("embedder")
    expected = model.embed(["fox"], prompt_name="query").vectors
    for change in ({"default_prompt_name": "query"}, {"default_prompt": "the quick brown "}):
        one = in_process.with_settings(**change)
        np.testing.assert_allclose(
            one.post("/embed", {"inputs": "fox"}).json(), expected, atol=1e-6
        )
        body = {"input": "fox"}
        row = one.post("/v1/embeddings", body).json()["data"][0]["embedding"]
        np.testing.assert_allclose(row, expected[0], atol=1e-6)


def test_pooling(in_process: InProcess) -> None:
    for given, mode in (("cls", "cls"), ("last-token", "lasttoken")):
        one = in_process.with_settings(pooling=given)
        expected = in_process.model("embedder").embed(["a fox"], pooling=mode).vectors
        np.testing.assert_allclose(
            one.post("/embed", {"inputs": "a fox"}).json(), expected, atol=1e-6
        )


def test_cors(in_process: InProcess) -> None:
    one = in_process.with_settings(cors_allow_origin=("https://a.example",))
    headers = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    asked = one.request("OPTIONS", "/embed", headers=headers)
    assert asked.headers["access-control-allow-origin"] == "https://a.example"
    answer = one.post("/embed", OK, headers={"Origin": "https://a.example"})
    assert answer.headers["access-control-allow-origin"] == "https://a.example"
    other = one.post("/embed", OK, headers={"Origin": "https://b.example"})
    assert "access-control-allow-origin" not in other.headers
    plain = in_process.post("/embed", OK, headers={"Origin": "https://a.example"})
    assert "access-control-allow-origin" not in plain.headers


def test_keys_are_compared_as_wholes(in_process: InProcess) -> None:
    site = in_process.with_settings(api_keys=("secret",)).site
    for wrong in (b"", b"Bearer", b"Bearer secre", b"Bearer secrets", b"Bearer \xc3\xa9"):
        with pytest.raises(ServeError):
            site.check_key(wrong)
    site.check_key(b"bearer secret")


def test_errors_of_nobody_are_none() -> None:
    assert as_serve_error(KeyError("a")) is None
