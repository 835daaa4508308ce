"""RowScheme: whether the rows of a pass are sharded over the ranks, and where each shard ends."""

import json
import math
from dataclasses import dataclass
from importlib.resources import files

from bytetx.parallel.layout import shard_offsets


@dataclass(frozen=True, slots=True)
class RowScheme:
    """From which number of rows on they are sharded over the ranks, and in which tiles.

    Below shard_from_tokens every rank holds all rows, and sums go through an all-reduce.
    tiles: (total_tokens, rows of a tile from there on), the largest total first.
    """

    shard_from_tokens: int
    tiles: tuple[tuple[int, int], ...]

    def offsets(self, total_tokens: int, size: int) -> tuple[int, ...] | None:
        """size + 1 row offsets in whole tiles, or None where every rank holds all rows."""
        if total_tokens < self.shard_from_tokens:
            return None
        tile = next(rows for first, rows in self.tiles if total_tokens >= first)
        return shard_offsets(total_tokens, size, step=tile)


def row_scheme(device_type: str, size: int, hidden_size: int | None = None) -> RowScheme:
    """The scheme of a group of so many devices of a kind (cpu, cuda), from row_schemes.json.

    Where none was measured for the size, that of the next larger group, or of the largest; of its
    models, the one whose hidden size is nearest to hidden_size (None: the largest).
    """
    table = json.loads(files("bytetx.parallel").joinpath("row_schemes.json").read_text())
    schemes = table[device_type]
    sizes = sorted({scheme["tp"] for scheme in schemes})
    nearest_size = next((tp for tp in sizes if tp >= size), sizes[-1])
    candidates = [s for s in schemes if s["tp"] == nearest_size]

    def distance(scheme: dict[str, int]) -> float:
        largest = -math.log(scheme["hidden_size"])
        return largest if hidden_size is None else abs(largest + math.log(hidden_size))

    scheme = min(candidates, key=distance)
    return RowScheme(scheme["shard_from_tokens"], tuple(map(tuple, scheme["tiles"])))
