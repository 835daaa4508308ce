"""Decode steps on one GPU: one copy in, one graph launch, and tokens that stay on the device.

A decode step of a small model is hundreds of kernels of a few microseconds: one by one they take
the host longer than the GPU. Captured, and with each row's token read from where the last step
left it, the host has all of a step's time to plan the next one.

Steps are padded to buckets with or without graphs: the same kernels with the same tiles give the
same bits.
"""

import sys
from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from bytetx.cache import KvCache
from bytetx.engine.block import PinnedRing
from bytetx.engine.decode_block import DecodeLayout, decode_layout
from bytetx.engine.graphs import GraphCache
from bytetx.engine.last_tokens import LastTokens
from bytetx.engine.step_columns import StepColumns
from bytetx.heads import LmHead
from bytetx.ops.paged_plan import takes_paged_plan
from bytetx.spec import ModelSpec
from bytetx.transformer import Transformer


class CudaDecode:
    """Runs steps whose rows are the tokens that were sampled last, on the current stream."""

    def __init__(
        self,
        transformer: Transformer,
        head: LmHead,
        *,
        cache: KvCache,
        last_tokens: LastTokens,
        device: torch.device,
        has_graphs: bool,
    ):
        self._transformer, self._head, self._cache = transformer, head, cache
        self._device = device
        self._last_tokens = last_tokens
        self._ring = PinnedRing()
        self._graphs: GraphCache | None = None
        if has_graphs and self.is_capturable:
            workspace_bytes = partial(_workspace_bytes, transformer.spec, head.decoder.dtype)
            self._graphs = GraphCache(device=device, workspace_bytes=workspace_bytes)

    @property
    def num_graphs(self) -> int:
        return 0 if self._graphs is None else len(self._graphs)

    def tokens(self, columns: StepColumns) -> Tensor:
        """int32 [batch_size]: the most likely next tokens, -1 where there is none; remembered."""
        return self._run(columns, is_greedy=True)

    def hidden_states(self, columns: StepColumns) -> Tensor:
        """[batch_size, hidden_size] after the last layer."""
        return self._run(columns, is_greedy=False)

    def give_memory_back(self) -> bool:
        """Lets go of the graphs; False where there was nothing to let go of."""
        return self._graphs is not None and self._graphs.clear()

    def _run(self, columns: StepColumns, *, is_greedy: bool) -> Tensor:
        num_rows, num_pages = len(columns.seats), columns.page_table.shape[1]
        layout = decode_layout(num_rows, num_pages)
        pinned = self._ring.take(layout.num_ints)
        offset = self._transformer.spec.position_offset
        layout.write(
            pinned.array[: layout.num_ints],
            columns,
            position_offset=offset,
            idle_seat=self._last_tokens.idle_seat,
        )
        source = pinned.tensor[: layout.num_ints]
        sizes = {"num_rows": layout.num_rows, "num_pages": layout.num_pages}
        options = {"is_greedy": is_greedy, "is_captured": self._graphs is not None}
        with self._transformer.decode_step(self._cache, **sizes, **options):
            output = self._replay(layout, is_greedy, source)
        pinned.is_free = torch.cuda.Event()
        pinned.is_free.record()
        return output[:num_rows]

    def _replay(self, layout: DecodeLayout, is_greedy: bool, source: Tensor) -> Tensor:
        """source: the step's block, in pinned memory."""
        compute = partial(self._compute, layout, is_greedy)
        captured = None
        if self._graphs is not None:
            key = (layout, is_greedy)
            captured = self._graphs.find(key)
            if captured is None and self._graphs.is_due(key):
                sizes = {"num_ints": layout.num_ints, "total_tokens": layout.num_rows}
                captured = self._graphs.capture(key, compute, **sizes)
        if captured is None:
            return compute(source.to(self._device, non_blocking=True))[0]
        captured.block.copy_(source, non_blocking=True)
        captured.graph.replay()
        return captured.outputs[0]

    def _compute(self, layout: DecodeLayout, is_greedy: bool, block: Tensor) -> tuple[Tensor]:
        batch, seats = layout.read(block, page_size=self._cache.page_size)
        batch = replace(batch, input_ids=self._last_tokens.of(seats))
        self._transformer.share(block, batch.input_ids)
        hidden_states = self._transformer.forward(batch, cache=self._cache)
        if not is_greedy:
            return (hidden_states,)
        return (self._last_tokens.choose(self._head.forward(hidden_states), seats),)

    @property
    def is_capturable(self) -> bool:
        """The reference of the paged ops reads lengths on the host, which no graph can."""
        decoder, layer = self._transformer.decoder, self._cache.layers[0]
        rows = layer.k_cache.flatten(0, 1)
        has_kernel = takes_paged_plan(rows, layer.k_cache, layer.v_cache, 1.0)
        return decoder is not None and decoder.is_capturable and has_kernel

    def __del__(self) -> None:
        # A graph is not destroyed under its own run.
        if not sys.is_finalizing() and getattr(self, "_graphs", None) is not None:
            with suppress(RuntimeError):
                self._graphs.clear()


def _workspace_bytes(spec: ModelSpec, dtype: torch.dtype, total_tokens: int) -> int:
    """Activations and logits."""
    logits = total_tokens * spec.vocab_size * dtype.itemsize
    return spec.workspace_bytes(total_tokens, dtype.itemsize) + logits
