"""Schemes of tags: entities of well-formed and ill-formed rows, and the likeliest allowed row."""

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import transformers
from checkpoints import SENTENCES, save_checkpoint

import bytetx
from bytetx.checkpoint.tag_calibration import TransitionBiases, read_transition_biases
from bytetx.errors import CheckpointError, InputError
from bytetx.tasks.tag_scheme import TagDecoder, TagScheme

BIOES = ("O", "B-x", "I-x", "E-x", "S-x", "B-y", "I-y", "E-y", "S-y")
BILOU = ("O", "B-x", "I-x", "L-x", "U-x")
BIO = ("O", "B-x", "I-x", "B-y", "I-y")


def labelled(labels: tuple[str, ...]) -> dict[str, dict]:
    names = dict(enumerate(labels))
    return {"id2label": names, "label2id": {name: i for i, name in names.items()}}


def entities(scheme: TagScheme, row: str) -> str:
    """Runs of a row such as "Bx Ix O", separated by |."""
    labels = [mark if len(mark) == 1 else f"{mark[0]}-{mark[1:]}" for mark in row.split()]
    return " | ".join(" ".join(row.split()[r.start : r.stop]) for r in scheme.runs(labels))


@pytest.mark.parametrize(
    ("labels", "prefixes"),
    [
        (BIOES, "BIES"),
        (BILOU, "BILU"),
        (BIO, "BI"),
        (("O", "B-x", "S-x"), "BIES"),
        (("O", "B-x", "I-x", "E-mail"), "BIES"),
        (("O", "E-mail", "S-Bahn"), "BI"),  # names, for nothing begins
        (("O", "B-x", "E-x", "e-mail"), "BI"),
        (("LABEL_0", "LABEL_1"), "BI"),
        (("B-x", "I-x", "L-x", "E-x"), "BI"),
    ],
)
def test_the_labels_show_the_scheme(labels: tuple[str, ...], prefixes: str) -> None:
    assert TagScheme.of(labels).prefixes == prefixes


@pytest.mark.parametrize(
    ("row", "runs"),
    [
        ("", ""),
        ("O O Sx O", "O O | Sx | O"),
        ("Bx Ix Ex Bx Ex", "Bx Ix Ex | Bx Ex"),
        ("Sx Sx", "Sx | Sx"),
        ("Bx Ix O", "Bx Ix | O"),  # nothing ends it
        ("Ix Ix Ex", "Ix Ix Ex"),  # nothing begins it
        ("Ex Ex", "Ex | Ex"),
        ("Sx Ix Ex", "Sx | Ix Ex"),
        ("Ex Ix", "Ex | Ix"),
        ("Bx Iy Ex", "Bx | Iy | Ex"),
        ("Bx Bx Ex", "Bx | Bx Ex"),
        ("Bx Sx", "Bx | Sx"),
        ("O Ix O", "O | Ix | O"),
    ],
)
def test_runs_of_bioes(row: str, runs: str) -> None:
    assert entities(TagScheme.of(BIOES), row) == runs
    swapped = str.maketrans("ES", "LU")
    bilou = TagScheme.of([label.translate(swapped) for label in BIOES])
    assert entities(bilou, row.translate(swapped)) == runs.translate(swapped)


def test_ends_are_tags_of_their_own_where_nothing_begins() -> None:
    assert entities(TagScheme.of(BIO), "Bx Ix Ex Ex") == "Bx Ix | Ex Ex"


def likeliest(rows: np.ndarray, decoder: TagDecoder) -> np.ndarray:
    """The best of all sequences."""

    def score(path: tuple[int, ...]) -> float:
        steps = sum(decoder.transitions[a, b] for a, b in zip(path, path[1:], strict=False))
        emitted = sum(np.log(row[i]) for row, i in zip(rows, path, strict=True))
        return float(decoder.first[path[0]] + decoder.last[path[-1]] + steps + emitted)

    return np.array(max(product(range(rows.shape[1]), repeat=len(rows)), key=score))


@pytest.mark.parametrize("labels", [BIOES, BILOU, BIO])
@pytest.mark.parametrize("biases", [None, TransitionBiases(0.4, -1, 2, -0.5, 0.3, 1.5)])
def test_viterbi_is_the_best_of_all_sequences(
    labels: tuple[str, ...], biases: TransitionBiases | None
) -> None:
    decoder = TagDecoder.of(labels, biases)
    assert decoder is not None
    rng = np.random.default_rng(3)
    for length in (1, 2, 3, 4):
        rows = rng.dirichlet(np.full(len(labels), 0.3), size=length).astype(np.float32) + 1e-9
        found = decoder.decode(rows)
        assert found.tolist() == likeliest(rows.astype(np.float64), decoder).tolist()
    assert decoder.decode(np.zeros((0, len(labels)), np.float32)).tolist() == []


@pytest.mark.parametrize(
    ("labels", "wrong"),
    [
        (BIOES, ["Ix", "Ex", "Bx", "Bx O", "Bx Sx", "Bx Ey", "O Ix", "Sx Ex", "Ex Ix", "Bx Ix"]),
        (BIO, ["Ix", "O Ix", "By Ix", "Iy Ix"]),
    ],
)
def test_what_a_scheme_does_not_allow(labels: tuple[str, ...], wrong: list[str]) -> None:
    decoder = TagDecoder.of(labels, None)
    assert decoder is not None
    for row in wrong:
        path = [labels.index(m if len(m) == 1 else f"{m[0]}-{m[1:]}") for m in row.split()]
        steps = [decoder.transitions[a, b] for a, b in zip(path, path[1:], strict=False)]
        assert decoder.first[path[0]] + decoder.last[path[-1]] + sum(steps) == -np.inf


def test_labels_without_o_that_allow_no_row_are_each_the_likeliest() -> None:
    decoder = TagDecoder.of(("B-x", "I-x", "E-x"), None)
    assert decoder is not None
    assert decoder.decode(np.array([[0.2, 0.7, 0.1]], np.float32)).tolist() == [1]
    assert decoder.decode(np.array([[0.2, 0.7, 0.1]] * 3, np.float32)).tolist() == [0, 1, 2]


@pytest.mark.feature("Tasks", "`tag`: BIOES, BILOU and Viterbi decoding")
def test_tags_of_a_model(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, head="ForTokenClassification", **labelled(BIOES))
    model, scheme = bytetx.load(folder), TagScheme.of(BIOES)
    texts = [text for text in SENTENCES if text]
    options = {"ignore_labels": (), "truncate": True}
    num_joined = 0
    for decoding in ("argmax", "viterbi"):
        rows = model.tag(texts, aggregation="none", decoding=decoding, **options)
        groups = model.tag(texts, decoding=decoding, **options)
        for text, tokens, found in zip(texts, rows, groups, strict=True):
            runs = list(scheme.runs([token.entity for token in tokens]))
            assert [(e.start, e.end) for e in found] == [
                (tokens[r.start].start, tokens[r.stop - 1].end) for r in runs
            ]
            for run, entity in zip(runs, found, strict=True):
                assert entity.entity == scheme.split(tokens[run.start].entity)[1]
                scores = [token.score for token in tokens[run.start : run.stop]]
                assert entity.score == pytest.approx(np.mean(scores))
                assert 0 <= entity.start < entity.end <= len(text)
                num_joined += len(run) > 1
            if decoding == "viterbi":
                path = [BIOES.index(token.entity) for token in tokens]
                decoder = TagDecoder.of(BIOES, None)
                assert decoder is not None
                steps = sum(decoder.transitions[a, b] for a, b in zip(path, path[1:], strict=False))
                assert decoder.first[path[0]] + decoder.last[path[-1]] + steps == 0
    assert num_joined > 5
    for aggregation in ("first", "average", "max"):
        assert len(model.tag(texts, aggregation=aggregation, decoding="viterbi", **options)) > 0
    assert model.tag(texts, **options) == model.tag(texts, decoding="argmax", **options)
    with pytest.raises(InputError, match="decoding must be one of auto, argmax, viterbi"):
        model.tag(texts, decoding="beam")


def test_a_calibration_of_the_checkpoint_counts_unless_argmax_is_asked_for(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, head="ForTokenClassification", **labelled(BIOES))
    texts = [text for text in SENTENCES if text]
    plain = bytetx.load(folder)
    names = TransitionBiases.__dataclass_fields__
    biases = {f"transition_bias_{name}": 0.0 for name in names}
    path = folder / "viterbi_calibration.json"

    def write(**changes: float) -> None:
        given = biases | {f"transition_bias_{name}": value for name, value in changes.items()}
        path.write_text(json.dumps({"operating_points": {"default": {"biases": given}}}))

    options = {"aggregation": "none", "truncate": True}
    greedy = plain.tag(texts, **options)
    write()
    model = bytetx.load(folder)
    path.unlink()  # a model holds all that it needs
    assert model.tag(texts, **options) == plain.tag(texts, decoding="viterbi", **options)
    argmax = model.tag(texts, decoding="argmax", **options)
    assert argmax == greedy
    write(background_to_start=-1000.0, end_to_start=-1000.0)
    few = bytetx.load(folder).tag(texts, truncate=True)
    assert max(map(len, few)) == 1  # nothing but a first token begins an entity
    write(inside_to_end=float("1e39"))
    with pytest.raises(CheckpointError, match="transition_bias_inside_to_end must be a number"):
        bytetx.load(folder)
    path.write_text(json.dumps({"operating_points": {"strict": {}}}))
    with pytest.raises(CheckpointError, match="operating_points lacks default"):
        read_transition_biases(folder)
    path.write_text(json.dumps({"operating_points": {"default": {"biases": {"bias": 1}}}}))
    with pytest.raises(CheckpointError, match="biases has 'bias'; known: transition_bias_back"):
        read_transition_biases(folder)


def test_viterbi_needs_prefixes(tmp_path: Path) -> None:
    labels = labelled(("cat", "dog", "O"))
    folder = save_checkpoint(tmp_path, head="ForTokenClassification", **labels)
    with pytest.raises(InputError, match="needs tags with prefixes.*cat, dog, O; use argmax"):
        bytetx.load(folder).tag(["a"], decoding="viterbi")


def test_a_bio_model_is_grouped_as_ever(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, head="ForTokenClassification", **labelled(BIO))
    pipeline = transformers.pipeline(
        "token-classification", str(folder), aggregation_strategy="simple"
    )
    ours = bytetx.load(folder).tag([SENTENCES[0]])[0]
    wanted = [(e["entity_group"], e["start"], e["end"]) for e in pipeline(SENTENCES[0])]
    assert [(e.entity, e.start, e.end) for e in ours] == wanted
