"""Receipts of GPU tests: what a run writes, when it writes none, and what a release asks for."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from gpu_receipt import GpuReceipt
from paths import ROOT

from benchmarks import gpu_tests
from benchmarks.gpu_tests import RECEIPTS, Receipt, append_receipt, news, read_receipts, refusal
from benchmarks.records import source_sha256
from bytetx.errors import BytetxError


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in ("csrc/cuda/a.cu", "bytetx/ops/b.py", "benchmarks/c.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "first")
    return tmp_path


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


class FakeItem(SimpleNamespace):
    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.keywords else None

    def iter_markers(self, name: str) -> list:
        return []


def run(root: Path, outcomes: dict[str, str | None], **options) -> GpuReceipt:
    """A session of GPU tests with these outcomes, None for one that was not reached."""
    given = {"why_partial": None, "cards": lambda: ["a card", "a card"]} | options
    plugin = GpuReceipt(root=root, **given)
    items = [FakeItem(nodeid=name, keywords={"gpu": 1}) for name in outcomes]
    items.append(FakeItem(nodeid="on_a_cpu", keywords={}))
    plugin.pytest_collection_finish(SimpleNamespace(items=items))
    for item in items:
        outcome = outcomes.get(item.nodeid, "passed")
        if outcome is None:
            continue
        phases = ["setup"] if outcome == "skipped" else ["setup", "call", "teardown"]
        for when in phases:
            now = outcome if when == "call" or outcome == "skipped" else "passed"
            report = {"nodeid": item.nodeid, "keywords": item.keywords, "when": when}
            report |= {"outcome": now, "failed": now == "failed", "skipped": now == "skipped"}
            plugin.pytest_runtest_logreport(SimpleNamespace(**report))
    plugin.pytest_sessionfinish(exitstatus=0)
    return plugin


WHOLE = {"a": "passed", "b": "passed", "c": "skipped"}


def test_a_whole_run_appends_a_line(checkout: Path) -> None:
    run(checkout, WHOLE)
    run(checkout, WHOLE | {"d": "failed"})
    lines = (checkout / RECEIPTS).read_text().splitlines()
    assert list(json.loads(lines[0])) == [
        *("source", "commit", "card", "cards", "passed", "skipped", "failed", "date")
    ]
    first, second = read_receipts(checkout)
    assert first.source == source_sha256(checkout)
    assert first.commit == git(checkout, "rev-parse", "HEAD").strip()
    assert (first.card, first.cards) == ("a card", 2)
    assert (first.passed, first.skipped, first.failed) == (2, 1, 0)
    assert (second.passed, second.skipped, second.failed) == (2, 1, 1)


@pytest.mark.parametrize(
    ("outcomes", "options", "says"),
    [
        ({"a": "skipped"}, {}, ""),  # no GPU
        (WHOLE | {"d": None}, {}, "1 of them were not reached"),
        (WHOLE, {"why_partial": "but of tests/ops"}, "but of tests/ops"),
        (WHOLE, {"cards": list}, "torch finds no GPU"),
    ],
)
def test_a_part_of_a_run_writes_none(
    checkout: Path, outcomes: dict, options: dict, says: str
) -> None:
    plugin = run(checkout, outcomes, **options)
    assert not (checkout / RECEIPTS).exists()
    assert says in plugin.message and bool(says) == bool(plugin.message)


def test_a_module_that_cannot_be_collected_makes_a_part(checkout: Path) -> None:
    plugin = GpuReceipt(None, list, checkout)
    plugin.pytest_collectreport(SimpleNamespace(nodeid="tests/a.py", failed=False))
    assert plugin.why_partial is None
    plugin.pytest_collectreport(SimpleNamespace(nodeid="tests/b.py", failed=True))
    assert plugin.why_partial == "tests/b.py could not be collected"


def test_a_gpu_test_that_is_left_out_makes_a_part(checkout: Path) -> None:
    plugin = GpuReceipt(None, list, checkout)
    for keywords in ({}, {"gpu": 1, "real": 1}, {"gpus": 1}):  # `-m gpu` leaves the last one out
        plugin.pytest_deselected([FakeItem(nodeid="a", keywords=keywords)])
    assert plugin.why_partial is None
    plugin.pytest_deselected([FakeItem(nodeid="a", keywords={"gpu": 1})])
    assert plugin.why_partial == "a was left out"


def test_a_release_needs_a_run_of_exactly_these_sources(checkout: Path) -> None:
    assert "no run is recorded" in news(checkout)
    assert f"run `{gpu_tests.COMMAND}` on a machine with a GPU" in (refusal(checkout) or "")
    run(checkout, WHOLE)
    assert refusal(checkout) is None and "run on these sources" in news(checkout)
    (checkout / "benchmarks/c.py").write_text("2")  # neither native nor an op
    assert refusal(checkout) is None
    (checkout / "csrc/cuda/a.cu").write_text("2")
    (checkout / "bytetx/ops/new.py").write_text("2")
    assert source_sha256(checkout)[:12] in (refusal(checkout) or "")
    assert news(checkout).splitlines()[1:] == ["  bytetx/ops/new.py", "  csrc/cuda/a.cu"]
    run(checkout, WHOLE | {"d": "failed"})
    assert refusal(checkout) is not None
    run(checkout, WHOLE)
    assert refusal(checkout) is None


def test_a_commit_of_elsewhere_and_a_broken_line_are_said(checkout: Path) -> None:
    append_receipt(Receipt("0" * 64, "f" * 40, "a card", 1, 2, 0, 0, "now"), checkout)
    assert "whose commit is not in this clone" in news(checkout)
    (checkout / RECEIPTS).write_text('{"source": 1}\n')
    with pytest.raises(BytetxError, match="gpu_tests.jsonl:1 is no receipt of GPU tests"):
        news(checkout)


def test_the_command_needs_no_package() -> None:
    """A release is refused before anything is installed."""
    command = [sys.executable, "-S", "-m", "benchmarks.gpu_tests"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={"PATH": ""})
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("GPU tests: ")


def test_processes_of_xdist_write_one_line(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each runs a part of the tests; one that GPUs need and `-k` leaves out makes a part."""
    (checkout / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    (checkout / "conftest.py").write_text(
        f"""
import sys
from pathlib import Path
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
import gpu_receipt

gpu_receipt._cards = lambda: ["a card"]
gpu_receipt.ROOT = Path(__file__).parent

def pytest_configure(config):
    gpu_receipt.register(config)
"""
    )
    (checkout / "test_a.py").write_text(
        "import pytest\n"
        "@pytest.mark.gpu\n@pytest.mark.parametrize('i', range(6))\ndef test_gpu(i): pass\n"
        "@pytest.mark.gpu\ndef test_skipped(): pytest.skip('no')\n"
        "def test_cpu(): pass\n"
    )
    # Other plugins, which six processes would import, have no part in it.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    command = [sys.executable, "-m", "pytest", "-q", "-n2", "-m", "gpu"]
    command += ["-p", "xdist", "-p", "no:cacheprovider"]
    subprocess.run([*command, "-k", "skipped or 0"], cwd=checkout, check=True, capture_output=True)
    assert not (checkout / RECEIPTS).exists()
    done = subprocess.run(command, cwd=checkout, check=True, capture_output=True, text=True)
    assert "has a new line" in done.stdout
    (receipt,) = read_receipts(checkout)
    assert (receipt.passed, receipt.skipped, receipt.failed) == (6, 1, 0)
