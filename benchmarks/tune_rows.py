"""`python -m benchmarks tp_layer --tune FILE`:
from how many rows on ranks shard them, and in which tiles.

Whole layers of several models, with every rank holding all rows and with shares of several tiles;
the scheme that is written for a model loses the least over all numbers of rows.
bytetx/parallel/row_scheme.py reads it.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import DTYPES
from benchmarks.lengths import dense
from benchmarks.ranks import Ranks, ranks_us
from benchmarks.suite import select
from benchmarks.tp_models import layers_run, prefill_batch, shared_layers, spec_of
from bytetx.nn.sharded_blocks import ShardedBlocks
from bytetx.parallel.row_scheme import RowScheme

_MODELS = ("gpt3", "llama-70b", "bert-large")
_ROWS = (64, 128, 256, 512, 704, 1024, 2112, 4160)  # whole sequences
_TILES = (16, 64, 128)  # rows
_SEQUENCE = 64  # tokens
_LAYERS = 2
_SAMPLES, _SAMPLE_US = 3, 1_000
_REPLICATED = 0  # in the place of a tile

Times = Mapping[int, Mapping[int, float]]  # rows -> tile -> microseconds


def tune_rows(path: Path, ranks: Ranks, *, patterns: list[str]) -> Iterator[str]:
    """Measures and yields a text for each line; rank 0 writes the schemes. All ranks call it.

    patterns: parts or globs of the models' names; empty means all.
    Raises BytetxError where none fits.
    """
    for model in select(_MODELS, patterns, name=str, what="no model", them="they"):
        times: dict[int, dict[int, float]] = {}
        for rows in _ROWS:
            times[rows] = _measure(model, rows, ranks)
            found = ", ".join(f"{tile}: {us:.1f}" for tile, us in times[rows].items())
            yield f"{model}, {rows} rows; us by rows of a tile (0: no shares): {found}"
        scheme = best_scheme(times)
        if ranks.group.rank == 0:
            hidden_size = spec_of(model).hidden_size
            write_scheme(path, scheme, size=ranks.size, hidden_size=hidden_size)
        yield f"{scheme}"


def best_scheme(times: Times) -> RowScheme:
    """The threshold and the tiles whose times are nearest to the best, over all rows."""
    rows = sorted(times)

    def loss(count: int, tile: int) -> float:
        return times[count][tile] / min(times[count].values())

    tiles = sorted({tile for by_tile in times.values() for tile in by_tile} - {_REPLICATED})
    best = {count: min(tiles, key=lambda tile: loss(count, tile)) for count in rows}

    def total(first: int) -> float:
        return sum(loss(r, best[r]) if r >= first else loss(r, _REPLICATED) for r in rows)

    first = min([*rows, 2 * rows[-1]], key=total)
    steps = [(count, best[count]) for count in rows if count > first]
    lowest = best.get(first, tiles[-1])
    changes = [(0, lowest)]
    for count, tile in steps:
        if tile != changes[-1][1]:
            changes.append((count, tile))
    return RowScheme(first, tuple(reversed(changes)))


def write_scheme(path: Path, scheme: RowScheme, *, size: int, hidden_size: int) -> None:
    """Puts the scheme of a model and a size of group on CUDA in the place of theirs."""

    def key(each: Mapping[str, Any]) -> tuple[int, int]:
        return each["tp"], each["hidden_size"]

    table = json.loads(path.read_text())
    own = {
        "tp": size,
        "hidden_size": hidden_size,
        "shard_from_tokens": scheme.shard_from_tokens,
        "tiles": scheme.tiles,
    }
    others = [other for other in table["cuda"] if key(other) != key(own)]
    table["cuda"] = sorted([*others, own], key=key)
    kinds = []
    for kind, schemes in table.items():
        lines = ",\n    ".join(json.dumps(each) for each in schemes)
        kinds.append(f'  "{kind}": [\n    {lines}\n  ]')
    path.write_text("{\n" + ",\n".join(kinds) + "\n}\n", encoding="utf-8")


def _measure(model: str, rows: int, ranks: Ranks) -> dict[int, float]:
    torch.manual_seed(0)
    spec, group = spec_of(model), ranks.group
    count = _LAYERS if spec.hidden_size > 4096 else spec.num_layers
    share = shared_layers(spec, group, count=count, dtype=DTYPES["bf16"])
    batch = prefill_batch(share, dense(_SEQUENCE, rows // _SEQUENCE))
    sharded, runs = share.blocks, {}
    assert isinstance(sharded, ShardedBlocks) and sharded.shard is not None
    for tile in (_REPLICATED, *_TILES):
        scheme = RowScheme(0 if tile else rows + 1, ((0, tile or 1),))
        own = ShardedBlocks(spec, replace(group, rows=scheme), sharded.shard)
        own.peers = sharded.peers
        runs[str(tile)] = layers_run(replace(share, blocks=own), batch, None)
    found = ranks_us(runs, [], required=runs, samples=_SAMPLES, sample_us=_SAMPLE_US)
    return {int(tile): us / count for tile, us in found.items()}
