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
WITH_DESCRIPTORS = (90, 100)  # TMA, and room for the tiles of a GEMM that loads by it


@pytest.mark.parametrize(
    ("capability", "sizes", "shared_bytes"),
    # One GPU of each kind of matrix instruction: mma, wgmma, tcgen05. The tiles of the first serve
    # every GPU without TMA, so they have to fit where a block has least: sm_86, sm_89 and sm_120.
    [(80, "short long", 99 * KIB), (90, "short", 227 * KIB), (100, "long", 227 * KIB)],
)
def test_every_kernel_compiles_and_fits(
    capability: int, sizes: str, shared_bytes: int, tmp_path: Path
) -> None:
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    if "PYTHONPATH" in os.environ:
        environment["PYTHONPATH"] += os.pathsep + os.environ["PYTHONPATH"]
    command = [sys.executable, str(ROOT / "tests" / "compile_triton.py")]
    command += [str(capability), *sizes.split()]
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
    assert max(line["shared_bytes"] for line in lines) <= shared_bytes
