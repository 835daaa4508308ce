"""The rows of adapters in the block of a step, at places that depend on its sizes alone."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch

from bytetx.adapter_rows import AdapterRows
from bytetx.ops.low_rank import RowTiles, max_tiles, row_tiles, tile_size
from bytetx.runtime.step_layout import BlockField

_ROWS, _TILES = "adapter_rows", "adapter_tiles"


def adapter_fields(total_tokens: int, num_sequences: int) -> tuple[BlockField, ...]:
    """The arrays of a step of these sizes."""
    num_tiles = max_tiles(total_tokens, num_sequences)
    return BlockField(_ROWS, (total_tokens,)), BlockField(_TILES, (num_tiles, 3))


def adapter_arrays(rows: AdapterRows, total_tokens: int) -> dict[str, np.ndarray]:
    """By field; tiles behind them are empty.  total_tokens: of the fields."""
    numbers, tiles = row_tiles(rows.segments, total_tokens)
    return {_ROWS: numbers, _TILES: tiles}


def on_device(
    rows: AdapterRows, views: Mapping[str, torch.Tensor], total_tokens: int
) -> AdapterRows:
    """The rows as views of a device block."""
    tiles = RowTiles(views[_ROWS], views[_TILES], tile_size(total_tokens))
    return replace(rows, tiles=tiles)
