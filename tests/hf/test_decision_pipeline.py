"""pipeline("decision") of a wrapped model: the stock answers and errors, from packed passes."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from decisions import (
    REQUESTS,
    SPAM,
    URGENCY,
    assert_same_answers,
    save_decider,
    save_jev,
    stock,
    stock_pipeline,
)
from hf_models import fallbacks_are_errors  # noqa: F401  (autouse)
from tiny import one_thread  # noqa: F401  (autouse)

import bytetx
from bytetx.hf import decision_pipeline
from bytetx.hf.decision_pipeline import PackedDecisionPipeline

TOGETHER = "{{ state | tojson }}{% for q in questions %}{{ q.name }}:<|mark|>{% endfor %}<|mark|>"


def wrapped_pipeline(folder: Path) -> Any:
    plain = stock_pipeline(folder)
    return transformers.pipeline(
        "decision", model=bytetx.wrap(plain.model), tokenizer=plain.tokenizer, device="cpu"
    )


@pytest.mark.feature("Wrap", '`pipeline("decision")` packs the prompts of a list')
@pytest.mark.parametrize("name", ["qwen2", "llama"])
def test_label_logits(name: str, tmp_path: Path) -> None:
    folder = save_decider(tmp_path, name)
    wanted = stock(folder, REQUESTS)
    pipe = wrapped_pipeline(folder)
    assert type(pipe) is PackedDecisionPipeline
    assert_same_answers(pipe(REQUESTS), wanted)
    assert_same_answers(pipe([json.dumps(one) for one in REQUESTS]), wanted)
    assert_same_answers(pipe(REQUESTS[0]), wanted[0])  # one request is no list
    assert_same_answers(list(pipe(one for one in REQUESTS)), wanted)
    assert pipe([]) == []
    bytetx.unwrap(pipe.model)
    assert_same_answers(pipe(REQUESTS), wanted)


@pytest.mark.parametrize("template", [None, TOGETHER])
def test_decision_heads(template: str | None, tmp_path: Path) -> None:
    folder = save_jev(tmp_path, num_verbalizers=40, softcap=3.0)
    temperature: dict[str, Any] = {"temperature": {"choice": 2.0}}
    (folder / "decision.json").write_text(json.dumps(temperature))
    requests = REQUESTS
    if template is not None:
        (folder / "decision_template.jinja").write_text(template.removesuffix("<|mark|>"))
    assert_same_answers(wrapped_pipeline(folder)(requests), stock(folder, requests))


def test_templates_with_more_marks_than_questions(tmp_path: Path) -> None:
    folder = save_decider(tmp_path, template=None)
    (folder / "decision_template.jinja").write_text(TOGETHER)
    assert_same_answers(wrapped_pipeline(folder)(REQUESTS), stock(folder, REQUESTS))


@pytest.mark.parametrize(("most", "num_passes"), [(10**6, 1), (1, 7)])
def test_passes(
    most: int, num_passes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_decider(tmp_path)
    pipe = wrapped_pipeline(folder)
    requests = [REQUESTS[0], *REQUESTS[2:]]
    wanted = pipe(requests)
    monkeypatch.setattr(decision_pipeline, "_PASS_TOKENS", most)
    assert_same_answers(pipe(requests), wanted)
    groups = decision_pipeline._passes(
        [prompt for one in requests for prompt in pipe.preprocess(one)["prompts"]]
    )
    assert len(groups) == num_passes


def test_errors_are_those_of_the_stock_pipeline(tmp_path: Path) -> None:
    folder = save_decider(tmp_path)
    settings = {"labels": {"noul": ["fox dog", "No"]}}
    (folder / "decision.json").write_text(json.dumps(settings))
    stock_one, pipe = stock_pipeline(folder), wrapped_pipeline(folder)
    bad = [{"state": 1, "questions": {"a": SPAM}}, {"state": 1, "questions": {}}, {"state": 2}, 5]
    for request in bad:
        with pytest.raises(ValueError) as theirs:
            stock_one([request])
        with pytest.raises(ValueError) as ours:
            pipe([request])
        assert str(ours.value) == str(theirs.value)
    due = {"state": 1, "questions": {"due": URGENCY}}
    assert_same_answers(pipe([due]), stock_one([due]))


def test_a_model_that_is_not_wrapped_runs_as_before(tmp_path: Path) -> None:
    folder = save_decider(tmp_path)
    wanted = stock(folder, REQUESTS)
    bytetx.wrap(stock_pipeline(folder).model)  # another one
    assert_same_answers(stock(folder, REQUESTS), wanted, atol=0)
