"""files: staged outputs and the resumption of a stopped job, with a model that is a function."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from paths import ROOT, TESTS

from bytetx.cli.files import job
from bytetx.cli.files.encoders import NPY_HEADER_BYTES, LineEncoder, VectorEncoder
from bytetx.cli.files.lock import OutputError, OutputLock, OutputPaths, check_output
from bytetx.cli.files.parquet import ParquetForm
from bytetx.cli.files.reader import open_sources, read_records
from bytetx.cli.files.records import Shape
from bytetx.cli.files.resume import (
    SIDE_FILES,
    Counts,
    JobProgress,
    check_same_job,
    model_identity,
    side_files_identity,
    skip_done,
)
from bytetx.cli.files.terminal import closing_line, short
from bytetx.cli.files.writer import StagedOutput, begin_or_resume, find_unfinished, is_complete
from bytetx.encode.request import RunStats
from bytetx.errors import InputError, OptionError

DIM = 4


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
    with OutputLock(OutputPaths(out)) as lock:
        return run_locked(lock, source, encoder, resume=resume, stop_after=stop_after)


def run_locked(lock: OutputLock, source: Path, encoder, *, resume: bool, stop_after=None) -> Counts:
    out = lock.paths.name
    progress = found(lock, {"task": "embed", "options": {}}, resume=resume)
    records = read_records(open_sources([str(source)]), Shape())
    skip_done(records, progress, out)
    if encoder is None:
        encoder = embedding_lines() if out.suffix == ".jsonl" else VectorEncoder(DIM)
    parquet = ParquetForm({"embedding": ["float32"]}) if out.suffix == ".parquet" else None
    output = StagedOutput(lock, encoder, progress=progress, parquet=parquet)
    try:
        job.run_job(
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


def found(lock: OutputLock, what: dict, *, resume: bool) -> JobProgress:
    unfinished = find_unfinished(lock, resume=resume, overwrite=False)
    return begin_or_resume(unfinished, what, lock, overwrite=False)


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
    assert row.is_error and b"not finite" in row.list_line


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
    monkeypatch.setattr("bytetx.cli.files.job.COMMIT_ROWS", 3)
    encoder = embedding_lines() if suffix == ".jsonl" else VectorEncoder(DIM)
    whole, out = tmp_path / f"whole{suffix}", tmp_path / f"out{suffix}"
    expected = run(texts, whole, encoder)
    with pytest.raises(KeyboardInterrupt):
        run(texts, out, encoder, stop_after=stop_after)
    assert not out.exists()
    counts = run(texts, out, encoder, resume=True)
    assert out.read_bytes() == whole.read_bytes()
    assert replace(counts, seconds=0) == replace(expected, seconds=0)


def test_rows_beyond_the_last_commit_are_written_over(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bytetx.cli.files.job.COMMIT_ROWS", 3)
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
    monkeypatch.setattr("bytetx.cli.files.job.COMMIT_ROWS", 3)
    out = tmp_path / "out.npy"
    with pytest.raises(KeyboardInterrupt):
        run(texts, out, stop_after=17)
    with (
        OutputLock(OutputPaths(out)) as lock,
        pytest.raises(InputError, match="options was .* and is"),
    ):
        found(lock, {"task": "embed", "options": {"dim": 3}}, resume=True)
    lines = texts.read_text().splitlines()
    texts.write_text("\n".join(['{"text": "other"}', *lines[1:]]))
    with pytest.raises(InputError, match="other inputs"):
        run(texts, out, resume=True)
    texts.write_text("\n".join(lines[:2]))
    with pytest.raises(InputError, match="other inputs"):
        run(texts, out, resume=True)
    texts.write_text("\n".join([*lines, '{"text": "one more"}']))
    assert run(texts, out, resume=True).num_texts == 41


def test_a_tokenizer_or_a_pooling_of_before_is_not_resumed_with_another(tmp_path: Path) -> None:
    (tmp_path / "1_Pooling").mkdir()
    files = ["config.json", "tokenizer.json", "vocab.txt", "1_Pooling/config.json"]
    files.append("viterbi_calibration.json")
    for name in files:
        (tmp_path / name).write_text("{}")
    first = side_files_identity(tmp_path)
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "config.json").write_text("{}")
    for name in ("README.md", "in.txt", "out.npy.progress.json", "out.jsonl"):
        (tmp_path / name).write_text("hello")
    assert side_files_identity(tmp_path) == first
    out = OutputPaths(tmp_path / "v.npy").progress
    progress = JobProgress({"task": "embed", SIDE_FILES: first})
    for name in files:
        (tmp_path / name).write_text("[]")
        now = side_files_identity(tmp_path)
        assert now != first
        with pytest.raises(InputError, match=SIDE_FILES):
            check_same_job(progress, {"task": "embed", SIDE_FILES: now}, out)
        # A job that noted none goes on.
        check_same_job(JobProgress({"task": "embed"}), {"task": "embed", SIDE_FILES: now}, out)
        (tmp_path / name).write_text("{}")
    assert side_files_identity(tmp_path) == first


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors",
        "pytorch_model.bin",
        "2_Dense/pytorch_model.bin",
        "2_Dense/model.safetensors",
        "sparse_linear.pt",
        "colbert_linear.pt",
        "model.gguf",
    ],
)
def test_other_weights_are_another_model(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"one")
    first = model_identity(tmp_path)
    (tmp_path / "out.npy").write_bytes(b"rows")
    assert model_identity(tmp_path) == first
    (tmp_path / name).write_bytes(b"two")
    assert model_identity(tmp_path) != first


def test_a_damaged_progress_file_is_an_error_that_says_so(tmp_path: Path) -> None:
    out = tmp_path / "out.npy"
    Path(f"{out}.partial").touch()
    Path(f"{out}.progress.json").write_text('{"job": {}')
    with OutputLock(OutputPaths(out)) as lock, pytest.raises(InputError, match="--overwrite"):
        found(lock, {}, resume=True)


def test_a_job_without_rows_leaves_nothing_behind(tmp_path: Path) -> None:
    with OutputLock(OutputPaths(tmp_path / "v.npy")) as lock:
        StagedOutput(lock, VectorEncoder(DIM), progress=JobProgress({})).close()
    assert os.listdir(tmp_path) == []


def test_two_jobs_on_one_output_are_refused(tmp_path: Path) -> None:
    paths = OutputPaths(tmp_path / "v.npy")
    with OutputLock(paths), pytest.raises(OutputError, match="written by another bytetx"):
        OutputLock(paths)
    assert os.listdir(tmp_path) == []


def test_disk_full_keeps_what_is_committed(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bytetx.cli.files.job.COMMIT_ROWS", 3)
    whole, out = tmp_path / "whole.npy", tmp_path / "out.npy"
    run(texts, whole)
    room, pwrite = [20], os.pwrite

    def full(descriptor: int, data: bytes, offset: int) -> int:
        room[0] -= 1
        if room[0] < 0:
            raise OSError(28, "No space left on device")
        return pwrite(descriptor, data[: max(1, len(data) // 2)], offset)  # short writes, too

    monkeypatch.setattr("bytetx.cli.files.writer.os.pwrite", full)
    with pytest.raises(OutputError, match="No space left on device; .* results are saved"):
        run(texts, out)
    monkeypatch.setattr("bytetx.cli.files.writer.os.pwrite", pwrite)
    run(texts, out, resume=True)
    assert out.read_bytes() == whole.read_bytes()


def test_check_output_refuses_before_any_work(tmp_path: Path) -> None:
    def problem(name: str) -> str:
        with pytest.raises(OutputError) as caught:
            check_output(tmp_path / name)
        return str(caught.value)

    with pytest.raises(OptionError, match="must end in .npy"):
        check_output(tmp_path / "v.bin")
    assert "no folder" in problem("none/v.npy")
    (tmp_path / "d.npy").mkdir()
    assert "is a folder" in problem("d.npy")


def test_an_existing_output_stays_without_overwrite(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bytetx.cli.files.job.COMMIT_ROWS", 3)
    out = tmp_path / "v.npy"
    out.touch()
    with OutputLock(check_output(out)) as lock:
        with pytest.raises(OutputError, match="--overwrite"):
            is_complete(lock, resume=False, overwrite=False)
        assert not is_complete(lock, resume=False, overwrite=True)
        assert is_complete(lock, resume=True, overwrite=False)
    out.unlink()
    with pytest.raises(KeyboardInterrupt):
        run(texts, out, stop_after=30)
    with OutputLock(check_output(out)) as lock:
        with pytest.raises(OutputError, match="--resume"):
            find_unfinished(lock, resume=False, overwrite=False)
        assert find_unfinished(lock, resume=False, overwrite=True) is None


def test_closing_line_says_everything() -> None:
    counts = Counts(1000, 12, 3, 2, 40_000, 60_000, 2.0)
    assert closing_line(counts, what="embed → v.npy") == (
        "embed → v.npy: 1,000 texts (12 blank, a row each), 40,000 tokens in 2.0 s (500 texts/s, "
        "20k tokens/s); 60,000 pad tokens not computed (60% of a padded run); 2 truncated, 3 errors"
    )
    assert closing_line(Counts(2, 0, 2), what="tag", errors_at="x").endswith(
        "2 texts, 0 tokens in 0.0 s (2.0k texts/s, 0 tokens/s); 0 pad tokens not computed; "
        "2 errors, listed in x"
    )
    assert [short(n) for n in (0.4, 87, 999.6, 46_200, 3.1e6)] == ["0", "87", "1.0k", "46k", "3.1M"]


# A job that commits all the time, so that a kill at a random moment often hits a commit.
ENDLESS_COMMITS = """
import sys
from pathlib import Path
import test_files_resume as t
t.job.COMMIT_SECONDS = 0
t.run(Path(sys.argv[1]), Path(sys.argv[2]), resume=True)
"""


@pytest.mark.parametrize("suffix", [".npy", ".jsonl"])
def test_kill_at_random_moments_loses_nothing(tmp_path: Path, suffix: str) -> None:
    source = tmp_path / "in.jsonl"
    rows = ["{" if i % 13 == 5 else json.dumps({"text": "x" * (i % 9)}) for i in range(1500)]
    source.write_text("\n".join(rows))
    whole, out = tmp_path / f"whole{suffix}", tmp_path / f"out{suffix}"
    run(source, whole)
    here = Path(__file__).parent
    command = [sys.executable, "-c", ENDLESS_COMMITS, str(source), str(out)]
    paths = os.pathsep.join((str(here), str(TESTS), str(ROOT)))
    draw = random.Random()
    progress_path, num_kills = Path(f"{out}.progress.json"), 0
    while not out.exists():
        process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": paths})
        before = progress_path.read_bytes() if progress_path.exists() else b""
        while process.poll() is None and num_kills < 3:
            if progress_path.exists() and progress_path.read_bytes() != before:
                time.sleep(draw.uniform(0, 0.05))
                process.kill()
                num_kills += 1
                break
            time.sleep(0.001)
        assert process.wait() in (0, -signal.SIGKILL)
    assert out.read_bytes() == whole.read_bytes(), num_kills
