"""Small steps on one GPU: one copy in, one graph launch, and tokens that stay on the device.

A step of decode rows, or of a few short prompts among them, is hundreds of kernels of a few
microseconds: one by one they take the host longer than the GPU. Captured, and with each decode
row's token read from where the last step left it, the host has all of a step's time to plan the
next one.

Steps are padded to buckets with or without graphs: the same kernels with the same tiles give the
same bits.
"""

import sys
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from bytetx.checkpoint.spec import ModelSpec
from bytetx.generate.last_tokens import LastTokens
from bytetx.generate.sampler import SamplingRows
from bytetx.nn.heads import LmHead
from bytetx.nn.kv_cache import KvCache
from bytetx.nn.transformer import Transformer
from bytetx.ops.paged_plan import takes_paged_plan
from bytetx.runtime.cuda_graphs import GraphCache
from bytetx.runtime.input_batch import StepColumns
from bytetx.runtime.paged_layout import (
    MAX_MIXED_TOKENS,
    PagedLayout,
    decode_layout,
    mixed_layout,
    round_rows,
)
from bytetx.runtime.pinned_buffers import PinnedRing


class CudaSteps:
    """Runs steps of few sizes on the current stream; `takes` says which."""

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
        # Steps that other ranks run with this one are of decode rows, or plain forward passes.
        self._takes_mixed = self.is_capturable and not transformer.has_followers
        if has_graphs and self.is_capturable:
            most = round_rows(last_tokens.idle_seat)
            workspace_bytes = partial(_workspace_bytes, transformer.spec, head.decoder.dtype, most)
            self._graphs = GraphCache(device=device, workspace_bytes=workspace_bytes)

    @property
    def num_graphs(self) -> int:
        return 0 if self._graphs is None else len(self._graphs)

    def takes(self, columns: StepColumns, wanted: SamplingRows) -> bool:
        """Whether `tokens` and `hidden_states` run this step.

        Rotations that turn by the length of a prompt want it said, and scores of prompts more rows
        of logits than a bucket has.
        """
        if self._transformer.spec.max_plain_prompt is not None:
            return False
        is_small = self._takes_mixed and len(columns.positions) <= MAX_MIXED_TOKENS
        return columns.is_decode or (is_small and not wanted.scoring and bool(wanted.numbers))

    def tokens(self, columns: StepColumns) -> Tensor:
        """int32 [sampling rows]: the most likely next tokens, -1 for none; remembered."""
        return self._run(columns, is_greedy=True)

    def hidden_states(self, columns: StepColumns) -> Tensor:
        """[sampling rows, hidden_size] after the last layer."""
        return self._run(columns, is_greedy=False)

    def give_memory_back(self) -> bool:
        """Lets go of the graphs; False where there was nothing to let go of."""
        return self._graphs is not None and self._graphs.clear()

    def _run(self, columns: StepColumns, *, is_greedy: bool) -> Tensor:
        layout = _layout_of(columns)
        pinned = self._ring.take(layout.num_ints)
        layout.write(
            pinned.array[: layout.num_ints],
            columns,
            position_offset=self._transformer.spec.position_offset,
            idle_seat=self._last_tokens.idle_seat,
        )
        source = pinned.tensor[: layout.num_ints]
        with self._shared(layout, is_greedy):
            output = self._replay(layout, is_greedy, source)
        pinned.is_free = torch.cuda.Event()
        pinned.is_free.record()
        return output[: int(columns.samples.sum())]

    def _shared(self, layout: PagedLayout, is_greedy: bool) -> AbstractContextManager[None]:
        """Around a step that other ranks run, too."""
        if not layout.is_decode:
            return nullcontext()
        sizes = {"num_rows": layout.num_rows, "num_pages": layout.num_pages}
        options = {"is_greedy": is_greedy, "is_captured": self._graphs is not None}
        return self._transformer.decode_step(self._cache, **sizes, **options)

    def _replay(self, layout: PagedLayout, is_greedy: bool, source: Tensor) -> Tensor:
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

    def _compute(self, layout: PagedLayout, is_greedy: bool, block: Tensor) -> tuple[Tensor]:
        step = layout.read(block, page_size=self._cache.page_size)
        if layout.is_decode:
            ids = self._last_tokens.of(step.seats)
            self._transformer.share(block, ids)
        else:
            ids = self._last_tokens.fill_in(step.batch.input_ids)
        batch = replace(step.batch, input_ids=ids)
        hidden_states = self._transformer.forward(batch, cache=self._cache)
        if step.logits_rows is not None:
            hidden_states = hidden_states.index_select(0, step.logits_rows)
        if not is_greedy:
            return (hidden_states,)
        return (self._last_tokens.choose(self._head.forward(hidden_states), step.seats),)

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


def _layout_of(columns: StepColumns) -> PagedLayout:
    num_sequences, num_pages = columns.page_table.shape
    if columns.is_decode:
        return decode_layout(num_sequences, num_pages)
    return mixed_layout(len(columns.positions), num_sequences, num_pages)


def _workspace_bytes(
    spec: ModelSpec, dtype: torch.dtype, max_logits: int, total_tokens: int
) -> int:
    """Activations, and the logits of the rows that sample."""
    logits = min(total_tokens, max_logits) * spec.vocab_size * dtype.itemsize
    return spec.workspace_bytes(total_tokens, dtype.itemsize) + logits
