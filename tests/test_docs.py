"""The documentation: every relative link leads somewhere, every benchmark command exists."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from bytetx.bench.cli import app

ROOT = Path(__file__).resolve().parent.parent
_PAGES = ["README.md", "CHANGELOG.md", "csrc/README.md", "benchmarks/README.md", "models/README.md"]
PAGES = [ROOT / page for page in _PAGES if (ROOT / page).is_file()]
PAGES += sorted((ROOT / "docs").rglob("*.md"))

_CODE_BLOCK = re.compile(r"^( *)```.*?^\1```", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"")


def links(page: Path) -> Iterator[str]:
    """Relative targets of Markdown links and HTML pictures outside code blocks."""
    prose = _CODE_BLOCK.sub("", page.read_text(encoding="utf-8"))
    for target in ("".join(found) for found in _LINK.findall(prose)):
        if not re.match(r"[a-z]+:", target):
            yield target


def anchors(page: Path) -> set[str]:
    """The ids that GitHub gives a page's headings."""
    prose = _CODE_BLOCK.sub("", page.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ +(.+?) *$", prose, re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", title.lower()) for title in titles)
    return {title.replace(" ", "-") for title in plain}


def dead_links(page: Path) -> Iterator[str]:
    for link in links(page):
        target, _, anchor = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            yield link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_relative_links_lead_somewhere(page: Path) -> None:
    assert list(dead_links(page)) == []


def test_a_dead_link_or_anchor_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One `two`, three\n[a](page.md#one-two-three) [b](#four) [c](gone.md) [d](https://e.f)\n"
        '```\n[in code](x.md)\n```\n<img src="gone.svg">\n',
        encoding="utf-8",
    )
    assert list(dead_links(page)) == ["#four", "gone.md", "gone.svg"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_bench_command_exists(page: Path) -> None:
    found = set(re.findall(r"bytetx bench ([a-z]\w*)", page.read_text(encoding="utf-8")))
    known = {command.name or command.callback.__name__ for command in app.registered_commands}
    assert found - known == set()
