"""Run by each process of the tests of training: every grid, and a plain torch GPT beside it."""

import math
import random
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from bytetx.parallel.autograd import TrainingGroups, join_training_groups
from bytetx.parallel.grid import Grid, grids_of, parse_grid
from bytetx.parallel.tp import prefix_store
from bytetx.parallel.training import GptConfig, GridGpt, initial_weights, train_step

NUM_RANKS, NUM_STEPS = 4, 50
COMPARED = (0, 3, 24, 49)  # steps whose gradients are compared, each number of them
# No weight's numbers are a multiple of 4, so that the last shard over z is padded.
CONFIG = GptConfig(44, 12, 2, 4, 20, 16)
# Through all steps; other grids take FEW_STEPS, one of each kind of batch.
LONG = [("z2.y2", torch.float64), ("data2.y2", torch.float32)]
# The same of two ranks, which have a GPU each.
LONG_OF_TWO = [(name, torch.float64) for name in ("data2", "z2", "y2", "x2")]
LONG_OF_TWO += [(name, torch.float32) for name in ("data2", "z2", "y2")]
FEW_STEPS = 4
# Of what is compared, on top of its largest number: sums in another order, through 50 steps.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-3}


def run(rank: int, folder: str) -> None:
    """One of four processes on CPUs. Raises AssertionError where a grid differs from one device."""
    torch.set_num_threads(1)
    check_grids(rank, folder, NUM_RANKS, LONG, torch.device("cpu"))


def run_on_gpu(rank: int, folder: str) -> None:
    """One of two processes with a GPU each."""
    check_grids(rank, folder, 2, LONG_OF_TWO, torch.device("cuda", rank))


def check_grids(
    rank: int,
    folder: str,
    num_ranks: int,
    long: list[tuple[str, torch.dtype]],
    device: torch.device,
) -> None:
    store = dist.FileStore(str(Path(folder) / "store"), num_ranks)
    wanted = {dtype: one_device(dtype, device) for dtype in TOLERANCES}
    cases = [(grid, torch.float64) for grid in grids_of(num_ranks)]
    cases += [(parse_grid(name), dtype) for name, dtype in long if dtype == torch.float32]
    for grid, dtype in cases:
        shared = prefix_store(f"{grid}-{dtype}", store)
        groups = join_training_groups(shared, grid, rank=rank, device=device)
        num_steps = NUM_STEPS if (str(grid), dtype) in long else FEW_STEPS
        check(groups, wanted[dtype], dtype=dtype, num_steps=num_steps)
        if str(grid) in ("data2.z2", "z2.y2", "y2.x2"):
            check_overlap(groups)
            check_micro_batches(groups)


def check_overlap(groups: TrainingGroups) -> None:
    """Waiting for each collective where it starts gives the same bits."""
    weights = initial_weights(CONFIG, seed=1)
    models = [
        GridGpt(CONFIG, weights, groups=groups, overlaps=overlaps) for overlaps in (True, False)
    ]
    optimizers = [optimizer_of(model.parameters()) for model in models]
    for batch in batches()[:FEW_STEPS]:
        pairs = zip(models, optimizers, strict=True)
        losses = [train_step(model, optimizer, batch) for model, optimizer in pairs]
        assert losses[0] == losses[1], groups.grid
        for p, q in zip(*(model.parameters() for model in models), strict=True):
            assert p.grad is not None and q.grad is not None
            assert torch.equal(p.grad, q.grad) and torch.equal(p, q), groups.grid


def check_micro_batches(groups: TrainingGroups) -> None:
    """Gradients of two batches add up, finished one by one or together."""
    weights = initial_weights(CONFIG, seed=1, dtype=torch.float64)
    whole = {name: w.to(groups.device).requires_grad_() for name, w in weights.items()}
    for batch in batches()[:2]:
        plain_loss(batch, whole).backward()
    sums = {name: w.grad for name, w in whole.items() if w.grad is not None}
    wanted = GridGpt(CONFIG, sums, groups=groups)
    for finishes_each in (True, False):
        model = GridGpt(CONFIG, weights, groups=groups)
        for batch in batches()[:2]:
            model.loss(batch).backward()
            if finishes_each:
                model.finish_gradients()
        if not finishes_each:
            model.finish_gradients()
        for (key, p), part in zip(model.named_parameters(), wanted.parameters(), strict=True):
            name = f"{groups.grid} {key}, each: {finishes_each}"
            assert p.grad is not None and torch.allclose(p.grad, part, atol=1e-12), name


def batches() -> list[list[list[int]]]:
    """A batch a step; some have fewer sequences than slots, or one that predicts nothing."""
    lengths = ([17, 2, 5, 9, 3], [7], [1, 12, 4], [2, 2, 2, 16, 11, 8])
    return [
        [[(first + 3 * j) % CONFIG.vocab_size for j in range(n)] for n in lengths[i % 4]]
        for i, first in enumerate(random.Random(0).choices(range(9), k=NUM_STEPS))
    ]


def optimizer_of(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    # A large eps: gradients of keys' biases are 0 but for rounding, which Adam would make steps of.
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4)


def check(
    groups: TrainingGroups,
    wanted: tuple[list[float], list[dict[str, Tensor]]],
    *,
    dtype: torch.dtype,
    num_steps: int,
) -> None:
    losses, gradients = wanted
    model = GridGpt(CONFIG, initial_weights(CONFIG, seed=1, dtype=dtype), groups=groups)
    optimizer, tolerance = optimizer_of(model.parameters()), TOLERANCES[dtype]
    for step, batch in enumerate(batches()[:num_steps]):
        before = counts(groups)
        loss = train_step(model, optimizer, batch)
        name = f"{groups.grid} {dtype} step {step}"
        assert math.isclose(loss, losses[step], rel_tol=tolerance), (name, loss, losses[step])
        if step == 0:
            check_counts(counts(groups) - before, groups.grid, dtype, batch)
        if step in COMPARED:
            # This rank's parts of one device's gradients.
            parts = GridGpt(CONFIG, gradients[step], groups=groups)
            for (key, p), part in zip(model.named_parameters(), parts.parameters(), strict=True):
                assert p.grad is not None, key
                limit = tolerance * max(float(part.detach().abs().max()), 1e-2)
                assert float((p.grad - part).abs().max()) <= limit, (name, key)


def counts(groups: TrainingGroups) -> Counter[tuple[str, str, int]]:
    """(axis, kind, bytes) -> collectives so far."""
    return Counter(
        {
            (axis, *key): count
            for axis in ("data", "z", "y", "x")
            for key, count in getattr(groups, axis).counts.items()
        }
    )


def check_counts(
    found: Counter[tuple[str, str, int]], grid: Grid, dtype: torch.dtype, batch: list[list[int]]
) -> None:
    """AxoNN's table of collectives, of the grids of two axes or fewer that have no x."""
    if grid.x > 1:
        return
    size, hidden, inner = dtype.itemsize, CONFIG.hidden_size, CONFIG.intermediate_size
    shapes = [(3 * hidden, hidden), (hidden, hidden), (inner, hidden), (hidden, inner)]
    numbers = [n * k // grid.y for n, k in shapes * CONFIG.num_layers]
    numbers.append(CONFIG.vocab_size * hidden // grid.y)
    wanted: Counter[tuple[str, str, int]] = Counter()
    for layer, count in enumerate(numbers):
        padded = -(-count // grid.z) * grid.z
        if grid.z > 1:
            # Forward and backward; once of the last layer, whose backward pass comes next.
            wanted["z", "all_gather", padded * size] += 2 if layer < len(numbers) - 1 else 1
            wanted["z", "reduce_scatter", padded * size] += 1
        if grid.data > 1:
            wanted["data", "all_reduce", padded // grid.z * size] += 1
    assert Counter({key: n for key, n in found.items() if key[0] in ("data", "z")}) == wanted
    tokens = sum(len(ids) - 1 for ids in batch)
    if grid.y == grid.size:  # one slot: two sums of all rows forward and two backward, and the head
        assert found["y", "all_reduce", tokens * hidden * size] == 4 * CONFIG.num_layers + 1


def one_device(
    dtype: torch.dtype, device: torch.device
) -> tuple[list[float], list[dict[str, Tensor]]]:
    """Losses and gradients of every step, of plain torch and whole weights."""
    initial = initial_weights(CONFIG, seed=1, dtype=dtype)
    weights = {name: w.to(device) for name, w in initial.items()}
    for w in weights.values():
        w.requires_grad_()
    optimizer = optimizer_of(weights.values())
    losses, gradients = [], []
    for batch in batches():
        optimizer.zero_grad()
        loss = plain_loss(batch, weights)
        loss.backward()
        losses.append(float(loss.detach()))
        gradients.append(
            {name: w.grad.clone() for name, w in weights.items() if w.grad is not None}
        )
        optimizer.step()
    assert losses[-1] < 0.95 * losses[0]
    return losses, gradients


def plain_loss(batch: list[list[int]], weights: dict[str, Tensor]) -> Tensor:
    device = weights["word"].device
    used = [torch.tensor(ids, device=device) for ids in batch if len(ids) > 1]
    logits = torch.cat([plain_gpt(ids[:-1], weights) for ids in used])
    return F.cross_entropy(logits, torch.cat([ids[1:] for ids in used]))


def plain_gpt(ids: Tensor, w: dict[str, Tensor]) -> Tensor:
    """Logits of one sequence."""

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"])

    h = w["word"][ids] + w["position"][: len(ids)]
    future = torch.ones(len(ids), len(ids), dtype=torch.bool, device=ids.device).triu(1)
    for i in range(CONFIG.num_layers):
        qkv = linear(norm(h, f"{i}.norm1"), f"{i}.qkv")
        q, k, v = qkv.view(len(ids), CONFIG.num_heads, 3, -1).permute(2, 1, 0, 3)
        scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(future, -math.inf)
        h = h + linear((scores.softmax(-1) @ v).transpose(0, 1).flatten(1), f"{i}.attn_out")
        h = h + linear(F.gelu(linear(norm(h, f"{i}.norm2"), f"{i}.ffn_in")), f"{i}.ffn_out")
    return linear(norm(h, "norm"), "head")
