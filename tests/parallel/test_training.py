"""Training steps on grids of processes: losses and gradients are those of one device."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import training_ranks

from bytetx.errors import InputError
from bytetx.parallel.autograd import TrainingGroups, cross_entropy_sum
from bytetx.parallel.grid import Grid
from bytetx.parallel.tp import GroupCollectives
from bytetx.parallel.training import GridGpt, initial_weights, train_step

CONFIG = training_ranks.CONFIG


@pytest.mark.feature("Several devices", "training on a grid")
def test_every_grid_of_four_trains_as_one_device(tmp_path: Path) -> None:
    """50 steps of AdamW; the first process that fails ends the others."""
    torch.multiprocessing.start_processes(
        training_ranks.run, (str(tmp_path),), nprocs=training_ranks.NUM_RANKS, start_method="spawn"
    )


def groups_of(grid: Grid) -> TrainingGroups:
    """Groups of rank 0, which calls no collective."""
    axes = [GroupCollectives(None, rank=0, size=grid.length(axis)) for axis in ("data", "z")]
    y, x = (GroupCollectives(None, rank=0, size=grid.length(axis)) for axis in ("y", "x"))
    slots = GroupCollectives(None, rank=0, size=grid.num_slots)
    return TrainingGroups(grid, 0, torch.device("cpu"), *axes, y, x, slots)


def test_gradients_of_two_batches_add_up() -> None:
    model = GridGpt(CONFIG, initial_weights(CONFIG, seed=1), groups=groups_of(Grid()))
    found = []
    for batches in ([[1, 2, 3]], [[4, 5]]), ([[1, 2, 3]],), ([[4, 5]],):
        model.zero_grad()
        for batch in batches:
            model.loss(batch).backward()
            model.finish_gradients()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert len(found[0]) == len(list(model.parameters()))
    for both, first, second in zip(*found, strict=True):
        torch.testing.assert_close(both, first + second)


def test_cross_entropy_of_half_types_is_summed_in_float32() -> None:
    logits = torch.randn(300, 5000).mul(3).bfloat16().requires_grad_()
    targets = torch.randint(0, 5000, (300,))
    loss = cross_entropy_sum(logits, targets, group=GroupCollectives(None, rank=0, size=1))
    loss.backward()
    exact = logits.detach().double().requires_grad_()
    wanted = F.cross_entropy(exact, targets, reduction="sum")
    wanted.backward()
    assert loss.dtype == torch.float32 and logits.grad.dtype == torch.bfloat16
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-6, atol=0)
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=2**-8, atol=1e-9)


def test_what_is_refused() -> None:
    weights = initial_weights(CONFIG, seed=1)
    with pytest.raises(InputError, match="multiple of y=3"):
        GridGpt(CONFIG, weights, groups=groups_of(Grid(y=3)))
    with pytest.raises(InputError, match="5 ranks must divide"):
        GridGpt(CONFIG, weights, groups=groups_of(Grid(x=5)))
    model = GridGpt(CONFIG, weights, groups=groups_of(Grid()))
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(InputError, match="the longest has 1"):
        train_step(model, optimizer, [[1], []])
    with pytest.raises(InputError, match="none of more than 17; the longest has 18"):
        train_step(model, optimizer, [[1] * 18])
