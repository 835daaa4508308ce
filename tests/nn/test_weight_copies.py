"""Layers of z gathered by copies: threads stand in for GPUs that read one another's memory."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peer_regions import Regions, SharedReads, without_streams
from ranks import on_ranks
from tiny import one_thread, random_ids, save, tiny_model  # noqa: F401  (one_thread is a fixture)

from bytetx.nn.grid_blocks import grid_blocks, grid_transformer
from bytetx.nn.loading import load_checkpoint, load_shard, load_spec
from bytetx.nn.slots import SlottedPlacement
from bytetx.nn.transformer import Transformer
from bytetx.nn.weight_gather import WeightGather
from bytetx.packed import PackedBatch, pack
from bytetx.parallel.grid import Grid, assign_sequences
from bytetx.parallel.planner.ledger import count_transfers, local_sizes, pass_transfers
from bytetx.parallel.planner.shapes import shape_of
from bytetx.parallel.tp import TpGroup

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
SEQLENS = [40, 1, 33, 0, 12, 7, 40, 2]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    without_streams(monkeypatch)


@pytest.fixture(scope="module", params=[3, 4], ids=["odd", "even"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_model("bert", num_hidden_layers=request.param, **SIZES)
    return save(model, tmp_path_factory.mktemp("bert"))


def batch_of(folder: Path) -> PackedBatch:
    spec = load_spec(folder)
    return pack(random_ids(SEQLENS), has_token_types=spec.num_token_types > 0)


def wanted(folder: Path) -> torch.Tensor:
    return load_checkpoint(folder, device="cpu", dtype="float32").transformer.forward(
        batch_of(folder)
    )


def on_copies(
    folder: Path,
    grid: Grid,
    do: Callable[[Transformer, WeightGather, TpGroup], object],
    *,
    works: bool = True,
) -> list[object]:
    """do(transformer, its gathers, group) on every rank of a grid of z alone."""
    spec, regions = load_spec(folder), Regions(grid.size)

    def run(group: TpGroup) -> object:
        assert group.axes is not None
        group.axes.z.peer_reads = SharedReads(regions, group.rank, works)  # type: ignore[assignment]
        blocks = grid_blocks(spec, group)
        local, _ = load_shard(folder, blocks, dtype=torch.float32, device=group.device)
        transformer, gather = grid_transformer(local, group), blocks.weight_gather
        assert isinstance(transformer.placement, SlottedPlacement) and isinstance(
            gather, WeightGather
        )
        return do(transformer, gather, group)

    return on_ranks(grid.size, run, grid=grid)


@pytest.mark.parametrize("z", [2, 3])
def test_answers_and_ledger(folder: Path, z: int) -> None:
    grid, batch = Grid(z=z), batch_of(folder)

    def do(
        transformer: Transformer, gather: WeightGather, group: TpGroup
    ) -> list[tuple[torch.Tensor, Counter[tuple[str, str, int]], int]]:
        assert group.axes is not None
        found = []
        for _ in range(3):
            before, begun = group.axes.counts(), group.axes.z.num_begun
            states = transformer.forward(batch)
            counted = group.axes.counts() - before
            found.append((states, counted, group.axes.z.num_begun - begun))
        return found

    shape = shape_of(folder)
    slots = assign_sequences(SEQLENS, z, hidden_size=shape.hidden_size)
    for rank, passes in enumerate(on_copies(folder, grid, do)):
        transfers = pass_transfers(
            shape,
            grid,
            local_sizes(shape, grid, rank=rank),
            num_rows=sum(SEQLENS[i] for i in slots[rank]),
            total_rows=sum(SEQLENS),
            itemsize=4,
            row_scheme=None,
        )
        for states, counted, num_collectives in passes:
            torch.testing.assert_close(states, wanted(folder), rtol=0, atol=5e-5)
            assert counted == count_transfers(transfers)
            assert num_collectives == 0  # no rank waits for another one's weights


def test_a_rank_runs_alone(folder: Path) -> None:
    """Three passes of one rank's layers while the others run none."""
    batch = batch_of(folder)

    def do(transformer: Transformer, gather: WeightGather, group: TpGroup) -> torch.Tensor | None:
        if group.rank:
            return None
        return [transformer.placement.local.forward(batch) for _ in range(3)][-1]

    first, _ = on_copies(folder, Grid(z=2), do)
    torch.testing.assert_close(first, wanted(folder), rtol=0, atol=5e-5)


def test_a_pass_after_one_that_failed(folder: Path) -> None:
    batch = batch_of(folder)

    def do(transformer: Transformer, gather: WeightGather, group: TpGroup) -> torch.Tensor:
        seen: list[torch.Tensor] = []

        def fail_late(x: torch.Tensor) -> None:
            seen.append(x)
            if len(seen) == 3:
                raise RuntimeError("no memory")

        with pytest.raises(RuntimeError, match="no memory"):
            transformer.placement.local.forward(batch, on_layer=fail_late)
        return transformer.forward(batch)

    for states in on_copies(folder, Grid(z=2), do):
        torch.testing.assert_close(states, wanted(folder), rtol=0, atol=5e-5)


def test_ranks_that_find_no_memory_use_collectives(folder: Path) -> None:
    batch = batch_of(folder)

    def do(
        transformer: Transformer, gather: WeightGather, group: TpGroup
    ) -> tuple[torch.Tensor, int]:
        assert group.axes is not None
        begun = group.axes.z.num_begun
        return transformer.forward(batch), group.axes.z.num_begun - begun

    for states, num_collectives in on_copies(folder, Grid(z=2), do, works=False):
        torch.testing.assert_close(states, wanted(folder), rtol=0, atol=5e-5)
        assert num_collectives == shape_of(folder).num_layers
