"""Docstrings and comments are plain English: they begin with a verb or a noun of the field."""

import ast
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "bytetx"
CSRC = PACKAGE.parent / "csrc"
FOLDERS = (
    "checkpoint",
    "cli",
    "encode",
    "executor",
    "generate",
    "hf",
    "integrations",
    "nn",
    "ops",
    "parallel",
    "requests",
    "runtime",
    "serve",
    "tasks",
)
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def sources() -> Iterator[Path]:
    for folder in FOLDERS:
        yield from sorted((PACKAGE / folder).rglob("*.py"))
    yield from sorted(PACKAGE.glob("*.py"))


def test_no_docstring_begins_with_of_or_what() -> None:
    root = PACKAGE.parent
    others = (
        path for folder in ("benchmarks", "docs", "tests") for path in (root / folder).rglob("*.py")
    )
    found = [
        f"{path.relative_to(root)}:{getattr(node, 'lineno', 1)}: {text[:60]}"
        for path in (*sources(), *sorted(others), root / "setup.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, _DOCUMENTED)
        and (text := ast.get_docstring(node) or "")
        and re.match(r"(Of|What)\b", text)
    ]
    assert found == []


def test_no_trailing_comment_begins_with_of() -> None:
    """A fragment such as "# of a text" is a better name, or a sentence."""
    found = []
    for path in sources():
        with path.open("rb") as file:
            for token in tokenize.tokenize(file.readline):
                is_trailing = token.line[: token.start[1]].strip() != ""
                if token.type == tokenize.COMMENT and is_trailing and token.string[:5] == "# of ":
                    found.append(f"{path.relative_to(PACKAGE)}:{token.start[0]}: {token.string}")
    assert found == []


def test_no_two_classes_have_one_name() -> None:
    """Private ones of two files may have one, but not that of a public class."""
    places: dict[str, list[str]] = {}
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                place = f"{path.relative_to(PACKAGE)}: {node.name}"
                places.setdefault(node.name.lstrip("_"), []).append(place)
    # A module of sentence-transformers has the name that it has there.
    del places["LayerNorm"]
    found = [
        of_one
        for name, of_one in places.items()
        if len(of_one) > 1 and any(place.endswith(f" {name}") for place in of_one)
    ]
    assert found == []


def test_no_native_comment_begins_with_of_or_what() -> None:
    """A comment on its own lines may go on with either word, in lower case; one behind code not."""
    fragment = re.compile(r"^\s*//+ ?(Of|What)\b|\S.*//+ ?(of|what|Of|What)\b")
    found = [
        f"{path.relative_to(CSRC)}:{number}: {line.strip()[:80]}"
        for path in sorted(CSRC.rglob("*"))
        if path.suffix in {".cpp", ".h", ".cu", ".cuh"}
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if fragment.search(line)
    ]
    assert found == []
