"""Suite `train`: its options, and a run of two ranks whose gradients are compared with torch's."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

from benchmarks import train
from benchmarks.cli import command_of
from benchmarks.train import SHAPES, Settings
from bytetx.errors import OptionError

TINY = ["--shape", "gpt2-tiny", "--layers", "1", "--vocab", "256"]
TINY += ["--tokens", "64", "--seqlen", "16", "--seconds", "0.1"]


def test_two_ranks_on_the_cpu(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    command = [sys.executable, "-m", "benchmarks", "train", "--device", "cpu", "--ranks", "2"]
    command += [*TINY, "--grid", "z2", "--grid", "y2", "--record", str(path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    z2, y2 = (json.loads(line) for line in path.read_text().splitlines())
    assert set(z2["rivals"]) == {"bytetx-no-overlap", "fsdp2"}
    assert set(y2["rivals"]) == {"bytetx-no-overlap", "dtensor-tp", "dtensor-tp-sp"}
    assert z2["case"] == "gpt2-tiny-l1-h128-t64-z2" and z2["shape"]["ranks"] == 2
    assert z2["shape"]["sent_mib"] > 0 and z2["ours"] > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (Settings(shape="gpt9"), "--shape must be one of gpt2-tiny, "),
        (Settings(hidden=100), "--hidden must be a multiple of 64, got 100"),
        (Settings(dtype="fp8"), "--dtype must be one of fp32, bf16"),
        (Settings(grids=("q2",)), "q2"),
    ],
)
def test_wrong_options_say_what_to_do(settings: Settings, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        settings.check()


def test_the_command_of_a_record_says_all_options() -> None:
    given = {"device": "cpu", "ranks": 4, "layers": 2, "hidden": 128, "grid": ["z2", "y2"]}
    words = command_of("train", [], given | {"no_overlap": True}).split()
    assert words[words.index("--ranks") + 1] == "4" and words[-1] == "--no-overlap"
    assert words.count("--grid") == 2 and "--vocab" not in words
    assert "--ranks" not in command_of("train", [], {"device": "cuda", "ranks": 4})
    settings = train.check(grid=["z2"], no_overlap=True, layers=2, hidden=128)
    assert settings.grids == ("z2",) and not settings.overlaps
    assert settings.config().num_heads == 2 and SHAPES["gpt2-small"][0] == 12
