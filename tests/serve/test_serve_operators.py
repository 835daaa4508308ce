"""The operators' view: pages without the internet, logs, names instead of paths, counts."""

import asyncio
import json
import logging
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import urljoin, urlsplit

import pytest
from serving import KEY, InProcess, Server, start_server

from bytetx.buckets import bucket_of
from bytetx.checkpoint.names import name_of
from bytetx.errors import BytetxError, OptionError
from bytetx.runtime.cuda_graphs import MAX_GRAPHS
from bytetx.serve.calls import Call
from bytetx.serve.engine import LocalBackend
from bytetx.serve.errors import ServeError
from bytetx.serve.loading import close_models, load_models, warm_up, warm_up_calls
from bytetx.serve.logs import set_up_logs
from bytetx.serve.settings import ServeSettings, model_sources, read_settings, settings_line

LINE = re.compile(r" INFO (\S+) (\S+) (\S+) (\d+) \d+\.\d{3}ms (\S+) (\S+)$")
FOREIGN = re.compile(r"""(?:src|href|url)\s*[=(:]\s*["']?(?:https?:)?//""")


@pytest.fixture(scope="module")
def unnamed(
    checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """Front-ends and an engine of one model that has no name, with a log of requests as JSON."""
    log = tmp_path_factory.mktemp("unnamed") / "log"
    options = ["--frontends", "2", "--access-log", "--json-output", "--api-key", KEY]
    with start_server(["--model", str(checkpoints["embedder"]), *options], log=log) as running:
        yield running


@pytest.mark.parametrize("page", ["/docs", "/redoc"])
def test_pages_of_the_api_load_all_from_the_server(in_process: InProcess, page: str) -> None:
    """Without a key, whose routes ask for one; no other host is named or may be asked."""
    one = in_process.with_settings(api_keys=(KEY,))
    answer = one.get(page, headers={"x-request-id": "mine"})
    assert answer.status_code == 200 and answer.headers["x-request-id"] == "mine"
    assert not FOREIGN.search(answer.text)
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'self'") and "://" not in policy
    links = re.findall(r"""(?:src|href)=["']([^"']+)""", answer.text)
    links += re.findall(r"""(?:url|spec-url)["']?\s*[=:]\s*["']([^"']+)""", answer.text)
    assert "/openapi.json" in links and any(link.endswith(".js") for link in links)
    for link in links:
        assert not urlsplit(link).netloc
        assert one.get(urljoin(page, link)).status_code == 200, link
    assert one.get("/docs/files/../../app.py").status_code == 404
    assert one.get("/docs/files/none.js").status_code == 404
    assert one.post("/docs").status_code == 404


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("BAAI/bge-base-en-v1.5", "BAAI/bge-base-en-v1.5"),
        ("/srv/models/bge-base/", "bge-base"),
        ("~/bge-base", "bge-base"),
        ("./models/bge-base", "bge-base"),
        ("/cache/models--BAAI--bge-base/snapshots/0123abc", "BAAI/bge-base"),
        ("/", "model"),
    ],
)
def test_a_model_is_named_by_no_path(given: str, name: str) -> None:
    assert name_of(given) == name
    (source,) = model_sources([given])
    assert (source.name, source.path) == (name, given)


def test_folders_of_the_same_name_need_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "org" / "net").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert model_sources(["org/net"])[0].name == "net"  # a folder that looks like a hub id
    with pytest.raises(OptionError, match=r"two models are called 'net'.*--model NAME=PATH"):
        ServeSettings(model_sources(["/a/net", "/b/net"]))


def test_no_answer_has_a_path(unnamed: Server, checkpoints: dict[str, Path]) -> None:
    path, name = str(checkpoints["embedder"]), checkpoints["embedder"].name
    body = {"input": "a", "model": path}
    with unnamed.client() as client:
        assert client.post("/v1/embeddings", json=body).json()["model"] == name
        answers = [
            client.post("/embed", json={"inputs": "a", "prompt_name": "nothing"}),
            client.post("/predict", json={"inputs": "a"}),
            client.post("/v1/chat/completions", json={"messages": [], "model": "x"}),
            client.post("/decode", json={"ids": [10**9]}),
            *(client.get(page) for page in ("/", "/info", "/v1/models", "/stats.json", "/metrics")),
        ]
    assert [answer.is_success for answer in answers] == [False] * 4 + [True] * 5
    assert answers[5].json()["model_id"] == answers[5].json()["served_model_name"] == name
    assert answers[6].json()["data"][0]["id"] == name
    assert answers[7].json()["models"][0]["name"] == name
    assert f'bytetx_inputs_total{{model="{name}"}} 1.0' in answers[8].text
    for answer in answers:
        assert path not in answer.text and str(checkpoints["embedder"].parent) not in answer.text
    _, _, since_ready = unnamed.read_log().partition('"ready"')  # loading names files
    assert since_ready and path not in since_ready


@pytest.mark.parametrize("kind", [BytetxError, ServeError])
def test_an_error_that_names_a_file_names_the_model(
    in_process: InProcess, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    from bytetx.serve import engine

    folder = in_process.model("writer").checkpoint.folder

    async def fail(*_: object) -> None:
        text = f"{folder / 'tokenizer.json'}: wrong"
        raise ServeError("validation", text) if kind is ServeError else kind(text)

    monkeypatch.setattr(engine, "TASKS", {"tokenize": fail})
    backend = in_process.site.backend
    assert isinstance(backend, LocalBackend)
    with pytest.raises(ServeError) as caught:
        asyncio.run(backend.run(Call("writer", "tokenize", ["a"])))
    assert caught.value.message == "writer/tokenizer.json: wrong"


@pytest.mark.feature("Server", "access log")
def test_a_line_for_each_request(unnamed: Server, checkpoints: dict[str, Path]) -> None:
    before = len(unnamed.read_log())
    with unnamed.client() as client:
        client.headers["x-request-id"] = "r1"
        answers = [
            client.post("/embed?key=secret", json={"inputs": "a"}),
            client.post("/embed", json={"inputs": 7}),
            client.get("/health"),
            client.get("/docs"),
            client.get("/no%0a{where}%20%22"),
        ]
    with unnamed.client(key="wrong") as client:
        answers.append(client.post("/embed", json={"inputs": "a"}))
    unnamed.wait_for('"status": ?401')
    lines = [json.loads(line) for line in unnamed.read_log()[before:].splitlines()]
    found = [line["fields"] for line in lines if line["target"] == "bytetx.access"]
    assert len(found) == len(answers) and all("timestamp" in line for line in lines)
    assert [one["request_id"] for one in found] == [a.headers["x-request-id"] for a in answers]
    assert [one["request_id"] for one in found[:5]] == ["r1"] * 5
    assert [(one["method"], one["path"], one["status"], one["model"]) for one in found] == [
        ("POST", "/embed", 200, checkpoints["embedder"].name),
        ("POST", "/embed", 422, None),
        ("GET", "/health", 200, None),
        ("GET", "/docs", 200, None),
        ("GET", "/no%0A%7Bwhere%7D%20%22", 404, None),
        ("POST", "/embed", 401, None),
    ]
    assert all(one["client"].startswith("127.0.0.1:") and one["duration_ms"] > 0 for one in found)


@pytest.fixture
def own_logs() -> Iterator[None]:
    """Puts the loggers back that a test sets up."""
    loggers = [logging.getLogger(name) for name in ("bytetx", "uvicorn")]
    before = [(one.handlers, one.propagate, one.level) for one in loggers]
    yield
    for one, (handlers, propagate, level) in zip(loggers, before, strict=True):
        one.handlers, one.propagate = handlers, propagate
        one.setLevel(level)


@pytest.mark.usefixtures("own_logs")
@pytest.mark.parametrize("level", ["debug", "info", "warning", "error"])
def test_the_level_of_the_log(
    in_process: InProcess, level: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each process reads the settings and has the level; lines of requests are at every one."""
    one = in_process.with_settings(log_level=level, access_log=True)
    set_up_logs(read_settings(settings_line(one.settings)))
    for name in ("debug", "info", "warning", "error"):
        getattr(logging.getLogger("bytetx.serve"), name)("said at %s", name)
    one.get("/models/embedder/info")
    lines = capsys.readouterr().err.splitlines()
    names = ["debug", "info", "warning", "error"]
    said = [line.rpartition(" ")[2] for line in lines if "said at" in line]
    assert said == names[names.index(level) :]
    (found,) = [found.groups() for line in lines if (found := LINE.search(line))]
    assert found[1:4] == ("GET", "/models/embedder/info", "200") and found[5] == "embedder"


@pytest.mark.usefixtures("own_logs")
def test_requests_are_not_logged_unless_it_is_asked_for(
    in_process: InProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    set_up_logs(in_process.settings)
    in_process.get("/health")
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("own_logs")
def test_a_request_from_another_origin_is_logged(
    in_process: InProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    """The question before it, too, which is answered before the routes."""
    one = in_process.with_settings(cors_allow_origin=("http://a",), access_log=True)
    set_up_logs(one.settings)
    headers = {"Origin": "http://a", "Access-Control-Request-Method": "POST"}
    one.request("OPTIONS", "/embed", headers=headers)
    (line,) = capsys.readouterr().err.splitlines()
    found = LINE.search(line)
    assert found is not None and found.groups()[1:] == ("OPTIONS", "/embed", "200", "-", "-")


def test_a_level_that_there_is_not() -> None:
    with pytest.raises(OptionError, match="--log-level must be one of debug, info.*'loud'"):
        ServeSettings(model_sources(["a"]), log_level="loud")


def test_what_ran_before_the_server_was_ready_does_not_count(checkpoints: dict[str, Path]) -> None:
    given = [f"{name}={checkpoints[name]}" for name in ("embedder", "writer")]
    settings = ServeSettings(model_sources(given), device="cpu")
    served = load_models(settings)
    try:
        asyncio.run(warm_up(LocalBackend(served, on_lost=lambda: None)))
        assert served[0].model.stats().num_steps > 0
        one = InProcess(settings, served)
        page = one.get("/metrics").text
        for name in ("steps", "step_tokens", "padding_saved_tokens", "dropped_texts"):
            assert f'bytetx_{name}_total{{model="embedder"}} 0.0' in page
        assert "bytetx_batch_tokens_count 0.0" in page
        stats = one.get("/stats.json").json()
        assert stats["steps"] == [] and set(stats["totals"].values()) == {0}
        one.post("/embed", {"inputs": ["a", "the quick brown fox"]})
        stats = one.get("/stats.json").json()
        assert len(stats["steps"]) == 1 and stats["totals"]["padding_saved_tokens"] > 0
        assert 'bytetx_steps_total{model="embedder"} 1.0' in one.get("/metrics").text
    finally:
        asyncio.run(close_models(served))


def test_a_gpu_is_warm_for_each_small_bucket(checkpoints: dict[str, Path]) -> None:
    """Else a load captures their graphs, one after the other, while its requests wait."""
    settings = ServeSettings(model_sources([str(checkpoints["embedder"])]), device="cpu")
    served = load_models(settings)
    facts = served[0].facts
    asyncio.run(close_models(served))
    info = {**facts.info, "device": "cuda:0", "token_budget": 4096, "max_tokens": 512}
    calls = warm_up_calls(replace(facts, info=info), most_tokens=1 << 20)
    lengths = [[len(ids) for ids in call.inputs] for call in calls]
    assert all(max(own) <= 512 and sum(own) <= 4096 for own in lengths)
    found = Counter(bucket_of(sum(own), len(own), max_tokens=4096) for own in lengths)
    assert all(count >= 2 for bucket, count in found.items() if bucket.total_tokens <= 2048)
    for length in (8, 10, 30, 100, 300, 512):
        for count in range(1, 2048 // length + 1):
            assert bucket_of(count * length, count, max_tokens=4096) in found, (count, length)
    assert len(found) < MAX_GRAPHS * 3 // 4  # what else is asked for has room
