"""The command line in this process or in one of its own, and the files it reads."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from checkpoints import save_checkpoint
from paths import ROOT

from bytetx.cli.commands import main

TEXTS = ["one short text", "", "another text that is rather longer than the first", "x"]


@dataclass(frozen=True, slots=True)
class Ran:
    """Output and exit status of one command."""

    code: int
    out: str
    err: str

    @property
    def rows(self) -> list[dict]:
        return [json.loads(line) for line in self.out.splitlines()]


Bytetx = Callable[..., Ran]


@pytest.fixture
def bytetx(
    capfdbinary: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Bytetx]:
    """Runs the command line in tmp_path, as the installed script does."""
    monkeypatch.chdir(tmp_path)
    for name in ("MODEL", "DEVICE", "DTYPE", "TOKEN_BUDGET"):
        monkeypatch.delenv(f"BYTETX_{name}", raising=False)
    # These models are so small that threads only wait for each other.
    monkeypatch.setenv("BYTETX_THREADS", "1")

    def run(*arguments: object) -> Ran:
        capfdbinary.readouterr()  # what the test's own preparations printed
        with pytest.raises(SystemExit) as exited:
            main([str(argument) for argument in arguments])
        out, err = capfdbinary.readouterr()
        return Ran(int(exited.value.code or 0), out.decode(), err.decode())

    num_threads = torch.get_num_threads()
    yield run
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="session")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    labels = {0: "bad", 1: "fine", 2: "good"}
    return save_checkpoint(
        tmp_path_factory.mktemp("classifier"), head="ForSequenceClassification", id2label=labels
    )


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts.txt"
    path.write_text("".join(f"{text}\n" for text in TEXTS))
    return path


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "bytetx", *map(str, arguments)]


def environment(**more: str) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "BYTETX_THREADS": "1"} | more
