"""Models that come into memory when they are asked for: budgets, idle times, races, failures."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from shutil import copytree
from typing import Any

import httpx
import numpy as np
import pytest
import transformers
from checkpoints import SENTENCES, save_checkpoint
from jina_adapters import save_with_adapters
from lora_adapters import save_adapter
from serving import KEY

import bytetx
from bytetx.errors import CheckpointError, OptionError
from bytetx.serve import model_pool
from bytetx.serve.app import build_app
from bytetx.serve.backends import open_backend
from bytetx.serve.calls import Call
from bytetx.serve.engine import ServedModel
from bytetx.serve.errors import ServeError
from bytetx.serve.metrics import Metrics
from bytetx.serve.model_pool import PooledBackend, PooledModel
from bytetx.serve.residency import State
from bytetx.serve.settings import ServeSettings, model_sources, parse_bytes
from bytetx.serve.site import Site

TEXTS = [text for text in SENTENCES if text]
WRITE = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
ALL = ("embedder", "classifier", "writer")


class Pool:
    """A server's application in this process, whose models come and go."""

    def __init__(self, backend: PooledBackend, settings: ServeSettings, metrics: Metrics):
        self.backend, self.settings = backend, settings
        self.site = Site(settings, metrics)
        self.site.backend, self.site.phase = backend, "ready"
        headers = {"Authorization": f"Bearer {KEY}"} if settings.api_keys else {}
        transport = httpx.ASGITransport(build_app(self.site), raise_app_exceptions=True)
        self.client = httpx.AsyncClient(
            transport=transport, base_url="http://test", timeout=60, headers=headers
        )

    async def embed(self, model: str) -> httpx.Response:
        return await self.client.post("/embed", json={"inputs": TEXTS, "model": model})

    def model(self, name: str) -> PooledModel:
        return next(one for one in self.backend._pooled if one.name == name)

    def states(self) -> dict[str, str]:
        return {one.name: one.state.value for one in self.backend._pooled}

    async def metric(self, name: str, model: str) -> float:
        page = (await self.client.get("/metrics")).text
        (line,) = (x for x in page.splitlines() if x.startswith(f'{name}{{model="{model}"}}'))
        return float(line.split()[1])

    def check_nothing_is_left(self) -> None:
        """No request is counted or waits for anything."""
        for one in self.backend._pooled:
            assert not one.num_running and not one.waiting and not one.leaving, one.name
            assert one.state in (State.IN, State.OUT)
        assert not self.backend._turns


@asynccontextmanager
async def open_pool(models: dict[str, Path], **options: Any) -> AsyncIterator[Pool]:
    settings = ServeSettings(
        model_sources([f"{name}={path}" for name, path in models.items()]),
        device="cpu",
        **{"lazy": True, "api_keys": (KEY,), **options},
    )
    metrics = Metrics(settings)
    async with open_backend(settings, metrics, on_lost=lambda: None) as backend:
        assert isinstance(backend, PooledBackend)
        yield Pool(backend, settings, metrics)


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not is_true():
            await asyncio.sleep(0.005)


@pytest.fixture(scope="module")
def own(checkpoints: dict[str, Path]) -> dict[str, bytetx.Model]:
    return {name: bytetx.load(checkpoints[name], device="cpu") for name in ALL}


@pytest.fixture(scope="module")
def right(own: dict[str, bytetx.Model]) -> dict[str, Any]:
    """The results of Model, for the three kinds of requests."""
    params = bytetx.SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    labels = own["classifier"].classify(TEXTS)
    return {
        "embedder": own["embedder"].embed(TEXTS).vectors,
        "classifier": [[label.score for label in one] for one in labels],
        "writer": own["writer"].generate(["the fox"], params)[0].text,
    }


def some(checkpoints: dict[str, Path], *names: str) -> dict[str, Path]:
    return {name: checkpoints[name] for name in names or ALL}


def budget_of_one(own: dict[str, bytetx.Model]) -> str:
    """Bytes of the largest, which does not fit beside another."""
    return str(max(model.info()["held_bytes"] for model in own.values()))


async def ask(client: httpx.AsyncClient, name: str) -> Any:
    """One request of a model's kind: its result, or None where there was no room."""
    if name == "embedder":
        answer = await client.post("/embed", json={"inputs": TEXTS, "model": name})
    elif name == "classifier":
        body = {"inputs": [[text] for text in TEXTS], "model": name}
        answer = await client.post("/predict", json=body)
    else:
        body = {"prompt": "the fox", "model": name, "stream": True, **WRITE}
        answer = await client.post("/v1/completions", json=body)
    if answer.status_code == 503:
        assert int(answer.headers["retry-after"]) >= 1
        return None
    assert answer.status_code == 200, answer.text
    if name == "embedder":
        return answer.json()
    if name == "classifier":
        return [[label["score"] for label in one] for one in answer.json()]
    events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


def check(name: str, found: Any, right: dict[str, Any]) -> None:
    if name == "writer":
        assert found == right[name]
    else:
        np.testing.assert_allclose(found, right[name], atol=1e-5)


@pytest.mark.feature("Server", "many models in little memory: loaded when asked for, a budget")
def test_a_storm_of_models_under_a_budget_of_one(
    checkpoints: dict[str, Path], own: dict[str, bytetx.Model], right: dict[str, Any]
) -> None:
    async def storm() -> None:
        async with open_pool(some(checkpoints), memory_budget=budget_of_one(own)) as pool:
            chance = random.Random(0)

            async def one(name: str) -> None:
                found = None
                while found is None:
                    found = await ask(pool.client, name)
                    held = pool.backend._residency.held_bytes
                    assert held <= pool.settings.memory_budget_bytes
                check(name, found, right)

            names = [chance.choice(ALL) for _ in range(60)]
            await asyncio.gather(*map(one, names))
            pool.check_nothing_is_left()
            moves = {name: await pool.metric("bytetx_model_loads_total", name) for name in ALL}
            assert all(count >= 1 for count in moves.values())
            loaded = [await pool.metric("bytetx_model_loaded", name) for name in ALL]
            assert pool.backend._residency.held_bytes <= int(budget_of_one(own))
            out = sum([await pool.metric("bytetx_model_unloads_total", name) for name in ALL])
            assert out == sum(moves.values()) - sum(loaded)
            counted = {
                name: await pool.metric("bytetx_inputs_total", name)
                for name in ("embedder", "classifier")
            }
            assert counted == {name: names.count(name) * len(TEXTS) for name in counted}
            assert (
                await pool.metric("bytetx_steps_total", "embedder") >= 1
            )  # counted over every load

    asyncio.run(storm())


def test_concurrent_first_requests_load_once(
    checkpoints: dict[str, Path], right: dict[str, Any]
) -> None:
    async def run() -> None:
        async with open_pool(some(checkpoints)) as pool:
            listed = (await pool.client.get("/v1/models")).json()["data"]
            assert [one["is_loaded"] for one in listed] == [False] * 3
            answers = await asyncio.gather(*(pool.embed("embedder") for _ in range(20)))
            for answer in answers:
                np.testing.assert_allclose(answer.json(), right["embedder"], atol=1e-5)
            assert pool.backend.loads == {"embedder": 1}
            assert (await pool.client.get("/info")).json()["is_loaded"] is True
            health = (await pool.client.get("/health")).json()
            assert health == {
                "models": {"embedder": "loaded", "classifier": "unloaded", "writer": "unloaded"}
            }
            listed = (await pool.client.get("/stats.json")).json()["models"]
            assert [one["is_loaded"] for one in listed] == [True, False, False]

    asyncio.run(run())


def test_models_are_loaded_at_the_start_as_far_as_they_fit(
    checkpoints: dict[str, Path], own: dict[str, bytetx.Model], right: dict[str, Any]
) -> None:
    async def run() -> None:
        options = {"lazy": False, "memory_budget": budget_of_one(own)}
        async with open_pool(some(checkpoints, "embedder", "writer"), **options) as pool:
            assert pool.states() == {"embedder": "loaded", "writer": "unloaded"}
            assert await pool.metric("bytetx_steps_total", "embedder") == 0  # it is warm
            check("writer", await ask(pool.client, "writer"), right)
            assert pool.states() == {"embedder": "unloaded", "writer": "loaded"}

    asyncio.run(run())


def test_idle_models_leave_and_streams_stay(
    checkpoints: dict[str, Path], right: dict[str, Any]
) -> None:
    async def run() -> None:
        async with open_pool(some(checkpoints), unload_after_s=0.05) as pool:
            await pool.embed("embedder")
            await until(lambda: pool.states()["embedder"] == "unloaded")
            place = pool.model("writer")
            calls = [await pool.backend._enter("writer")]  # a request that takes long
            await asyncio.sleep(0.3)
            assert place.state is State.IN and place.num_running == 1
            check("writer", await ask(pool.client, "writer"), right)
            pool.backend._leave(calls.pop())
            await until(lambda: place.state is State.OUT)
            check("writer", await ask(pool.client, "writer"), right)
            pool.check_nothing_is_left()

    asyncio.run(run())


def test_a_long_stream_is_not_dropped_for_another_model(
    checkpoints: dict[str, Path],
    own: dict[str, bytetx.Model],
    right: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model_pool, "_LEAVE_S", 0.2)

    async def run() -> None:
        async with open_pool(some(checkpoints), memory_budget=budget_of_one(own)) as pool:
            place = await pool.backend._enter("writer")
            answer = await pool.embed("embedder")
            assert answer.status_code == 503 and answer.headers["retry-after"] == "5"
            assert "no room for embedder" in answer.text
            assert place.state is State.IN  # and it takes requests again
            check("writer", await ask(pool.client, "writer"), right)
            waiting = asyncio.create_task(pool.embed("embedder"))
            await until(lambda: place.state is State.LEAVING)
            pool.backend._leave(place)
            assert (await waiting).status_code == 200
            pool.check_nothing_is_left()

    asyncio.run(run())


def test_batches_make_way_for_requests_and_drop_no_model_that_is_asked_for(
    checkpoints: dict[str, Path],
    own: dict[str, bytetx.Model],
    right: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        async with open_pool(some(checkpoints), memory_budget=budget_of_one(own)) as pool:
            embeds = Call("embedder", "embed", TEXTS, {}, priority=1)
            check("writer", await ask(pool.client, "writer"), right)
            with pytest.raises(ServeError, match="no room for embedder") as refused:
                await pool.backend.run(embeds)
            assert (refused.value.kind, refused.value.retry_after_s) == ("unhealthy", 5)
            assert pool.model("writer").state is State.IN
            monkeypatch.setattr(model_pool, "_SPARED_S", -1.0)
            vectors = (await pool.backend.run(embeds)).arrays[0]
            np.testing.assert_allclose(vectors, right["embedder"], atol=1e-5)
            assert pool.model("writer").state is State.OUT
            monkeypatch.setattr(model_pool, "_LEAVE_S", 60.0)

            async def write() -> list[Any]:
                options = {"max_tokens": 400, "ignore_eos": True}
                call = Call("writer", "generate", "a", options, priority=1)
                return [piece async for piece in pool.backend.generate(call)]

            line = asyncio.create_task(write())
            await until(lambda: bool(pool.model("writer").interruptible))
            check("classifier", await ask(pool.client, "classifier"), right)
            with pytest.raises(ServeError, match="made room for another model") as stopped:
                await line
            assert stopped.value.kind == "unhealthy"
            assert len(await write()) > 1
            pool.check_nothing_is_left()
            assert not any(one.num_asked or one.patient for one in pool.backend._pooled)

    asyncio.run(run())


def test_a_request_that_joins_a_batch_s_wait_is_not_refused_with_it(
    checkpoints: dict[str, Path],
    own: dict[str, bytetx.Model],
    right: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model_pool, "_LEAVE_S", 0.2)

    async def run() -> None:
        async with open_pool(some(checkpoints), memory_budget=budget_of_one(own)) as pool:
            place = await pool.backend._enter("writer", 1)  # a call that nobody can interrupt
            call = Call("embedder", "embed", TEXTS, {}, priority=1)
            line = asyncio.create_task(pool.backend.run(call))
            await until(lambda: place.state is State.LEAVING)
            waiting = asyncio.create_task(pool.embed("embedder"))
            with pytest.raises(ServeError, match="no room for embedder"):
                await line
            pool.backend._leave(place, 1)
            assert (await waiting).status_code == 200
            pool.check_nothing_is_left()

    asyncio.run(run())


def test_a_load_that_fails_is_tried_again(
    checkpoints: dict[str, Path], right: dict[str, Any], tmp_path: Path
) -> None:
    folder = copytree(checkpoints["embedder"], tmp_path / "broken")
    (weights,) = folder.rglob("model.safetensors")
    whole = weights.read_bytes()

    async def run() -> None:
        models = {"broken": folder, **some(checkpoints, "classifier")}
        async with open_pool(models) as pool:
            weights.write_bytes(whole[:-100])
            answers = await asyncio.gather(*(pool.embed("broken") for _ in range(4)))
            for answer in answers:
                assert answer.status_code == 424
                assert "broken could not be loaded" in answer.text
                assert str(folder) not in answer.text
            check("classifier", await ask(pool.client, "classifier"), right)
            assert (await pool.client.get("/health")).status_code == 200
            assert await pool.metric("bytetx_model_failed_loads_total", "broken") == 1
            weights.write_bytes(whole)
            answer = await pool.embed("broken")
            np.testing.assert_allclose(answer.json(), right["embedder"], atol=1e-5)
            pool.check_nothing_is_left()

    asyncio.run(run())


def test_a_model_of_more_bytes_than_expected(
    checkpoints: dict[str, Path], own: dict[str, bytetx.Model], right: dict[str, Any]
) -> None:
    async def run() -> None:
        async with open_pool(some(checkpoints), memory_budget=budget_of_one(own)) as pool:
            for one in pool.backend._pooled:
                one.num_bytes = 1
            check("writer", await ask(pool.client, "writer"), right)
            answers = await asyncio.gather(*(ask(pool.client, name) for name in ALL))
            for name, found in zip(ALL, answers, strict=True):
                check(name, found, right)
            assert pool.backend._residency.held_bytes <= int(budget_of_one(own))
            await pool.client.post("/models/unload", json={"model": "writer"})
            pool.backend._residency.budget_bytes = 2
            pool.model("writer").num_bytes = 1
            body = {"prompt": "a", "model": "writer"}
            answer = await pool.client.post("/v1/completions", json=body)
            assert answer.status_code == 424 and "--memory-budget is 2" in answer.text
            await until(lambda: not pool.backend._turns)  # memory is given back first
            answer = await pool.client.post("/v1/completions", json=body)
            assert answer.status_code == 424 and "--memory-budget is 2" in answer.text
            await until(lambda: not pool.backend._turns)
            assert await pool.metric("bytetx_model_failed_loads_total", "writer") == 1
            pool.check_nothing_is_left()

    asyncio.run(run())


def test_an_unexpected_fault_of_a_load_ends_nothing(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with open_pool(some(checkpoints, "embedder")) as pool:
            with monkeypatch.context() as patch:
                patch.setattr(PooledBackend, "_load", lambda self, place: 1 / 0)
                answer = await pool.embed("embedder")
                assert answer.status_code == 424 and "division" not in answer.text
            assert (await pool.embed("embedder")).status_code == 200

    asyncio.run(run())


def test_a_request_waits_for_its_model_only_so_long(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    may_load, load = threading.Event(), PooledBackend._load

    def slow(backend: PooledBackend, place: PooledModel) -> ServedModel:
        may_load.wait(60)
        return load(backend, place)

    async def run() -> None:
        monkeypatch.setattr(PooledBackend, "_load", slow)
        async with open_pool(some(checkpoints, "embedder"), load_timeout_s=0.2) as pool:
            answer = await pool.embed("embedder")
            assert answer.status_code == 503 and "--load-timeout" in answer.text
            assert int(answer.headers["retry-after"]) >= 1
            left = asyncio.create_task(pool.embed("embedder"))  # its client goes
            await until(lambda: len(pool.model("embedder").waiting) == 1)
            left.cancel()
            with suppress(asyncio.CancelledError):
                await left
            assert not pool.model("embedder").waiting
            may_load.set()
            await until(lambda: pool.states() == {"embedder": "loaded"})
            assert (await pool.embed("embedder")).status_code == 200
            pool.check_nothing_is_left()
            assert pool.backend.loads == {"embedder": 1}

    asyncio.run(run())


def test_races_of_loads_unloads_and_cancelled_requests(
    checkpoints: dict[str, Path],
    own: dict[str, bytetx.Model],
    right: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model_pool, "_LEAVE_S", 0.3)

    async def run() -> None:
        options = {"memory_budget": budget_of_one(own), "unload_after_s": 0.02}
        async with open_pool(some(checkpoints), **options) as pool:
            chance = random.Random(1)

            async def one(number: int) -> None:
                name, kind = chance.choice(ALL), chance.random()
                await asyncio.sleep(chance.random())
                if kind < 0.2:
                    path = chance.choice(["load", "unload"])
                    answer = await pool.client.post(f"/models/{path}", json={"model": name})
                    assert answer.status_code in (200, 503), answer.text
                    return
                asking = asyncio.create_task(ask(pool.client, name))
                if kind < 0.5:
                    await asyncio.sleep(0.1 * chance.random())
                    asking.cancel()
                with suppress(asyncio.CancelledError):
                    found = await asking
                    if found is not None:
                        check(name, found, right)

            await asyncio.gather(*map(one, range(120)))
            await until(lambda: set(pool.states().values()) == {"unloaded"})
            pool.check_nothing_is_left()
            assert pool.site.num_running == 0
            for name in ALL:
                check(name, await ask(pool.client, name), right)

    asyncio.run(run())


def test_models_are_loaded_and_unloaded_by_hand(checkpoints: dict[str, Path]) -> None:
    async def run() -> None:
        async with open_pool(some(checkpoints)) as pool:
            for path, state in (("load", "loaded"), ("unload", "unloaded"), ("unload", "unloaded")):
                answer = await pool.client.post(f"/models/{path}", json={"model": "classifier"})
                assert answer.json() == {"model": "classifier", "is_loaded": state == "loaded"}
                assert pool.states()["classifier"] == state
            answer = await pool.client.post("/models/load", json={"model": "nothing"})
            assert answer.status_code == 404
            answer = await pool.client.post("/models/load", headers={"Authorization": "Bearer x"})
            assert answer.status_code == 401
        async with open_pool(some(checkpoints), api_keys=()) as pool:
            answer = await pool.client.post("/models/load", json={})
            assert answer.status_code == 401 and "--api-key" in answer.text

    asyncio.run(run())


def test_adapters_come_back_with_their_model(
    checkpoints: dict[str, Path], own: dict[str, bytetx.Model], tmp_path: Path
) -> None:
    base = checkpoints["embedder"] / "0_Transformer"
    base = base if base.is_dir() else checkpoints["embedder"]
    for seed, name in enumerate(("legal", "news")):
        kind = transformers.AutoModel
        save_adapter(base, tmp_path / name, kind, seed, target_modules=["query", "dense"])
    with bytetx.load(checkpoints["embedder"], device="cpu") as model:
        right = {None: model.embed(TEXTS).vectors}
        for name in ("legal", "news"):
            model.add_adapter(name, tmp_path / name)
            right[name] = model.embed(TEXTS, adapter=name).vectors

    async def run() -> None:
        options = {
            "adapters": [f"embedder:legal={tmp_path / 'legal'}"],
            "memory_budget": budget_of_one(own),
        }
        async with open_pool(some(checkpoints), **options) as pool:
            names = [facts.name for facts in pool.backend.models]
            assert names == [*ALL, "embedder:legal"]

            async def check_adapter(name: str) -> None:
                answer = await pool.embed(f"embedder:{name}")
                np.testing.assert_allclose(answer.json(), right[name], atol=1e-5)

            await check_adapter("legal")
            body = {"model": "embedder", "name": "news", "path": str(tmp_path / "news")}
            assert (await pool.client.post("/adapters/load", json=body)).status_code == 200
            for _ in range(2):
                assert await ask(pool.client, "writer") is not None
                assert pool.states()["embedder"] == "unloaded"
                listed = (await pool.client.get("/v1/models")).json()["data"]
                assert {one["id"]: one["is_loaded"] for one in listed} == {
                    **{"embedder": False, "classifier": False, "writer": True},
                    **{"embedder:legal": False, "embedder:news": False},
                }
                await check_adapter("news")
                await check_adapter("legal")
            body = {"model": "embedder", "name": "legal"}
            assert (await pool.client.post("/adapters/unload", json=body)).status_code == 200
            assert await ask(pool.client, "writer") is not None
            assert (await pool.embed("embedder:legal")).status_code == 404
            await check_adapter("news")
            assert (await pool.embed("embedder:legal")).status_code == 404

    asyncio.run(run())


def test_tasks_of_a_checkpoint_are_known_before_it_is_loaded(tmp_path: Path) -> None:
    base = save_checkpoint(tmp_path / "base", "jina_embeddings_v3")
    folder = save_with_adapters(tmp_path / "jina", base)

    async def run() -> None:
        async with open_pool({"jina": folder}) as pool:
            before = [facts.name for facts in pool.backend.models]
            assert len(before) > 1
            answer = await pool.client.post("/embed", json={"inputs": "a", "model": before[1]})
            assert answer.status_code == 200
            assert [facts.name for facts in pool.backend.models] == before

    asyncio.run(run())


def test_what_is_known_without_weights(checkpoints: dict[str, Path]) -> None:
    """All facts that routes need are those of the loaded models."""

    async def run() -> None:
        async with open_pool(dict(checkpoints)) as pool:
            before = {facts.name: facts for facts in pool.backend.models}
            for one in pool.backend._pooled:
                assert one.outline is not None, one.name
                expected = one.num_bytes
                await pool.client.post("/models/load", json={"model": one.name})
                served = pool.backend._served[one.name]
                known = model_pool.model_facts(one.source, served.model.model)
                ours = before[one.name]
                assert (known.tasks, known.main_task) == (ours.tasks, ours.main_task)
                assert known.has_chat_template == ours.has_chat_template
                differing = {
                    key for key, value in known.info.items() if value != ours.info[key]
                } - {
                    "held_bytes",
                    "held_bits",
                    "prefix_cache_bytes",
                }  # kernels of the weights' device
                assert not differing, one.name
                assert abs(one.num_bytes - expected) <= 0.05 * one.num_bytes, one.name

    asyncio.run(run())


def test_errors_of_a_lazy_model_are_found_at_the_start(
    checkpoints: dict[str, Path], own: dict[str, bytetx.Model], tmp_path: Path
) -> None:
    async def start(folder: Path, **options: Any) -> None:
        async with open_pool({"broken": folder}, **options):
            pass

    folder = copytree(checkpoints["embedder"], tmp_path / "cut")
    (weights,) = folder.rglob("model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="not a complete safetensors file"):
        asyncio.run(start(folder))
    folder = copytree(checkpoints["embedder"], tmp_path / "config")
    (config,) = (one for one in folder.rglob("config.json") if "model_type" in one.read_text())
    config.write_text(config.read_text().replace('"intermediate_size": ', '"intermediate_size": 1'))
    with pytest.raises(CheckpointError, match="config.json implies"):
        asyncio.run(start(folder))
    with pytest.raises(OptionError, match="none of broken is one"):
        asyncio.run(start(checkpoints["embedder"], num_speculative_tokens=2))
    with pytest.raises(OptionError, match="weights of broken have .* bytes in memory"):
        asyncio.run(start(checkpoints["embedder"], memory_budget="1KiB"))
    with pytest.raises(CheckpointError, match="has no config.json"):
        asyncio.run(start(checkpoints["embedder"], adapters=[f"x={tmp_path}"]))


@pytest.mark.parametrize(
    ("text", "size"),
    [("10GiB", 10 << 30), ("1.5 kb", 1500), ("7", 7), ("2T", 2 * 10**12), ("3mib", 3 << 20)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes("--memory-budget", text) == size


def test_options_that_are_refused() -> None:
    models = model_sources(["m=/nowhere"])
    for text in ("", "GiB", "-1", "0", "1e3", "10 apples", "nan", "1" * 40):
        with pytest.raises(OptionError, match="--memory-budget must be a size above 0"):
            ServeSettings(models, memory_budget=text)
    for name in ("unload_after_s", "load_timeout_s"):
        for seconds in (0.0, -1.0, float("inf"), float("nan")):
            with pytest.raises(OptionError, match="must be a number of seconds above 0"):
                ServeSettings(models, **{name: seconds})
    with pytest.raises(OptionError, match="--tensor-parallel-size is 2"):
        ServeSettings(models, lazy=True, tp=2)


def test_a_model_without_weights_runs_no_task(checkpoints: dict[str, Path]) -> None:
    model = bytetx.load(checkpoints["embedder"], device="cpu", reads_weights=False)
    assert model.info()["family"] == "bert" and model.tokenizer is not None
    with pytest.raises(OptionError, match="reads_weights=False"):
        model.embed(["a"])
    again = bytetx.load(checkpoints["embedder"], device="cpu", outline=model)
    assert again.tokenizer is model.tokenizer
    assert np.isfinite(again.embed(["a"]).vectors).all()
    writer = bytetx.load(checkpoints["writer"], device="cpu", reads_weights=False)
    with pytest.raises(OptionError, match="reads_weights=False"):
        writer.generate(["a"])
    with pytest.raises(OptionError, match="is for one process"):
        bytetx.load(checkpoints["embedder"], device="cpu", reads_weights=False, tp=2)
