"""bytetx decide: requests in, answers out; temperatures that are fitted to labelled requests."""

import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pyarrow.parquet
import pytest
from cli_runs import Bytetx
from decisions import REQUESTS, SPAM, TONE, URGENCY, assert_same_answers, save_decider, save_judge
from tiny import one_thread  # noqa: F401  (autouse)

from bytetx import load
from bytetx.cli.decisions import Labelled, fitted_factor, measure


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_decider(tmp_path_factory.mktemp("decider"))


def write_lines(path: str, rows: list[object]) -> None:
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    Path(path).write_text("".join(f"{line}\n" for line in lines))


@pytest.mark.feature("Command line", "`decide`, and the calibration of its probabilities")
def test_a_bad_row_costs_that_row(bytetx: Bytetx, folder: Path) -> None:
    bad = ["{", {"state": 1}, {"state": 1, "questions": {"a": {"type": "x"}}}, "[1]"]
    write_lines("r.jsonl", [*bad, *REQUESTS])
    ran = bytetx("decide", "r.jsonl", "-m", folder, "-o", "a.jsonl")
    assert ran.code == 0, ran.err
    rows = [json.loads(line) for line in Path("a.jsonl").read_text().splitlines()]
    assert [row["index"] for row in rows] == list(range(len(bad) + len(REQUESTS)))
    assert all("error" in row for row in rows[: len(bad)])
    assert "question 'a' has a type" in rows[2]["error"]
    wanted = list(load(folder, device="cpu").decide(REQUESTS))
    assert_same_answers([row["answers"] for row in rows[len(bad) :]], wanted)
    write_lines("r.txt", [*bad, *REQUESTS])  # a line of a text file is the JSON of a request
    again = bytetx("decide", "r.txt", "-m", folder)
    assert_same_answers([row["answers"] for row in again.rows[len(bad) :]], wanted)
    assert bytetx("decide", "r.jsonl", "-m", folder, "-o", "a.parquet").code == 0
    answers = pyarrow.parquet.read_table("a.parquet")["answers"].to_pylist()
    assert_same_answers(list(map(json.loads, answers[len(bad) :])), wanted)


def test_columns_are_kept_and_orders_averaged(bytetx: Bytetx, folder: Path) -> None:
    write_lines("r.jsonl", [{**one, "id": n} for n, one in enumerate(REQUESTS)])
    ran = bytetx("decide", "r.jsonl", "-m", folder, "--keep", "id", "--order", "average")
    assert [row["id"] for row in ran.rows] == list(range(len(REQUESTS)))
    wanted = load(folder, device="cpu").decide(REQUESTS, order="average")
    assert_same_answers([row["answers"] for row in ran.rows], list(wanted))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["r.csv"], "decide reads .jsonl"),
        (["r.jsonl", "--truncate"], "--truncate does not go with requests"),
        (["r.jsonl", "--column", "x"], "--column does not go with requests"),
        (["r.jsonl", "--order", "all"], "order must be given or average"),
        (["r.jsonl", "--reliability", "x.svg"], "--reliability goes with --calibrate"),
        (["r.jsonl", "--calibrate", "r.jsonl"], "leave FILES out"),
        (["--calibrate", "r.jsonl", "--reliability", "x.png"], "must name an .svg file"),
    ],
)
def test_wrong_usage(bytetx: Bytetx, folder: Path, arguments: list[str], message: str) -> None:
    write_lines("r.jsonl", REQUESTS[:1])
    Path("r.csv").write_text("state,questions\na,b\n")
    ran = bytetx("decide", *arguments, "-m", folder)
    assert ran.code == 2 and message in ran.err, ran.err


def test_a_temperature_is_found_again() -> None:
    """Answers drawn from probabilities are calibrated; sharper ones get their temperature back."""
    rng = np.random.default_rng(0)
    drawn: list[Labelled] = []
    for _ in range(4000):
        scores = rng.normal(size=rng.integers(2, 6)) * 2
        chances = np.exp(scores) / np.exp(scores).sum()
        drawn.append(Labelled("choice", np.log(chances), int(rng.choice(len(scores), p=chances))))
    assert fitted_factor(drawn) == pytest.approx(1.0, abs=0.08)
    sharp = []
    for one in drawn:
        scores = 3 * one.log_chances
        sharp.append(Labelled("choice", scores - np.log(np.exp(scores).sum()), one.right))
    assert fitted_factor(sharp) == pytest.approx(3.0, rel=0.08)
    before, plain = measure(sharp), measure(drawn)
    assert plain.ece < 0.03 < before.ece and plain.brier < before.brier
    assert before.accuracy == plain.accuracy and before.nll > plain.nll
    sure = [Labelled("noul", np.log(np.array([0.9, 0.1])), 0)]
    assert fitted_factor(sure) == pytest.approx(1 / 20)  # always right: as sharp as is allowed


def test_calibrate(bytetx: Bytetx, tmp_path: Path) -> None:
    folder = save_decider(tmp_path / "model")
    (folder / "decision.json").write_text(json.dumps({"temperature": {"score": 2.0}, "other": 1}))
    model, rng = load(folder, device="cpu"), np.random.default_rng(1)
    rows = []
    for number in range(60):
        questions = {"spam": SPAM, "tone": TONE, "due": URGENCY}
        rows.append({"state": f"fox {number}", "questions": questions})
    answers = model.decide(rows)
    for row, own in zip(rows, answers, strict=True):
        due = int(rng.integers(0, 3))
        right = {"spam": bool(own["spam"]["noul"] > 0.5), "tone": own["tone"]["choice"]}
        row["answers"] = {**right, "due": due} if rng.random() < 0.8 else {"spam": True, "due": due}
    write_lines("labelled.jsonl", rows)
    ran = bytetx(
        *("decide", "--calibrate", "labelled.jsonl", "-m", folder, "--reliability", "r.svg"),
        *("-o", "decision.json"),
    )
    assert ran.code == 0, ran.err
    written = json.loads(Path("decision.json").read_text())
    assert written["other"] == 1 and written["temperature"].keys() == {"noul", "choice", "score"}
    assert written["temperature"]["choice"] == 0.05  # always the likeliest one
    assert written["temperature"]["score"] > 2.0  # answers at random
    for word in ("noul", "choice", "score", "ECE", "Brier", "accuracy", "wrote decision.json"):
        assert word in ran.out
    assert ElementTree.parse("r.svg").getroot().tag.endswith("svg")
    assert bytetx("decide", "--calibrate", "labelled.jsonl", "-m", folder).code == 0
    fitted = load(folder, device="cpu").checkpoint.decisions
    assert dict(fitted.temperature) == written["temperature"]


def test_a_head_beside_a_trunk_is_calibrated(bytetx: Bytetx, tmp_path: Path) -> None:
    """Temperatures of the types that are not asked stay those of the head's own file."""
    folder = save_judge(tmp_path / "model")
    rows = [
        {"state": f"fox {n}", "questions": {"a": SPAM}, "answers": {"a": n % 3 == 0}}
        for n in range(30)
    ]
    write_lines("labelled.jsonl", rows)
    ran = bytetx("decide", "--calibrate", "labelled.jsonl", "-m", folder)
    assert ran.code == 0, ran.err
    written = json.loads((folder / "decision.json").read_text())["temperature"]
    model = load(folder, device="cpu")
    assert written.keys() == {"noul"} and written["noul"] != 1.5
    assert dict(model.checkpoint.decisions.temperature) == {"choice": 0.75, "score": 1.0, **written}
    write_lines("r.jsonl", REQUESTS[:2])
    ran = bytetx("decide", "r.jsonl", "-m", folder)
    assert_same_answers([row["answers"] for row in ran.rows], list(model.decide(REQUESTS[:2])))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"state": 1, "questions": {"a": SPAM}}, 'must have "answers"'),
        ({"state": 1, "questions": {"a": SPAM}, "answers": {"b": True}}, "no such question"),
        ({"state": 1, "questions": {"a": SPAM}, "answers": {"a": "perhaps"}}, "none of: true, fal"),
        ({"state": 1, "questions": {"a": TONE}, "answers": {"a": "x"}}, "none of: calm, mad"),
        ({"state": 1, "questions": {"a": {}}, "answers": {"a": 1}}, "question 'a' has a type"),
        ("", "has no labelled requests"),
        ("{", "not JSON"),
    ],
)
def test_bad_labels(bytetx: Bytetx, folder: Path, row: object, message: str) -> None:
    write_lines("labelled.jsonl", [row])
    ran = bytetx("decide", "--calibrate", "labelled.jsonl", "-m", folder, "-o", "d.json")
    assert ran.code == 1 and message in ran.err, ran.err
    assert not Path("d.json").exists()
