"""Executor: how an engine's steps reach every process that holds a part of the model."""

from contextlib import AbstractContextManager, nullcontext

import torch

from bytetx.nn.kv_cache import KvCache
from bytetx.parallel.grid import Grid


class Executor:
    """Executor of a model that runs in this process alone, which has nothing to do.

    A tensor-parallel group has bytetx.executor.leader.GroupExecutor.
    """

    has_workers = False  # whether other ranks run the same passes
    grid = Grid()
    shares_pages = True  # whether sequences may read one another's pages of the cache

    def check(self) -> None:
        """Raises a GroupError where a rank has failed, and with it what the device computed."""

    def decode_step(
        self, cache: KvCache, *, num_rows: int, num_pages: int, is_greedy: bool, is_captured: bool
    ) -> AbstractContextManager[None]:
        """Around a decode step, which the workers run as well.

        is_greedy: with the language model head.  is_captured: as a CUDA graph where such a step
        was run before.
        """
        return nullcontext()

    def broadcast(self, *tensors: torch.Tensor) -> None:
        """To the workers, which read them first in a decode step, in this order."""

    def close(self) -> None:
        """Ends the workers."""
