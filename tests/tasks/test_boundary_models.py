"""fill_schema and extract of GLiNER2.5's models, against the gliner2 package."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tasks.test_fill_schema import ATTRIBUTES, LONG, SCHEMA, TEXTS, assert_close

import bytetx
from bytetx.errors import CheckpointError, NotFiniteError, TooLongError

oracle = pytest.importorskip("gliner2_models", reason="needs the gliner2 package")

HEADS: list[tuple[str, dict[str, Any]]] = [
    ("deberta-v2", {}),
    (
        "bert",
        {
            "boundary_attention_layers": 2,
            "boundary_attention_window": 3,
            "content_soft_max_pool": True,
            "directional_relation_states": True,
            "enable_abstention": False,
            "overlap_policy": "nested",
            "pair_temperature": 2.0,
            "relation_biaffine_content": True,
        },
    ),
    (
        "deberta-v2",
        {
            "abstention_threshold": 0.6,
            "boundary_attention_layers": 1,
            "boundary_refinement_layers": 2,
            "classification_temperature": 3.0,
            "dropout": 0.0,
            "enable_span_content": False,
            "min_pool_per_query": 2,
            "overlap_policy": "longest",
            "pool_boundary_top_k": 6,
            "pool_size": 20,
            "relation_argument_proposal_threshold": 0.2,
            "relation_heads_per_type": 4,
            "relation_pair_cap": 7,
            "relation_temperature": 0.5,
            "use_inside_evidence": False,
        },
    ),
    ("bert", {"enable_relations": False, "boundary_refinement_layers": 0, "min_pool_per_query": 0}),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("boundary")
    oracle.save_boundary(path)
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> bytetx.Model:
    return bytetx.load(folder)


@pytest.mark.feature("Tasks", "`fill_schema` and `extract` by models of boundaries (GLiNER2.5)")
@pytest.mark.parametrize(("family", "head"), HEADS, ids=str)
def test_results_are_those_of_the_package(
    family: str, head: dict[str, Any], tmp_path: Path
) -> None:
    theirs = oracle.save_boundary(tmp_path, family, **head)
    ours = bytetx.load(tmp_path)
    attributed = {"entities": SCHEMA["entities"], "entity_attributes": ATTRIBUTES}
    for schema in (SCHEMA, attributed, *({key: own} for key, own in SCHEMA.items())):
        for threshold in (0.3, 0.5, 0.7):
            found = ours.fill_schema(TEXTS, schema, threshold=threshold)
            wanted = oracle.package_results(theirs, TEXTS, schema, threshold=threshold)
            for one, own in zip(found, wanted, strict=True):
                assert_close(oracle.as_plain(one), own)


def test_spans_have_any_length(model: bytetx.Model) -> None:
    [spans] = model.extract([LONG], ["x", "y"], threshold=0, nested=True)
    assert max(span.end - span.start for span in spans) > 60


def test_batch_mates_change_nothing(model: bytetx.Model) -> None:
    texts = [*TEXTS, "", " ", "a", "New York is big. San Francisco isn't far"]
    schema = {**SCHEMA, "entity_attributes": ATTRIBUTES}
    for threshold in (0, 0.4):
        found = model.fill_schema(texts, schema, threshold=threshold)
        for one, text in zip(found, texts, strict=True):
            [alone] = model.fill_schema([text], schema, threshold=threshold)
            assert_close(asdict(one), asdict(alone))
            for span in one.entities:
                assert text[span.start : span.end] == span.text != ""


def test_no_spans_of_a_text_of_which_no_word_fits(model: bytetx.Model) -> None:
    texts = ["-".join(["word"] * (1 << 15)), "a fox"]
    for schema in (SCHEMA, *({key: own} for key, own in SCHEMA.items())):
        none, mate = model.fill_schema(texts, schema, truncate=True, threshold=0)
        assert_close(asdict(mate), asdict(model.fill_schema(["a fox"], schema, threshold=0)[0]))
        assert not none.entities and not any(none.classifications.values())
        assert not any([*none.structures.values(), *none.relations.values()])
    assert list(model.extract(["a fox", ""], [])) == [[], []]
    with pytest.raises(TooLongError):
        model.fill_schema(texts, SCHEMA)


def _changed(folder: Path, path: Path, changes: dict[str, Any], **tensors: Any) -> Path:
    """The checkpoint with changes of its boundary_head and its tensors."""
    for file in folder.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            (path / file.name).symlink_to(file)
    config = json.loads((folder / "config.json").read_text())
    config["boundary_head"] |= changes
    (path / "config.json").write_text(json.dumps(config))
    saved = load_file(folder / "model.safetensors")
    for name, change in tensors.items():
        saved[name.replace("__", ".")].add_(change)
    save_file(saved, path / "model.safetensors")
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"candidate_pool": "per_query"}, "candidate_pool 'per_query' is not supported"),
        ({"candidate_attention_layers": 2}, "candidate_attention_layers 2 is not supported"),
        ({"candidate_attention_layers": None}, "candidate_attention_layers 2 is not supported"),
        ({"query_attention_layers": 1}, "query_attention_layers 1 is not supported"),
        ({"adaptive_threshold": True}, "adaptive_threshold true is not supported"),
        ({"boundary_attention_layers": 1, "boundary_attention_heads": 3}, "must be a multiple"),
        ({"boundary_attention_layers": 1}, "attention_blocks.0"),
        ({"overlap_policy": "x"}, "overlap_policy must be"),
        ({"pair_temperature": 0}, "pair_temperature must be"),
        ({"pool_size": 0}, "pool_size must be"),
        ({"boundary_dim": "a"}, "boundary_dim must be"),
        ({"boundary_dim": 8}, "must have shape|boundary_head"),
        ({"relation_biaffine_content": True}, "head_content_projection"),
    ],
)
def test_heads_that_are_not_read(
    folder: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        bytetx.load(_changed(folder, tmp_path, changes))


def test_older_configs_have_no_relations(folder: Path, tmp_path: Path) -> None:
    path = _changed(folder, tmp_path, {"enable_relations": None})
    config = json.loads((path / "config.json").read_text()) | {"config_version": 2}
    (path / "config.json").write_text(json.dumps(config))
    [one] = bytetx.load(path).fill_schema(["a fox met a dog"], {"relations": ["met"]}, threshold=0)
    assert one.relations == {"met": []}


def test_numbers_that_are_not_finite_are_the_texts_own_error(folder: Path, tmp_path: Path) -> None:
    change = torch.full((16,), 3e38)
    path = _changed(
        folder,
        tmp_path,
        {},
        boundary_head__shared_pool_scorer__candidate_norm__bias=change,
    )
    model = bytetx.load(path)
    with pytest.raises(NotFiniteError):
        model.fill_schema(["a fox jumps"], SCHEMA)
    assert model.fill_schema(["a fox"], {"classifications": SCHEMA["classifications"]})
