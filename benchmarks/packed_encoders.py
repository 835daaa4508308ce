"""packed-encoders as a rival of ModernBERT: in a process of its own, with packages of its own."""

import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import packed_encoders_process
from benchmarks.rivals import quiet
from benchmarks.whole_models import TokenInputs
from bytetx.errors import OptionError

NAME = "packed-encoders"
_MODULE = "packed_encoders"
_TIMEOUT_SECONDS = 300.0  # of one case, with the compilation of its kernels
# It has no f16, and bf16 rounds at 2^-9, eight times as coarse, through 22 layers.
_MAX_RELATIVE_ERROR = 6e-2


def check_folder(folder: Path | None) -> None:
    """Raises OptionError where a named folder holds no packed-encoders."""
    if folder is not None and not (folder / _MODULE / "__init__.py").is_file():
        raise OptionError(
            f"--packed-encoders needs a folder that holds the package {_MODULE}, got {folder}; "
            f"make one with: pip install --target {folder} packed-encoders==0.2.0"
        )


def measure(
    model: Any, inputs: TokenInputs, ours: Tensor, *, folder: Path | None, notes: list[str]
) -> dict[str, float]:
    """Microseconds of its forward passes whose hidden states are ours: as launched, and as a graph.

    model: transformers' ModernBertModel, whose weights it takes.  ours: [total_tokens,
    hidden_size].  folder: where pip installed it with its needs; None: this interpreter's own.
    notes: gets a line where it is missing, fails or differs.
    """
    if folder is None and importlib.util.find_spec(_MODULE) is None:
        notes.append(
            f"{NAME} left out: not installed; --packed-encoders FOLDER says where it is, see "
            "docs/performance.md"
        )
        return {}
    device = str(inputs.device)
    with tempfile.TemporaryDirectory(prefix="bytetx-bench-") as work:
        with quiet():
            model.save_pretrained(work)
        np.save(Path(work) / packed_encoders_process.LENGTHS, inputs.lengths)
        np.save(Path(work) / packed_encoders_process.IDS, inputs.packed_ids[0].cpu().numpy())
        command = [sys.executable, "-m", packed_encoders_process.__name__, work, device]
        command += [] if folder is None else [str(folder.resolve())]
        try:
            child = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_SECONDS
            )
        except subprocess.TimeoutExpired:
            notes.append(f"{NAME} left out: not done after {_TIMEOUT_SECONDS:.0f} s")
            return {}
        if child.returncode:
            last = child.stderr.strip().rpartition("\n")[2] or f"exit status {child.returncode}"
            notes.append(f"{NAME} left out: {last}")
            return {}
        answer = json.loads(child.stdout.strip().rpartition("\n")[2])  # others may print, too
        theirs = torch.from_numpy(np.load(Path(work) / packed_encoders_process.HIDDEN_STATES))
    notes += [f"{NAME}: {line}" for line in answer["notes"]]
    expected = ours.float().cpu()
    distance = float((theirs - expected).norm() / expected.norm())
    if not distance <= _MAX_RELATIVE_ERROR:
        notes.append(f"{NAME} left out: its relative distance to ours is {distance:.1e}")
        return {}
    found: dict[str, float] = answer["us"]
    return found
