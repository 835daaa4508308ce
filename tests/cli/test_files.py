"""files: records out of every kind of input, broken ones too."""

import json
import os
from pathlib import Path

import pytest

from bytetx.cli.files.reader import open_sources, read_records
from bytetx.cli.files.records import RankRequest, Record, Shape
from bytetx.errors import InputError

DIM = 4


def read(path: Path, *columns: str, format: str | None = None, rank: bool = False) -> list:
    shape = Shape(columns or ("text",), rank_requests=rank)
    return [r.value for r in read_records(open_sources([str(path)], format=format), shape)]


def errors_in(values: list) -> list[str]:
    return [str(value) for value in values if isinstance(value, InputError)]


@pytest.mark.parametrize("name", ["a.txt", "README.md", "notes", "x.py"])
def test_text_is_one_record_a_line_blank_lines_too(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"\xef\xbb\xbfone\r\n\n  two \nthree\xe2\x80\xa8still three")
    assert read(path) == ["one", "", "  two ", "three\u2028still three"]


def test_empty_file_gives_no_records(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    (tmp_path / "a.jsonl").touch()
    assert read(tmp_path / "a.txt") == read(tmp_path / "a.jsonl") == []


def test_bytes_that_are_not_utf8_are_that_lines_error(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\ncaf\xe9\nthree\n")
    values = read(path)
    assert values[0] == "one" and values[2] == "three"
    assert errors_in(values) == [
        f"{path} line 2: byte 0xe9 is not UTF-8; convert the file, such as with iconv"
    ]


def test_binary_content_ends_the_job(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("words".encode("utf-16"))
    with pytest.raises(InputError, match="is not UTF-8 text"):
        read(path)


def test_broken_jsonl_lines_are_errors_and_the_others_go_on(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = ['{"text": "one"}', '{"text": "tw', "", "[1]", '{"text": 5}', '{"other": "x"}']
    path.write_text("\n".join([*lines, '{"text": [7, 8]}', '{"text": "last"}']))
    values = read(path)
    assert [v for v in values if not isinstance(v, InputError)] == ["one", [7, 8], "last"]
    messages = errors_in(values)
    assert [m.split(":")[0].removeprefix(str(path)) for m in messages] == [
        " line 2",
        " line 4",
        " line 5",
        " line 6",
    ]
    assert "got a list" in messages[1] and "got a number" in messages[2]
    assert "there are: other" in messages[3]


def test_deep_json_is_an_error_and_no_crash(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n' + "[" * 200_000 + "\n")
    assert len(errors_in(read(path))) == 1


def test_lone_surrogate_escapes_reach_the_model(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "\\ud800"}\n')
    assert read(path) == ["\ud800"]


def test_broken_csv_rows_are_errors_and_the_others_go_on(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'id,text\n1,"two\nlines"\n2\n3,"a"b\n4,caf\xe9\n\xe9,fine\n5,last\n')
    values = read(path)
    assert [v for v in values if not isinstance(v, InputError)] == ["two\nlines", "fine", "last"]
    assert [m.split(":")[0].split()[-1] for m in errors_in(values)] == ["4", "5", "6"]


def test_csv_cells_in_quotes_keep_their_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'\xef\xbb\xbfid,text\r\n1,"two\r\nlines"\r\n2,"a\rb\n"\r\n\r\n3,last\r')
    assert read(path) == ["two\r\nlines", "a\rb\n", "last"]
    path.write_bytes(b'text\n"\r"\n"x\r\n"\nend')
    assert read(path) == ["\r", "x\r\n", "end"]


def test_csv_quote_that_never_ends_is_an_error_where_it_starts(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('text\nfine\n"open\nand\nmore\n')
    values = read(path)
    assert values[0] == "fine" and "line 3:" in errors_in(values)[0]
    assert values[2:] == ["and", "more"]  # the other lines are records of their own


def test_tsv_and_long_cells(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text("id\ttext\n1\t" + "x" * 200_000 + "\n")
    assert read(path) == ["x" * 200_000]


def test_pairs_from_two_columns(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("a,b\nx,y\n")
    assert read(path, "a", "b") == [("x", "y")]
    (tmp_path / "a.txt").write_text("x\n")
    with pytest.raises(InputError, match="no columns"):
        read(tmp_path / "a.txt", "a", "b")


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.jsonl", '{"body": "x", "id": "1"}\n'), ("a.csv", "body,id\nx,1\n")],
)
def test_missing_column_lists_those_there(tmp_path: Path, name: str, content: str) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(InputError, match="no column 'text'; its columns: body, id"):
        read(path)


def test_a_later_file_without_the_column_fails_before_the_first_record(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text\nx\n")
    (tmp_path / "b.csv").write_text("body\nx\n")
    sources = open_sources([str(tmp_path / "a.csv"), str(tmp_path / "b.csv")])
    with pytest.raises(InputError, match="b.csv has no column"):
        read_records(sources, Shape())


@pytest.mark.feature("Command line", "text, CSV, JSONL and Parquet")
def test_parquet_rows_nulls_and_columns(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["one", None, "three"], "n": [1, 2, 3]}), path)
    values = read(path)
    assert values[0] == "one" and values[2] == "three"
    assert errors_in(values) == [
        f"{path} row 2: column 'text' must be a string or token ids, got null"
    ]
    with pytest.raises(InputError, match="its columns: text, n"):
        read(path, "body")
    path.write_bytes(b"PAR1 not really")
    with pytest.raises(InputError, match="cannot be read as parquet"):
        read(path)


def test_rank_requests(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    good = {"query": "q", "documents": ["a", "b"]}
    path.write_text(json.dumps(good) + '\n{"query": "q", "documents": "a"}\n')
    values = read(path, rank=True)
    assert values[0] == RankRequest("q", ("a", "b"))
    assert "'documents' must be a list" in errors_in(values)[0]


@pytest.mark.parametrize(
    ("name", "says"),
    [("a.txt.gz", "zcat"), ("a.json", "jq"), ("none.txt", "No such file"), ("", "is a folder")],
)
def test_inputs_that_cannot_be_opened_say_what_to_do(tmp_path: Path, name: str, says: str) -> None:
    if name.endswith(("gz", "json")):
        (tmp_path / name).write_text("x")
    with pytest.raises(InputError, match=says):
        open_sources([str(tmp_path / name)])


def test_end_bytes_reach_the_size_of_all_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    (tmp_path / "b.csv").write_text("text\nthree\n")
    sources = open_sources([str(tmp_path / "a.txt"), str(tmp_path / "b.csv")])
    ends = [record.end_bytes for record in read_records(sources, Shape())]
    assert ends == [4, 8, sum(source.size_bytes for source in sources)]


def test_records_of_a_pipe_are_read_once(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    os.write(write_end, b"one\ntwo\n")
    os.close(write_end)
    sources = open_sources([f"/dev/fd/{read_end}"])
    assert list(read_records(sources, Shape())) == [
        Record("one", 4, f"/dev/fd/{read_end} line 1"),
        Record("two", 8, f"/dev/fd/{read_end} line 2"),
    ]
    os.close(read_end)
