"""cli: what careless users and closed, full or shared files do to it, each named by its symptom."""

# ruff: noqa: F811  (fixtures of test_cli)

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from checkpoints import save_checkpoint
from cli_runs import Bytetx, command, environment

from bytetx.cli.files.encoders import LineEncoder
from bytetx.cli.files.options import MAX_THREADS
from bytetx.cli.files.resume import Counts
from bytetx.cli.files.terminal import closing_line

LONG_NAME = "a" * 300


def shell(redirection: str, *arguments: object) -> subprocess.CompletedProcess:
    """The command with one of its standard files closed or full."""
    line = f'exec "$@" {redirection}'
    return subprocess.run(
        ["bash", "-c", line, "bash", *command(*arguments)],
        env=environment(),
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    ("redirection", "says"),
    [
        ("<&-", "stdin is closed; give files"),
        (">&-", "stdout is closed; give an output file"),
        (">/dev/full", "stdout cannot be written: No space left on device"),
    ],
)
def test_a_closed_or_full_standard_file_was_a_traceback(
    encoder: Path,
    texts: Path,
    redirection: str,
    says: str,
) -> None:
    files = [] if "<" in redirection else [texts]
    ran = shell(redirection, "embed", "-m", encoder, *files)
    assert ran.returncode == 1 and says in ran.stderr
    assert ran.stderr.startswith("error: ") and ran.stderr.count("\n") == 1


def test_a_closed_stderr_costs_no_result(encoder: Path, texts: Path, tmp_path: Path) -> None:
    ran = shell("2>&-", "embed", "-m", encoder, texts, "-o", tmp_path / "v.npy")
    assert ran.returncode == 0 and np.load(tmp_path / "v.npy").shape[0] == 4


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("texts.txt", "-o", f"{LONG_NAME}.npy"), 1, "File name too long; give a shorter name"),
        (("texts.txt", "-o", f"{'a' * 245}.npy"), 1, "File name too long; give a shorter name"),
        ((LONG_NAME,), 1, "File name too long"),
        (("texts.txt", "-m", LONG_NAME), 1, "File name too long"),
        (("texts.txt", "-m", "~nobody-here/x"), 1, "cannot be opened"),
        (("texts.txt", "-m", "./none"), 1, "there is no folder none"),
        (("texts.txt", "-m", ""), 2, "--model is empty"),
        (("",), 2, "an input has an empty name"),
        (("-", "-"), 2, "stdin can be read only once"),
        (("texts.txt", "-o", ".npy"), 2, "must end in .npy, .jsonl, .parquet, got '.npy'"),
        (("texts.txt", "--threads", str(MAX_THREADS + 1)), 2, "--threads"),
        (("texts.txt", "--prompt", "\udcff"), 2, "prompt holds half a surrogate pair"),
        (("twice.csv", "-c", "a"), 1, "has column 'a' twice"),
    ],
)
def test_names_and_values_that_ended_in_a_traceback_or_misled(
    bytetx: Bytetx,
    texts: Path,
    encoder: Path,
    arguments: tuple[str, ...],
    code: int,
    says: str,
) -> None:
    Path("twice.csv").write_text("a,a\n1,2\n")
    model = () if "-m" in arguments else ("-m", encoder)
    ran = bytetx("embed", *arguments, *model)
    assert ran.code == code and says in ran.err, ran.err
    assert ran.err.startswith("error: ") and ran.err.count("\n") == 1
    assert sorted(os.listdir()) == ["texts.txt", "twice.csv"]


def test_overwrite_replaced_the_input(bytetx: Bytetx, encoder: Path, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"text": "mine"}\n')
    Path("folder").symlink_to(tmp_path)
    for name in ("t.jsonl", "folder/t.jsonl"):
        ran = bytetx("embed", path, "-m", encoder, "-o", name, "--overwrite")
        assert ran.code == 2 and "is an input and" in ran.err
    assert path.read_text() == '{"text": "mine"}\n'


def test_half_a_surrogate_in_a_query_ended_the_job(bytetx: Bytetx, tmp_path: Path) -> None:
    ranker = save_checkpoint(tmp_path / "rank", head="ForSequenceClassification", num_labels=1)
    lines = [{"query": "\ud800", "documents": ["x"]}, {"query": "a", "documents": ["x", "\ud800"]}]
    (tmp_path / "r.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    rows = bytetx("rerank", "r.jsonl", "-m", ranker).rows
    assert "r.jsonl line 1: the query holds half a surrogate pair" in rows[0]["error"]
    assert [hit["index"] for hit in rows[1]["hits"]] == [0, 1] and "error" in rows[1]["hits"][1]


def test_queries_and_documents_both_read_stdin(bytetx: Bytetx, encoder: Path) -> None:
    ran = bytetx("rerank", "-", "--query-file", "-", "-m", encoder)
    assert ran.code == 2 and "cannot both come from stdin" in ran.err


def test_half_a_surrogate_in_a_label_ended_the_job() -> None:
    row = LineEncoder(lambda label: json.dumps({"label": label}, ensure_ascii=False))
    assert json.loads(row.encode(0, "\ud800").data) == {"index": 0, "label": "\ud800"}


def test_token_ids_beyond_64_bits_are_out_of_range(bytetx: Bytetx, encoder: Path) -> None:
    Path("a.jsonl").write_text('{"text": [1' + "0" * 30 + ']}\n{"text": [3]}\n')
    rows = bytetx("embed", "a.jsonl", "-m", encoder).rows
    assert "holds token id 1000" in rows[0]["error"] and "embedding" in rows[1]


def test_one_of_a_thing_has_no_plural() -> None:
    counts = Counts(num_texts=1, num_tokens=1, num_pad_tokens=1, num_errors=1, seconds=1)
    line = closing_line(counts, what="embed")
    assert line.startswith("embed: 1 text, 1 token in") and line.endswith("1 error")
    assert "1 pad token not computed" in line


def test_a_checkpoint_without_a_tokenizer_says_how_to_add_one(
    bytetx: Bytetx,
    texts: Path,
    tmp_path: Path,
) -> None:
    folder = save_checkpoint(tmp_path / "m")
    for path in folder.glob("tokenizer*"):
        path.unlink()
    ran = bytetx("embed", texts, "-m", folder)
    assert ran.code == 1 and "save the tokenizer into" in ran.rows[0]["error"]
