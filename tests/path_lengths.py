"""Counts the files, functions and calls of bytetx that one call runs."""

import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import bytetx

ROOT = str(Path(bytetx.__file__).parent)


def path_length(make: Callable[[], Callable[[], object]]) -> tuple[int, int, int]:
    """(files, functions, calls) of bytetx that one call runs.

    make: returns the call, which has run twice before it is counted.  Those of all threads that
    `make` and the call start count.
    """
    seen: Counter[tuple[str, str]] = Counter()
    is_counted = False

    def note(frame, event, argument):
        code = frame.f_code
        if is_counted and event == "call" and code.co_filename.startswith(ROOT):
            seen[code.co_filename, code.co_qualname] += 1

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
    functions = {name: count for name, count in seen.items() if not name[1].endswith(inner)}
    files = {file for file, _ in functions}
    return len(files), len(functions), sum(functions.values())
