"""GroupedRun: several calls of `embed` with the same options, on their way as one."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from bytetx.encode.engine import EncodeEngine
from bytetx.encode.request import Window
from bytetx.tasks.call import Call
from bytetx.tasks.call_run import CallRun
from bytetx.tasks.reading_pool import ReadingPool
from bytetx.tasks.results import Embeddings


class GroupedRun(CallRun[Embeddings]):
    """Counts the tokens of each of the calls, and gives each its own result."""

    def __init__(
        self,
        call: Call[Embeddings],
        engine: EncodeEngine,
        pool: ReadingPool,
        *,
        sizes: Sequence[int],
        token_budget: int,
        max_window_texts: int,
    ):
        """call: of the texts of all calls, one after the other, with on_error="return".

        sizes: number of texts of each call.
        """
        super().__init__(
            call,
            engine,
            pool,
            token_budget=token_budget,
            max_window_texts=max_window_texts,
            priority=0,
        )
        self.open.num_calls = len(sizes)
        self._starts = np.cumsum([0, *sizes])
        self._num_tokens, self._num_truncated = np.zeros((2, len(sizes)), dtype=np.int64)

    def accept(self, window: Window) -> None:
        requests = window.requests
        owners = self._owners(requests.indices)
        np.add.at(self._num_tokens, owners, requests.seqlens)
        np.add.at(self._num_truncated, owners, requests.is_truncated)
        super().accept(window)

    async def results(self) -> list[Embeddings | None]:
        """Of each call; None for one with a text that failed.  Raises the error of all calls.

        Their seconds are those of all together; num_pad_tokens is not counted.
        """
        whole = await self.result()
        failed = set(self._owners(np.array(list(whole.errors), dtype=np.int64)).tolist())
        bounds = self._starts.tolist()
        return [
            None
            if number in failed
            else Embeddings(
                whole.vectors[start:stop],
                replace(
                    whole.stats,
                    num_texts=stop - start,
                    num_tokens=num_tokens,
                    num_truncated=num_truncated,
                    num_pad_tokens=0,
                    num_errors=0,
                ),
                {},
            )
            for number, (start, stop, num_tokens, num_truncated) in enumerate(
                zip(
                    bounds[:-1],
                    bounds[1:],
                    self._num_tokens.tolist(),
                    self._num_truncated.tolist(),
                    strict=True,
                )
            )
        ]

    def _owners(self, indices: np.ndarray) -> np.ndarray:
        """The call of each text."""
        return np.searchsorted(self._starts, indices, side="right") - 1
