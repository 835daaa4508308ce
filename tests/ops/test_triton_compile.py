"""Every Triton kernel compiles for the GPUs that it is for, which need not be there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

pytest.importorskip("triton")

KIB = 1024
# Of an A100; of an A10 (as sm_89), an L4 or RTX 4090; of an H100; of a B200; of an RTX 5090: what a
# block may have.
SHARED_BYTES = {80: 163 * KIB, 89: 99 * KIB, 90: 227 * KIB, 100: 227 * KIB, 120: 99 * KIB}
WITH_DESCRIPTORS = (90, 100)  # TMA, and room for the tiles of a GEMM that loads by it


@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_every_kernel_compiles_and_fits(capability: int, tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    if "PYTHONPATH" in os.environ:
        environment["PYTHONPATH"] += os.pathsep + os.environ["PYTHONPATH"]
    command = [sys.executable, str(ROOT / "tests" / "compile_triton.py"), str(capability)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    sources = (ROOT / "bytetx" / "ops" / "triton_kernels").glob("*.py")
    kernels = {
        word.removeprefix("def ").partition("(")[0]
        for path in sources
        for word in path.read_text().splitlines()
        if word.startswith("def _") and "_kernel(" in word
    }
    if capability not in WITH_DESCRIPTORS:
        kernels.remove("_descriptor_kernel")
    assert {line["kernel"] for line in lines} == kernels
    assert all(line["cubin_bytes"] > 0 for line in lines)
    assert max(line["shared_bytes"] for line in lines) <= SHARED_BYTES[capability]
