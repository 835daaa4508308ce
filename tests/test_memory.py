"""Resident memory over calls of ever different sizes, and what is said of it beforehand."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
_MIB = 2**20

linux = pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")


@linux
def test_memory_stays_where_sizes_of_calls_never_repeat() -> None:
    """A GPT-2 of three narrow layers grew by half a GiB in 300 calls: a primitive a row count."""
    found = _run([str(TESTS / "soak.py"), "--calls", "75", "--sweep"])
    assert found["end_mib"] < 1.05 * found["start_mib"]


@linux
def test_printed_sizes_are_what_generation_takes(tmp_path: Path) -> None:
    """The model's steps have had each row count, and its cache was full once."""
    code = """
import gc, json, pathlib, sys
import bytetx, soak
from bytetx.ops.host import release_heap
import numpy as np, torch

def run(folder, texts):
    model = bytetx.load(folder, device="cpu", dtype=torch.float32)
    if texts is None:
        soak.sweep(model, model, np.random.default_rng(0))
    else:
        soak.generate(model, texts, bytetx.SamplingParams(max_tokens=2))
    return model

torch.set_num_threads(1)
folder = soak.save_causal(pathlib.Path(sys.argv[1]), "gpt2", n_positions=soak.MAX_POSITIONS,
                          n_embd=192, n_layer=4)
run(folder, [[5, 6, 7]])  # the libraries' code and their own buffers
gc.collect()
release_heap()
before = soak.resident_mib()
model = run(folder, None)
sizes = model.generation_sizes(kv_cache_tokens=soak.CACHE_TOKENS)
parts = {name: getattr(sizes, name) / 2**20 for name in (
    "weights_bytes", "cache_bytes", "workspace_bytes", "primitives_bytes", "total_bytes")}
print(json.dumps(parts | {"grown": soak.resident_mib() - before, "text": str(sizes)}))
"""
    found = _run(["-c", code, str(tmp_path)])
    # The heap has gaps between what is live, and Python its own objects: a tenth and 8 MiB.
    assert 0.75 * found["total_bytes"] < found["grown"] < 1.1 * found["total_bytes"] + 8
    assert (found["primitives_bytes"] > 0) == ("primitives" in found["text"])


def _run(arguments: list[str]) -> dict[str, float]:
    command = [sys.executable, *arguments]
    child = subprocess.run(command, capture_output=True, text=True, check=False, cwd=TESTS)
    assert child.returncode == 0 and child.stdout, child.stderr
    return json.loads(child.stdout.splitlines()[-1])
