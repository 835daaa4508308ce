"""fill_schema and extract of GLiNER2's models, against the gliner2 package where it is there."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_runs import Bytetx, bytetx
from extractors import save_extractor, save_schema_model
from safetensors.torch import load_file, save_file

import bytetx as package
from bytetx.errors import (
    CheckpointError,
    InputError,
    NotFiniteError,
    OptionError,
    TooLongError,
)

__all__ = ["bytetx"]  # a fixture

LONG = "Angela Merkel met Zaphod in Berlin " * 10 + "."
TEXTS = [
    "Angela Merkel met Zaphod in Berlin.",
    ".",
    "A red fox. It's big! See https://a.b/c?d or mail me@x.org, @me (İstanbul wörds नमस्ते).",
    LONG,
]
SCHEMA: dict[str, Any] = {
    "entities": {
        "person": "a human being",
        "place": {"dtype": "str", "threshold": 0.4},
        "due date": {"description": "a date"},
    },
    "structures": {
        "thing": {
            "fields": [
                {"name": "colour", "choices": ["red", "dark blue"], "dtype": "str"},
                {"name": "sizes", "description": "how big", "threshold": 0.6},
                {"name": "kinds", "choices": ["animal", "red"], "threshold": 0.1},
                {"name": "owner", "dtype": "str"},
            ]
        },
        "trip": {"fields": [{"name": "to"}]},
    },
    "relations": ["met", "lives in"],
    "classifications": [
        {"task": "mood", "labels": ["good", "bad"]},
        {
            "task": "topics",
            "labels": {"art": "of pictures", "war": "of fights", "sea": "of ships"},
            "multi_label": True,
            "cls_threshold": 0.3,
            "top_k": 2,
            "prompt": "what it is about",
            "examples": [["a ship sank", "sea"]],
        },
        {"task": "one", "labels": ["x", "y"], "class_act": "sigmoid"},
    ],
}
ATTRIBUTES: dict[str, Any] = {
    "mood": {"labels": ["good", "bad", "place of birth"]},
    "kinds": {
        "labels": ["red", "person", "न"],
        "multi_label": True,
        "threshold": 0.4,
        "applies_to": ["due date", "person"],
        "qualify_labels": True,
    },
}
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("deberta-v2", {}),
    ("bert", {"counting_layer": "count_lstm_v2", "token_pooling": "mean"}),
    ("deberta-v2", {"counting_layer": "count_lstm_moe", "token_pooling": "max", "max_width": 3}),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_schema_model(tmp_path_factory.mktemp("gliner2") / "model")


@pytest.fixture(scope="module")
def model(folder: Path) -> package.Model:
    return package.load(folder)


def assert_close(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs), (ours, theirs)
    if isinstance(ours, dict):
        assert list(ours) == list(theirs)
        for key in ours:
            assert_close(ours[key], theirs[key])
    elif isinstance(ours, list | tuple):
        assert len(ours) == len(theirs), (ours, theirs)
        for pair in zip(ours, theirs, strict=True):
            assert_close(*pair)
    elif isinstance(ours, float):
        assert abs(ours - theirs) < 1e-4
    else:
        assert ours == theirs


@pytest.mark.feature("Tasks", "`fill_schema`: entities, classes, structures, relations (GLiNER2)")
@pytest.mark.parametrize(("family", "config"), KINDS, ids=str)
def test_results_are_those_of_gliner2(family: str, config: dict[str, Any], tmp_path: Path) -> None:
    oracle = pytest.importorskip("gliner2_models", reason="needs the gliner2 package")
    theirs = oracle.save_gliner2(tmp_path, family, **config)
    ours = package.load(tmp_path)
    attributed = {"entities": SCHEMA["entities"], "entity_attributes": ATTRIBUTES}
    for schema in (SCHEMA, attributed, *({key: own} for key, own in SCHEMA.items())):
        for threshold in (0.3, 0.55):
            found = ours.fill_schema(TEXTS, schema, threshold=threshold)
            wanted = oracle.package_results(theirs, TEXTS, schema, threshold=threshold)
            for one, own in zip(found, wanted, strict=True):
                assert_close(oracle.as_plain(one), own)


def test_an_end_of_a_sentence_that_a_text_lacks_is_no_span(tmp_path: Path) -> None:
    oracle = pytest.importorskip("gliner2_models", reason="needs the gliner2 package")
    theirs = oracle.save_gliner2(tmp_path)
    ours = package.load(tmp_path)
    schema = {"entities": ["person", "place"]}
    texts = ["", "a red fox", "see https://a.b/c"]
    for text, one in zip(texts, ours.fill_schema(texts, schema, threshold=0), strict=True):
        [own] = oracle.package_results(theirs, [text], schema, threshold=0)
        wanted = {(start, min(end, len(text))) for start, end, *_ in own["entities"]}
        found = {(span.start, span.end) for span in one.entities}
        assert found == {span for span in wanted if span[0] < len(text)}
        assert all(text[span.start : span.end] == span.text for span in one.entities)


@pytest.mark.feature("Tasks", "`extract`: spans with any labels by GLiNER2")
def test_labels_alone_are_entities(model: package.Model) -> None:
    texts = ["Angela met Zaphod", "", "a fox"]
    spans = model.extract(texts, {"x": "a thing"}, threshold=0)
    filled = model.fill_schema(texts, {"entities": {"x": "a thing"}}, threshold=0)
    assert list(spans) == [one.entities for one in filled] and any(spans)
    assert list(model.extract(["a fox", ""], [])) == [[], []]
    flat = model.extract(["a fox met a dog"], ["x", "y"], threshold=0)[0]
    assert all(one.end <= other.start for one, other in zip(flat, flat[1:], strict=False))


def test_batch_mates_change_nothing(model: package.Model) -> None:
    texts = TEXTS + ["a fox", "New York is big. San Francisco isn't far"]
    for one, text in zip(model.fill_schema(texts, SCHEMA), texts, strict=True):
        [alone] = model.fill_schema([text], SCHEMA)
        assert_close(asdict(one), asdict(alone))


def test_many_names_and_no_structure_counted(folder: Path, tmp_path: Path) -> None:
    many = [f"label {number}" for number in range(300)]
    [one] = package.load(folder).fill_schema(["a fox"], {"entities": many}, threshold=0)
    assert {span.label for span in one.entities} == {*many}
    for path in folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    tensors = load_file(folder / "model.safetensors")
    tensors["count_pred.2.bias"][:2] = torch.tensor([100.0, 0.0])
    (tmp_path / "model.safetensors").unlink()
    save_file(tensors, tmp_path / "model.safetensors")
    [none] = package.load(tmp_path).fill_schema(["a fox"], SCHEMA, threshold=0)
    assert none.entities == [] and none.structures == {"thing": [], "trip": []}
    assert none.relations == {"met": [], "lives in": []}
    assert {*none.classifications} == {"mood", "topics", "one"}


@pytest.mark.parametrize("mates", [[], ["a fox", "Angela met Zaphod"]])
def test_a_text_of_which_no_word_fits(model: package.Model, mates: list[str]) -> None:
    texts = ["-".join(["word"] * 2100), *mates]
    for schema in (SCHEMA, *({key: own} for key, own in SCHEMA.items())):
        none, *others = model.fill_schema(texts, schema, truncate=True)
        assert_close(
            [asdict(one) for one in others],
            [asdict(model.fill_schema([text], schema)[0]) for text in mates],
        )
        assert none.entities == []
        assert not any([*none.structures.values(), *none.relations.values()])
        assert not any(none.classifications.values())
        names = [one["task"] for one in schema.get("classifications", [])]
        assert [*none.classifications] == names
    assert model.extract(texts, ["x"], truncate=True, threshold=0)[0] == []


def test_counts_of_logits_that_are_not_finite(folder: Path, tmp_path: Path) -> None:
    for path in folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    tensors = load_file(folder / "model.safetensors")
    tensors["count_pred.0.weight"] *= 1e38
    tensors["count_pred.2.weight"] *= 1e38
    (tmp_path / "model.safetensors").unlink()
    save_file(tensors, tmp_path / "model.safetensors")
    model = package.load(tmp_path)
    for schema in ({key: SCHEMA[key]} for key in ("entities", "structures", "relations")):
        with pytest.raises(NotFiniteError):
            model.fill_schema(["a fox"], schema)
    with pytest.raises(NotFiniteError):
        model.extract(["a fox"], ["x"])
    assert model.fill_schema(["a fox"], {"classifications": SCHEMA["classifications"]})


def _attributed(groups: Any) -> dict[str, Any]:
    return {"entities": ["x"], "entity_attributes": groups}


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({}, "names nothing"),
        (["x"], "must be a table"),
        ({"entites": ["x"]}, "'entites' is not known"),
        ({"entities": "x"}, "entities must be a list"),
        ({"entities": ["x", "x"]}, "twice"),
        ({"entities": [""]}, "must not be empty"),
        ({"entities": {"x": {"dtype": "int"}}}, "dtype must be"),
        ({"entities": {"x": {"threshold": 3}}}, "number from 0 to 1"),
        ({"entities": {"x": {"choices": ["a"]}}}, "'choices' is not known"),
        ({"structures": {"a": {}}}, "fields must be"),
        ({"structures": {"a": {"fields": [{}]}}}, r"fields\[0\].name"),
        ({"structures": {"a": {"fields": [{"name": "b", "choices": []}]}}}, "choices must be"),
        ({"structures": {"a": {"mode": "natural"}}}, "'mode' is not known"),
        ({"relations": {"a": 5}}, "must be a table"),
        ({"entity_attributes": {"a": {"labels": ["b"]}}}, "are of entities"),
        (_attributed({"a": 1}), "must be a table"),
        (_attributed({"a": {"labels": []}}), "labels must be a list"),
        (_attributed({"a": {"labels": "bc"}}), "labels must be a list"),
        (_attributed({"a": {"labels": ["b", "b"]}}), "twice"),
        (_attributed({"a": {"labels": ["b"]}, "c": {"labels": ["b"]}}), "twice"),
        (_attributed({"a": {"labels": ["x"]}}), "qualify_labels"),
        (_attributed({"a": {"labels": [""]}}), "must not be empty"),
        (_attributed({"a": {"labels": ["b"], "threshold": 2}}), "number from 0 to 1"),
        (_attributed({"a": {"labels": ["b"], "multi_label": 1}}), "multi_label must be"),
        (_attributed({"a": {"labels": ["b"], "qualify_labels": 1}}), "qualify_labels must be"),
        (_attributed({"a": {"labels": ["b"], "applies_to": ["y"]}}), "no entity"),
        (_attributed({"a": {"labels": ["b"], "applies_to": "x"}}), "applies_to must be"),
        ({"classifications": {"a": ["b", "c"]}}, "must be a list of tables"),
        ({"classifications": [{"task": "a", "labels": ["b"]}]}, "two or more"),
        ({"classifications": [{"task": "a", "labels": ["b", "c"], "top_k": 0}]}, "top_k"),
        ({"classifications": [{"task": "a", "labels": ["b", "c"], "class_act": "x"}]}, "class_act"),
        ({"classifications": [{"labels": ["b", "c"]}]}, "task"),
        (
            {"classifications": [{"task": "a", "labels": ["b", "c"], "examples": [["x", "y"]]}]},
            "examples",
        ),
        (
            {"classifications": [{"task": "a", "labels": ["b", "c"], "examples": [["x", ["b"]]]}]},
            "examples",
        ),
        ({"entities": {"x": {"threshold": 10**400}}}, "number from 0 to 1"),
    ],
)
def test_schemas_that_are_none(model: package.Model, schema: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        model.fill_schema(["a"], schema)


def test_bad_calls(model: package.Model, tmp_path: Path) -> None:
    schema = {"entities": ["x"]}
    with pytest.raises(OptionError, match="threshold"):
        model.fill_schema(["a"], schema, threshold=2)
    with pytest.raises(InputError, match=r"texts\[0\] must be a str"):
        model.fill_schema([("a", "b")], schema)
    with pytest.raises(TooLongError, match="schema has"):
        model.fill_schema(["a"], {"entities": ["word " * 2100]})
    with pytest.raises(TooLongError, match="truncate=True"):
        model.fill_schema(["word " * 2100], schema)
    [cut] = model.fill_schema(["word " * 2100], schema, truncate=True, threshold=0)
    assert cut.entities
    first = package.load(save_extractor(tmp_path / "first"))
    with pytest.raises(InputError, match="version 1"):
        first.fill_schema(["a"], schema)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "lines"}, "architecture must be one of span, boundary"),
        ({"counting_layer": "none"}, "counting_layer must be"),
        ({"counting_layer": "count_lstm_v2"}, "count_embed.transformer"),
        ({"span_head": {"max_width": 0}}, "max_width must be"),
        ({"span_head": {"span_mode": "x"}}, "span_mode must be"),
        ({"span_head": []}, "span_head must be"),
        ({"max_len": "a"}, "max_len must be"),
        ("encoder_config", "encoder_config/config.json"),
    ],
)
def test_damaged_checkpoints(folder: Path, tmp_path: Path, changes: Any, message: str) -> None:
    for path in folder.iterdir():
        if path.name not in (changes, "config.json"):
            (tmp_path / path.name).symlink_to(path)
    config = json.loads((folder / "config.json").read_text())
    config |= {} if isinstance(changes, str) else changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        package.load(tmp_path)


def test_numbers_that_are_not_finite_are_the_texts_own_error(folder: Path, tmp_path: Path) -> None:
    for path in folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    tensors = load_file(folder / "model.safetensors")
    tensors["classifier.0.bias"] += 3e38
    (tmp_path / "model.safetensors").unlink()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(package.NotFiniteError):
        package.load(tmp_path).fill_schema(["a fox jumps"], SCHEMA)


@pytest.mark.feature("Command line", "`fill-schema`: what a schema file asks for, from each text")
def test_the_command_writes_what_the_schema_asks_for(
    bytetx: Bytetx, folder: Path, model: package.Model
) -> None:
    Path("t.jsonl").write_text('{"text": "Angela met Zaphod"}\n{"text": ""}\n')
    Path("s.json").write_text(json.dumps(SCHEMA))
    given = ("fill-schema", "t.jsonl", "-m", folder, "--schema", "s.json", "--threshold", "0.2")
    ran = bytetx(*given)
    assert ran.code == 0, ran.err
    wanted = model.fill_schema(["Angela met Zaphod", ""], SCHEMA, threshold=0.2)
    for row, one in zip(ran.rows, wanted, strict=True):
        own = json.loads(json.dumps(asdict(one)))
        assert_close({key: row[key] for key in own}, own)
    Path("s.json").write_text("[]")
    ran = bytetx(*given)
    assert ran.code != 0 and "JSON object" in ran.err
