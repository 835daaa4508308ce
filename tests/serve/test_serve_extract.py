"""POST /extract: spans of texts with the labels of the request."""

from pathlib import Path

import pytest
from serving import InProcess

import bytetx


@pytest.mark.feature("Server", "`/extract`: spans with the labels of the request")
def test_spans_are_those_of_the_model(in_process: InProcess, checkpoints: dict[str, Path]) -> None:
    texts, labels = ["Angela met Zaphod", ""], ["x", "y"]
    body = {"texts": texts, "labels": labels, "threshold": 0.2, "nested": True}
    body |= {"model": "extractor"}
    answer = in_process.post("/extract", body)
    assert answer.status_code == 200, answer.text
    model = bytetx.load(checkpoints["extractor"])
    wanted = model.extract(texts, labels, threshold=0.2, nested=True)
    found = [
        [(one["start"], one["end"], one["text"], one["label"]) for one in spans]
        for spans in answer.json()
    ]
    assert found == [
        [(one.start, one.end, one.text, one.label) for one in spans] for spans in wanted
    ]
    assert in_process.post("/", body).json() == answer.json()
    described = in_process.post("/extract", body | {"labels": {"x": "a thing"}})
    assert described.status_code == 200


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"texts": ["a"], "labels": ["x"] * 1025}, 422, "1024"),
        ({"texts": ["a"], "labels": ["x"], "threshold": 2}, 422, "threshold"),
        ({"texts": ["a " * 99], "labels": ["x"], "truncate": False}, 413, "set truncate"),
        ({"texts": ["a"]}, 422, "labels"),
        ({"texts": [], "labels": ["x"]}, 400, "texts"),
    ],
)
def test_bad_requests(in_process: InProcess, body: dict, status: int, message: str) -> None:
    answer = in_process.post("/extract", body | {"model": "extractor"})
    assert answer.status_code == status, answer.text
    assert message in answer.text
