"""Ranks for tests: threads of this process that meet as a group of processes does."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

import torch
import torch.distributed as dist

from bytetx.parallel.grid import Grid
from bytetx.parallel.row_scheme import RowScheme
from bytetx.parallel.tp import TpGroup, join_group

R = TypeVar("R")


def on_ranks(
    size: int,
    do: Callable[[TpGroup], R],
    *,
    rows: RowScheme | None = None,
    grid: Grid | None = None,
) -> list[R]:
    """do(group) on every rank at the same time; results in the order of ranks.

    Where one rank fails, the others do not wait for it: its error is the one that is raised.
    """
    store, device = dist.HashStore(), torch.device("cpu")

    def run(rank: int) -> R:
        torch.set_num_threads(1)
        with torch.inference_mode():
            group = join_group(store, rank=rank, size=size, device=device, rows=rows, grid=grid)
            try:
                return do(group)
            except BaseException:
                group.abort()
                raise

    with ThreadPoolExecutor(size) as pool:
        ranks = [pool.submit(run, rank) for rank in range(size)]
        for ended in as_completed(ranks):
            ended.result()  # the first error
        return [rank.result() for rank in ranks]
