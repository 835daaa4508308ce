"""The garbage collector while a job starts, runs and has ended."""

import gc
from pathlib import Path

import pytest
from cli_runs import Bytetx

from bytetx.cli.files import command


def test_a_job_starts_without_the_collector_and_runs_with_it(
    bytetx: Bytetx, encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    load, run_job = command._load, command.run_job
    monkeypatch.setattr(command, "_load", lambda *a: (seen.append(gc.isenabled()), load(*a))[1])

    def watched(*arguments: object, **options: object) -> object:
        seen.append(gc.isenabled() and gc.get_freeze_count() > 0)
        return run_job(*arguments, **options)

    monkeypatch.setattr(command, "run_job", watched)
    (tmp_path / "one.txt").write_text("one\n")
    assert bytetx("embed", "-m", encoder, tmp_path / "one.txt").code == 0
    assert seen == [False, True]
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_a_job_that_does_not_start_leaves_the_collector_on(bytetx: Bytetx, tmp_path: Path) -> None:
    assert bytetx("embed", "-m", tmp_path / "none", tmp_path / "none.txt").code != 0
    assert gc.isenabled() and gc.get_freeze_count() == 0
