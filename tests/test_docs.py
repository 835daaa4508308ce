"""The documentation: links lead somewhere, bench commands exist, figures are those of records."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from paths import ROOT, load_script

import benchmarks.cli
import bytetx.cli.bench

figures = load_script("figures")
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
    text = page.read_text(encoding="utf-8")
    for app, pattern in (
        (benchmarks.cli.app, r"python -m benchmarks ([a-z]\w*)"),
        (bytetx.cli.bench.app, r"bytetx bench ([a-z]\w*)"),
    ):
        known = {command.name or command.callback.__name__ for command in app.registered_commands}
        assert set(re.findall(pattern, text)) - known == set()


def test_the_page_of_features_is_of_these_tests() -> None:
    listing = load_script("list_features")
    assert listing.PAGE.read_text("utf-8") == listing.page(), "run: python docs/list_features.py"
    names = [(group, name) for group, name, *_ in listing.features()]
    assert len(set(names)) == len(names) > 60


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_bytes()) <= 8192


@pytest.mark.parametrize("page", figures.PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_figures_are_those_of_the_records(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert figures.with_tables(text) == text, "run: python docs/figures.py"
    assert [figure for figure in figures.tied_figures(text) if not figure.is_true] == []


@pytest.mark.parametrize("page", figures.PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_figure_names_its_record(page: Path) -> None:
    assert list(figures.untied_figures(page.read_text(encoding="utf-8"))) == []


def test_a_stale_or_untied_figure_is_found() -> None:
    record = figures.records("h200")["encoder", "base-1x128"]
    comment = "<!-- h200 encoder/base-1x128 -->"
    right = f"{record.ours:.2f} ms{comment}, {record.ours * 1e3:,.0f} µs{comment}"
    assert [figure.is_true for figure in figures.tied_figures(right)] == [True, True]
    wrong = f"{record.ours + 0.01:.2f} ms{comment}"
    assert [figure.is_true for figure in figures.tied_figures(wrong)] == [False]
    with pytest.raises(KeyError):
        list(figures.tied_figures("1 ms<!-- h200 encoder/gone -->"))
    assert list(figures.untied_figures(right)) == []
    assert list(figures.untied_figures("It takes 3 ms.\n\n4 ms <!-- apart: once -->")) == ["3 ms"]


def test_marks_of_figures_measured_apart() -> None:
    def untied(text: str) -> list[str]:
        return list(figures.untied_figures(text))

    table = "| a | b |\n|---|--:|\n| c | 1 ms |\n| d | 2 % |\n"
    assert untied(table) == ["1 ms", "2 %"]
    assert untied(f"<!-- apart: on two lines,\nonce -->\n{table}\n3 ms") == ["3 ms"]
    assert untied(f"Words. <!-- apart: of this paragraph -->\n{table}") == ["1 ms", "2 %"]
    assert untied("4 ms <!-- apart: -->") == ["4 ms"]
    assert untied("- 5 ms\n- 6 ms <!-- apart: once -->\n  - 7 ms\n") == ["5 ms", "7 ms"]

    page = (
        "# A\n1 ms\n## B\n<!-- apart section: trials -->\n2 ms\n### C\n3 ms\n```\n# 8 ms\n```\n"
        "4 ms\n## D\n5 ms\n\n<!-- apart section: not under a heading -->\n6 ms\n"
    )
    assert untied(page) == ["1 ms", "5 ms", "6 ms"]
    assert untied("## B\n\n<!-- apart section: -->\n1 ms") == ["1 ms"]
    assert untied("### B\n<!-- apart section: trials -->\n1 ms\n## D\n2 ms") == ["2 ms"]


@pytest.mark.parametrize("page", figures.PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_no_comment_breaks_a_paragraph(page: Path) -> None:
    prose = _CODE_BLOCK.sub("", page.read_text(encoding="utf-8"))
    assert re.findall(r"(?<=\S)\n *<!--[^\n]*--> *\S.*", prose) == []
