"""A checkpoint on one process, on several that it starts, or on those of torchrun."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from bytetx.arguments import check_group_timeout, check_positive
from bytetx.checkpoint.router import read_router
from bytetx.checkpoint.spec import ModelSpec
from bytetx.errors import OptionError
from bytetx.nn.loading import LoadedCheckpoint, default_token_budget, load_checkpoint
from bytetx.nn.quantization import QUANTIZATIONS

if TYPE_CHECKING:
    from bytetx.executor.torchrun import TorchrunLeader


def load_ranks(
    folder: Path,
    tp: "int | TorchrunLeader",
    *,
    device: str | torch.device,
    dtype: str | torch.dtype,
    token_budget: int | None,
    group_timeout: float,
) -> LoadedCheckpoint:
    """A checkpoint on tp ranks, of which this process is the first; options as of bytetx.load."""
    check_group_timeout(group_timeout)
    if tp == 1:
        return load_checkpoint(folder, device=device, dtype=dtype)
    if read_router(folder) is not None:
        raise OptionError("a model with a Router does not run with tp; load it with tp=1")
    # Imported here: torch.distributed imports slowly, and few models are sharded.
    from bytetx.executor.leader import load_sharded

    if isinstance(tp, int):
        check_positive("tp", tp)
    if dtype in QUANTIZATIONS:
        raise OptionError(f"dtype {dtype} runs in one process; leave out tp, or use dtype float16")

    def budget_of(spec: ModelSpec, device: torch.device) -> int:
        return default_token_budget(spec, device) if token_budget is None else token_budget

    return load_sharded(
        folder,
        ranks=tp,
        device=device,
        dtype=dtype,
        token_budget=budget_of,
        group_timeout=float(group_timeout),
    )
