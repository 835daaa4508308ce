"""Metrics, options and files that deploy/, Dockerfile and docs/ name exist."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import typer
from paths import ROOT

from benchmarks.cli import app as benchmarks_app
from bytetx.cli.commands import all_commands

PAGES = [ROOT / "README.md", ROOT / "Dockerfile", *sorted((ROOT / "docs").rglob("*.md"))]
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")


def options(command: click.Command) -> Iterator[str]:
    for parameter in command.params:
        yield from (*parameter.opts, *parameter.secondary_opts)
    for inner in getattr(command, "commands", {}).values():
        yield from options(inner)


KNOWN = {
    *options(typer.main.get_command(all_commands())),
    *options(typer.main.get_command(benchmarks_app)),
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_pages_name_only_options_that_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    code = re.findall(r"`([^`\n]+)`", text)  # in sentences
    code += re.findall(r"^ *(.*(?:bytetx|-m benchmarks) \w.*)$", text, re.MULTILINE)  # in blocks
    lines = [line.split("# ")[0] for line in code]
    named = {
        option
        for line in lines
        if line.startswith("--")
        or re.match(r"(bytetx|torchrun .*-m bytetx|python -m benchmarks)\b", line)
        for option in _OPTION.findall(re.sub(r"^.*?(?=bytetx|-m benchmarks)", "", line))
    }
    # Named because they are not there: TEI's own.
    named -= {"--max-batch-requests", "--dense-path", "--hf-token", "--trust-remote-code"}
    assert named - KNOWN == set()


def exported() -> set[str]:
    """Names of metrics in the source of the server, with the endings that Prometheus adds."""
    source = "".join(p.read_text() for p in sorted((ROOT / "bytetx" / "serve").glob("*.py")))
    names = set(re.findall(r'"(bytetx_[a-z_]+)"', source))
    endings = ("", "_total", "_bucket", "_sum", "_count")
    return {f"{name}{ending}" for name in names for ending in endings}


def expressions() -> list[str]:
    dashboard = json.loads((ROOT / "deploy" / "grafana.json").read_text())
    panels = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    return [*panels, (ROOT / "deploy" / "alerts.yml").read_text()]


@pytest.mark.feature("Server", "dashboard and alerts")
def test_dashboard_and_alerts_ask_for_metrics_that_exist() -> None:
    asked = {name for text in expressions() for name in re.findall(r"bytetx_[a-z_]+", text)}
    assert asked and asked - exported() == set()


def test_alerts_are_yaml_with_what_prometheus_needs() -> None:
    yaml = pytest.importorskip("yaml")
    content = yaml.safe_load((ROOT / "deploy" / "alerts.yml").read_text())
    rules = [rule for group in content["groups"] for rule in group["rules"]]
    assert rules and all({"alert", "expr", "for", "labels", "annotations"} <= set(r) for r in rules)


def test_the_image_builds_from_files_that_are_let_in() -> None:
    """.dockerignore lets in what setup.py and pyproject.toml read, and no build output."""
    rules = (ROOT / ".dockerignore").read_text().splitlines()
    let_in = {rule[1:] for rule in rules if rule.startswith("!")}
    assert let_in >= {
        "bytetx",
        "csrc",
        "models",
        "setup.py",
        "pyproject.toml",
        "README.md",
        "LICENSE",
    }
    assert all((ROOT / name).exists() for name in let_in)
    dockerfile = (ROOT / "Dockerfile").read_text()
    for target in ("cpu", "cuda"):
        stage = dockerfile[dockerfile.index(f"FROM base AS {target}") :].split("\nFROM ")[0]
        assert stage.rstrip().endswith("USER 10001")
