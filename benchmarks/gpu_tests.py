"""Receipts of runs of the GPU tests: a line of gpu_tests.jsonl a run, and what changed since.

    python -m benchmarks.gpu_tests [--require]

prints which native files changed since the latest run without failures. With --require it fails
unless such a run was of exactly these sources. tests/gpu_receipt.py writes the lines. Needs nothing
but Python.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.records import source_sha256
from bytetx.errors import BytetxError

ROOT = Path(__file__).resolve().parent.parent
RECEIPTS = Path("benchmarks") / "gpu_tests.jsonl"  # below a checkout
COMMAND = "pytest tests -m gpu"


@dataclass(frozen=True, slots=True)
class Receipt:
    """One whole run of the GPU tests.

    source: sha256 of csrc/ and bytetx/ops/, see benchmarks.records.source_sha256().
    commit: what was checked out; the sources may have been edited since.
    card, cards: the first GPU's name, and how many there were.
    passed, skipped, failed: of tests that need GPUs; one that failed to set up has failed.
    date: UTC, as 2026-01-31T12:00:00Z.
    """

    source: str
    commit: str
    card: str
    cards: int
    passed: int
    skipped: int
    failed: int
    date: str


def read_receipts(root: Path = ROOT) -> list[Receipt]:
    """Every receipt, oldest first; BytetxError names a line that is none."""
    path = root / RECEIPTS
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    receipts = []
    for number, line in enumerate(lines, 1):
        try:
            receipts.append(Receipt(**json.loads(line)))
        except (json.JSONDecodeError, TypeError) as error:
            raise BytetxError(
                f"{path}:{number} is no receipt of GPU tests: {error}; delete the line and run: "
                f"{COMMAND}"
            ) from error
    return receipts


def append_receipt(receipt: Receipt, root: Path = ROOT) -> None:
    with (root / RECEIPTS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(receipt)) + "\n")


def is_covered(root: Path = ROOT) -> bool:
    """Whether the GPU tests ran without failures on exactly these sources."""
    source = source_sha256(root)
    return any(one.source == source and one.failed == 0 for one in read_receipts(root))


def refusal(root: Path = ROOT) -> str | None:
    """Why CUDA wheels of these sources may not be released, or None."""
    if is_covered(root):
        return None
    return (
        f"no line of {RECEIPTS} is a run of the GPU tests without failures on these sources "
        f"({source_sha256(root)[:12]}): run `{COMMAND}` on a machine with a GPU and commit the "
        "line that it writes, or build without the CUDA half (--cpu)"
    )


def news(root: Path = ROOT) -> str:
    """List the changes since the latest run without failures: one line, and one per file."""
    if is_covered(root):
        return "GPU tests: run on these sources"
    good = [one for one in read_receipts(root) if one.failed == 0]
    if not good:
        return "GPU tests: no run is recorded"
    since = f"since the run of {good[-1].date} on {good[-1].card}"
    files = _changed_since(good[-1].commit, root)
    if files is None:
        return f"GPU tests: native files changed {since}, whose commit is not in this clone"
    return "\n  ".join([f"GPU tests: {len(files)} native files changed {since}:", *files])


def head_commit(root: Path = ROOT) -> str:
    lines = _git(root, "rev-parse", "HEAD")
    return lines[0] if lines else "unknown"


def _changed_since(commit: str, root: Path) -> list[str] | None:
    folders = ("--", "csrc", "bytetx/ops")
    changed = _git(root, "diff", "--name-only", commit, *folders)
    new = _git(root, "ls-files", "--others", "--exclude-standard", *folders)
    return None if changed is None else sorted({*changed, *(new or [])})


def _git(root: Path, *arguments: str) -> list[str] | None:
    """The lines that git prints, None where it fails or is not installed."""
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.splitlines() if done.returncode == 0 else None


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_tests")
    parser.add_argument("--require", action="store_true", help="fail where these sources were not")
    reason = refusal() if parser.parse_args().require else None
    if reason is not None:
        print(reason, file=sys.stderr)
        raise SystemExit(1)
    print(news())


if __name__ == "__main__":
    main()
