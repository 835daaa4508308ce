"""Draws the packages of bytetx and who imports whom into docs/architecture.md, from the source.

    python docs/draw_architecture.py

The picture is a Mermaid graph between two marker lines. tests/test_architecture.py fails where it
is not what this script draws.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- picture: begin -->", "<!-- picture: end -->"

# Top to bottom. A package imports packages of lower rows only. "api" stands for the modules at the
# root of bytetx/ that make the public interface.
ROWS = (
    ("cli",),
    ("hf", "integrations", "serve"),
    ("api",),
    ("tasks",),
    ("requests",),
    ("encode", "generate"),
    ("executor",),
    ("nn",),
    ("runtime",),
    ("parallel",),
    ("checkpoint",),
    ("ops",),
    ("base",),
)
# Modules at the root of bytetx/ that everything may import.
BASE = (
    "adapter_rows",
    "arguments",
    "buckets",
    "errors",
    "packed",
    "sampling_params",
    "sequence_tree",
)
_MEANINGS = {
    "cli": "cli<br/>commands, files",
    "hf": "hf<br/>wrap, unwrap",
    "serve": "serve<br/>HTTP server",
    "integrations": "integrations<br/>LangChain, LlamaIndex, Haystack",
    "api": "bytetx<br/>load, Model",
    "tasks": "tasks<br/>embed, classify, tag, ...",
    "requests": "requests<br/>texts and prompts to ids",
    "encode": "encode<br/>engine of one-pass tasks",
    "generate": "generate<br/>engine of generation",
    "executor": "executor<br/>leader and workers",
    "nn": "nn<br/>layers, heads, KV cache",
    "runtime": "runtime<br/>CUDA graphs, buffers",
    "parallel": "parallel<br/>groups, sharding",
    "checkpoint": "checkpoint<br/>spec, weights, tokenizer",
    "ops": "ops<br/>checks, dispatch, reference",
}
_COMPILED = {"bytetx._cpu", "bytetx._cuda"}


@dataclass(frozen=True, slots=True)
class Import:
    """One import: the module named, its line, and the name taken from it, if any."""

    target: str
    line: int
    name: str | None = None


@cache
def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for path in sorted((ROOT / "bytetx").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports(module: str) -> Iterator[Import]:
    """Every import of a module, those inside functions too."""
    for node in ast.walk(tree(modules()[module])):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: relative import"
            for alias in node.names:
                deeper = f"{node.module}.{alias.name}"
                is_module = deeper in modules() or deeper in _COMPILED
                target = deeper if is_module else str(node.module)
                yield Import(target, node.lineno, None if is_module else alias.name)


def package(module: str) -> str:
    """The box of the picture that a module is in."""
    parts = module.split(".")
    if len(parts) == 1 or parts[1] == "__main__":
        return "cli" if len(parts) > 1 else "api"
    if (modules()["bytetx"].parent / parts[1]).is_dir():
        return parts[1]
    return "base" if parts[1] in BASE else "api"


def package_imports() -> set[tuple[str, str]]:
    """(importer, imported) of all packages; the root's __init__ imports only on use."""
    found = set()
    for module in modules():
        if module == "bytetx":
            continue
        for one in imports(module):
            if one.target in modules() and one.target != "bytetx":
                found.add((package(module), package(one.target)))
    return {(a, b) for a, b in found if a != b}


def mermaid() -> str:
    """The picture: packages in rows, arrows to what each imports; `base` is left out.

    An arrow that follows from two others is left out as well.
    """
    arrows = {(a, b) for a, b in package_imports() if "base" not in (a, b)}
    kept = sorted((a, b) for a, b in arrows if not _is_implied(a, b, arrows))
    lines = ["```mermaid", "flowchart TD"]
    lines += [f'    {name}["{text}"]' for name, text in _MEANINGS.items()]
    lines += [f"    {a} --> {b}" for a, b in kept]
    lines += ['    native["native module<br/>csrc/"]', "    ops --> native", "```"]
    return "\n".join(lines)


def _is_implied(a: str, b: str, arrows: set[tuple[str, str]]) -> bool:
    """Whether a longer path leads from a to b."""
    seen, ahead = set(), [end for start, end in arrows if start == a and end != b]
    while ahead:
        current = ahead.pop()
        if current == b:
            return True
        if current not in seen:
            seen.add(current)
            ahead += [end for start, end in arrows if start == current]
    return False


def page_with(picture: str) -> str:
    """The page with the picture in its place."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{picture}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page_with(mermaid()), encoding="utf-8")
