"""A checkpoint on one process, on several that it starts, or on those of torchrun."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from bytetx.arguments import check_group_timeout, check_positive
from bytetx.checkpoint.families import Families
from bytetx.checkpoint.router import read_router
from bytetx.checkpoint.spec import ModelSpec
from bytetx.errors import OptionError
from bytetx.nn.loading import (
    LoadedCheckpoint,
    load_checkpoint,
    load_spec,
    overflows_float16,
    resolve_device,
    resolve_dtype,
    saved_dtype,
)
from bytetx.nn.quantization import WEIGHT_FORMATS
from bytetx.nn.sentence_modules import load_sentence_spec
from bytetx.nn.token_budget import default_token_budget
from bytetx.parallel.grid import Grid, parse_grid

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
    grid: str | Grid | None = None,
    batch_invariant: bool = False,
    families: Families | None = None,
    outline: LoadedCheckpoint | None = None,
    reads_weights: bool = True,
) -> LoadedCheckpoint:
    """A checkpoint on tp ranks, of which this process is the first; options as of bytetx.load."""
    check_group_timeout(group_timeout)
    if grid == "auto":
        if isinstance(tp, int) and tp != 1:
            raise OptionError(f"grid auto chooses from all GPUs, and tp is {tp}; leave out one")
        axes = _planned_grid(folder, tp, device=device, dtype=dtype, families=families)
    else:
        axes = _grid(tp, grid)
    if isinstance(tp, int) and axes is not None:
        tp = axes.size
    if tp == 1:
        return load_checkpoint(
            folder,
            device=device,
            dtype=dtype,
            batch_invariant=batch_invariant,
            families=families,
            outline=outline,
            reads_weights=reads_weights,
        )
    if not reads_weights:
        raise OptionError(
            f"reads_weights=False is for one process, and this asks for {_named(tp, axes)}"
        )
    if batch_invariant:
        raise OptionError(
            "batch_invariant runs in one process, for sums over ranks are taken in an order that "
            f"depends on the batch, and this asks for {_named(tp, axes)}; leave out one of the two"
        )
    if read_router(folder) is not None:
        raise OptionError("a model with a Router does not run with tp; load it with tp=1")
    if not load_spec(folder, families).num_layers:
        raise OptionError("a static embedding has no layers for tp to share; load it with tp=1")
    if load_sentence_spec(folder).layer_mean is not None:
        raise OptionError("a WeightedLayerPooling does not run with tp; load the model with tp=1")
    # Imported here: torch.distributed imports slowly, and few models are sharded.
    from bytetx.executor.leader import load_sharded

    if isinstance(tp, int):
        check_positive("tp", tp)
    if isinstance(dtype, str) and dtype in WEIGHT_FORMATS:
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
        grid=axes,
        families=families,
    )


def _named(tp: "int | TorchrunLeader", axes: Grid | None) -> str:
    if axes is not None:
        return f"grid {axes}"
    return f"tp={tp}" if isinstance(tp, int) else f"the {tp.size} ranks of torchrun"


# Machine files of the planner, by what torch calls the GPU.
_MACHINES = {"H200": "h200-nvlink", "H100": "h100-nvlink", "A100": "a100-pcie"}
_AUTO_BATCH, _AUTO_TOKENS = 64, 512  # texts, and tokens of each, of the traffic that auto plans for


def _planned_grid(
    folder: Path,
    tp: "int | TorchrunLeader",
    *,
    device: str | torch.device,
    dtype: str | torch.dtype,
    families: Families | None,
) -> Grid | None:
    """The grid that the planner finds fastest for all GPUs of this machine; None for one device.

    Of a causal model it plans for a token of output for each of the input.
    """
    from bytetx.parallel.planner.plan import plan
    from bytetx.parallel.planner.shapes import shape_of

    placed = resolve_device(device)
    num_gpus = torch.cuda.device_count() if placed.type == "cuda" else 1
    size = num_gpus if isinstance(tp, int) else tp.size
    if size == 1:
        return None
    name = torch.cuda.get_device_name(placed) if placed.type == "cuda" else "a CPU"
    machine = next((file for kind, file in _MACHINES.items() if kind in name), None)
    if machine is None:
        raise OptionError(
            f"grid auto knows {', '.join(_MACHINES)} and this is {name}; measure it with "
            "`bytetx plan --calibrate FILE`, and give the grid that `bytetx plan` then names"
        )
    spec = load_spec(folder, families)
    if spec.experts is not None:
        raise OptionError(
            f"grid auto knows dense layers, and {spec.family} has experts; give tp={size} or a "
            "grid of data and y"
        )
    shape = shape_of(spec)
    most = spec.max_positions // (2 if shape.has_lm_head else 1)
    tokens = max(1, min(_AUTO_TOKENS, most))
    overflows, saved = overflows_float16(spec), saved_dtype(folder, spec)
    resolved = resolve_dtype(dtype, placed, saved=saved, overflows_float16=overflows)
    planned = plan(
        shape,
        machine=machine,
        gpus=size,
        lengths=tokens,
        batch=_AUTO_BATCH,
        output_tokens=tokens if shape.has_lm_head else 0,
        dtype=str(resolved).removeprefix("torch."),
    )
    return planned.best.grid


def _grid(tp: "int | TorchrunLeader", grid: str | Grid | None) -> Grid | None:
    """The grid that is asked for. Raises OptionError where tp says something else."""
    if grid is None:
        return None
    axes = parse_grid(grid) if isinstance(grid, str) else grid
    if isinstance(tp, int):
        if tp not in (1, axes.y):
            raise OptionError(f"grid {axes} has y={axes.y} and tp is {tp}; leave out tp")
    elif tp.size != axes.size:
        raise OptionError(f"grid {axes} has {axes.size} ranks, and torchrun started {tp.size}")
    return axes
