"""docs/cookbook.md: every block runs as written, with checkpoints of this machine in place of the
hub's, and with a free port."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from paths import ROOT

from bytetx.checkpoint.demo import demo_checkpoint

TEXT = (ROOT / "docs" / "cookbook.md").read_text(encoding="utf-8")
RECIPES = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", TEXT, re.DOTALL | re.MULTILINE))
NEEDS = {"Search in DuckDB": "duckdb", "SetFit: a classifier from a few labels": "setfit"}
BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def cross_encoder(folder: Path) -> Path:
    transformers.set_seed(0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo_checkpoint())
    config = transformers.BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        num_labels=1,
    )
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def run(kind: str, code: str, folder: Path) -> None:
    # Packages are there already, and no test asks the network.
    code = re.sub(r"^pip install .*\n", "", code, flags=re.MULTILINE)
    code = code.replace("sentence-transformers/all-MiniLM-L6-v2", str(demo_checkpoint()))
    code = code.replace("cross-encoder/ms-marco-MiniLM-L6-v2", str(folder / "cross-encoder"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        code = code.replace("8080", str(free.getsockname()[1]))
    command = ["bash", "-euc", code] if kind == "sh" else [sys.executable, "-c", code]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the shared file, and what the first recipe writes."""
    folder = tmp_path_factory.mktemp("cookbook")
    cross_encoder(folder / "cross-encoder")
    introduction = TEXT[: TEXT.index("\n## ")]
    for part in (introduction, RECIPES["CSV to Parquet"]):
        for kind, code in BLOCK.findall(part):
            run(kind, code, folder)
    return folder


@pytest.mark.feature("Python", "recipes of the cookbook")
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_runs_as_written(recipe: str, folder: Path) -> None:
    if recipe in NEEDS:
        pytest.importorskip(NEEDS[recipe])
    for kind, code in BLOCK.findall(RECIPES[recipe]):
        run(kind, code, folder)
