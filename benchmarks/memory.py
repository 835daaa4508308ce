"""Peak memory of embedding many texts, measured in a process of its own: python -m, or a case."""

import gc
import json
import re
import subprocess
import sys
from pathlib import Path

import torch

import bytetx
from benchmarks.suite import Measurement
from bytetx.cli.passages import Lognormal, english_passages
from bytetx.errors import BytetxError
from bytetx.ops.host import release_heap

_MIB = 2**20
# Short and long together, and short on average, so that the case is about memory, not time.
_LENGTHS = Lognormal(24, 0.8, 4, 192)
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def measure_memory(checkpoint: Path, dtype_name: str, num_texts: int) -> Measurement:
    """Growth of peak RSS (MiB) over an interpreter that holds the texts and has run a few once.

    The first run, of a model then dropped, brings in the libraries' code and their own buffers.
    The floor is what must be held: weights, the workspace of one token budget, and the results.
    """
    command = [sys.executable, "-m", __name__, str(checkpoint), dtype_name, str(num_texts)]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    if child.returncode:
        raise BytetxError(f"the memory case's process failed:\n{child.stderr.strip()}")
    found = json.loads(child.stdout)
    parts = {key: found[key] for key in ("weights_mib", "workspace_mib", "results_mib")}
    return Measurement(
        ours=found.pop("growth_mib"), rivals={}, floor=sum(parts.values()), shape=found
    )


def main(checkpoint: str, dtype_name: str, num_texts: str) -> None:
    """Embeds the texts and prints the sizes as JSON; Linux alone says a process' peak."""
    passages = english_passages(int(num_texts), lengths=_LENGTHS)
    bytetx.load(Path(checkpoint), device="cpu", dtype=_DTYPES[dtype_name]).embed(passages[:64])
    gc.collect()
    release_heap()
    baseline = status_mib("VmRSS")
    reset_peak()
    model = bytetx.load(Path(checkpoint), device="cpu", dtype=_DTYPES[dtype_name])
    result = model.embed(passages)
    peak = status_mib("VmHWM")
    itemsize = _DTYPES[dtype_name].itemsize
    sizes = {
        "growth_mib": peak - baseline,
        "baseline_mib": baseline,
        "weights_mib": model.checkpoint.num_parameters * itemsize / _MIB,
        "workspace_mib": model.spec.workspace_bytes(model.token_budget, itemsize) / _MIB,
        "results_mib": result.vectors.nbytes / _MIB,
    }
    rounded = {key: round(value, 1) for key, value in sizes.items()}
    counts = {"texts": len(passages), "tokens": result.stats.num_tokens}
    print(json.dumps(rounded | counts | {"token_budget": model.token_budget}))


def status_mib(key: str) -> float:
    """A size from /proc/self/status; VmRSS is the memory resident now, VmHWM its peak."""
    status = Path("/proc/self/status")
    if not status.is_file():
        raise BytetxError("the memory case reads /proc/self/status, which only Linux has")
    found = re.search(rf"^{key}:\s+(\d+) kB$", status.read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) / 1024


def reset_peak() -> None:
    """Makes VmHWM start again from now: the imports' own peak is not the run's."""
    Path("/proc/self/clear_refs").write_text("5")


if __name__ == "__main__":
    main(*sys.argv[1:])
