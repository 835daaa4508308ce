"""LoRA adapters as models of the server: named in requests, loaded and unloaded while it runs."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import transformers
from checkpoints import SENTENCES, save_checkpoint
from jina_adapters import TASKS, save_with_adapters
from lora_adapters import save_adapter
from serving import KEY, InProcess, start_server

import bytetx
from bytetx.errors import OptionError
from bytetx.serve.engine import LocalBackend
from bytetx.serve.loading import close_models, load_models
from bytetx.serve.settings import (
    ModelSource,
    ServeSettings,
    model_sources,
    read_settings,
    settings_line,
)

TEXTS = [text for text in SENTENCES if text]
WITH_KEY = {"headers": {"Authorization": f"Bearer {KEY}"}}


@pytest.fixture(scope="module")
def adapters(
    checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Folders of adapters, by MODEL:NAME."""
    root = tmp_path_factory.mktemp("adapters")
    cases = {
        "embedder:legal": (transformers.AutoModel, {"target_modules": ["query", "dense"]}),
        "embedder:news": (transformers.AutoModel, {"target_modules": ["value"], "r": 3}),
        "classifier:legal": (
            transformers.AutoModelForSequenceClassification,
            {"target_modules": ["query"], "task_type": "SEQ_CLS"},
        ),
        "writer:legal": (
            transformers.AutoModelForCausalLM,
            {"target_modules": ["c_attn", "c_fc"], "task_type": "CAUSAL_LM"},
        ),
    }
    found = {}
    for seed, (name, (kind, config)) in enumerate(cases.items()):
        base, _, own = name.partition(":")
        found[name] = root / base / own
        folder = checkpoints[base] / "0_Transformer"
        folder = folder if folder.is_dir() else checkpoints[base]
        save_adapter(folder, found[name], kind, seed, **config)
    return found


@pytest.fixture(scope="module")
def served(checkpoints: dict[str, Path], adapters: dict[str, Path]) -> Iterator[InProcess]:
    """The models with one adapter each, and a key."""
    names = ("embedder", "classifier", "writer")
    settings = ServeSettings(
        model_sources([f"{name}={checkpoints[name]}" for name in names]),
        device="cpu",
        api_keys=(KEY,),
        adapters=[f"{name}={path}" for name, path in adapters.items() if name.endswith("legal")],
    )
    models = load_models(read_settings(settings_line(settings)))
    yield InProcess(settings, models)
    asyncio.run(close_models(models))


def names(served: InProcess) -> list[str]:
    return [one["id"] for one in served.get("/v1/models", **WITH_KEY).json()["data"]]


@pytest.mark.feature("Server", "adapters as models")
def test_an_adapter_is_a_model(served: InProcess) -> None:
    assert names(served) == [
        *("embedder", "classifier", "writer"),
        *("embedder:legal", "classifier:legal", "writer:legal"),
    ]
    listed = served.get("/v1/models", **WITH_KEY).json()["data"]
    assert [one.get("parent") for one in listed] == [None] * 3 + [
        "embedder",
        "classifier",
        "writer",
    ]
    model = served.model("embedder")
    right = {name: model.embed(TEXTS, adapter=name).vectors for name in (None, "legal")}
    assert np.abs(right[None] - right["legal"]).max() > 1e-2
    for name, vectors in (("embedder", right[None]), ("embedder:legal", right["legal"])):
        body = {"inputs": TEXTS, "model": name}
        found = served.post("/embed", body, **WITH_KEY).json()
        np.testing.assert_allclose(found, vectors, atol=1e-5)
        found = served.post(f"/models/{name}/embed", {"inputs": TEXTS}, **WITH_KEY).json()
        np.testing.assert_allclose(found, vectors, atol=1e-5)
        body = {"input": TEXTS, "model": name}
        answer = served.post("/v1/embeddings", body, **WITH_KEY).json()
        assert answer["model"] == name
        found = [one["embedding"] for one in answer["data"]]
        np.testing.assert_allclose(found, vectors, atol=1e-5)


def test_heads_and_prompts(served: InProcess) -> None:
    model = served.model("classifier")
    for name, adapter in (("classifier", None), ("classifier:legal", "legal")):
        found = served.post("/predict", {"inputs": TEXTS[0], "model": name}, **WITH_KEY).json()
        right = model.classify([TEXTS[0]], adapter=adapter)[0]
        assert [one["label"] for one in found] == [one.label for one in right]
        assert np.allclose([one["score"] for one in found], [one.score for one in right], atol=1e-5)
    writer = served.model("writer")
    params = bytetx.SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    texts = []
    for name, adapter in (("writer", None), ("writer:legal", "legal"), ("writer", None)):
        body = {"prompt": "the fox", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
        answer = served.post("/v1/completions", {**body, "model": name}, **WITH_KEY).json()
        right = writer.generate(["the fox"], params, adapter=adapter)[0]
        assert answer["choices"][0]["text"] == right.text
        texts.append(right.text)
    assert texts[0] == texts[2] != texts[1]


def test_an_unknown_adapter_is_not_the_base_model(served: InProcess) -> None:
    body = {"inputs": "a fox", "model": "embedder:nothing"}
    answer = served.post("/embed", body, **WITH_KEY)
    assert answer.status_code == 404 and "'embedder:nothing' is not served" in answer.text
    assert served.post("/models/embedder:nothing/embed", body, **WITH_KEY).status_code == 404
    anybody = served.with_settings(only="embedder", accepts_any_name=True)
    assert anybody.post("/embed", {**body, "model": "x"}, **WITH_KEY).status_code == 200
    assert anybody.post("/embed", body, **WITH_KEY).status_code == 404
    body = {"task": "score", "texts": ["a fox"], "model": "writer", "options": {"adapter": "legal"}}
    answer = served.post("/tasks", body, **WITH_KEY)
    assert answer.status_code == 422 and "options.'adapter' is not known" in answer.text


def test_adapters_come_and_go(served: InProcess, adapters: dict[str, Path]) -> None:
    body = {"inputs": TEXTS, "model": "embedder:news"}
    assert served.post("/embed", body, **WITH_KEY).status_code == 404
    load = {"name": "news", "path": str(adapters["embedder:news"])}
    answer = served.post("/adapters/load", load, **WITH_KEY)
    assert answer.status_code == 200 and answer.json() == {"model": "embedder:news"}
    assert "embedder:news" in names(served)
    right = served.model("embedder").embed(TEXTS, adapter="news").vectors
    found = served.post("/embed", body, **WITH_KEY).json()
    np.testing.assert_allclose(found, right, atol=1e-5)
    page = served.get("/metrics").text
    assert 'bytetx_adapters{model="embedder"} 2.0' in page
    assert 'bytetx_inputs_total{model="embedder:news"}' in page
    assert 'bytetx_adapter_bytes{model="embedder"}' in page
    twice = served.post("/adapters/load", load, **WITH_KEY)
    assert twice.status_code == 422 and "is there already; remove it first" in twice.text
    answer = served.post("/adapters/unload", {"name": "news"}, **WITH_KEY)
    assert answer.status_code == 200 and "embedder:news" not in names(served)
    assert served.post("/embed", body, **WITH_KEY).status_code == 404
    assert 'bytetx_adapters{model="embedder"} 1.0' in served.get("/metrics").text
    answer = served.post("/adapters/unload", {"name": "news"}, **WITH_KEY)
    assert answer.status_code == 422 and "name of a loaded one" in answer.text


def test_what_the_routes_refuse(served: InProcess, adapters: dict[str, Path]) -> None:
    load = {"name": "x", "path": str(adapters["embedder:news"])}
    for path in ("/adapters/load", "/adapters/unload"):
        assert served.post(path, load).status_code == 401
        open_server = served.with_settings(api_keys=())
        answer = open_server.post(path, load if path.endswith("/load") else {"name": "legal"})
        assert answer.status_code == 401 and "--api-key" in answer.text
    for wrong in ("a:b", "", "a/b"):
        answer = served.post("/adapters/load", {**load, "name": wrong}, **WITH_KEY)
        assert answer.status_code == 422 and "name of an adapter must be" in answer.text
    answer = served.post("/adapters/load", {**load, "nmae": "y"}, **WITH_KEY)
    assert answer.status_code == 422 and "nmae" in answer.text
    answer = served.post("/adapters/load", {**load, "name": None}, **WITH_KEY)
    assert answer.status_code == 422 and "name" in answer.text
    answer = served.post("/adapters/load", {**load, "model": "embedder:legal"}, **WITH_KEY)
    assert answer.status_code == 422 and "name its model, embedder" in answer.text
    answer = served.post("/adapters/load", {**load, "model": "nothing"}, **WITH_KEY)
    assert answer.status_code == 404
    answer = served.post("/adapters/load", {**load, "path": "/nothing"}, **WITH_KEY)
    assert answer.status_code in (422, 424) and "there is no folder" in answer.text
    answer = served.post("/adapters/load", {**load, "model": "writer"}, **WITH_KEY)
    assert answer.status_code in (422, 424) and "the base model lacks" in answer.text
    replica = served.with_settings()
    replica.site.backend = LocalBackend(
        replica.served, on_lost=lambda: None, changes_adapters=False
    )
    answer = replica.post("/adapters/load", load, **WITH_KEY)
    assert answer.status_code == 400 and "start all of them with --adapter" in answer.text


def test_settings_of_adapters() -> None:
    two = [ModelSource("a", "x"), ModelSource("b:c", "y")]
    settings = ServeSettings(two, adapters=["a:n=p", "b:c:m=q=r"])
    assert settings.adapters_of("a") == {"n": "p"}
    assert settings.adapters_of("b:c") == {"m": "q=r"}
    assert ServeSettings(two[:1], adapters=["n=p"]).adapters_of("a") == {"n": "p"}
    for wrong in ("n=p", "n", "c:n=p", "a:n=", "a:n"):
        with pytest.raises(OptionError, match="--adapter must be NAME=PATH"):
            ServeSettings(two, adapters=[wrong])
    with pytest.raises(OptionError, match="name of an adapter must be"):
        ServeSettings(two, adapters=["a:.n=p"])
    with pytest.raises(OptionError, match="two models or adapters are called 'a:n'"):
        ServeSettings(two, adapters=["a:n=p", "a:n=q"])
    with pytest.raises(OptionError, match="two models or adapters are called 'a:n'"):
        ServeSettings([two[0], ModelSource("a:n", "y")], adapters=["a:n=p"])


def test_front_ends_know_of_adapters(
    checkpoints: dict[str, Path], adapters: dict[str, Path], tmp_path: Path
) -> None:
    """All of them, soon after one has loaded it: each has connections of its own."""
    arguments = ["--model", f"embedder={checkpoints['embedder']}", "--frontends", "2"]
    arguments += ["--api-key", KEY, "--adapter", f"legal={adapters['embedder:legal']}"]
    with start_server(arguments, log=tmp_path / "log") as server:

        def embed(name: str) -> list[httpx.Response]:
            """The answers of several connections."""
            answers = []
            for _ in range(8):
                with server.client() as client:
                    answers.append(client.post("/embed", json={"inputs": "a", "model": name}))
            return answers

        base, legal = embed("embedder")[0].json(), embed("embedder:legal")[0].json()
        assert np.abs(np.array(base) - legal).max() > 1e-2
        with server.client() as client:
            load = {"name": "news", "path": str(adapters["embedder:news"])}
            assert client.post("/adapters/load", json=load).status_code == 200
            assert client.post("/embed", json={"inputs": "a", "model": "embedder:news"}).is_success
            assert client.post("/adapters/unload", json={"name": "legal"}).status_code == 200
        end = time.monotonic() + 30
        found = embed("embedder:news")
        while not all(one.is_success for one in found) and time.monotonic() < end:
            found = embed("embedder:news")  # the other front-end was not told yet
        assert all(one.is_success and one.json() == found[0].json() for one in found)
        assert {one.status_code for one in embed("embedder:legal")} == {404}


@pytest.mark.feature("Server", "tasks of a checkpoint as models, and in requests")
def test_tasks_of_a_checkpoint(tmp_path: Path) -> None:
    base = save_checkpoint(tmp_path / "base", "jina_embeddings_v3")
    folder = save_with_adapters(tmp_path / "jina", base)
    settings = ServeSettings(model_sources([f"jina={folder}"]), device="cpu")
    models = load_models(read_settings(settings_line(settings)))
    texts = ["a", "fox", "the fox"]
    one = InProcess(settings, models)
    try:
        listed = one.get("/v1/models").json()["data"]
        assert [entry["id"] for entry in listed] == ["jina", *(f"jina:{task}" for task in TASKS)]
        assert {entry.get("parent") for entry in listed[1:]} == {"jina"}
        model = one.model("jina")
        right = {task: model.embed(texts, task=task).vectors for task in (None, *TASKS)}
        for task in TASKS:
            for body in (
                {"inputs": texts, "task": task},
                {"inputs": texts, "model": f"jina:{task}"},
            ):
                found = one.post("/embed", body).json()
                np.testing.assert_allclose(found, right[task], atol=1e-5)
                found = one.post(
                    "/embed", body | {"truncate": True, "truncation_direction": "Left"}
                )
                np.testing.assert_allclose(found.json(), right[task], atol=1e-5)
            states = model.hidden_states(texts, task=task)
            found = one.post("/embed_all", {"inputs": texts, "model": f"jina:{task}"}).json()
            for vectors, own in zip(found, states, strict=True):
                np.testing.assert_allclose(vectors, own[0], atol=1e-5)
        mixed = [TASKS[0], None, *["separation"] * (len(texts) - 2)]
        wanted = [right[task][row] for row, task in enumerate(mixed)]
        found = one.post("/embed", {"inputs": texts, "task": mixed}).json()
        np.testing.assert_allclose(found, wanted, atol=1e-5)
        answer = one.post("/v1/embeddings", {"input": texts, "task": mixed}).json()
        np.testing.assert_allclose([row["embedding"] for row in answer["data"]], wanted, atol=1e-5)
        for body in (
            {"inputs": "a", "task": "query"},
            {"inputs": ["a", "b"], "task": ["query", None]},
        ):
            answer = one.post("/embed", body)
            assert answer.status_code == 422 and "'retrieval.passage'" in answer.text
        refused = one.post("/predict", {"inputs": "a", "model": "jina:separation"})
        assert refused.status_code == 424
        unknown = one.post("/embed", {"inputs": "a", "model": "jina:query"})
        assert unknown.status_code == 404 and "jina:separation" in unknown.text
    finally:
        asyncio.run(close_models(models))
