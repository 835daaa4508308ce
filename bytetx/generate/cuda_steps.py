"""Small steps on one GPU: one copy in, one CUDA graph launch, and tokens that stay on the device.

A step of decode rows, with or without a few short prompts, is hundreds of kernels of a few
microseconds. Launched one by one they take the host longer than the GPU. With a captured graph, and
with the last tokens read on the device, the host can plan the next step while this one runs.

Steps are padded to buckets with and without graphs: the same kernels with the same tiles give the
same bits.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from bytetx.adapter_rows import AdapterRows
from bytetx.checkpoint.spec import ModelSpec
from bytetx.generate.sampler import LastTokens, SamplingMetadata
from bytetx.nn.adapted_rows import read_by_graphs
from bytetx.nn.executor import Executor
from bytetx.nn.heads import LmHead
from bytetx.nn.kv_cache import KvCache
from bytetx.nn.one_sequence import OneSequence
from bytetx.nn.transformer import Transformer
from bytetx.ops.low_rank import captures_low_rank
from bytetx.ops.paged_plan import launches_by_sizes
from bytetx.runtime.cuda_graphs import GraphCache
from bytetx.runtime.input_batch import InputBatch
from bytetx.runtime.paged_layout import (
    MAX_MIXED_TOKENS,
    PagedLayout,
    decode_layout,
    mixed_layout,
    round_rows,
)
from bytetx.runtime.pinned_buffers import PinnedRing


class CudaSteps:
    """Runs steps of bucketed sizes on the current stream; `can_run` says which."""

    def __init__(
        self,
        transformer: Transformer,
        head: LmHead,
        *,
        executor: Executor,
        cache: KvCache,
        last_tokens: LastTokens,
        max_samples: int,
        device: torch.device,
        has_graphs: bool,
    ):
        """max_samples: the most tokens that a step samples."""
        self._transformer, self._head, self._cache = transformer, head, cache
        self._executor, self._device = executor, device
        self._last_tokens = last_tokens
        self._ring = PinnedRing()
        self._graphs: GraphCache | None = None
        self._captures_adapters = captures_low_rank(device, transformer.embeddings.word.dtype)
        self._one_sequence = OneSequence.of(transformer, cache)
        # The other ranks of a tensor-parallel group run bucketed decode steps, but no mixed ones.
        self._runs_mixed = self.is_capturable and not executor.has_workers
        if has_graphs and self.is_capturable:
            workspace_bytes = partial(
                _workspace_bytes, transformer.spec, head.decoder.dtype, round_rows(max_samples)
            )
            self._graphs = GraphCache(device=device, workspace_bytes=workspace_bytes)

    @property
    def num_graphs(self) -> int:
        return 0 if self._graphs is None else len(self._graphs)

    def can_run(self, input_batch: InputBatch, metadata: SamplingMetadata) -> bool:
        """Whether `sample_greedy` and `hidden_states` run this step.

        They do not where the rotary embedding depends on the length of the prompt, where
        prompt_logprobs needs more rows of logits than a bucket has, or where no kernel takes rows
        with adapters.
        """
        if self._transformer.spec.max_plain_prompt is not None:
            return False
        if input_batch.adapters is not None and not self._captures_adapters:
            return False
        is_small = self._runs_mixed and len(input_batch.positions) <= MAX_MIXED_TOKENS
        samples_only = bool(metadata.sampling_rows) and not metadata.prompt_logits
        return input_batch.is_decode or (is_small and samples_only)

    def sample_greedy(self, input_batch: InputBatch) -> Tensor:
        """int32 [samples]: the most likely next tokens, -1 for none; also in last_tokens."""
        return self._run(input_batch, is_greedy=True)

    def hidden_states(self, input_batch: InputBatch) -> Tensor:
        """[samples, hidden_size] after the last layer."""
        return self._run(input_batch, is_greedy=False)

    def release_memory(self) -> bool:
        """Frees the graphs; False where there were none."""
        return self._graphs is not None and self._graphs.clear()

    def _run(self, input_batch: InputBatch, *, is_greedy: bool) -> Tensor:
        layout = _layout_of(input_batch, has_states=bool(self._cache.states))
        pinned = self._ring.take(layout.num_ints)
        layout.write(
            pinned.array[: layout.num_ints],
            input_batch,
            position_offset=self._transformer.spec.position_offset,
            padding_slot_index=self._last_tokens.padding_slot_index,
        )
        source = pinned.tensor[: layout.num_ints]
        with self._on_all_ranks(layout, is_greedy):
            output = self._replay(layout, is_greedy, source, input_batch.adapters)
        pinned.is_free = torch.cuda.Event()
        pinned.is_free.record()
        return output[: int(input_batch.num_samples.sum())]

    def _on_all_ranks(self, layout: PagedLayout, is_greedy: bool) -> AbstractContextManager[None]:
        """Has the other ranks run the same decode step."""
        if not layout.is_decode:
            return nullcontext()
        return self._executor.decode_step(
            self._cache,
            num_rows=layout.num_rows,
            num_pages=layout.num_pages,
            is_greedy=is_greedy,
            is_captured=self._graphs is not None,
        )

    def _replay(
        self, layout: PagedLayout, is_greedy: bool, source: Tensor, adapters: AdapterRows | None
    ) -> Tensor:
        """The step's output.  source: its block, in pinned memory.  adapters: of its rows."""
        compute = partial(self._compute, layout, is_greedy, adapters=adapters)
        captured = None
        if self._graphs is not None:
            sizes = (layout.num_ints, layout.num_rows)
            version, keep = read_by_graphs(adapters)
            key = (layout, is_greedy, version)
            capture = partial(self._graphs.capture, key, compute, *sizes, keep=keep)
            captured = self._graphs.find_or_capture(key, capture)
        if captured is None:
            return compute(source.to(self._device, non_blocking=True))[0]
        captured.block.copy_(source, non_blocking=True)
        captured.graph.replay()
        return captured.outputs[0]

    def _compute(
        self,
        layout: PagedLayout,
        is_greedy: bool,
        block: Tensor,
        *,
        adapters: AdapterRows | None = None,
    ) -> tuple[Tensor]:
        step = layout.read(block, page_size=self._cache.page_size, adapters=adapters)
        if layout.is_decode:
            ids = self._last_tokens.gather(step.slot_indices)
            self._executor.broadcast(block, ids)
        else:
            ids = self._last_tokens.resolve(step.batch.input_ids)
        batch = replace(step.batch, input_ids=ids)
        is_one = layout.is_decode and layout.num_rows == 1 and adapters is None
        if self._one_sequence is not None and is_one:
            hidden_states = self._one_sequence.forward(batch)
        else:
            hidden_states = self._transformer.forward(batch, cache=self._cache)
        if step.logits_rows is not None:
            hidden_states = hidden_states.index_select(0, step.logits_rows)
        if not is_greedy:
            return (hidden_states,)
        return (
            self._last_tokens.store_argmax(self._head.forward(hidden_states), step.slot_indices),
        )

    @property
    def is_capturable(self) -> bool:
        """Whether the paged ops have a kernel; the reference reads lengths on the host."""
        layer = self._cache.layers[0]
        num_kv_heads, head_dim = layer.k_cache.shape[2:]
        has_kernel = launches_by_sizes(
            self._transformer.embeddings.word.dtype,
            num_heads=num_kv_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_seqlen=2,
            has_codes=self._cache.has_codes,
            device=layer.k_cache.device,
        )
        return self._transformer.captures_decode_steps and has_kernel

    def __del__(self) -> None:
        graphs: GraphCache | None = getattr(self, "_graphs", None)
        if graphs is not None:
            graphs.finish()


def _layout_of(input_batch: InputBatch, *, has_states: bool) -> PagedLayout:
    num_sequences, num_pages = input_batch.page_table.shape
    kinds = {"has_adapters": input_batch.adapters is not None, "has_states": has_states}
    if input_batch.is_decode:
        return decode_layout(num_sequences, num_pages, **kinds)
    num_samples = int(input_batch.num_samples.sum())
    sizes = len(input_batch.positions), num_sequences, num_pages, num_samples
    return mixed_layout(*sizes, **kinds)


def _workspace_bytes(
    spec: ModelSpec, dtype: torch.dtype, max_logits: int, total_tokens: int
) -> int:
    """Activations, and the logits of the rows that sample."""
    logits = min(total_tokens, max_logits) * spec.vocab_size * dtype.itemsize
    return spec.workspace_bytes(total_tokens, dtype.itemsize) + logits
