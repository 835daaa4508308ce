"""Lists the features that tests hold in the tables of docs/features.md.

    python docs/list_features.py

A test that holds a feature is marked `@pytest.mark.feature(group, name)`; the name may be Markdown.
tests/test_docs.py fails where the page is not what this script writes.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "features.md"
GROUPS = (
    "Tasks",
    "Python",
    "Generation",
    "Checkpoints",
    "Arithmetic",
    "Wrap",
    "Several devices",
    "Command line",
    "Server",
)
_HEAD = """\
# Features

Each feature with the test that holds it. `python docs/list_features.py` writes this page from the
marks in the tests, `@pytest.mark.feature(group, name)`; a test marked `gpu` or `gpus(n)` runs where
the GPUs are.
"""


def features() -> Iterator[tuple[str, str, str, str]]:
    """(group, name, file, test), in the order of files and lines; no test is imported."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.feature":
                    group, name = (ast.literal_eval(argument) for argument in mark.args)
                    yield group, name, path.relative_to(ROOT).as_posix(), node.name


def page() -> str:
    """The whole page; a ValueError names a test whose group is none."""
    rows: dict[str, list[str]] = {group: [] for group in GROUPS}
    for group, name, file, test in features():
        if group not in rows:
            raise ValueError(f"{file}::{test}: {group!r} is none of the groups {GROUPS}")
        rows[group].append(f"| {name} | [`{test}`](../{file}) |")
    tables = (
        "\n".join([f"\n## {group}\n", "| feature | test |", "|---|---|", *sorted(lines), ""])
        for group, lines in rows.items()
    )
    return _HEAD + "".join(tables)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
