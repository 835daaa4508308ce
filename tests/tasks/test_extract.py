"""extract: spans of GLiNER's models, against the gliner package where it is installed."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import edit_json, save_checkpoint
from cli_runs import Bytetx, bytetx
from extractors import save_extractor
from safetensors.torch import load_file, save_file

import bytetx as package
from bytetx.errors import CheckpointError, InputError, OptionError, TooLongError
from bytetx.tasks.results import ExtractedSpan

__all__ = ["bytetx"]  # a fixture

LABELS = ["person", "place", "due date"]
LONG = "Angela Merkel met Zaphod in Berlin " * 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_extractor(tmp_path_factory.mktemp("extractor") / "model")


@pytest.fixture(scope="module")
def model(folder: Path) -> package.Model:
    return package.load(folder)


def _rows(spans: list[ExtractedSpan]) -> list[tuple[Any, ...]]:
    return [(one.start, one.end, one.text, one.label) for one in spans]


KINDS: list[tuple[str, dict[str, Any]]] = [
    ("deberta-v2", {}),
    ("bert", {"span_mode": "marker", "num_rnn_layers": 0}),
    ("modernbert", {"span_mode": "markerV1", "num_rnn_layers": 2, "subtoken_pooling": "mean"}),
    ("bert", {"subtoken_pooling": "max", "hidden_size": 16}),
    ("deberta-v2", {"subtoken_pooling": "last", "embed_ent_token": False, "hidden_size": 48}),
    ("deberta-v2", {"span_mode": "token_level"}),
    ("modernbert", {"span_mode": "token_level", "num_rnn_layers": 0}),
    ("deberta-v2", {"labels_family": "bert"}),
    ("bert", {"labels_family": "bert", "hidden_size": 48, "subtoken_pooling": "mean"}),
    ("bert", {"labels_family": "deberta-v2", "span_mode": "token_level"}),
    (
        "bert",
        {
            "labels_family": "modernbert",
            "post_fusion_schema": "l2l-l2t-t2t-t2l",
            "num_post_fusion_layers": 2,
            "hidden_size": 48,
        },
    ),
    (
        "deberta-v2",
        {
            "labels_family": "bert",
            "post_fusion_schema": "l2t",
            "span_mode": "token_level",
            "hidden_size": 48,
        },
    ),
]


@pytest.mark.feature("Tasks", "`extract`: spans with any labels (GLiNER)")
@pytest.mark.parametrize(("family", "config"), KINDS, ids=str)
def test_spans_are_those_of_gliner(family: str, config: dict[str, Any], tmp_path: Path) -> None:
    oracle = pytest.importorskip("gliner_models", reason="needs the gliner package")
    theirs = oracle.save_gliner(tmp_path, family, **config)
    # A byte-level vocabulary of ASCII drops other characters, whose words the package miscounts.
    texts = [text for text in oracle.TEXTS if family != "modernbert" or text.isascii()]
    ours = package.load(tmp_path)
    many = [f"label {number}" for number in range(100)]
    for labels in (LABELS, ["a"], many, [*LABELS, "place"], {"p": "a person", "[SEP]": "b [SEP]"}):
        for nested in (False, True):
            found = ours.extract(texts, labels, nested=nested, threshold=0.4)
            wanted = oracle.package_spans(theirs, texts, labels, flat_ner=not nested, threshold=0.4)
            assert [_rows(spans) for spans in found] == [
                [span[:4] for span in spans] for spans in wanted
            ]
            scores = [one.score for spans in found for one in spans]
            theirs_of = [span[4] for spans in wanted for span in spans]
            np.testing.assert_allclose(scores, theirs_of, atol=1e-4)


@pytest.mark.feature("Tasks", "`extract` by bi-encoders, which compute a label once (GLiNER)")
def test_labels_with_an_encoder_of_their_own_are_computed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle = pytest.importorskip("gliner_models", reason="needs the gliner package")
    oracle.save_gliner(tmp_path, "bert", labels_family="bert")
    model = package.load(tmp_path)
    own = [name for name in model.checkpoint.unused_tensors if "labels_encoder" in name]
    assert all("pooler" in name for name in own)
    head = model.checkpoint.heads.extraction
    assert head is not None and head.labels is not None
    texts = ["Angela met Zaphod", "", "a fox"]
    first = model.extract(texts, LABELS, threshold=0.4, nested=True, multi_label=True)
    monkeypatch.setattr(type(head.labels), "_encode", None)  # a label that is not kept fails
    assert head.labels.num_kept == len(LABELS)
    again = model.extract(texts, LABELS[::-1], threshold=0.4, nested=True, multi_label=True)
    assert [{*_rows(one)} for one in again] == [{*_rows(one)} for one in first]
    monkeypatch.undo()
    monkeypatch.setattr("bytetx.nn.label_encoder._MOST_KEPT", 4)
    monkeypatch.setattr("bytetx.nn.label_encoder._TOKEN_BUDGET", 16)
    many = [f"label {number}" for number in range(40)]
    [spans] = model.extract(["a fox"], many, threshold=0, multi_label=True)
    assert {span.label for span in spans} == {*many} and head.labels.num_kept == 4
    with pytest.raises(TooLongError, match="the labels' encoder"):
        model.extract(texts, ["word " * 80])
    assert list(model.extract(texts, [])) == [[], [], []]


def test_spans_beyond_the_window_are_those_of_the_package_without_the_rest(tmp_path: Path) -> None:
    oracle = pytest.importorskip("gliner_models", reason="needs the gliner package")
    theirs = oracle.save_gliner(tmp_path, max_len=12)
    ours = package.load(tmp_path)
    with pytest.raises(TooLongError, match="12 words"):
        ours.extract([LONG], LABELS)
    found = ours.extract([LONG], LABELS, truncate=True)
    assert found.stats.num_truncated == 1
    wanted = oracle.package_spans(theirs, [LONG], LABELS)
    assert [_rows(spans) for spans in found] == [[span[:4] for span in one] for one in wanted]
    # Relative positions have no last one: more tokens than config.json names are read.
    long = package.load(oracle.save_gliner(tmp_path / "long").config.model_name + "/..")
    assert long.tokenizer is not None and long.tokenizer.max_tokens > 1024


def test_batch_mates_change_nothing(model: package.Model) -> None:
    texts = ["Angela met Zaphod", "", "a", "New York is big. San Francisco isn't far"]
    for labels in (LABELS, ["x"], [f"n {i}" for i in range(5)]):
        together = model.extract(texts, labels, threshold=0.3, nested=True)
        for text, spans in zip(texts, together, strict=True):
            [alone] = model.extract([text], labels, threshold=0.3, nested=True)
            assert _rows(alone) == _rows(spans)
            scores = ([one.score for one in row] for row in (alone, spans))
            np.testing.assert_allclose(*scores, atol=1e-6)


def test_texts_without_words_and_calls_without_labels_have_no_spans(model: package.Model) -> None:
    assert list(model.extract(["", "  \n", "a fox"], [])) == [[], [], []]
    assert list(model.extract(["", "  \n"], LABELS)) == [[], []]
    assert list(model.extract([], LABELS)) == []
    everything = model.extract(["a fox"], ["x"], threshold=0, nested=True)[0]
    assert {one.text for one in everything} == {"a", "a fox", "fox"}


def test_several_labels_of_one_span(model: package.Model) -> None:
    [one] = model.extract(["fox"], ["x", "y"], threshold=0)
    [both] = model.extract(["fox"], ["x", "y"], threshold=0, multi_label=True)
    assert len(one) == 1
    assert {span.label for span in both} == {"x", "y"}


def test_a_stream_and_half_types(folder: Path, model: package.Model) -> None:
    texts = ["Angela met Zaphod", "a fox"]
    stream = model.extract(iter(texts), LABELS, stream=True)
    assert [_rows(spans) for spans in stream] == list(map(_rows, model.extract(texts, LABELS)))
    wanted = model.extract(texts, ["x"], threshold=0, nested=True)
    half = package.load(folder, dtype="bfloat16").extract(texts, ["x"], threshold=0, nested=True)
    for ours, exact in zip(half, wanted, strict=True):
        by_span = {(one.start, one.end): one.score for one in exact}
        # bfloat16 has 8 bits: the encoder's rows differ by a hundredth.
        for one in ours:
            assert abs(one.score - by_span[one.start, one.end]) < 0.1


@pytest.mark.parametrize(
    ("texts", "labels", "options", "error", "message"),
    [
        (["a"], "person", {}, InputError, "labels must be a list"),
        (["a"], ["\ud800"], {}, InputError, "labels"),
        ([("a", "b")], ["x"], {}, InputError, r"texts\[0\] must be a str"),
        ([[5, 6]], ["x"], {}, InputError, r"texts\[0\] must be a str"),
        (["a"], ["word " * 80], {}, TooLongError, "labels have"),
        (["a"], ["x"], {"threshold": 2}, OptionError, "threshold"),
        ([LONG], ["x"], {}, TooLongError, "truncate=True"),
    ],
)
def test_bad_calls(
    model: package.Model, texts: Any, labels: Any, options: Any, error: type, message: str
) -> None:
    with pytest.raises(error, match=message):
        model.extract(texts, labels, **options)


def test_a_bad_text_stops_no_other(model: package.Model) -> None:
    found = model.extract(["a fox", LONG], LABELS, on_error="return")
    assert isinstance(found[0], list) and isinstance(found[1], TooLongError)


def test_a_model_without_the_head_says_so(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="span extraction"):
        package.load(save_checkpoint(tmp_path / "plain")).extract(["a"], LABELS)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("span_mode", "conv_max", "span_mode 'conv_max'"),
        ("labels_encoder", "bert", "no labels_encoder_config"),
        ("relations_layer", "biaffine", "relations"),
        ("fuse_layers", True, "fuse_layers"),
        ("words_splitter_type", "jieba", "words_splitter_type"),
        ("max_width", 0, "max_width must be"),
        ("encoder_config", None, "no encoder_config"),
        ("hidden_size", 24, "token_rep_layer.projection"),
    ],
)
def test_other_kinds_are_refused_by_name(
    folder: Path, tmp_path: Path, key: str, value: object, message: str
) -> None:
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).symlink_to(folder / name)
    config = json.loads((folder / "gliner_config.json").read_text()) | {key: value}
    (tmp_path / "gliner_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        package.load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"post_fusion_schema": "l2l-x"}, "post_fusion_schema must be of"),
        ({"post_fusion_schema": "l2l"}, "no multiple of the encoder's"),
        ({"num_post_fusion_layers": 0}, "num_post_fusion_layers"),
        ({"labels_encoder_config": {"model_type": "nothing"}}, "nothing"),
        ({"labels_encoder_config": {"auto_map": {"AutoModel": "a.B"}}}, "code"),
        ({"labels_encoder_config": []}, "labels_encoder_config"),
        ({"hidden_size": 48}, "has shape"),
        ("labels_tokenizer", "labels_tokenizer is not there"),
        ("labels_tokenizer/tokenizer.json", "no tokenizer.json"),
    ],
)
def test_damaged_bi_encoders(tmp_path: Path, changes: Any, message: str) -> None:
    oracle = pytest.importorskip("gliner_models", reason="needs the gliner package")
    oracle.save_gliner(tmp_path, "bert", labels_family="bert")
    config = json.loads((tmp_path / "gliner_config.json").read_text())
    if isinstance(changes, str):
        (tmp_path / changes).rename(tmp_path / "moved")
    else:
        (tmp_path / "gliner_config.json").write_text(json.dumps(config | changes))
    with pytest.raises(CheckpointError, match=message):
        package.load(tmp_path)


def test_plain_tensors_of_torch_save_are_read_and_other_objects_refused(
    folder: Path, tmp_path: Path, model: package.Model
) -> None:
    for name in ("gliner_config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).symlink_to(folder / name)
    path, tensors = tmp_path / "pytorch_model.bin", load_file(folder / "model.safetensors")
    torch.save(tensors, path)
    found = package.load(tmp_path).extract(["a fox met Angela"], LABELS, threshold=0.2)
    assert list(found) == list(model.extract(["a fox met Angela"], LABELS, threshold=0.2))
    torch.save({**tensors, "config": Path("x")}, path)
    with pytest.raises(CheckpointError, match="plain tensors.*as model.safetensors"):
        package.load(tmp_path)
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="plain tensors"):
        package.load(tmp_path)


def test_numbers_that_are_not_finite_are_the_texts_own_error(folder: Path, tmp_path: Path) -> None:
    for name in ("gliner_config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).symlink_to(folder / name)
    tensors = load_file(folder / "model.safetensors")
    tensors["prompt_rep_layer.3.bias"] = tensors["prompt_rep_layer.3.bias"] * 0 + 3e38
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(package.NotFiniteError):
        package.load(tmp_path).extract(["a fox jumps"], LABELS)


def test_the_command_writes_spans(bytetx: Bytetx, folder: Path, model: package.Model) -> None:
    Path("t.jsonl").write_text('{"text": "Angela met Zaphod"}\n{"text": ""}\n')
    ran = bytetx("extract", "t.jsonl", "-m", folder, "--label", "x", "--threshold", "0", "--nested")
    assert ran.code == 0, ran.err
    wanted = model.extract(["Angela met Zaphod"], ["x"], threshold=0, nested=True)[0]
    first = ran.rows[0]["spans"]
    assert [(one["start"], one["end"], one["text"], one["label"]) for one in first] == _rows(wanted)


RELATIONS = ["works for", "near"]
_WIDE = {"span_mode": "markerV1", "hidden_size": 48}
_WORDS = {"span_mode": "token_level"}
RELATED: list[tuple[str, dict[str, Any]]] = [
    ("deberta-v2", {"relations_layer": "none"}),
    ("bert", {"relations_layer": "dot", "embed_rel_token": False, "hidden_size": 16}),
    ("deberta-v2", {"relations_layer": "mlp", **_WIDE}),
    ("bert", {"relations_layer": "bilinear", "span_mode": "marker", "subtoken_pooling": "mean"}),
    ("deberta-v2", {"relations_layer": "attn", **_WIDE}),
    ("deberta-v2", {"relations_layer": "gcn", **_WORDS}),
    ("deberta-v2", {"relations_layer": "gat", **_WIDE}),
    ("deberta-v2", {"relations_layer": "none", **_WORDS}),
    ("deberta-v2", {"relations_layer": "mlp", "num_rnn_layers": 0, **_WORDS}),
]


def _related(text: list[ExtractedSpan]) -> dict[tuple[Any, ...], float]:
    return {
        ((one.start, one.end), (text[own.tail].start, text[own.tail].end), own.label): own.score
        for one in text
        for own in one.relations
    }


@pytest.mark.feature("Tasks", "`extract`: relations between spans (GLiNER relex)")
@pytest.mark.parametrize(("family", "config"), RELATED, ids=str)
def test_relations_are_those_of_gliner(family: str, config: dict[str, Any], tmp_path: Path) -> None:
    oracle = pytest.importorskip("gliner_models", reason="needs the gliner package")
    theirs = oracle.save_gliner(tmp_path, family, **config)
    ours, count = package.load(tmp_path), 0
    texts = [*oracle.TEXTS[:3], "   ", "One", "Merkel, Zaphod; e-mail_x (nested [brackets])"]
    limits = {"threshold": 0.3, "relation_threshold": 0.1, "adjacency_threshold": 0.02}
    for nested, given in ((False, {"threshold": 0.45}), (False, limits), (True, limits)):
        found = ours.extract(texts, LABELS, relations=RELATIONS, nested=nested, **given)
        wanted = oracle.package_relations(
            theirs, texts, LABELS, RELATIONS, flat_ner=not nested, **given
        )
        for one, expected in zip(found, wanted, strict=True):
            if expected is None:
                continue
            spans, relations = expected
            assert _rows(one) == [span[:4] for span in spans]
            own = _related(one)
            assert own.keys() == relations.keys()
            count += len(own)
            for key, score in own.items():
                assert abs(score - relations[key]) < 1e-4
    assert count
    plain = ours.extract(texts, LABELS, threshold=0.45)
    spans = oracle.package_relations(theirs, texts, LABELS, [], threshold=0.45)
    for one, expected in zip(plain, spans, strict=True):
        assert expected is None or _rows(one) == [span[:4] for span in expected[0]]
    together = ours.extract(texts * 2, LABELS, relations=RELATIONS, threshold=0.45)
    for text, one in zip(texts * 2, together, strict=True):
        [alone] = ours.extract([text], LABELS, relations=RELATIONS, threshold=0.45)
        assert _rows(alone) == _rows(one)
        assert _related(alone) == pytest.approx(_related(one), abs=1e-5)


def test_relations_that_are_refused(
    model: package.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bytetx: Bytetx
) -> None:
    with pytest.raises(InputError, match="no head for relations"):
        model.extract(["a fox"], LABELS, relations=RELATIONS)
    for wrong in ("near", [1], ["\ud800"], 3):
        with pytest.raises(InputError, match="relations"):
            model.extract(["a fox"], LABELS, relations=wrong)  # type: ignore[arg-type]
    for name in ("relation_threshold", "adjacency_threshold"):
        with pytest.raises(OptionError, match=name):
            model.extract(["a fox"], LABELS, **{name: 2})
    oracle = pytest.importorskip("gliner_models", reason="needs the gliner package")
    oracle.save_gliner(tmp_path / "a", relations_layer="dot")
    edit_json(tmp_path / "a" / "gliner_config.json", triples_layer="distmult")
    with pytest.raises(CheckpointError, match="triples_layer"):
        package.load(tmp_path / "a")
    oracle.save_gliner(tmp_path / "b", relations_layer="none")
    related = package.load(tmp_path / "b")
    monkeypatch.setattr("bytetx.tasks.extract._MOST_RELATIONS", 3)
    spans = related.extract([LONG], LABELS, relations=RELATIONS, threshold=0)[0]
    assert len(_related(spans)) == 3
    Path("t.jsonl").write_text(json.dumps({"text": LONG}) + "\n")
    options = ["--label", "person", "--relation", "near", "--threshold", "0"]
    ran = bytetx("extract", "t.jsonl", "-m", tmp_path / "b", *options)
    assert ran.code == 0, ran.err
    assert {"label", "tail", "score"} == set(ran.rows[0]["spans"][0]["relations"][0])
