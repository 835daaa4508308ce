"""files: jobs that meet on one output or are killed, at every step; what the lock must stand."""

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cli_runs import command, environment
from paths import TESTS

from bytetx.cli.files.lock import OutputError, OutputLock, OutputPaths
from bytetx.errors import BytetxError

# Each of them with every task, suffix and step takes an hour on two cores; these are those that
# differ, and where it is not about the end of a job, some of the steps.
SCENARIOS = [
    ("two_resume", "embed", ".npy", 5),
    ("two_resume_what_a_third_left", "generate", ".jsonl", 5),
    ("two_overwrite", "embed", ".parquet", 5),
    ("killed", "generate", ".jsonl", 5),
    ("killed_in_finish", "embed", ".npy", 1),
    ("killed_in_finish", "generate", ".parquet", 1),
    ("killed_while_it_replaces", "embed", ".parquet", 5),
    ("killed_in_finish_while_it_replaces", "embed", ".npy", 1),
]


@pytest.mark.parametrize(("scenario", "task", "suffix", "every"), SCENARIOS)
def test_jobs_that_meet_or_die_at_any_step_left_zeros_or_strays(
    scenario: str, task: str, suffix: str, every: int, tmp_path: Path
) -> None:
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    script = TESTS / "job_steps.py"
    ran = subprocess.run(
        [sys.executable, script, scenario, task, suffix, tmp_path, str(every)],
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout.split()[-2]) > 15  # it did stop where files are touched


def test_two_jobs_started_together_wrote_rows_of_zeros(
    encoder: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    (tmp_path / "in.txt").write_text("a fox\n" * 50)
    own = ("embed", tmp_path / "in.txt", "-m", encoder, "--resume")
    for out in ("a.npy", "b.npy"):
        # Another spelling of the same output, through a link to its folder and one to the file.
        (tmp_path / "folder").unlink(missing_ok=True)
        (tmp_path / "folder").symlink_to(tmp_path)
        (tmp_path / f"link-{out}").symlink_to(out)
        names = (tmp_path / out, tmp_path / "folder" / f"link-{out}")
        jobs = [
            subprocess.Popen(
                command(*own, "-o", name), env=environment(), stderr=subprocess.PIPE, text=True
            )
            for name in names
        ]
        said = [job.communicate()[1] for job in jobs]
        codes = [job.returncode for job in jobs]
        assert 0 in codes and set(codes) <= {0, 1}, said
        for code, line in zip(codes, said, strict=True):
            assert code == 0 or ("written by another bytetx" in line and line.count("\n") == 1)
        vectors = (tmp_path / out).read_bytes()
        assert len(vectors) > 128 and vectors[-4:] != b"\0\0\0\0"
    names = {"in.txt", "folder", "a.npy", "b.npy", "link-a.npy", "link-b.npy"}
    assert set(os.listdir(tmp_path)) == names


def test_a_second_job_is_refused_before_any_model_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("a fox\n")
    with OutputLock(OutputPaths(tmp_path / "v.npy")):
        ran = subprocess.run(
            command("embed", tmp_path / "in.txt", "-m", "no/model", "-o", tmp_path / "v.npy"),
            env=environment(),
            capture_output=True,
            text=True,
        )
    assert ran.returncode == 1 and "is being written by another bytetx" in ran.stderr
    assert ran.stderr.count("\n") == 1 and os.listdir(tmp_path) == ["in.txt"]


def test_a_lock_file_that_a_killed_job_left_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / "v.npy.lock").touch()
    with OutputLock(OutputPaths(tmp_path / "v.npy")):
        pass
    assert os.listdir(tmp_path) == []


def test_a_lock_that_its_holder_deletes_meanwhile_is_taken_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths, flock = OutputPaths(tmp_path / "v.npy"), fcntl.flock
    first = OutputLock(paths)

    def late(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        first.release()  # after the second has opened the file, before it locks it
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with OutputLock(paths), pytest.raises(OutputError, match="another bytetx"):
        OutputLock(paths)  # a third meets the lock that has the name
    assert os.listdir(tmp_path) == []


def test_where_the_file_system_cannot_lock_the_file_is_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(descriptor: int, operation: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    paths = OutputPaths(tmp_path / "v.npy")
    with OutputLock(paths), pytest.raises(OutputError, match="delete that file if no job runs"):
        OutputLock(paths)
    assert os.listdir(tmp_path) == []


def test_a_lock_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "v.npy.lock").symlink_to("elsewhere")
    with pytest.raises(BytetxError, match="v.npy.lock cannot be created"):
        OutputLock(OutputPaths(tmp_path / "v.npy"))
    (tmp_path / "u.npy.lock").write_text("not of bytetx")
    with OutputLock(OutputPaths(tmp_path / "u.npy")):
        pass
    assert (tmp_path / "u.npy.lock").read_text() == "not of bytetx"
