"""Decode steps on a worker: the same kernels in the same order as on rank 0.

They are the steps of generate/cuda_steps.py. Both sides capture the second step of some sizes, so
that their collectives run in the order of the steps, captured or not.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from bytetx.nn.heads import LmHead
from bytetx.nn.kv_cache import KvCache
from bytetx.nn.transformer import Transformer
from bytetx.runtime.cuda_graphs import GraphCache
from bytetx.runtime.paged_layout import PagedLayout, decode_layout


class DecodeRunner:
    """A worker's part of the steps that rank 0 plans, on the current stream.

    receive: broadcasts rank 0's tensor into one of this rank, which it returns.
    """

    def __init__(
        self,
        transformer: Transformer,
        head: LmHead,
        *,
        cache: KvCache,
        receive: Callable[[Tensor], Tensor],
        device: torch.device,
    ):
        self._transformer, self._head, self._cache = transformer, head, cache
        self._receive, self._device = receive, device
        self._graphs = GraphCache(device=device, workspace_bytes=self._workspace_bytes)

    def run(self, num_rows: int, num_pages: int, *, is_greedy: bool, is_captured: bool) -> None:
        """One step of these sizes. is_captured: whether rank 0 captures steps at all."""
        layout = decode_layout(num_rows, num_pages)
        compute = partial(self._compute, layout, is_greedy)
        captured = None
        if is_captured:
            key, sizes = (layout, is_greedy), (layout.num_ints, layout.num_rows)
            capture = partial(self._graphs.capture, key, compute, *sizes)
            captured = self._graphs.find_or_capture(key, capture)
        if captured is not None:
            captured.graph.replay()
            return
        compute(torch.empty(layout.num_ints, dtype=torch.int32, device=self._device))

    def clear(self) -> None:
        """Frees the graphs once they have run."""
        self._graphs.clear()

    def _compute(self, layout: PagedLayout, is_greedy: bool, block: Tensor) -> tuple[Tensor]:
        self._receive(block)
        step = layout.read(block, page_size=self._cache.page_size)
        batch = replace(step.batch, input_ids=self._receive(torch.empty_like(step.slot_indices)))
        output = self._transformer.forward(batch, cache=self._cache)
        return (self._head.forward(output) if is_greedy else output,)

    def _workspace_bytes(self, total_tokens: int) -> int:
        """Activations and logits."""
        itemsize = self._transformer.embeddings.word.element_size()
        logits = 2 * total_tokens * self._head.vocab_size * itemsize
        return self._transformer.spec.workspace_bytes(total_tokens, itemsize) + logits
