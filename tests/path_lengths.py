"""Counts the files and functions of bytetx that one call runs."""

import sys
import threading
from collections.abc import Callable
from pathlib import Path

import bytetx

ROOT = str(Path(bytetx.__file__).parent)


def path_length(make: Callable[[], Callable[[], object]]) -> tuple[int, int]:
    """(files, functions) of bytetx that the call runs that `make` returns, once it has run twice.

    Those of all threads that `make` and the call start count.
    """
    seen: set[tuple[str, str]] = set()
    is_counted = False

    def note(frame, event, argument):
        code = frame.f_code
        if is_counted and event == "call" and code.co_filename.startswith(ROOT):
            seen.add((code.co_filename, code.co_qualname))

    threading.setprofile(note)
    try:
        call = make()
        for _ in range(2):
            call()
        is_counted = True
        sys.setprofile(note)
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        is_counted = False
    inner = ("<lambda>", "<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>")
    functions = {(file, name) for file, name in seen if not name.endswith(inner)}
    return len({file for file, _ in functions}), len(functions)
