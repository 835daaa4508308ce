"""files: --keep copies columns of the input into the output's rows, with their types."""

# ruff: noqa: F811  (fixtures of test_cli)

import datetime
import decimal
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
from checkpoints import save_checkpoint
from cli_runs import Bytetx

ROWS = [
    {"id": 1, "text": "one fox", "more": {"a": [1.5, None]}},
    {"id": 2, "text": 5, "more": None},
    {"text": "two foxes", "id": 3},
]


def write_rows(name: str) -> None:
    lines = [*map(json.dumps, ROWS), "{broken"]
    Path(name).write_text("\n".join(lines))


def test_copied_columns_are_in_jsonl_rows_and_errors(bytetx: Bytetx, encoder: Path) -> None:
    write_rows("a.jsonl")
    ran = bytetx("embed", "a.jsonl", "-m", encoder, "--keep", "id,more", "--keep", "text")
    assert ran.code == 0, ran.err
    assert [list(row)[:4] for row in ran.rows] == [["index", "id", "more", "text"]] * 4
    assert [list(row)[4] for row in ran.rows] == ["embedding", "error", "embedding", "error"]
    assert [row["id"] for row in ran.rows] == [1, 2, 3, None]
    assert [row["more"] for row in ran.rows] == [{"a": [1.5, None]}, None, None, None]
    assert [row["text"] for row in ran.rows] == ["one fox", 5, "two foxes", None]


@pytest.mark.parametrize("task", ["embed", "classify"])
def test_copied_columns_of_jsonl_get_their_types_in_parquet(
    bytetx: Bytetx, encoder: Path, classifier: Path, task: str
) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    write_rows("a.jsonl")
    model = encoder if task == "embed" else classifier
    ran = bytetx(task, "a.jsonl", "-m", model, "--keep", "id,more,text", "-o", "v.parquet")
    assert ran.code == 0, ran.err
    table = pq.read_table("v.parquet")
    own = "embedding" if task == "embed" else "labels"
    assert table.column_names == ["index", "id", "more", "text", own, "error"]
    assert table.schema.field("id").type == pa.int64()
    assert table.schema.field("more").type == pa.struct([("a", pa.list_(pa.float64()))])
    assert table.column("id").to_pylist() == [1, 2, 3, None]
    assert table.column("text").to_pylist() == ["one fox", "5", "two foxes", None]
    assert [value is None for value in table.column(own).to_pylist()] == [False, True, False, True]
    errors = table.column("error").to_pylist()
    assert errors[0] is None and "must be a string" in errors[1] and "not JSON" in errors[3]


def parquet_columns() -> dict:
    pa = pytest.importorskip("pyarrow")
    day, second = datetime.date(2024, 2, 29), datetime.datetime(2024, 2, 29, 12, 0, 1)
    dictionary = pa.array(["x", "y"]).dictionary_encode()
    return {
        "small": pa.array([1, None], pa.int8()),
        "large": pa.array([2**64 - 1, 0], pa.uint64()),
        "half": pa.array([0.1, math.nan], pa.float32()),
        "flag": pa.array([True, None]),
        "day": pa.array([day, None]),
        "time": pa.array([1_709_208_001_123_456_789, None], pa.timestamp("ns")),
        "zone": pa.array([second, None], pa.timestamp("us", tz="UTC")),
        "price": pa.array([decimal.Decimal("12.340"), None], pa.decimal128(10, 3)),
        "raw": pa.array([b"\x00\xff", None], pa.binary()),
        "words": pa.array([["é", None], []], pa.list_(pa.string())),
        "long": pa.array(["\U0001f642", None], pa.large_string()),
        "kind": dictionary,
    }


@pytest.mark.feature("Command line", "columns that are kept")
def test_copied_columns_of_parquet_have_their_types(bytetx: Bytetx, encoder: Path) -> None:
    columns = parquet_columns()
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": ["a", "b"], **columns}), "a.parquet")
    keep = ",".join(columns)
    ran = bytetx("embed", "a.parquet", "-m", encoder, "--keep", keep, "-o", "v.parquet")
    assert ran.code == 0, ran.err
    table = pq.read_table("v.parquet")
    for name, column in columns.items():
        column = column.dictionary_decode() if name == "kind" else column
        found = table.column(name).combine_chunks()
        assert found.type == column.type, name
        if name == "half":
            np.testing.assert_array_equal(found.to_numpy(False), column.to_numpy(False))
        else:
            assert found.equals(column), name
    row = bytetx("embed", "a.parquet", "-m", encoder, "--keep", keep).rows[1]
    assert row["half"] is None and row["large"] == 0 and row["kind"] == "y"
    rows = bytetx("embed", "a.parquet", "-m", encoder, "--keep", keep).rows
    assert rows[0]["price"] == "12.340" and rows[0]["raw"] == "AP8=" and rows[0]["small"] == 1
    assert rows[0]["day"] == "2024-02-29" and rows[0]["time"].endswith("01.123456789")


def test_values_without_one_type_become_text(bytetx: Bytetx, encoder: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    rows = [{"text": "a", "x": 2**60 + 1, "y": {}, "z": "\ud800"}]
    rows += [{"text": "b", "x": 0.5, "y": [1], "z": "é"}]
    Path("a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    ran = bytetx("embed", "a.jsonl", "-m", encoder, "--keep", "x,y,z", "-o", "v.parquet")
    assert ran.code == 0, ran.err
    found = pq.read_table("v.parquet").to_pydict()
    assert found["x"] == [str(2**60 + 1), "0.5"] and found["y"] == ["{}", "[1]"]
    assert found["z"] == ["\\ud800", "é"]


def test_copied_columns_of_csv_and_text(bytetx: Bytetx, encoder: Path) -> None:
    Path("a.csv").write_bytes(b"id,text\n07,one\ncaf\xe9,two\n3,caf\xe9\n4\n")
    rows = bytetx("embed", "a.csv", "-m", encoder, "--keep", "id").rows
    assert [row["id"] for row in rows] == ["07", None, "3", None]
    assert ["error" in row for row in rows] == [False, True, True, True]
    Path("a.txt").write_text("one\n\n")
    rows = bytetx("embed", "a.txt", "-m", encoder, "--keep", "text").rows
    assert [row["text"] for row in rows] == ["one", ""]


def test_copied_columns_of_queries(bytetx: Bytetx, tmp_path: Path) -> None:
    ranker = save_checkpoint(tmp_path / "rank", head="ForSequenceClassification", num_labels=1)
    Path("docs.txt").write_text("big apple\nfox\n")
    Path("q.csv").write_text("id,text\n7,city\n8,animal\n")
    own = ("rerank", "docs.txt", "-m", ranker, "--keep", "id")
    rows = bytetx(*own, "--query-file", "q.csv").rows
    assert [(row["id"], row["query"]) for row in rows] == [("7", "city"), ("8", "animal")]
    ran = bytetx(*own, "--query", "city")
    assert ran.code == 2 and "--query-file" in ran.err
    request = {"query": "city", "documents": ["a"], "id": [1]}
    Path("r.jsonl").write_text(json.dumps(request))
    assert bytetx("rerank", "r.jsonl", *own[2:]).rows[0]["id"] == [1]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("--keep", "id,date"), 1, "has no column 'date'; its columns: id, text (give --keep)"),
        (("--keep", "index"), 2, "have index, embedding, error already"),
        (("--keep", "id,id"), 2, "names 'id' twice"),
        (("--keep", "id,"), 2, "empty name"),
        (("--keep", "id", "-o", "v.npy"), 2, ".npy has no columns but vectors"),
    ],
)
def test_columns_that_cannot_be_copied_are_one_line(
    bytetx: Bytetx, encoder: Path, arguments: tuple[str, ...], code: int, says: str
) -> None:
    Path("a.csv").write_text("id,text\n1,x\n")
    ran = bytetx("embed", "a.csv", "-m", encoder, *arguments)
    assert ran.code == code and says in ran.err and ran.err.count("\n") == 1, ran.err
    assert "a.csv" in os.listdir() and not list(Path().glob("v.npy*"))


def test_a_type_that_cannot_be_copied_is_one_line(bytetx: Bytetx, encoder: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    days = pa.array([[datetime.date(2024, 1, 1)]])
    pq.write_table(pa.table({"text": ["a"], "days": days}), "a.parquet")
    for out in ("v.parquet", "v.jsonl"):
        ran = bytetx("embed", "a.parquet", "-m", encoder, "--keep", "days", "-o", out)
        assert ran.code == 1 and "which --keep does not copy" in ran.err, ran.err
    pq.write_table(pa.table({"text": ["a"], "days": [1]}), "b.parquet")
    Path("b.csv").write_text("days,text\n1,a\n")
    own = ("embed", "b.parquet", "b.csv", "-m", encoder, "--keep", "days", "-o", "v.parquet")
    assert "--keep needs one type" in bytetx(*own).err


def test_a_job_does_not_resume_with_other_columns(
    bytetx: Bytetx, encoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bytetx.cli.files.writer import StagedOutput

    write_rows("a.jsonl")
    own = ("embed", "a.jsonl", "-m", encoder, "-o", "v.jsonl")
    with monkeypatch.context() as patch:
        patch.setattr(StagedOutput, "finish", lambda output: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            bytetx(*own, "--keep", "id")
    ran = bytetx(*own, "--keep", "more", "--resume")
    assert ran.code == 1 and "keep was ['id'] and is ['more'] now" in ran.err
    changed = Path("a.jsonl").read_text().replace('"id": 3', '"id": 4')
    Path("b.jsonl").write_text(changed)
    ran = bytetx("embed", "b.jsonl", *own[2:], "--keep", "id", "--resume")
    assert ran.code == 1 and "other inputs" in ran.err
    assert bytetx(*own, "--keep", "id", "--resume").code == 0
    assert len(Path("v.jsonl").read_text().splitlines()) == 4
