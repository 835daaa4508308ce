"""POST /v1/systemone and /v1/decisions give the answers of Model.decide, and its errors."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from decisions import (
    REQUESTS,
    SPAM,
    TONE,
    URGENCY,
    assert_same_answers,
    save_codes,
    save_decider,
    save_judge,
    stock,
)
from serving import InProcess

from bytetx.serve.loading import load_models
from bytetx.serve.settings import ServeSettings, model_sources

STATE = {"message": "WIN a fox", "from": ["a", None, 2]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_decider(tmp_path_factory.mktemp("decider"))


@pytest.fixture(scope="module")
def decider(folder: Path) -> InProcess:
    settings = ServeSettings(models=model_sources([f"decider={folder}"]), batch_invariant=True)
    return InProcess(settings, load_models(settings))


@pytest.mark.feature("Server", "decisions: /v1/systemone and /v1/decisions")
def test_systemone(decider: InProcess, folder: Path) -> None:
    given = [one for one in REQUESTS if isinstance(one["state"], str | dict | list)]
    for request, wanted in zip(given, stock(folder, given), strict=True):
        body = {key: request[key] for key in ("state", "questions")}
        answer = decider.post("/v1/systemone", body | {"model": "decider"})
        assert answer.status_code == 200, answer.text
        found = answer.json()
        assert_same_answers(found["answers"], wanted)
        assert found["model"] == "decider"
        assert found["usage"]["input_tokens"] > 10 and found["usage"]["output_tokens"] == 0
        assert decider.post("/v1/decisions", body).json()["answers"] == found["answers"]
    assert decider.get("/info").json()["batch_invariant"] is True


@pytest.mark.parametrize("save", [save_codes, save_judge])
def test_heads_beside_a_trunk(save: Callable[..., Path], tmp_path: Path) -> None:
    folder = save(tmp_path)
    settings = ServeSettings(models=model_sources([f"m={folder}"]))
    server = InProcess(settings, load_models(settings))
    body = {"state": STATE, "questions": REQUESTS[0]["questions"]}
    found = server.post("/v1/systemone", body).json()["answers"]
    assert_same_answers(found, stock(folder, [body])[0])


def test_states_that_requests_share_are_kept(folder: Path) -> None:
    settings = ServeSettings(models=model_sources([f"d={folder}"]), prefix_cache_bytes=1 << 20)
    one = InProcess(settings, load_models(settings))
    assert one.get("/info").json()["prefix_cache_bytes"] == 1 << 20
    questions = {"spam": SPAM, "tone": TONE}
    answers = [
        one.post("/v1/systemone", {"state": "a fox", "questions": questions}).json()["answers"]
        for _ in range(4)
    ]
    assert all(answer == answers[0] for answer in answers)
    samples = dict(line.split() for line in one.get("/metrics").text.splitlines() if line[0] != "#")
    assert float(samples['bytetx_prefix_saved_tokens_total{model="d"}']) > 32
    assert 0 < float(samples['bytetx_prefix_cache_bytes{model="d"}']) <= 1 << 20
    computed, of_texts = (
        float(samples[f'bytetx_step_{name}_total{{model="d"}}'])
        for name in ("tokens", "text_tokens")
    )
    assert 0 < computed < of_texts
    assert float(samples["bytetx_batch_tokens_sum"]) == computed
    steps = one.get("/stats.json").json()["steps"]
    assert sum(step["computed_tokens"] for step in steps) == computed
    assert sum(step["tokens"] for step in steps) == of_texts


def test_decisions_of_openai(decider: InProcess) -> None:
    choices = [{"value": "calm"}, {"value": "mad", "description": "loud"}]
    levels = [{"label": text} for text in URGENCY["criteria"]]
    questions: list[dict[str, Any]] = [
        {"type": "predicate", "name": "spam", "instructions": SPAM["instructions"]},
        {"type": "choice", "instructions": TONE["instructions"], "choices": choices},
        {"type": "score", "name": "due", "instructions": "How urgent?", "levels": levels},
    ]
    message = {"role": "user", "content": [{"type": "input_text", "text": "a fox"}]}
    asked = {"spam": SPAM, "tone": TONE, "due": URGENCY}
    one = decider.post("/v1/systemone", {"state": "a fox", "questions": asked}).json()["answers"]
    for given in ("a fox", [message]):
        answer = decider.post("/v1/decisions", {"input": given, "questions": questions})
        assert answer.status_code == 200, answer.text
        spam, tone, due = answer.json()["answers"]
        assert spam == {"type": "predicate", "name": "spam", "probability": one["spam"]["noul"]}
        assert tone["name"] is None and tone["choice"] == one["tone"]["choice"]
        assert [row["value"] for row in tone["probabilities"]] == ["calm", "mad"]
        assert due["score"] == one["due"]["score"]
        assert due["probabilities"][1]["label"] == "now"
        assert answer.json()["usage"]["total_tokens"] > 30
    both = {"input": [message, {"role": "user", "content": "b"}], "questions": questions[:1]}
    assert decider.post("/v1/decisions", both).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/systemone", {"state": "a"}, "questions"),
        ("/v1/systemone", {"state": "a", "questions": {}}, "questions"),
        ("/v1/systemone", {"state": 5, "questions": {"a": SPAM}}, "state"),
        ("/v1/systemone", {"state": "a", "questions": {"a": {"type": "x"}}}, "question 'a' has"),
        (
            "/v1/systemone",
            {"state": "a", "questions": dict.fromkeys(map(str, range(65)), SPAM)},
            "",
        ),
        (
            "/v1/systemone",
            {"state": "a", "questions": {"a": SPAM}, "assets": {"img-1": {"data_base64": ""}}},
            "has assets ['img-1']: images",
        ),
        ("/v1/systemone", {"state": "a " * 3000, "questions": {"a": SPAM}}, "makes a prompt of"),
        ("/v1/decisions", {"input": "a"}, "questions"),
        ("/v1/decisions", {"input": "a", "questions": []}, "questions"),
        ("/v1/decisions", {"questions": [{"type": "predicate"}]}, "must have input"),
        ("/v1/decisions", {"input": "a", "questions": [{"type": "box"}]}, "questions[0].type must"),
        ("/v1/decisions", {"input": "a", "questions": [{"type": "choice"}]}, "choices must be a"),
        ("/v1/decisions", {"input": "a", "questions": [{"type": "score"}]}, "levels must be a"),
        (
            "/v1/decisions",
            {"input": "a", "questions": [{"type": "predicate", "name": "x"}] * 2},
            "two questions have one name",
        ),
        (
            "/v1/decisions",
            {
                "input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}],
                "questions": [{"type": "predicate"}],
            },
            "must be text or parts of text, got 'input_image'",
        ),
    ],
)
def test_a_bad_body(decider: InProcess, path: str, body: dict[str, Any], message: str) -> None:
    answer = decider.post(path, body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error" and message in error["message"]
    assert "requests[0]" not in error["message"] and "\n" not in error["message"]


def test_a_model_that_decides_nothing(in_process: InProcess) -> None:
    body = {"state": "a", "questions": {"a": SPAM}, "model": "embedder"}
    answer = in_process.post("/v1/systemone", body)
    assert answer.status_code == 400
    assert "the model embedder cannot decide" in answer.json()["error"]["message"]
