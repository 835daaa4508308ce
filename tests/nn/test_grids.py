"""Grids over threads: one device's answers, and the planner's ledger, collective by collective."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from ranks import on_ranks
from tiny import one_thread, random_ids, save, tiny_model  # noqa: F401  (one_thread is a fixture)
from tiny_decoders import tiny_decoder

from bytetx.checkpoint.weights import Weights
from bytetx.nn.grid_blocks import grid_blocks, grid_transformer
from bytetx.nn.layer import LayerWeights
from bytetx.nn.loading import load_checkpoint, load_shard, load_spec
from bytetx.nn.transformer import Transformer
from bytetx.nn.weight_gather import WeightGather
from bytetx.ops.linear import LinearWeight
from bytetx.packed import PackedBatch, pack
from bytetx.parallel.grid import Grid, assign_sequences, grids_of, parse_grid
from bytetx.parallel.planner.ledger import count_transfers, local_sizes, pass_transfers
from bytetx.parallel.planner.shapes import shape_of
from bytetx.parallel.row_scheme import RowScheme, row_scheme
from bytetx.parallel.tp import TpGroup

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
GRIDS = [grid for size in (2, 4) for grid in grids_of(size)]
# Of 8 ranks, those with three axes, and the longest of each.
LARGE_GRIDS = [
    parse_grid(t) for t in ("data2.z2.y2", "z2.y2.x2", "data2.y2.x2", "data2.z2.x2", "z8")
]
# Sequences of no tokens, of one, and fewer sequences than slots.
BATCHES = ([40, 1, 33, 0, 12, 7, 40, 2], [9])
# f32 sums of up to 96 products in another order, through two or three layers of values around 1.
TOLERANCE = 5e-5


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Post-norm and learned positions; a causal pre-norm model; RMS norms, gates, shared heads;
    halves in parallel with interleaved q, k and v."""
    models = {
        "bert": tiny_model("bert", num_hidden_layers=3, **SIZES),
        "gpt2": tiny_decoder("gpt2", **SIZES),
        "llama": tiny_decoder("llama", **SIZES),
        "gpt_neox": tiny_decoder("gpt_neox", rotary_pct=0.5, **SIZES),
    }
    return {name: save(m, tmp_path_factory.mktemp(name)) for name, m in models.items()}


def batch_of(folder: Path, seqlens: Sequence[int]) -> PackedBatch:
    spec = load_spec(folder)
    return pack(
        random_ids(seqlens),
        has_token_types=spec.num_token_types > 0,
        position_offset=spec.position_offset,
    )


def run_grid(
    folder: Path, grid: Grid, batches: Sequence[Sequence[int]], rows: RowScheme | None = None
) -> list[tuple[list[list[torch.Tensor]], list[Counter[tuple[str, str, int]]]]]:
    """For each rank: all layers' states of each batch, and the collectives of a pass without
    them."""
    spec = load_spec(folder)
    packed = [batch_of(folder, seqlens) for seqlens in batches]

    def do(group: TpGroup) -> tuple[list[list[torch.Tensor]], list[Counter[tuple[str, str, int]]]]:
        blocks = grid_blocks(spec, group)
        local, _ = load_shard(folder, blocks, dtype=torch.float32, device=group.device)
        transformer = grid_transformer(local, group)
        found, counts = [], []
        for batch in packed:
            layers: list[torch.Tensor] = []
            before = Counter() if group.axes is None else group.axes.counts()
            last = transformer.forward(batch)
            after = Counter() if group.axes is None else group.axes.counts()
            counts.append(after - before)
            assert torch.equal(transformer.forward(batch, on_layer=layers.append), last)
            found.append([*layers, last])
        return found, counts

    return on_ranks(grid.size, do, grid=grid, rows=rows)


def wanted_states(folder: Path, seqlens: Sequence[int]) -> list[torch.Tensor]:
    layers: list[torch.Tensor] = []
    checkpoint = load_checkpoint(folder, device="cpu", dtype="float32")
    with torch.inference_mode():
        last = checkpoint.transformer.forward(batch_of(folder, seqlens), on_layer=layers.append)
    return [*layers, last]


def assert_one_devices_answers(folder: Path, grid: Grid) -> None:
    wanted = [wanted_states(folder, seqlens) for seqlens in BATCHES]
    results = run_grid(folder, grid, BATCHES)
    shape, scheme = shape_of(folder), row_scheme("cpu", grid.y)
    for rank, (found, counts) in enumerate(results):
        for seqlens, ours, theirs, counted in zip(BATCHES, found, wanted, counts, strict=True):
            assert len(ours) == len(theirs)
            for x, y in zip(ours, theirs, strict=True):
                assert x.shape == y.shape
                torch.testing.assert_close(x, y, rtol=0, atol=TOLERANCE)
            if grid.y == grid.size:
                continue  # tensor parallelism alone has no axes
            slots = assign_sequences(seqlens, grid.num_slots, hidden_size=shape.hidden_size)
            transfers = pass_transfers(
                shape,
                grid,
                local_sizes(shape, grid, rank=rank),
                num_rows=sum(seqlens[i] for i in slots[grid.slot(rank)]),
                total_rows=sum(seqlens),
                itemsize=4,
                row_scheme=scheme,
            )
            assert counted == count_transfers(transfers), f"rank {rank} of {grid}"


@pytest.mark.feature("Several devices", "grids of data, z, y and x")
@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_every_grid_of_two_and_four(name: str, grid: Grid, folders: dict[str, Path]) -> None:
    assert_one_devices_answers(folders[name], grid)


@pytest.mark.parametrize("grid", LARGE_GRIDS, ids=str)
@pytest.mark.parametrize("name", ["llama", "gpt_neox"])
def test_grids_of_eight(name: str, grid: Grid, folders: dict[str, Path]) -> None:
    assert_one_devices_answers(folders[name], grid)


def test_a_layer_ahead_in_two_slots(folders: dict[str, Path]) -> None:
    """While layer i runs, its whole weights are in place, and at most two layers are held."""
    folder = folders["bert"]
    spec = load_spec(folder)
    wanted = [local_weights(layer) for layer in unpacked_layers(folder)]

    def do(group: TpGroup) -> tuple[int, int]:
        blocks = grid_blocks(spec, group)
        local, _ = load_shard(folder, blocks, dtype=torch.float32, device=group.device)
        gather = blocks.weight_gather
        assert isinstance(gather, WeightGather)
        for _ in range(2):
            gather.begin()
            for i, layer in enumerate(local.layers.weights):
                gather.enter(i)
                pairs = zip(local_weights(layer), wanted[i], strict=True)
                assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
        storages = {
            w.untyped_storage().data_ptr(): w.untyped_storage().nbytes()
            for layer in local.layers.weights
            for w in local_weights(layer)
        }
        return gather.num_bytes, sum(storages.values())

    for shard_bytes, slot_bytes in on_ranks(4, do, grid=Grid(z=4)):
        a_layer = sum(w.nbytes for w in wanted[0])
        assert shard_bytes == 3 * a_layer / 4
        assert slot_bytes == 2 * a_layer


def unpacked_layers(folder: Path) -> list[LayerWeights]:
    spec = load_spec(folder)
    transformer = Transformer.from_tensors(
        spec, Weights(folder, spec), dtype=torch.float32, device="cpu", prepack=False
    )
    return transformer.layers.weights


def local_weights(layer: LayerWeights) -> list[torch.Tensor]:
    assert all(isinstance(w, LinearWeight) for w in layer.linears)
    return [w.weight for w in layer.linears]


@pytest.mark.parametrize("grid", ["data2", "z2", "x2"])
def test_halves_on_a_grid_are_as_good_as_on_one_device(grid: str, folders: dict[str, Path]) -> None:
    folder, seqlens = folders["llama"], BATCHES[0]
    exact = wanted_states(folder, seqlens)[-1]
    plain = load_checkpoint(folder, device="cpu", dtype="bfloat16").transformer
    batch = batch_of(folder, seqlens)
    error = (plain.forward(batch).float() - exact).abs().max()

    def do(group: TpGroup) -> torch.Tensor:
        blocks = grid_blocks(plain.spec, group)
        local, _ = load_shard(folder, blocks, dtype=torch.bfloat16, device=group.device)
        return grid_transformer(local, group).forward(batch).float()

    noise = torch.finfo(torch.bfloat16).eps * exact.abs().max()
    for found in on_ranks(2, do, grid=parse_grid(grid)):
        assert (found - exact).abs().max() <= 2 * error + noise
