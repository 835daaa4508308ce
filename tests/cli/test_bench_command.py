"""`bytetx bench`: what it measures on this machine, and where it sends who asks for more."""

import json
from pathlib import Path

import pytest
from checkpoints import save_checkpoint
from paths import ROOT
from typer.testing import CliRunner

from bytetx.cli import bench
from bytetx.cli.commands import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("bench") / "encoder")


def test_embedding_on_the_cpu(folder: Path) -> None:
    arguments = ["cpu", "--model", str(folder), "--texts", "4", "--seconds", "0.1"]
    shown = CliRunner().invoke(bench.app, arguments)
    assert shown.exit_code == 0, shown.output
    assert "bytetx" in shown.output and "python -m benchmarks" in shown.output
    found = json.loads(CliRunner().invoke(bench.app, [*arguments, "--json"]).stdout)
    assert found["device"] == "cpu" and found["texts"] == 4 and found["tokens"] > 8
    assert set(found["speeds"]) == {"bytetx", "sentence-transformers"}
    for speed in found["speeds"].values():
        assert all(value > 0 for value in speed.values())


@pytest.mark.feature("Command line", "`bytetx bench`")
def test_a_server_under_load(folder: Path) -> None:
    arguments = ["serve", "--model", str(folder), "--device", "cpu", "--callers", "2"]
    arguments += ["--texts-per-request", "2", "--seconds", "0.2", "--json"]
    answered = CliRunner().invoke(bench.app, arguments)
    assert answered.exit_code == 0, answered.output
    found = json.loads(answered.stdout)
    assert found["requests"] > 0 and found["texts_per_second"] > 0
    assert 0 < found["p50_ms"] <= found["p99_ms"]


def test_a_server_that_cannot_start_says_why(tmp_path: Path, capsys) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "serve", "--model", str(tmp_path), "--device", "cpu"])
    error = capsys.readouterr().err
    assert stopped.value.code == 1 and "did not start; its last lines: " in error


@pytest.mark.parametrize("has_repository", [True, False])
def test_suites_of_the_repository_are_named(
    has_repository: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    if not has_repository:
        monkeypatch.setattr(bench, "_REPOSITORY", tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "attention"])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert "bench has cpu, gpu, serve, not 'attention'" in error
    assert ("clone it" in error) is not has_repository
    assert (str(ROOT) in error) is has_repository
