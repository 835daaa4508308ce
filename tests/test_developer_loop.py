"""The developer's loop: tests chosen by what changed, and the stages of the whole check."""

import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
from paths import ROOT

CI = ROOT / ".ci"
pytestmark = pytest.mark.skipif(not CI.is_dir(), reason="a checkout without .ci")


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, CI / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("changed", "some", "none_in"),
    [
        ("bytetx/ops/padding.py", "tests/ops/test_padding.py", "tests/serve"),
        ("bytetx/model.py", "tests/test_model.py", "tests/ops"),
        ("bytetx/serve/static/status.html", "tests/serve/test_status_page.py", "tests/ops"),
        ("csrc/cpu/attention_avx2.cpp", "tests/ops/test_attention.py", "tests/nn"),
        ("csrc/cuda/decode_step.cu", "tests/ops/test_cuda_decode_step.py", "tests/nn"),
        ("csrc/cpu/isa.cpp", "tests/ops/test_ops.py", "tests/nn"),  # no test bears its name
        ("models/bert.toml", "tests/nn/test_families.py", "tests/serve"),
        ("benchmarks/serve.py", "tests/bench/test_bench_serve.py", "tests/serve"),
        ("docs/python.md", "tests/test_docs.py", "tests/ops"),
        ("setup.py", "tests/test_build.py", "tests/ops"),
        ("tests/paged_steps.py", "tests/ops/test_paged.py", "tests/serve"),
        ("tests/ops/test_rows_to_come.py", None, "tests"),
    ],
)
def test_a_change_picks_its_tests(changed: str, some: str | None, none_in: str) -> None:
    chosen = load("changed_tests").tests_of(changed)
    assert some is None or some in chosen
    assert [test for test in chosen if test.startswith(f"{none_in}/")] == []
    assert [test for test in chosen if not (ROOT / test).is_file()] == []


def test_every_module_has_tests() -> None:
    """A change of any module or native source runs something beside the structure's tests."""
    picking = load("changed_tests")
    sources = [*(ROOT / "bytetx").rglob("*.py"), *(ROOT / "csrc").rglob("*.c*")]
    general = {"tests/test_architecture.py"}
    paths = [source.relative_to(ROOT).as_posix() for source in sources]
    assert [path for path in paths if not picking.tests_of(path) - general] == []


def test_uncommitted_and_new_files_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True)

    git("init", "--quiet", "--initial-branch=main")
    for name in ("same", "committed", "edited"):
        (tmp_path / name).write_text("1")
    git("add", ".")
    git("commit", "--quiet", "-m", "first")
    git("checkout", "--quiet", "-b", "own")
    (tmp_path / "committed").write_text("2")
    git("commit", "--quiet", "-am", "second")
    (tmp_path / "edited").write_text("2")
    (tmp_path / "new").write_text("2")
    picking = load("changed_tests")
    monkeypatch.setattr(picking, "ROOT", tmp_path)
    assert picking.changed_files() == ["committed", "edited", "new"]


def test_an_unknown_stage_is_named() -> None:
    result = subprocess.run([CI / "run", "lint", "tests"], capture_output=True, text=True)
    assert result.returncode == 2
    assert "no stage is called tests; there are: environment lint test types" in result.stderr
