#!/usr/bin/env python3
"""Prints the test files of what changed against main, one a line: .ci/changed_tests.py [BASE].

Committed, uncommitted and new files count. A change in bytetx/X picks files of tests/X and of
tests/ itself that import the changed module, bear its name or mention the file; where none does,
all of tests/X. csrc/ is tested by tests/ops. This is the quick part of the suite, not a
replacement: .ci/run runs all of it.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent
# Folders beside bytetx/ and the tests of what lies in them.
_MIRRORS = {"csrc": "tests/ops", "benchmarks": "tests/bench", "models": "tests/nn"}
# Instruction sets and shapes in the names of native files, which no test's name has.
_VARIANTS = re.compile(r"^(avx\w*|neon\w*|portable|simd|kernels?|d?\d+(x\d+)?)$")


def changed_files(base: str = "main") -> list[str]:
    """Paths that differ from where this branch left `base`, those not yet in git included."""
    # A clone that has only its own branch knows main as origin's.
    known = next((name for name in (base, f"origin/{base}") if _is_commit(name)), "HEAD")
    start = _git("merge-base", known, "HEAD")[0]
    return sorted({*_git("diff", "--name-only", start), *_new_files()})


def tests_of(path: str) -> set[str]:
    """The test files for a change of the file at `path` (of the repository, with slashes)."""
    file = PurePosixPath(path)
    top, package = file.parts[0], file.parts[1] if len(file.parts) > 2 else ""
    if top == "tests" and file.suffix == ".py":
        return _tests_of_test_file(file)
    if file.suffix == ".md" or top == "docs":
        return {"tests/test_docs.py"} | _near(file, _test_files("tests"))
    if path == "setup.py":
        return {"tests/test_build.py"}
    own = _MIRRORS.get(top, f"tests/{package}" if top == "bytetx" else None)
    if own is None or not (ROOT / own).is_dir():
        return _near(file, _all_test_files())
    mirrored = _test_files(own)
    if path.startswith("csrc/cpu/"):
        mirrored = {test for test in mirrored if not re.search(r"cuda|triton", test)}
    near = _near(file, mirrored)
    chosen = (near or mirrored) | (set() if top == "models" else _near(file, _test_files("tests")))
    if top == "models" or (top == "bytetx" and file.suffix == ".py"):
        chosen.add("tests/test_architecture.py")
    return chosen


def _tests_of_test_file(file: PurePosixPath) -> set[str]:
    if file.name.startswith("test_"):
        return {str(file)} if (ROOT / file).is_file() else set()
    if file.name == "conftest.py":
        return _test_files(str(file.parent))
    direct = {test for test in _all_test_files() if file.stem in _imported(test)}
    # Others are run as scripts, or used by helpers: the tests of those that mention it.
    word = re.compile(rf"\b{file.stem}\b")
    users = [
        path for path in (ROOT / "tests").rglob("*.py") if word.search(path.read_text("utf-8"))
    ]
    stems = {path.stem for path in users}
    return direct or {
        test
        for test in _all_test_files()
        if PurePosixPath(test).stem in stems or stems & _imported(test)
    }


def _near(file: PurePosixPath, tests: Iterable[str]) -> set[str]:
    """Those of `tests` that import the file's module, bear its name or mention it."""
    module = ".".join(file.with_suffix("").parts).removesuffix(".__init__")
    words = [word for word in file.stem.split("_") if not _VARIANTS.match(word)]
    name = "_".join(words)
    bears = re.compile(rf"_{re.escape(name)}(_|\.)")
    return {
        test
        for test in tests
        if (file.suffix == ".py" and module in _imported(test))
        or (name and file.stem != "__init__" and bears.search(PurePosixPath(test).name))
        or (file.suffix != ".py" and (file.name if file.suffix else str(file)) in _text(test))
        or (file.parts[0] == "models" and f'"{file.stem}"' in _text(test))
    }


@cache
def _imported(test: str) -> frozenset[str]:
    """Modules that a file of tests/ imports itself."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(_text(test))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(found)


@cache
def _text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def _test_files(folder: str) -> set[str]:
    return {path.relative_to(ROOT).as_posix() for path in (ROOT / folder).glob("test_*.py")}


@cache
def _all_test_files() -> frozenset[str]:
    return frozenset(p.relative_to(ROOT).as_posix() for p in (ROOT / "tests").rglob("test_*.py"))


def _new_files() -> list[str]:
    return _git("ls-files", "--others", "--exclude-standard")


def _is_commit(name: str) -> bool:
    command = ["git", "rev-parse", "--quiet", "--verify", f"{name}^{{commit}}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 0


def _git(*arguments: str) -> list[str]:
    command = ["git", *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return result.stdout.splitlines()


def main() -> None:
    chosen: set[str] = set()
    for path in changed_files(*sys.argv[1:2]):
        tests = tests_of(path)
        print(f"{path}: {' '.join(sorted(tests)) or 'no test of its own'}", file=sys.stderr)
        chosen |= tests
    print("\n".join(sorted(chosen)))


if __name__ == "__main__":
    main()
