"""csv: a malformed record costs its own lines; kept values that are nested too deep, their row."""

# ruff: noqa: F811  (fixtures of test_cli)

import csv
import io
import json
import re
import subprocess
from pathlib import Path

import pytest
from cli_runs import Bytetx, command, environment
from hypothesis import given, settings
from hypothesis import strategies as st
from pairwise import pairwise

from bytetx.cli.files import csv_reader, job
from bytetx.cli.files.reader import open_sources, read_records
from bytetx.cli.files.records import MalformedRecord, Record, Shape
from bytetx.errors import InputError

GOOD = ["a,one", 'b,"two, or\nmore"', "c,three"]
# A malformed record between good ones, the lines of it, and what its error says.
DAMAGED = [
    ('x,"6 inch pipe', 1, "quote that never ends|written twice"),
    ('x,"6" pipe', 1, "written twice"),
    ('"x,6 inch', 1, "quote that never ends|written twice"),
    ('x,"y"z', 1, "written twice"),
    ("x", 1, "1 cells, where the header has 2"),
    ("x,y,z", 1, "3 cells, where the header has 2"),
    ("x,a\0b", 1, "NUL byte"),
    ("\0", 1, "NUL byte"),
    ("x,a\rb", 1, "a carriage return outside quotes"),
    ('x,"a "b" c\nmore of it\nstill"', 3, "written twice"),
    ('x,"a\nb",z', 2, "3 cells, where the header has 2"),
    ('x,"a\0\nb"', 2, "NUL byte"),
]


def read(path: Path, **shape: tuple[str, ...]) -> list[Record]:
    return list(read_records(open_sources([str(path)]), Shape(**shape)))


def texts_of(records: list[Record]) -> list[str]:
    return [record.value for record in records if isinstance(record.value, str)]


def errors_of(records: list[Record]) -> list[InputError]:
    return [record.value for record in records if isinstance(record.value, InputError)]


@pairwise(
    {
        "damaged,num_lines,says": DAMAGED,
        "place": [0, 1, 3],
        "delimiter": [pytest.param(",", id="comma"), pytest.param("\t", id="tab")],
        "end": [pytest.param("\n", id="lf"), pytest.param("\r\n", id="crlf")],
    }
)
def test_a_malformed_record_costs_its_own_lines(
    tmp_path: Path,
    damaged: str,
    num_lines: int,
    says: str,
    place: int,
    delimiter: str,
    end: str,
) -> None:
    records = [*GOOD[:place], damaged, *GOOD[place:]]
    content = "\n".join(["id,text", *records, ""]).replace(",", delimiter).replace("\n", end)
    path = tmp_path / ("a.csv" if delimiter == "," else "a.tsv")
    path.write_bytes(content.encode())
    found = read(path)
    expected = ["one", f"two{delimiter} or{end}more", "three"]
    assert texts_of(found) == expected
    (error,) = errors_of(found)
    assert type(found[place].value) is MalformedRecord
    first = 2 + sum(record.count("\n") + 1 for record in records[:place])
    where = f"line {first}:" if num_lines == 1 else f"lines {first} to {first + num_lines - 1}:"
    assert where in str(error)
    assert re.search(says, str(error)), error
    assert found[-1].end_bytes == path.stat().st_size


def test_a_stray_quote_swallowed_all_later_rows(bytetx: Bytetx, encoder: Path) -> None:
    rows = [f'{i},"6 inch pipe' if i == 10 else f"{i},plain text {i}" for i in range(300)]
    Path("a.csv").write_text("\n".join(["id,text", *rows, ""]))
    ran = bytetx("embed", "a.csv", "-m", encoder, "--keep", "id")
    assert ran.code == 3 and len(ran.rows) == 300, ran.err
    assert [i for i, row in enumerate(ran.rows) if "error" in row] == [10]
    assert [row["id"] for row in ran.rows[11:]] == [str(i) for i in range(11, 300)]
    assert "a.csv line 12: malformed: a quote that never ends" in ran.rows[10]["error"]
    assert "1 error, 1 malformed record of csv among them" in ran.err
    stdin = subprocess.run(
        command("embed", "-m", encoder, "--input-format", "csv"),
        input=Path("a.csv").read_bytes(),
        capture_output=True,
        env=environment(),
    )
    assert stdin.returncode == 3 and stdin.stdout.count(b"\n") == 300


def test_a_job_whose_rows_are_all_read_still_exits_with_0(bytetx: Bytetx, encoder: Path) -> None:
    Path("a.csv").write_bytes(b'id,text\n1,"a\nb"\n2,caf\xe9\n3,6" pipe\n')
    ran = bytetx("embed", "a.csv", "-m", encoder)
    assert ran.code == 0 and ["error" in row for row in ran.rows] == [False, True, False]


def test_malformed_documents_of_a_query_are_lost_rows_too(bytetx: Bytetx, ranker: Path) -> None:
    Path("docs.csv").write_text('text\none\n"two"x\nthree\n')
    ran = bytetx("rerank", "docs.csv", "-m", ranker, "--query", "q")
    assert ran.code == 3 and len(ran.rows[0]["hits"]) == 3
    assert "malformed" in ran.rows[0]["hits"][-1]["error"]


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from checkpoints import save_checkpoint

    folder = tmp_path_factory.mktemp("ranker")
    return save_checkpoint(folder, head="ForSequenceClassification", num_labels=1)


@pytest.mark.parametrize("interrupted_at", [0, 1, 39, 41, 90, 119])
def test_a_job_with_malformed_records_resumes_exactly(
    bytetx: Bytetx, encoder: Path, monkeypatch: pytest.MonkeyPatch, interrupted_at: int
) -> None:
    monkeypatch.setattr(job, "COMMIT_ROWS", 1)
    rows = [f"{i},text {i}" for i in range(120)]
    rows[0], rows[40], rows[80] = '0,"stray', '40,"bad"cell\nand a line', "80"
    Path("a.csv").write_text("\n".join(["id,text", *rows, ""]))
    own = ("embed", "a.csv", "-m", encoder, "--keep", "id", "--token-budget", 64, "-o")
    assert bytetx(*own, "whole.jsonl").code == 3
    own_iter = job._GoodValues.__iter__

    def interrupted(values: object) -> object:
        for number, value in enumerate(own_iter(values)):
            if number == interrupted_at:
                raise KeyboardInterrupt
            yield value

    with monkeypatch.context() as patch:
        patch.setattr(job._GoodValues, "__iter__", interrupted)
        assert bytetx(*own, "v.jsonl").code == (3 if interrupted_at > 116 else 130)
    assert bytetx(*own, "v.jsonl", "--resume").code in ((0,) if interrupted_at > 116 else (3,))
    assert Path("v.jsonl").read_bytes() == Path("whole.jsonl").read_bytes()


def test_a_quote_that_never_ends_is_found_in_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(csv_reader, "_MAX_CHARACTERS", 20_000)
    path = tmp_path / "a.csv"
    path.write_text("\n".join(["text", '"open', *map(str, range(5000)), ""]))
    most, get = 0, csv_reader._LinesAhead.get

    def counted(lines: csv_reader._LinesAhead, index: int) -> object:
        nonlocal most
        line = get(lines, index)
        most = max(most, len(lines._waiting))
        return line

    monkeypatch.setattr(csv_reader._LinesAhead, "get", counted)
    found = read(path)
    assert texts_of(found) == [str(i) for i in range(5000)] and most < 110
    assert "a quote that has not ended after 9" in str(errors_of(found)[0])
    path.write_text('text\n"' + "x" * 100_000 + '\ny"\nlast\n')
    assert [len(text) for text in texts_of(read(path))] == [100_002, 4]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('id,"text\n1,a\n2,b\n', "has no header that can be read: a quote that never ends"),
        ('id,text,"x\n1,a,b\n2,c,5"\n3,d,e\n', "a quote in it reaches into the rows below"),
        ('id,"' + "\n".join(f"{i},a" for i in range(999)) + '"\n', "has no (column|header)"),
        ("id,te\0xt\n1,a\n", "holds NUL bytes"),
        ("id,text\r1,a\r2,b\r", "a carriage return outside quotes"),
    ],
)
def test_a_broken_header_is_one_short_line(tmp_path: Path, content: str, says: str) -> None:
    (tmp_path / "a.csv").write_bytes(content.encode())
    with pytest.raises(InputError, match=says) as raised:
        read(tmp_path / "a.csv")
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 500


def test_a_header_of_several_lines_and_utf16(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('id,"the\ntext",text\n1,a,b\n')
    assert texts_of(read(path)) == ["b"]
    path.write_bytes("id,text\n1,a\n".encode("utf-16"))
    with pytest.raises(InputError, match="not UTF-8 text"):
        read(path)


# Cells begin with a letter: behind a stray quote, one that begins as a quoted cell may end (with a
# delimiter or a line end) makes a legal record of several.
CELL = st.builds("".join, st.tuples(st.sampled_from("ab7é"), st.text('ab1, "\n\té', max_size=6)))
CELLS = st.one_of(st.just(""), CELL.map(lambda cell: cell.rstrip(",\t\n")))
DAMAGE = st.sampled_from(['"', '"', ",", "\t", "\n", "\0", "\r", "\udcff", ""])


@st.composite
def damaged_tables(draw: st.DrawFn) -> tuple[str, list[list[str]], list[str], int]:
    """(delimiter, rows, their records with one that is damaged, its number)"""
    width, delimiter = draw(st.integers(2, 4)), draw(st.sampled_from(",\t"))
    rows = draw(st.lists(st.lists(CELLS, min_size=width, max_size=width), min_size=1, max_size=8))
    records = []
    for row in rows:
        written = io.StringIO()
        csv.writer(written, delimiter=delimiter, lineterminator="\n").writerow(row)
        records.append(written.getvalue()[:-1])
    bad = draw(st.integers(0, len(rows) - 1))
    place = draw(st.integers(0, len(records[bad])))
    rest = records[bad][place + draw(st.integers(0, 1)) :]
    records[bad] = records[bad][:place] + draw(DAMAGE) + rest
    return delimiter, rows, records, bad


@given(damaged_tables())
@settings(max_examples=200, derandomize=True, deadline=None)
def test_damage_to_one_record_loses_no_other(
    tmp_path_factory: pytest.TempPathFactory,
    table: tuple[str, list[list[str]], list[str], int],
) -> None:
    delimiter, rows, records, bad = table
    names = tuple(f"column {i}" for i in range(len(rows[0])))
    folder = tmp_path_factory.getbasetemp()
    path = folder / ("damaged.csv" if delimiter == "," else "damaged.tsv")
    content = "\n".join([delimiter.join(names), *records, ""])
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    found = iter(read(path, columns=names[:1], keep=names))
    for number, row in enumerate(rows):
        if number != bad:
            assert any([*record.kept.values()] == row for record in found), (records, row)


def nested(levels: int, *, kind: str) -> str:
    """JSON of so many levels."""
    opens, ends = ("[", "]") if kind == "list" else ('{"a":', "}")
    return opens * levels + "1" + ends * levels


@pytest.mark.parametrize("out", ["v.jsonl", "v.parquet", "-"])
@pytest.mark.parametrize("kind", ["list", "object"])
def test_values_to_keep_that_are_nested_too_deep_ended_the_job(
    bytetx: Bytetx, encoder: Path, out: str, kind: str
) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    depths = [1, 40, 100, 101, 500, 900, 100_000]
    lines = [f'{{"text": "x", "id": {nested(depth, kind=kind)}}}' for depth in depths]
    lines += ['{"text": "last", "id": 2}', f'{{"text": "free", "other": {lines[4]}}}']
    Path("a.jsonl").write_text("\n".join(lines))
    ran = bytetx("embed", "a.jsonl", "-m", encoder, "--keep", "id", "-o", out)
    assert ran.code == 0, ran.err
    if out == "-":
        rows = ran.rows
    elif out == "v.jsonl":
        rows = [json.loads(line) for line in Path(out).read_text().splitlines()]
    else:
        rows = pq.read_table(out).to_pylist()
    is_error = [row.get("error") is not None for row in rows]
    assert is_error == [False] * 3 + [True] * 4 + [False] * 2
    assert "column 'id' is nested more than 100 levels" in rows[4]["error"]
    assert [row["id"] for row in rows[3:7]] == [None] * 4 and rows[8]["id"] is None
    found = rows[2]["id"]
    assert (json.loads(found) if isinstance(found, str) else found) == json.loads(
        nested(100, kind=kind)
    )


VALUES = [
    "1" + "0" * 400,
    "1" + "0" * 5000,
    "[NaN, Infinity]",
    '"\\ud800"',
    '{"\\ud800": ["\\udc00"]}',
    '{"a": 1, "a": [2]}',
    '[1, "a", {}]',
    "[[], [[]], {}]",
    '{"": 0}',
    '"\\u0000"',
    "1e400",
    "-0.0",
]


@pytest.mark.parametrize("out", ["v.jsonl", "v.parquet"])
def test_odd_values_to_keep_are_rows_or_their_errors(
    bytetx: Bytetx, encoder: Path, out: str
) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    for values in (VALUES, *([value] for value in VALUES)):
        rows = [f'{{"text": "x", "id": {value}}}' for value in [*values, "7"]]
        Path("a.jsonl").write_text("\n".join(rows))
        own = ("embed", "a.jsonl", "-m", encoder, "--keep", "id", "-o", out, "--overwrite")
        ran = bytetx(*own)
        assert ran.code == 0, (values, ran.err)
        if out == "v.jsonl":
            found = [json.loads(line) for line in Path(out).read_text().splitlines()]
        else:
            found = pq.read_table(out).to_pylist()
        assert len(found) == len(values) + 1 and str(found[-1]["id"]) in ("7", "7.0"), found
        for value, row in zip(values, found, strict=False):
            assert (row.get("error") is not None) == (len(value) > 5000), (value, row)


def test_a_chat_that_is_nested_too_deep_is_its_rows_error(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    chat = '[{"role": "user", "content": %s}]'
    contents = [nested(90, kind="list"), nested(300, kind="list"), '"fine"']
    path.write_text("\n".join(json.dumps({"text": 0}).replace("0", chat % c) for c in contents))
    found = list(read_records(open_sources([str(path)]), Shape(chats=True)))
    assert [isinstance(record.value, InputError) for record in found] == [False, True, False]


def test_huge_token_ids_are_their_rows_error(bytetx: Bytetx, encoder: Path) -> None:
    ids = [[1, 2], [10**30], [-1], [2**31], [2]]
    Path("a.jsonl").write_text("\n".join(json.dumps({"text": one}) for one in ids))
    ran = bytetx("embed", "a.jsonl", "-m", encoder)
    assert ran.code == 0, ran.err
    assert ["error" in row for row in ran.rows] == [False, True, True, True, False]
