"""Training steps on grids of two GPUs, over NCCL: 50 of them are those of one device."""

from pathlib import Path

import pytest
import torch
import training_ranks

pytestmark = pytest.mark.gpus(2)


def test_every_grid_of_two_trains_as_one_device(tmp_path: Path) -> None:
    """In float64, and in float32 without x; the first process that fails ends the other."""
    torch.multiprocessing.start_processes(
        training_ranks.run_on_gpu, (str(tmp_path),), nprocs=2, start_method="spawn"
    )
