"""Lists the families of models/*.toml in the table of docs/models.md.

    python docs/list_families.py

The table is between two marker lines. tests/test_architecture.py fails where it is not what this
script writes.
"""

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"

# What a head of a checkpoint is for; every family embeds and gives hidden states.
_METHODS = {
    "sequence_classification": ("classify", "rerank"),
    "token_classification": ("tag",),
    "question_answering": ("answer",),
    "masked_lm": ("fill_mask", "embed_sparse"),
    "lm": ("generate", "score"),
    "ranking": ("rerank",),
}


def table() -> str:
    """Encoders first, each group in the order of names; files of one family share a row."""
    families: dict[str, list[dict[str, Any]]] = {}
    for path in sorted((ROOT / "models").glob("*.toml")):
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        families.setdefault(content["names"], []).append(content)
    rows = sorted(families.items(), key=lambda item: (_is_causal(item[1]), item[0].lower()))
    lines = ["| checkpoints | `model_type` | layers | with its head also |", "|---|---|---|---|"]
    for names, tables in rows:
        types = _unique(name for content in tables for name in content["model_types"])
        heads = {head for content in tables for head in content.get("heads", {})}
        methods = [name for head, names in _METHODS.items() if head in heads for name in names]
        kind = "causal" if _is_causal(tables) else "encoder"
        lines.append(f"| {names} | {_code(types)} | {kind} | {_code(methods)} |")
    return "\n".join(lines)


def page_with(families: str) -> str:
    """The page with the table in its place."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{families}\n{END}{after}"


def _is_causal(tables: list[dict[str, Any]]) -> bool:
    return any(content["architecture"].get("causal", False) for content in tables)


def _unique(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    PAGE.write_text(page_with(table()), encoding="utf-8")
