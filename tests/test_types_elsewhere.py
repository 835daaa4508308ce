"""Type checkers see bytetx's types from another folder, with the install that is tested."""

import subprocess
import sys
from pathlib import Path

import pytest
from paths import TESTS

MYPY = ("mypy", "--strict", "--cache-dir", "cache", "--python-executable", sys.executable)
PYRIGHT = ("basedpyright", "--level", "error", "--pythonpath", sys.executable)


@pytest.mark.feature("Python", "types of results for type checkers")
@pytest.mark.parametrize("command", [MYPY, PYRIGHT], ids=["mypy", "pyright"])
def test_results_have_types_in_another_folder(command: tuple[str, ...], tmp_path: Path) -> None:
    code = (TESTS / "typing_user.py").read_text(encoding="utf-8")
    (tmp_path / "right.py").write_text(code, encoding="utf-8")
    wrong = "import bytetx\nbytetx.load('x').classify(['a text'])[0].nonsense\n"
    (tmp_path / "wrong.py").write_text(wrong, encoding="utf-8")
    command = (sys.executable, "-m", *command, "right.py", "wrong.py")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    errors = [line for line in done.stdout.splitlines() if "error:" in line]
    assert errors and all("wrong.py" in line for line in errors), done.stdout + done.stderr
