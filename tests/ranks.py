"""Ranks for tests: threads of this process that meet as a group of processes does."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
import torch.distributed as dist

from bytetx.parallel.row_scheme import RowScheme
from bytetx.parallel.tp import TpGroup, join_group

R = TypeVar("R")


def on_ranks(size: int, do: Callable[[TpGroup], R], *, rows: RowScheme | None = None) -> list[R]:
    """do(group) on every rank at the same time; results in the order of ranks."""
    store, device = dist.HashStore(), torch.device("cpu")

    def run(rank: int) -> R:
        torch.set_num_threads(1)
        with torch.inference_mode():
            return do(join_group(store, rank=rank, size=size, device=device, rows=rows))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))
