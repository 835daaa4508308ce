"""POST /extract: spans of texts with the labels of the request."""

from dataclasses import asdict
from pathlib import Path

import pytest
from extractors import save_extractor
from serving import InProcess

import bytetx
from bytetx.serve.loading import load_models
from bytetx.serve.settings import ServeSettings, model_sources


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


def test_relations_are_those_of_the_model(in_process: InProcess, tmp_path: Path) -> None:
    folder = save_extractor(tmp_path / "model", relations=True)
    settings = ServeSettings(model_sources([f"related={folder}"]), device="cpu")
    one, model = InProcess(settings, load_models(settings)), bytetx.load(folder)
    given = {"threshold": 0.0, "relation_threshold": 0.001, "adjacency_threshold": 0.3}
    body = {"texts": ["Angela met Zaphod", ""], "labels": ["x"], "relations": ["a", "b"], **given}
    answer = one.post("/extract", body)
    assert answer.status_code == 200, answer.text
    wanted = model.extract(body["texts"], ["x"], relations=["a", "b"], **given)
    assert [[asdict(span) for span in spans] for spans in wanted] == [
        [span | {"relations": tuple(span["relations"])} for span in spans]
        for spans in answer.json()
    ]
    assert answer.json()[0][0]["relations"]
    for wrong in ({"relations": "a"}, {"relation_threshold": 2}, {"relations": [1]}):
        assert one.post("/extract", body | wrong).status_code == 422
    none = in_process.post("/extract", body | {"model": "extractor"})
    assert none.status_code >= 400 and "no head for relations" in none.text


@pytest.mark.feature("Server", "`/fill_schema`: what a schema asks for, from each text")
def test_schemas_are_filled_as_by_the_model(
    in_process: InProcess, checkpoints: dict[str, Path]
) -> None:
    schema = {
        "entities": ["x", "y"],
        "structures": {"s": {"fields": [{"name": "f", "choices": ["a", "b"], "dtype": "str"}]}},
        "classifications": [{"task": "c", "labels": ["a", "b"]}],
    }
    body = {"texts": ["Angela met Zaphod", ""], "schema": schema, "threshold": 0.2}
    body |= {"model": "schemas"}
    answer = in_process.post("/fill_schema", body)
    assert answer.status_code == 200, answer.text
    model = bytetx.load(checkpoints["schemas"])
    wanted = model.fill_schema(body["texts"], schema, threshold=0.2)
    for row, one in zip(answer.json(), wanted, strict=True):
        assert [own["text"] for own in row["entities"]] == [own.text for own in one.entities]
        assert {*row["classifications"]} == {"c"} and {*row["structures"]} == {"s"}
    assert in_process.post("/", body).json() == answer.json()
    bad = in_process.post("/fill_schema", body | {"schema": {"entities": 5}})
    assert bad.status_code in (400, 422) and "entities must be a list" in bad.text
    other = in_process.post("/fill_schema", body | {"model": "extractor"})
    assert other.status_code in (400, 422, 424), other.text


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
