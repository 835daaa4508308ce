"""files: readers, writers and the resumption of a killed job, with a model that is a function."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from bytetx.engine.request import RunStats

from bytetx.errors import InputError
from bytetx.files.job import run_job
from bytetx.files.reader import RankRequest, Record, Shape, open_sources, read_records
from bytetx.files.resume import Counts, Progress, skip_done
from bytetx.files.terminal import closing_line, short
from bytetx.files.writer import (
    NPY_HEADER_BYTES,
    LineEncoder,
    OutputError,
    StagedOutput,
    VectorEncoder,
    check_output,
    unfinished_progress,
)

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


def test_csv_quote_that_never_ends_is_an_error_where_it_starts(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('text\nfine\n"open\nand\nmore\n')
    values = read(path)
    assert values[0] == "fine" and "line 3:" in errors_in(values)[0] and len(values) == 2


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


# --- outputs and jobs -----------------------------------------------------------------------


@dataclass
class FakeStream:
    """A model on a stream: a text's vector is made of its letters; "bad" cannot be run."""

    texts: Iterator[str]
    stop_after: int | None = None
    num_texts: int = 0
    num_tokens: int = 0

    @property
    def stats(self) -> RunStats:
        return RunStats(num_texts=self.num_texts, num_tokens=self.num_tokens)

    def __iter__(self) -> Iterator[object]:
        for number, text in enumerate(self.texts):
            if number == self.stop_after:
                raise KeyboardInterrupt
            self.num_texts += 1
            self.num_tokens += len(text)
            is_bad = text == "bad"
            yield InputError("a bad text") if is_bad else np.full(DIM, len(text), np.float32)


def run(source: Path, out: Path, encoder=None, *, resume: bool = False, stop_after=None) -> Counts:
    job = {"task": "embed", "options": {}}
    progress = unfinished_progress(out, job, resume=resume)
    records = read_records(open_sources([str(source)]), Shape())
    skip_done(records, progress, out)
    encoder = encoder or VectorEncoder(DIM)
    output = StagedOutput(out, encoder, progress=progress)
    try:
        run_job(
            records,
            lambda texts: FakeStream(texts, stop_after=stop_after),
            output=output,
            encoder=encoder,
            show=lambda counts, end_bytes: None,
        )
        output.finish()
    finally:
        output.close()
    return output.progress.counts


def embedding_lines() -> LineEncoder:
    return LineEncoder(lambda vector: json.dumps({"embedding": vector.tolist()}))


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    rows = [json.dumps({"text": "x" * (i % 7)}) for i in range(40)]
    rows[3], rows[11], rows[39] = "broken", '{"text": "bad"}', "{"
    path.write_text("\n".join(rows) + "\n")
    return path


def test_npy_rows_stand_in_order_and_errors_are_nan_rows(texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "v.npy"
    counts = run(texts, out)
    vectors = np.load(out)
    assert vectors.shape == (40, DIM) and vectors.dtype == np.float32
    assert [i for i in range(40) if np.isnan(vectors[i]).all()] == [3, 11, 39]
    assert vectors[5, 0] == 5 and counts.num_errors == 3 and counts.num_texts == 40
    errors = [json.loads(line) for line in Path(f"{out}.errors.jsonl").read_text().splitlines()]
    assert [row["index"] for row in errors] == [3, 11, 39]
    assert sorted(os.listdir(tmp_path)) == ["in.jsonl", "v.npy", "v.npy.errors.jsonl"]


def test_npy_header_is_numpys_own(tmp_path: Path) -> None:
    for num_rows, dim in ((0, 0), (3, 384), (10**12, 4096)):
        header = VectorEncoder(dim).header(num_rows)
        assert len(header) == NPY_HEADER_BYTES and len(header) % 64 == 0
    out = tmp_path / "v.npy"
    out.write_bytes(VectorEncoder(3).header(2) + np.arange(6, dtype="<f4").tobytes())
    assert np.load(out).tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_vector_that_is_not_finite_is_an_error() -> None:
    row = VectorEncoder(2).encode(7, np.array([1, np.inf], np.float32))
    assert row.is_error and b"not finite" in row.error_line


def test_jsonl_holds_errors_in_line(texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "v.jsonl"
    run(texts, out, embedding_lines())
    rows = [json.loads(line) for line in out.open()]
    assert [row["index"] for row in rows] == list(range(40))
    assert [row["index"] for row in rows if "error" in row] == [3, 11, 39]


def test_parquet_from_vectors(texts: Path, tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    out = tmp_path / "v.parquet"
    run(texts, out)
    table = pq.read_table(out)
    assert table.column("index").to_pylist() == list(range(40))
    vectors = table.column("embedding").to_pylist()
    assert vectors[5] == [5.0] * DIM and vectors[3] is None
    assert "not JSON" in table.column("error").to_pylist()[3]
    assert sorted(os.listdir(tmp_path)) == ["in.jsonl", "v.parquet"]


@pytest.mark.parametrize("suffix", [".npy", ".jsonl", ".parquet"])
@pytest.mark.parametrize("stop_after", [1, 4, 17, 36])
def test_a_stopped_job_resumes_to_the_same_bytes(
    texts: Path, tmp_path: Path, suffix: str, stop_after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bytetx.files.job.COMMIT_ROWS", 3)
    encoder = embedding_lines() if suffix == ".jsonl" else VectorEncoder(DIM)
    whole, out = tmp_path / f"whole{suffix}", tmp_path / f"out{suffix}"
    expected = run(texts, whole, encoder)
    with pytest.raises(KeyboardInterrupt):
        run(texts, out, encoder, stop_after=stop_after)
    assert not out.exists()
    assert check_output(out, resume=True, overwrite=False)
    counts = run(texts, out, encoder, resume=True)
    assert out.read_bytes() == whole.read_bytes()
    assert replace(counts, seconds=0) == replace(expected, seconds=0)


def test_rows_beyond_the_last_commit_are_written_over(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bytetx.files.job.COMMIT_ROWS", 3)
    out = tmp_path / "out.jsonl"
    expected = tmp_path / "whole.jsonl"
    run(texts, expected, embedding_lines())
    with pytest.raises(KeyboardInterrupt):
        run(texts, out, embedding_lines(), stop_after=17)
    with Path(f"{out}.partial").open("ab") as file:
        file.write(b'{"index": 18, "embed' + b"x" * 10_000)
    run(texts, out, embedding_lines(), resume=True)
    assert out.read_bytes() == expected.read_bytes()


def test_resuming_with_other_inputs_or_options_is_refused(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bytetx.files.job.COMMIT_ROWS", 3)
    out = tmp_path / "out.npy"
    with pytest.raises(KeyboardInterrupt):
        run(texts, out, stop_after=17)
    with pytest.raises(InputError, match="options was .* and is"):
        unfinished_progress(out, {"task": "embed", "options": {"dim": 3}}, resume=True)
    lines = texts.read_text().splitlines()
    texts.write_text("\n".join(['{"text": "other"}', *lines[1:]]))
    with pytest.raises(InputError, match="other inputs"):
        run(texts, out, resume=True)
    texts.write_text("\n".join(lines[:2]))
    with pytest.raises(InputError, match="other inputs"):
        run(texts, out, resume=True)
    texts.write_text("\n".join([*lines, '{"text": "one more"}']))
    assert run(texts, out, resume=True).num_texts == 41


def test_a_damaged_progress_file_is_an_error_that_says_so(tmp_path: Path) -> None:
    out = tmp_path / "out.npy"
    Path(f"{out}.partial").touch()
    Path(f"{out}.progress.json").write_text('{"job": {}')
    with pytest.raises(InputError, match="--overwrite"):
        unfinished_progress(out, {}, resume=True)


def test_a_job_without_rows_leaves_nothing_behind(tmp_path: Path) -> None:
    output = StagedOutput(tmp_path / "v.npy", VectorEncoder(DIM), progress=Progress({}))
    output.close()
    assert os.listdir(tmp_path) == []


def test_two_jobs_on_one_output_are_refused(tmp_path: Path) -> None:
    first = StagedOutput(tmp_path / "v.npy", VectorEncoder(DIM), progress=Progress({}))
    with pytest.raises(OutputError, match="another bytetx"):
        StagedOutput(tmp_path / "v.npy", VectorEncoder(DIM), progress=Progress({}))
    first.close()


def test_disk_full_keeps_what_is_committed(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bytetx.files.job.COMMIT_ROWS", 3)
    whole, out = tmp_path / "whole.npy", tmp_path / "out.npy"
    run(texts, whole)
    room, pwrite = [20], os.pwrite

    def full(descriptor: int, data: bytes, offset: int) -> int:
        room[0] -= 1
        if room[0] < 0:
            raise OSError(28, "No space left on device")
        return pwrite(descriptor, data[: max(1, len(data) // 2)], offset)  # short writes, too

    monkeypatch.setattr("bytetx.files.writer.os.pwrite", full)
    with pytest.raises(OutputError, match="No space left on device; .* results are kept"):
        run(texts, out)
    monkeypatch.setattr("bytetx.files.writer.os.pwrite", pwrite)
    run(texts, out, resume=True)
    assert out.read_bytes() == whole.read_bytes()


def test_check_output_refuses_before_any_work(tmp_path: Path) -> None:
    def problem(name: str, *, resume: bool = False, overwrite: bool = False) -> str:
        with pytest.raises(OutputError) as caught:
            check_output(tmp_path / name, resume=resume, overwrite=overwrite)
        return str(caught.value)

    assert "must end in .npy" in problem("v.bin")
    assert "no folder" in problem("none/v.npy")
    (tmp_path / "d.npy").mkdir()
    assert "is a folder" in problem("d.npy")
    (tmp_path / "v.npy").touch()
    assert "--overwrite" in problem("v.npy")
    assert check_output(tmp_path / "v.npy", resume=False, overwrite=True)
    assert not check_output(tmp_path / "v.npy", resume=True, overwrite=False)
    for name in ("u.npy.partial", "u.npy.progress.json"):
        (tmp_path / name).touch()
    assert "--resume" in problem("u.npy")


def test_closing_line_says_everything() -> None:
    counts = Counts(1000, 12, 3, 2, 40_000, 60_000, 2.0)
    assert closing_line(counts, what="embed → v.npy") == (
        "embed → v.npy: 1,000 texts (12 blank, a row each), 40,000 tokens, 60,000 pad tokens "
        "not computed (60% of a padded run), 2 truncated, 3 errors; 2.0 s, 500 texts/s, "
        "20k tokens/s"
    )
    assert [short(n) for n in (0.4, 87, 999.6, 46_200, 3.1e6)] == ["0", "87", "1.0k", "46k", "3.1M"]


def test_records_of_a_pipe_are_read_once(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    os.write(write_end, b"one\ntwo\n")
    os.close(write_end)
    sources = open_sources([f"/dev/fd/{read_end}"])
    assert list(read_records(sources, Shape())) == [Record("one", 4), Record("two", 8)]
    os.close(read_end)
