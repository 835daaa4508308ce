"""Ray Serve on a local cluster: answers, routing and scaling by tokens, a killed replica."""

import asyncio
import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from checkpoints import SENTENCES, save_causal, save_sentence_model

import bytetx
from bytetx.errors import OptionError

pytest.importorskip("ray.serve", reason="ray is not installed")

import ray
from ray import serve
from ray.util import list_named_actors

from bytetx.serve.balance import TokenLedger, estimate_tokens
from bytetx.serve.calls import Call, Outcome, Timings
from bytetx.serve.errors import ServeError
from bytetx.serve.ray import RayBackend, Refusal, Scale, app, application
from bytetx.serve.ray_policies import QueuedTokensPolicy, TokenAwareRouter
from bytetx.serve.settings import ModelSource, ServeSettings

TEXTS = [text for text in SENTENCES if text][:5]
UNHEALTHY = Refusal.of(ServeError("unhealthy", "the device is lost"))


@dataclass(frozen=True)
class Cluster:
    """The application on a local cluster, and its models in this process."""

    url: str
    embedder: "bytetx.Model"
    writer: "bytetx.Model"
    settings: ServeSettings

    def post(self, path: str, body: object) -> tuple[int, dict[str, str], bytes]:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, dict(answer.headers), answer.read()
        except urllib.error.HTTPError as error:
            return error.code, dict(error.headers), error.read()

    def embed(self, texts: list[str]) -> np.ndarray:
        status, _, body = self.post("/embed", {"inputs": texts, "model": "embedder"})
        assert status == 200, body
        return np.array(json.loads(body), np.float32)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling

    folder = tmp_path_factory.mktemp("models")
    paths = {
        "embedder": save_sentence_model(folder / "e", [Pooling(48, "mean"), Normalize()]),
        "writer": save_causal(folder / "w", "gpt2"),
    }
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ray.init(
        num_cpus=4,
        object_store_memory=200_000_000,
        include_dashboard=False,
        configure_logging=False,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
    )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        sources = [ModelSource(name, str(path)) for name, path in paths.items()]
        settings = ServeSettings(sources, device="cpu", threads=1, max_queued_tokens=16_384)
        scale = Scale(min_replicas=2, max_replicas=2, cpus=0.5)
        serve.run(application(settings, scale), name="bytetx")
        models = {name: bytetx.load(path, device="cpu") for name, path in paths.items()}
        yield Cluster(f"http://127.0.0.1:{port}", **models, settings=settings)
    finally:
        serve.shutdown()
        ray.shutdown()


def engines() -> list[str]:
    """Names of the actors of the engines that run."""
    names = [one["name"] for one in list_named_actors(all_namespaces=True)]
    return sorted(name for name in names if "#Engine#" in name)


@pytest.mark.feature("Server", "Ray Serve")
def test_answers_are_those_of_the_model(cluster: Cluster) -> None:
    expected = cluster.embedder.embed(TEXTS).vectors
    np.testing.assert_allclose(cluster.embed(TEXTS), expected, rtol=0, atol=1e-6)
    body = {"prompt": [5, 6, 7], "model": "writer", "max_tokens": 6, "temperature": 0}
    status, _, answer = cluster.post("/v1/completions", body)
    params = bytetx.SamplingParams(max_tokens=6, temperature=0.0)
    (output,) = cluster.writer.generate([[5, 6, 7]], params)[0].outputs
    assert (status, json.loads(answer)["choices"][0]["text"]) == (200, output.text)
    status, headers, answer = cluster.post("/v1/completions", body | {"stream": True})
    events = [line[6:] for line in answer.decode().splitlines() if line.startswith("data: ")]
    assert events.pop() == "[DONE]" and status == 200
    pieces = [json.loads(event)["choices"] for event in events]
    assert "".join(choice["text"] for part in pieces for choice in part) == output.text


def test_errors_arrive_as_those_of_one_server(cluster: Cluster) -> None:
    status, _, body = cluster.post("/embed", {"inputs": "a", "model": "writers"})
    assert status == 404 and b"there is: embedder, writer" in body
    long = {"inputs": "the " * 200, "truncate": False, "model": "embedder"}
    status, headers, body = cluster.post("/embed", long)
    assert status == 413 and json.loads(body)["error_type"] == "validation"
    assert b"tokens" in body and "x-request-id" in {name.lower() for name in headers}
    above_the_queue = [
        ("/embed", {"inputs": "fox " * 20_000, "model": "embedder"}),
        ("/v1/completions", {"prompt": [[5] * 30] * 32, "n": 100, "model": "writer"}),
    ]
    for path, content in above_the_queue:
        status, _, body = cluster.post(path, content)
        assert status == 413 and b"--max-queued-tokens" in body


def test_a_replica_is_killed_under_load_and_every_answer_is_right(cluster: Cluster) -> None:
    before = engines()
    assert len(before) == 2
    expected = cluster.embedder.embed(TEXTS).vectors
    begun, killed = threading.Semaphore(0), threading.Event()

    def caller(number: int) -> int:
        """Asks until the replica is dead, and 20 times more; gives the answers."""
        num_answers = num_after = 0
        while num_after < 20:
            num_after += killed.is_set()
            i = (number + num_answers) % len(TEXTS)
            got = cluster.embed([TEXTS[i], TEXTS[0]])
            np.testing.assert_allclose(got, expected[[i, 0]], rtol=0, atol=1e-6)
            num_answers += 1
            begun.release()
        return num_answers

    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(caller, number) for number in range(8)]
        for _ in range(40):
            begun.acquire()
        ray.kill(ray.get_actor(before[0], namespace="serve"), no_restart=True)
        killed.set()
        answers = [call.result(timeout=60) for call in calls]
    assert sum(answers) >= 40 + 8 * 20
    assert before[0] not in engines()


def test_engines_come_with_queued_tokens_and_drain_when_they_leave(cluster: Cluster) -> None:
    """Every call is answered, and rightly, while engines start and while they stop."""
    scale = Scale(min_replicas=1, max_replicas=2, cpus=0.5, target_tokens=60)
    quick = replace(scale, upscale_delay_s=0.5, downscale_delay_s=1.0)
    serve.run(application(cluster.settings, quick), name="bytetx")
    expected = cluster.embedder.embed(TEXTS).vectors

    def ask_until(num_engines: int, given: list[int]) -> int:
        num_answers = 0
        while len(engines()) != num_engines:
            got = cluster.embed([TEXTS[i] for i in given])
            np.testing.assert_allclose(got, expected[given], rtol=0, atol=1e-6)
            num_answers += 1
        return num_answers

    ask_until(1, [0])  # those of the test before leave
    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(ask_until, 2, [0, 1, 2, 3]) for _ in range(8)]
        assert sum(call.result(timeout=90) for call in calls) > 8
    assert ask_until(1, [0]) > 1


def test_a_call_whose_replicas_all_fail_is_refused_with_a_time_to_retry() -> None:
    tries = []

    class Dying:
        def remote(self, call: Call) -> "Dying":
            tries.append(call)
            return self

        def __await__(self) -> Iterator[None]:
            yield from ()
            raise ray.exceptions.ActorDiedError()

    backend = RayBackend(SimpleNamespace(run=Dying()), ())
    with pytest.raises(ServeError, match="4 replicas failed") as found:
        asyncio.run(backend.run(Call("m", "embed", ["a"])))
    assert found.value.kind == "unhealthy" and found.value.retry_after_s and len(tries) == 4


def test_a_call_whose_replica_dies_is_answered_by_another() -> None:
    """Under load a replica may die between two calls; here it certainly dies within one."""
    outcome = Outcome(Timings(num_texts=1), arrays=(np.ones((1, 2), np.float32),))
    answers: list[object] = [ray.exceptions.ActorDiedError(), UNHEALTHY, outcome]

    class Answer:
        def __await__(self) -> Iterator[None]:
            yield from ()
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

    backend = RayBackend(SimpleNamespace(run=remote_of(lambda call: Answer())), ())
    assert asyncio.run(backend.run(Call("m", "embed", ["a"]))) is outcome and not answers
    answers = [Refusal.of(ServeError("validation", "too long", param="inputs")), outcome]
    with pytest.raises(ServeError, match="too long") as found:
        asyncio.run(backend.run(Call("m", "embed", ["a"])))
    assert (found.value.kind, found.value.param) == ("validation", "inputs")
    assert answers == [outcome]  # what the caller did wrong is not tried again


@pytest.mark.parametrize("num_before", [0, 2])
def test_a_stream_is_begun_again_only_before_its_first_piece(num_before: int) -> None:
    tries: list[int] = []

    class Response:
        def __init__(self, pieces: list[str], dies: bool):
            self.pieces, self.dies = iter(pieces), dies

        def __aiter__(self) -> "Response":
            return self

        async def __anext__(self) -> str:
            for piece in self.pieces:
                return piece
            if self.dies:
                raise ray.exceptions.ActorDiedError()
            raise StopAsyncIteration

        def cancel(self) -> None:
            pass

    def remote(call: Call) -> Response:
        tries.append(1)
        first = len(tries) == 1
        return Response(["a", "b"][: num_before if first else 2], dies=first)

    engines = SimpleNamespace(options=lambda stream: SimpleNamespace(generate=remote_of(remote)))

    async def read() -> list[object]:
        return [piece async for piece in RayBackend(engines, ()).generate(Call("m", "g", "x"))]

    if num_before:
        with pytest.raises(ServeError, match="send the request again"):
            asyncio.run(read())
    else:
        assert asyncio.run(read()) == ["a", "b"]
    assert len(tries) == (1 if num_before else 2)


def remote_of(call: Callable[[Call], object]) -> SimpleNamespace:
    return SimpleNamespace(remote=call)


def test_the_router_ranks_replicas_by_tokens_and_counts_until_the_end() -> None:
    router = object.__new__(TokenAwareRouter)
    router.initialize_state()
    replicas = [
        SimpleNamespace(replica_id=name, routing_stats={"queued_tokens": tokens} if tokens else {})
        for name, tokens in (("a", 0), ("b", 300), ("c", 0))
    ]

    def request(number: int, length: int) -> SimpleNamespace:
        call = Call("m", "embed", ["x" * length])
        return SimpleNamespace(
            args=[call],
            metadata=SimpleNamespace(internal_request_id=number),
            routing_context=SimpleNamespace(should_backoff=False),
        )

    def ranks(pending: SimpleNamespace) -> list[str]:
        found = asyncio.run(router.choose_replicas(replicas, pending))
        assert pending.routing_context.should_backoff
        return [rank[0].replica_id for rank in found]

    first = request(1, 4000)
    assert ranks(first) == ["a", "c", "b"]
    router.on_request_routed(first, "a", None)
    assert router.ledger.tokens("a") == estimate_tokens(first.args[0]) == 1002
    assert ranks(request(2, 4)) == ["c", "b", "a"]
    router.on_request_completed("a", 1)
    assert isinstance(router.ledger, TokenLedger) and ranks(request(2, 4))[0] == "a"


def test_replicas_follow_the_queued_tokens() -> None:
    policy = QueuedTokensPolicy(target_tokens=1000)
    context = SimpleNamespace(
        aggregated_metrics={"queued_tokens": {"a": 2500.0, "b": 1500.0}}, target_num_replicas=2
    )
    assert policy(context) == (4.0, {})
    context.aggregated_metrics["queued_tokens"] = {"a": 10.0, "b": 0.0}
    assert policy(context)[0] < 1
    context.aggregated_metrics = {}
    assert policy(context) == (2, {})


def test_arguments_of_the_command_line_are_read_and_checked(tmp_path: Path) -> None:
    given = {"model": f"m={tmp_path}", "min_replicas": "2", "max_replicas": "5", "tp": "2"}
    given |= {"device": "cuda", "auto_truncate": "false", "api_keys": "a,b"}
    made = app(given | {"target_tokens": "9000"})
    assert made._bound_deployment.name == "Ingress"
    engine = made._bound_deployment.init_args[0]._bound_deployment
    (settings,) = engine.init_args
    assert (settings.models[0], settings.tp) == (ModelSource("m", str(tmp_path)), 2)
    assert settings.auto_truncate is False and settings.accepts_any_name
    assert list(settings.api_keys) == ["a", "b"]
    scaling = engine._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas) == (2, 5)
    assert scaling.policy.policy_kwargs == {"target_tokens": 9000}
    assert engine.ray_actor_options["num_gpus"] == 2
    assert engine._deployment_config.graceful_shutdown_timeout_s == settings.shutdown_timeout_s
    for wrong, message in {
        "replicas": "replicas is no argument; they are: model.*max_replicas",
        "min_replicas": "min_replicas cannot be 'x'",
        "auto_truncate": "auto_truncate cannot be 'x'",
    }.items():
        with pytest.raises(OptionError, match=message):
            app({"model": str(tmp_path), wrong: "x"})
    with pytest.raises(OptionError, match="min_replicas must be at least 1 and at most"):
        replace(Scale(), min_replicas=3)
    with pytest.raises(OptionError, match="runs no batches"):
        app({"model": str(tmp_path), "batch_dir": str(tmp_path)})
    with pytest.raises(OptionError, match="no model was named"):
        app({})
