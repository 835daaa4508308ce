"""Passes of ranks as graphs: threads stand in for ranks, and runs of the same work for graphs."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cuda import FakeEvent, fake_capture
from peer_regions import Regions, SharedReads, without_streams
from ranks import on_ranks
from tiny import one_thread, random_ids, save, tiny_model  # noqa: F401  (one_thread is a fixture)
from tiny_decoders import tiny_decoder

from bytetx.nn import grid_blocks as blocks_of_grids
from bytetx.nn.grid_blocks import grid_blocks, grid_transformer
from bytetx.nn.loading import load_checkpoint, load_shard, load_spec
from bytetx.nn.pass_graphs import PassGraphs
from bytetx.nn.transformer import Transformer
from bytetx.packed import PackedBatch, pack
from bytetx.parallel.grid import parse_grid
from bytetx.parallel.tp import TpGroup
from bytetx.runtime import cuda_graphs as graphs
from bytetx.runtime.batch_layout import BatchLayout
from bytetx.runtime.cuda_graphs import CapturedStep

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
# Sizes that share buckets, no tokens for a slot, none at all, and more than a graph may have.
BATCHES = ([40, 1, 33, 0, 12], [39, 2, 30, 3], [9], [], [41, 35, 12, 1], [30, 20, 20, 30, 31])
MAX_TOKENS = 70


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory=False, **o: empty(*a, **o))
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(graphs.GraphCache, "_capture", fake_capture)
    monkeypatch.setattr(graphs.GraphCache, "_reserve", lambda cache, total_tokens: None)
    monkeypatch.setattr(blocks_of_grids, "_all_capture", lambda local, group: True)
    without_streams(monkeypatch)
    monkeypatch.setattr(
        blocks_of_grids,
        "PassGraphs",
        lambda *a, **options: PassGraphs(*a, max_tokens=MAX_TOKENS, **options),
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    models = {
        "bert": tiny_model("bert", num_hidden_layers=2, **SIZES),
        "llama": tiny_decoder("llama", **SIZES),
    }
    return {name: save(m, tmp_path_factory.mktemp(name)) for name, m in models.items()}


def batch_of(folder: Path, seqlens: Sequence[int]) -> PackedBatch:
    return pack(random_ids(seqlens), has_token_types=load_spec(folder).num_token_types > 0)


def on_grid(
    folder: Path,
    grid: str,
    do: Callable[[Transformer, TpGroup], object],
    *,
    copies: bool = False,
) -> list[object]:
    """do(transformer, group) on every rank.  copies: z gathers by copies."""
    axes, spec = parse_grid(grid), load_spec(folder)
    regions = Regions(axes.size)

    def run(group: TpGroup) -> object:
        if copies:
            assert group.axes is not None
            group.axes.z.peer_reads = SharedReads(regions, group.rank)  # type: ignore[assignment]
        blocks = grid_blocks(spec, group)
        local, _ = load_shard(folder, blocks, dtype=torch.float32, device=group.device)
        return do(grid_transformer(local, group), group)

    return on_ranks(axes.size, run, grid=axes)


@pytest.mark.parametrize("name", ["bert", "llama"])
@pytest.mark.parametrize(
    ("grid", "copies"),
    [("data2", False), ("z2", True), ("z2", False), ("y2", False), ("x2", False)]
    + [("data2.z2", False), ("data2.y2", False)],
)
def test_replays_give_one_devices_answers(
    name: str, grid: str, copies: bool, folders: dict[str, Path]
) -> None:
    folder = folders[name]
    plain = load_checkpoint(folder, device="cpu", dtype="float32").transformer
    batches = [batch_of(folder, seqlens) for seqlens in BATCHES] * 3
    wanted = [plain.forward(batch) for batch in batches[: len(BATCHES)]] * 3

    def do(transformer: Transformer, group: TpGroup) -> tuple[list[torch.Tensor], int]:
        found = [transformer.forward(batch) for batch in batches]
        return found, transformer.placement.graphs.num_graphs  # type: ignore[attr-defined]

    for found, num_graphs in on_grid(folder, grid, do, copies=copies):
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=5e-5)
        assert num_graphs >= 1


def test_what_is_no_pass_of_sequences_alone_runs_without(folders: dict[str, Path]) -> None:
    """One whose layers are asked for, one with positions of its own, and one that may not."""
    batch = batch_of(folders["bert"], [20, 5])
    positioned = replace(batch, bias_positions=batch.position_ids)

    def do(transformer: Transformer, group: TpGroup) -> int:
        for _ in range(3):
            transformer.forward(batch, on_layer=lambda x: None)
            transformer.forward(positioned)
            transformer.forward(replace(batch, allows_capture=False))
        return transformer.placement.graphs.num_graphs  # type: ignore[attr-defined]

    assert on_grid(folders["bert"], "data2", do) == [0, 0]


def test_rows_outlive_the_next_replay(folders: dict[str, Path]) -> None:
    first, second = (batch_of(folders["bert"], [n, 5]) for n in (20, 19))

    def do(transformer: Transformer, group: TpGroup) -> bool:
        for _ in range(3):
            states = transformer.forward(first)
        kept = states.clone()
        transformer.forward(second)
        return torch.equal(states, kept)

    assert all(on_grid(folders["bert"], "y2", do))


def test_replays_are_in_the_ledger(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A capture counts as its first replay; here it runs once more than a device would."""
    blocks = recorded_blocks(monkeypatch)

    def capture(
        cache: graphs.GraphCache, block: torch.Tensor, compute: graphs.Compute, keep: object
    ) -> CapturedStep:
        block.copy_(blocks[-1])  # no kernel runs on a device
        compute(block)
        return CapturedStep(UncountedGraph(lambda: compute(block)), block, (), keep)  # type: ignore

    groups: list[TpGroup] = []

    class UncountedGraph:
        def __init__(self, compute: Callable[[], object]):
            self._compute = compute

        def replay(self) -> None:
            collectives = groups[0].all_collectives()
            tallies = [one.tally() for one in collectives]
            self._compute()
            for one, tally in zip(collectives, tallies, strict=True):
                one.restore(tally)

    monkeypatch.setattr(graphs.GraphCache, "_capture", capture)
    batch = batch_of(folders["bert"], [20, 20])

    def do(transformer: Transformer, group: TpGroup) -> list[Counter[tuple[str, str, int]]]:
        if group.rank:
            return []
        groups.append(group)
        return ledgers(transformer, group, batch)

    first, *others = on_grid(folders["bert"], "z2", do, copies=True)[0]
    assert first and all(other == first for other in others)


def test_a_refused_capture_leaves_the_ledger(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = recorded_blocks(monkeypatch)

    def refuse(cache: object, block: torch.Tensor, compute: graphs.Compute, keep: object) -> None:
        block.copy_(blocks[-1])
        compute(block)
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(graphs.GraphCache, "_capture", refuse)
    batch = batch_of(folders["bert"], [20, 20])

    def do(transformer: Transformer, group: TpGroup) -> list[Counter[tuple[str, str, int]]]:
        return [] if group.rank else ledgers(transformer, group, batch)

    first, *others = on_grid(folders["bert"], "z2", do, copies=True)[0]
    assert first and all(other == first for other in others)


def recorded_blocks(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Every batch that is read, the last one last."""
    blocks: list[torch.Tensor] = []
    read = BatchLayout.read

    def recorded(layout: BatchLayout, block: torch.Tensor, **options: Any) -> Any:
        blocks.append(block)
        return read(layout, block, **options)

    monkeypatch.setattr(BatchLayout, "read", recorded)
    return blocks


def ledgers(
    transformer: Transformer, group: TpGroup, batch: PackedBatch
) -> list[Counter[tuple[str, str, int]]]:
    """Return the results of five passes of one rank's layers."""
    assert group.axes is not None
    found = []
    for _ in range(5):
        before = group.axes.counts()
        transformer.placement.graphs.run(batch)  # type: ignore[attr-defined]
        found.append(group.axes.counts() - before)
    return found
