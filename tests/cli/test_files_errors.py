"""files: inputs and outputs that fail while a job runs, each a row's error or one line."""

# ruff: noqa: F811  (fixtures of test_cli)

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader, FileIO
from pathlib import Path

import numpy as np
import pytest
from chat_templates import TEMPLATE
from checkpoints import save_causal, save_checkpoint
from cli_runs import Bytetx, command, environment

import bytetx as api
from bytetx.cli.files import job
from bytetx.cli.files.reader import open_sources, read_records
from bytetx.cli.files.records import Record, RecordError, Shape
from bytetx.errors import InputError

HALF = "\ud800"


def read(*paths: Path, columns: tuple[str, ...] = ("text",)) -> list[Record]:
    return list(read_records(open_sources([str(path) for path in paths]), Shape(columns)))


def write_parquet(path: str, **columns: list) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table(columns), path)


def write_bad_utf8(path: str, cells: list[bytes]) -> None:
    """A string column whose bytes are what they are."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    offsets = np.cumsum([0, *map(len, cells)]).astype(np.int32)
    buffers = [None, pa.py_buffer(offsets.tobytes()), pa.py_buffer(b"".join(cells))]
    texts = pa.StringArray.from_buffers(len(cells), buffers[1], buffers[2])
    pq.write_table(pa.table({"text": texts, "id": list(range(len(cells)))}), path)


class Failing(FileIO):
    """A file whose disk fails behind some bytes."""

    good_bytes = 0

    def readinto(self, buffer: memoryview) -> int:
        if self.tell() >= self.good_bytes:
            raise OSError(5, "Input/output error")
        return super().readinto(memoryview(buffer)[: self.good_bytes - self.tell()])


@contextmanager
def failing_disk(good_bytes: int) -> Iterator[None]:
    """Inputs that fail behind so many bytes."""
    own = Path.open

    def opened(path: Path, mode: str = "r", *rest: object, **more: object) -> object:
        if mode != "rb" or path.suffix not in (".jsonl", ".csv", ".txt"):
            return own(path, mode, *rest, **more)
        file = Failing(path, "rb")
        file.good_bytes = good_bytes
        return BufferedReader(file)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "open", opened)
        yield


@pytest.mark.parametrize("out", ["v.npy", "v.jsonl", "v.parquet"])
def test_a_disk_that_fails_under_an_input_was_a_traceback_and_kept_nothing(
    bytetx: Bytetx, encoder: Path, out: str
) -> None:
    if out == "v.parquet":
        pytest.importorskip("pyarrow")
    rows = [json.dumps({"text": f"text {i}"}) for i in range(2000)]
    Path("a.jsonl").write_text("\n".join(rows))
    own = ("embed", "a.jsonl", "-m", encoder, "-o")
    assert bytetx(*own, f"whole-{out}").code == 0
    with failing_disk(20_000):
        ran = bytetx(*own, out)
    num_whole_lines = "\n".join(rows)[:20_000].count("\n")
    assert ran.code == 1 and ran.err.count("\n") == 1, ran.err
    assert "a.jsonl cannot be read: Input/output error; " in ran.err
    assert f"{num_whole_lines:,} results are saved; continue with" in ran.err
    assert bytetx(*own, out, "--resume").code == 0
    assert Path(out).read_bytes() == Path(f"whole-{out}").read_bytes()


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv"])
@pytest.mark.parametrize("good_bytes", [0, 12])
def test_every_reader_says_which_input_failed(tmp_path: Path, name: str, good_bytes: int) -> None:
    path = tmp_path / name
    path.write_text("text\n" + '{"text": 1}\n' * 5)
    with (
        failing_disk(good_bytes),
        pytest.raises(InputError, match=f"{name} cannot be read: Input/output error"),
    ):
        read(path)


def test_what_cannot_be_read_at_all_is_one_line(bytetx: Bytetx, encoder: Path) -> None:
    for name in ("mem.txt", "mem.jsonl", "mem.csv", "mem.parquet"):
        Path(name).symlink_to("/proc/self/mem")  # its first byte is an EIO
        ran = bytetx("embed", name, "-m", encoder)
        assert ran.code == 1 and "cannot be read" in ran.err and ran.err.count("\n") == 1, ran.err
    ran = bytetx("rerank", "-m", encoder, "--query-file", "mem.txt", "mem.txt")
    assert ran.code == 1 and "mem.txt cannot be read" in ran.err


def test_a_file_that_went_away_or_became_shorter(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("a text\n" * 5000)
    sources = open_sources([str(path)])
    records = read_records(sources, Shape())
    next(records)
    path.write_text("a text\n" * 10)
    with pytest.raises(InputError, match="a.txt became shorter while it was read"):
        list(records)
    path.unlink()
    with pytest.raises(InputError, match="a.txt cannot be read: No such file"):
        read_records(sources, Shape())


def test_a_stdin_that_cannot_be_read_is_one_line(encoder: Path, tmp_path: Path) -> None:
    with open("/proc/self/mem", "rb") as stdin:
        ran = subprocess.run(
            command("embed", "-m", encoder),
            env=environment(),
            stdin=stdin,
            capture_output=True,
            text=True,
        )
    assert ran.returncode == 1 and ran.stderr.startswith("error: stdin cannot be read")
    assert ran.stderr.count("\n") == 1


def test_a_full_stderr_costs_no_result(encoder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n")
    with open("/dev/full", "w") as stderr:
        own = command("embed", tmp_path / "a.txt", "-m", encoder, "-o", tmp_path / "v.npy")
        assert subprocess.run(own, env=environment(), stderr=stderr).returncode == 0
        assert subprocess.run(own, env=environment(), stderr=stderr).returncode == 1
    assert np.load(tmp_path / "v.npy").shape[0] == 1


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'"a"b,text\n', "has no header that can be read"),
        (b'"text\nx\n', "header that can be read"),
    ],
)
def test_a_csv_header_that_cannot_be_read_is_one_line(
    tmp_path: Path, content: bytes, says: str
) -> None:
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(InputError, match=says):
        read(tmp_path / "a.csv")


def test_a_csv_header_that_is_not_utf8_is_one_line(bytetx: Bytetx, encoder: Path) -> None:
    Path("a.csv").write_bytes(b"caf\xe9,text\n1,x\n")
    assert len(bytetx("embed", "a.csv", "-m", encoder).rows) == 1
    ran = bytetx("embed", "a.csv", "-m", encoder, "-c", "body")
    assert ran.code == 1 and "its columns: caf" in ran.err and ran.err.count("\n") == 1


def test_parquet_text_that_is_not_utf8_is_that_rows_error(bytetx: Bytetx, encoder: Path) -> None:
    write_bad_utf8("a.parquet", [b"one", b"caf\xe9", b"three"])
    ran = bytetx("embed", "a.parquet", "-m", encoder, "--keep", "id,text")
    assert ran.code == 0, ran.err
    assert ["error" in row for row in ran.rows] == [False, True, False]
    assert "a.parquet row 2: column 'text': byte 0xe9 is not UTF-8" in ran.rows[1]["error"]
    assert [row["text"] for row in ran.rows] == ["one", None, "three"]
    assert [row["id"] for row in ran.rows] == [0, 1, 2]


def test_a_parquet_file_that_is_cut_is_one_line(bytetx: Bytetx, encoder: Path) -> None:
    write_parquet("a.parquet", text=[f"text {i}" for i in range(5000)])
    data = Path("a.parquet").read_bytes()
    Path("a.parquet").write_bytes(data[: len(data) // 2] + data[-len(data) // 4 :])
    ran = bytetx("embed", "a.parquet", "-m", encoder)
    assert ran.code == 1 and "cannot be read as parquet" in ran.err and ran.err.count("\n") == 1


def test_a_parquet_column_that_is_there_twice_was_taken_silently(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    pq.write_table(table, path)
    with pytest.raises(InputError, match="has column 'text' twice; rename one of them"):
        read(path)


def test_half_a_surrogate_in_an_error_ended_a_parquet_output(bytetx: Bytetx, encoder: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    name = os.fsdecode(b"caf\xe9.txt")
    Path(name).write_text("fine\n" + "long " * 100)
    assert bytetx("embed", name, "-m", encoder, "-o", "v.parquet").code == 0
    assert "has more than" in pq.read_table("v.parquet").column("error").to_pylist()[1]


@pytest.mark.parametrize("out", ["v.npy", "v.jsonl"])
def test_a_renamed_input_with_a_broken_line_could_not_be_resumed(
    bytetx: Bytetx, encoder: Path, monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    monkeypatch.setattr(job, "COMMIT_ROWS", 1)
    lines = ["{broken", '{"text": 5}', *(json.dumps({"text": f"text {i}"}) for i in range(600))]
    Path("a.jsonl").write_text("\n".join(lines))
    own = ("-m", encoder, "--token-budget", 64, "-o", out)
    with monkeypatch.context() as patch:
        own_iter = job._GoodValues.__iter__

        def interrupted(values: object) -> object:
            for number, value in enumerate(own_iter(values)):
                if number == 580:
                    raise KeyboardInterrupt
                yield value

        patch.setattr(job._GoodValues, "__iter__", interrupted)
        assert bytetx("embed", "a.jsonl", *own).code == 130
    Path("elsewhere").mkdir()
    Path("a.jsonl").rename("elsewhere/b.jsonl")
    changed = Path("elsewhere/c.jsonl")
    changed.write_text("\n".join(["fine", *lines[1:]]).replace('"text": 5', '"text": []'))
    ran = bytetx("embed", changed, *own, "--resume")
    assert ran.code == 1 and "other inputs" in ran.err
    ran = bytetx("embed", "elsewhere/b.jsonl", *own, "--resume")
    assert ran.code == 0 and "602 texts" in ran.err, ran.err


def test_a_broken_query_or_document_is_known_by_what_is_wrong_with_it() -> None:
    from bytetx.cli.files.records import RankRequest
    from bytetx.cli.files.resume import digest_record

    def digest(where: str, problem: str) -> str:
        error = RecordError(where, problem)
        return digest_record("", Record(RankRequest("q", ("a", error)), 0, where))

    assert digest("a.txt line 1", "bad") == digest("b.txt line 7", "bad")
    assert digest("a.txt line 1", "bad") != digest("a.txt line 1", "worse")


def test_an_input_that_stands_beside_the_output_was_deleted(bytetx: Bytetx, encoder: Path) -> None:
    for name in ("v.npy.errors.jsonl", "v.npy.partial", "v.npy.progress.json"):
        Path(name).write_text('{"text": "mine"}\n')
        own = ("embed", name, "-m", encoder, "-o", "v.npy", "--input-format", "jsonl")
        ran = bytetx(*own, "--overwrite")
        assert ran.code == 2 and "is an input and" in ran.err, ran.err
        assert Path(name).read_text() == '{"text": "mine"}\n'
        Path(name).unlink()


def test_overwrite_replaced_the_file_of_queries(bytetx: Bytetx, tmp_path: Path) -> None:
    ranker = save_checkpoint(tmp_path / "rank", head="ForSequenceClassification", num_labels=1)
    Path("docs.txt").write_text("x\n")
    Path("q.jsonl").write_text('{"text": "mine"}\n')
    own = ("rerank", "docs.txt", "-m", ranker, "--query-file", "q.jsonl", "--overwrite", "-o")
    for out in ("q.jsonl", "docs.jsonl"):
        Path("docs.jsonl").unlink(missing_ok=True)
        Path("docs.jsonl").hardlink_to("docs.txt")
        ran = bytetx(*own, out)
        assert ran.code == 2 and "is an input and" in ran.err
    assert Path("q.jsonl").read_text() == '{"text": "mine"}\n'


CHATS = [
    [{"role": "user", "content": f"half {HALF}"}],
    [{"role": f"us{HALF}er", "content": "x"}],
    [{"role": "user", "content": [{"type": "text", "text": HALF}]}],
    [{"role": "user", "content": "x", "tool_calls": [{"function": {"name": HALF, "a": 1}}]}],
    [{"role": "user", "content": {f"key {HALF}": 1}}],
]
NESTED = (
    "{% for m in messages %}{{ m.role }}: {{ m.content if m.content is string else "
    "m.content | tojson }}{{ m.tool_calls | tojson if m.tool_calls else '' }}{% endfor %}"
)


@pytest.mark.parametrize("template", [NESTED, TEMPLATE])
def test_half_a_surrogate_in_a_chat_ended_the_whole_job(
    bytetx: Bytetx, tmp_path: Path, template: str
) -> None:
    folder = save_causal(tmp_path / "causal")
    (folder / "chat_template.jinja").write_text(template)
    fine = [{"role": "user", "content": "hello"}]
    chats = [fine, *CHATS, fine]
    Path("c.jsonl").write_text("".join(json.dumps({"text": chat}) + "\n" for chat in chats))
    own = ("generate", "c.jsonl", "-m", folder, "--max-tokens", 3, "--temperature", 0)
    ran = bytetx(*own)
    assert ran.code == 0, ran.err
    is_error = ["error" in row for row in ran.rows]
    # The short template shows no field but role and content, and what is not shown does no harm.
    unseen = template == TEMPLATE
    assert is_error[:4] == [False, True, True, not unseen or is_error[3]]
    assert not is_error[6] and ran.rows[6]["text"] == ran.rows[0]["text"]
    model = api.load(folder)
    params = api.SamplingParams(max_tokens=3, temperature=0)
    answers = model.generate(chats, params, on_error="return")
    assert [isinstance(answer, InputError) for answer in answers] == is_error
    assert "half a surrogate pair" in str(answers[1])
    with pytest.raises(InputError, match=r"prompts\[1\]: .*half a surrogate pair"):
        model.generate(chats, params)


def test_entities_have_the_fields_of_hugging_faces_pipeline(bytetx: Bytetx, tmp_path: Path) -> None:
    pq, transformers = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("transformers")
    folder = save_checkpoint(tmp_path / "tag", head="ForTokenClassification")
    text = "New York is big. San Francisco isn't far"
    Path("t.txt").write_text(f"{text}\n")
    for aggregation in ("none", "simple", "first"):
        theirs = transformers.pipeline(
            "token-classification", str(folder), aggregation_strategy=aggregation, device="cpu"
        )(text)
        ran = bytetx("tag", "t.txt", "-m", folder, "--aggregation", aggregation)
        ours = ran.rows[0]["entities"]
        names = sorted(ours[0])
        assert theirs and len(ours) == len(theirs)
        for own, their in zip(ours, theirs, strict=True):
            assert list(own) == list(their)
            assert own.pop("score") == pytest.approx(float(their.pop("score")), abs=1e-5)
            assert own == their
        out = f"{aggregation}.parquet"
        assert (
            bytetx("tag", "t.txt", "-m", folder, "--aggregation", aggregation, "-o", out).code == 0
        )
        assert sorted(pq.read_table(out).to_pylist()[0]["entities"][0]) == names


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("embed", "t.txt", "--pooling", "best"), "pooling must be one or more of"),
        (("embed", "t.txt", "--prompt-name", "none"), "prompt_name 'none' is not in"),
        (("embed", "t.txt", "--dtype", "int3"), "dtype must be"),
        (("embed", "t.txt", "--device", "tpu"), "device must be"),
        (("embed", "-", "--input-format", "parquet"), "cannot be read from stdin"),
        (("tag", "t.txt", "--aggregation", "best"), "aggregation must be one of"),
        (("generate", "t.txt", "--stop", ""), "stop must be"),
        (("rerank", "t.txt", "--query", "\udcff"), "not UTF-8"),
    ],
)
def test_wrong_options_exit_with_2_even_where_the_model_refuses_them(
    bytetx: Bytetx, encoder: Path, arguments: tuple[str, ...], says: str
) -> None:
    Path("t.txt").write_text("x\n")
    ran = bytetx(*arguments, "-m", encoder)
    assert ran.code == 2 and says in ran.err, ran.err
    assert ran.err.startswith("error: ") and ran.err.count("\n") == 1
