"""Runs steps on one GPU, queued on a separate stream.

A step costs the host its packing, one copy in from pinned memory, one graph launch (or the
kernels one by one) and one copy out to pinned memory; nothing waits for the GPU. On an H200 the
launch itself takes 2.4 us for the 110 kernels of BERT-base, which one by one take 1.6 ms. Both
copies stand in the same stream as the kernels: with them a step of 128 tokens takes 10 us more than
the bare graph, host included; at the rate of PCIe the 200 KB of 16k tokens take 4 of 1100 us. Large
outputs, which only steps without a graph have, leave on a stream of their own while the next step
computes.

Batches are padded to buckets with or without graphs: the same kernels with the same tiles give the
same bits. A batch beyond the largest bucket, and any where the forward pass cannot be captured,
runs at its own size. The outputs of padding are cut off.
"""

import threading
from dataclasses import replace
from functools import lru_cache, partial

import numpy as np
import torch

from bytetx.adapter_rows import AdapterRows
from bytetx.buckets import FILLER_TOKENS, Bucket, bucket_of
from bytetx.encode.request import Requests
from bytetx.encode.step import Capture, Computation, Step
from bytetx.encode.tree_passes import TreePasses
from bytetx.nn.adapted_rows import read_by_graphs
from bytetx.nn.transformer import Transformer
from bytetx.ops import host
from bytetx.ops.low_rank import captures_low_rank
from bytetx.ops.native_params import StepBlockLayout
from bytetx.packed import SharedPrefixes, positions_of, prefix_sums, upload
from bytetx.runtime.adapter_block import adapter_arrays, adapter_fields, on_device
from bytetx.runtime.batch_layout import BatchLayout
from bytetx.runtime.cuda_graphs import CapturedStep, GraphCache
from bytetx.runtime.on_stream import OnStream
from bytetx.runtime.pinned_buffers import PinnedRing
from bytetx.runtime.step_layout import BlockField

# Outputs from this size on leave on their own stream: 20 us over PCIe, more than its two events.
_OVERLAPPED_BYTES = 1 << 20
_NONE = np.empty(0, dtype=np.int32)


class EncodeLayout:
    """The block of a step of a bucket's sizes. There is one object for each of its arguments.

    position_offset: of the family.  has_adapters: whether some of its texts may have one.
    """

    def __init__(self, batch: BatchLayout, *, position_offset: int, has_adapters: bool):
        self.batch, self._position_offset = batch, position_offset
        self.has_adapters = has_adapters
        self.bucket, self.num_ints = batch.bucket, batch.num_ints
        bucket = batch.bucket
        self._native = StepBlockLayout(
            cu_seqlens=batch.start("cu_seqlens"),
            prompt_tokens=batch.start("prompt_tokens"),
            input_ids=batch.start("input_ids"),
            position_ids=batch.start("position_ids"),
            token_type_ids=batch.start("token_type_ids"),
            num_texts=bucket.num_texts,
            num_fillers=bucket.num_fillers,
            filler_tokens=FILLER_TOKENS,
            total_tokens=bucket.total_tokens,
            position_offset=position_offset,
        )

    def write(
        self, block: np.ndarray, requests: Requests, adapters: AdapterRows | None = None
    ) -> None:
        """Fills a host block from the texts of a step; tokens beyond their own are zeros.

        adapters: of the texts, where the block has them.
        """
        own = {}
        if self.has_adapters and adapters is not None:
            own = adapter_arrays(adapters, self.bucket.total_tokens)
        ids, seqlens = requests.token_ids, requests.seqlens
        types, prompt_tokens = requests.token_type_ids, requests.prompt_tokens
        write = host.write_step_block()
        if write is not None:
            write(self._native, block, ids, seqlens, types, prompt_tokens)
            for name, array in own.items():
                self.batch.write_array(block, name, array)
            return
        cu_seqlens = prefix_sums(seqlens)
        arrays = {
            "cu_seqlens": cu_seqlens,
            "input_ids": ids,
            "position_ids": positions_of(
                ids, seqlens, cu_seqlens, position_offset=self._position_offset
            ),
            "token_type_ids": _NONE if types is None else types,
            "prompt_tokens": _NONE if prompt_tokens is None else prompt_tokens,
            **own,
        }
        self.batch.write_arrays(block, arrays)

    def read(
        self,
        block: torch.Tensor,
        step: Step,
        *,
        max_seqlen: int,
        adapters: AdapterRows | None = None,
    ) -> Step:
        """The step with views of a device block; `seqlens` stays that of the texts alone.

        adapters: of the texts.
        """
        seqlens = step.batch.seqlens
        batch, columns = self.batch.read(block, seqlens=seqlens, max_seqlen=max_seqlen)
        sizes = step.batch.total_tokens, step.batch.batch_size
        if sizes == (self.bucket.total_tokens, self.bucket.batch_size):  # without padding
            batch = replace(batch, on_host=step.batch)
        if adapters is not None and self.has_adapters:
            adapters = on_device(adapters, columns, self.bucket.total_tokens)
        batch = replace(batch, adapters=adapters)
        return Step(step.requests, batch, columns["prompt_tokens"])


@lru_cache(maxsize=256)
def encode_layout(
    bucket: Bucket,
    *,
    has_token_types: bool,
    position_offset: int = 0,
    has_adapters: bool = False,
) -> EncodeLayout:
    """The layout of a step of these sizes."""
    columns = [BlockField("prompt_tokens", (bucket.batch_size,))]
    if has_adapters:
        columns += adapter_fields(bucket.total_tokens, bucket.batch_size)
    layout = BatchLayout(bucket, has_token_types=has_token_types, columns=columns)
    return EncodeLayout(layout, position_offset=position_offset, has_adapters=has_adapters)


@lru_cache(maxsize=4096)
def padded_layout(
    total_tokens: int,
    num_texts: int,
    *,
    max_tokens: int,
    has_token_types: bool,
    position_offset: int,
    has_adapters: bool = False,
) -> EncodeLayout | None:
    """The layout of the bucket for so many tokens and texts; None where it exceeds max_tokens'."""
    bucket = bucket_of(total_tokens, num_texts, max_tokens=max_tokens)
    if bucket is None:
        return None
    return encode_layout(
        bucket,
        has_token_types=has_token_types,
        position_offset=position_offset,
        has_adapters=has_adapters,
    )


class CudaQueue:
    """Runs a model's steps on one GPU, in the order of the calls; threads may share it."""

    def __init__(
        self, transformer: Transformer, *, device: torch.device, max_tokens: int, has_graphs: bool
    ):
        self._transformer, self._device = transformer, device
        self._is_capturable = transformer.is_capturable
        self._captures_adapters = captures_low_rank(device, transformer.embeddings.word.dtype)
        options = {
            "has_token_types": transformer.spec.num_token_types > 0,
            "position_offset": transformer.spec.position_offset,
        }
        self._layout = partial(encode_layout, **options)
        self._padded_layout = partial(padded_layout, max_tokens=max_tokens, **options)
        itemsize = transformer.embeddings.word.element_size()
        workspace_bytes = partial(transformer.spec.workspace_bytes, itemsize=itemsize)
        self._graphs = (
            GraphCache(device=device, workspace_bytes=workspace_bytes) if has_graphs else None
        )
        self._ring = PinnedRing()
        self._trees = None
        if self._is_capturable and transformer.prefix_multiple:
            self._trees = TreePasses(
                transformer, device=device, max_tokens=max_tokens, ring=self._ring
            )
        self._lock = threading.Lock()
        self._stream, self._copy_stream = torch.cuda.Stream(device), torch.cuda.Stream(device)
        # The weights may still be copied.
        self._stream.wait_stream(torch.cuda.current_stream(device))

    @torch.inference_mode()
    def start(
        self, step: Step, task: Computation
    ) -> tuple[tuple[torch.Tensor, ...], torch.cuda.Event, CapturedStep | None]:
        """Queues a step that lies on the host.

        Returns its outputs in pinned memory, the event after which they are there, and what must
        stay alive until then.
        """
        shared, adapters = step.shared, step.requests.adapter_rows
        is_padded = shared is None and (adapters is None or self._captures_adapters)
        capture = task.capture if self._is_capturable and is_padded else None
        sizes = step.requests.total_tokens, len(step.requests)
        padded = None
        if capture is not None:
            padded = self._padded_layout(*sizes, has_adapters=adapters is not None)
        layout = padded or self._layout(Bucket(*sizes, num_fillers=0))
        with self._lock, OnStream(self._stream):
            pinned = self._ring.take(layout.num_ints)
            layout.write(pinned.array, step.requests, adapters)
            source = pinned.tensor[: layout.num_ints]
            captured = None
            if capture is not None and padded is not None and self._graphs is not None:
                captured = self._find_graph(self._graphs, layout, capture, step, task, adapters)
            if captured is not None:
                captured.block.copy_(source, non_blocking=True)
                captured.graph.replay()
                outputs = captured.outputs
            else:
                block = source.to(self._device, non_blocking=True)
                max_seqlen = self._max_seqlen(layout.bucket, step, is_padded=padded is not None)
                here = layout.read(block, step, max_seqlen=max_seqlen, adapters=adapters)
                if shared is not None:
                    batch = replace(here.batch, shared=self._start_shared(shared))
                    here = Step(here.requests, batch, here.prompt_tokens)
                if self._graphs is None:
                    batch = replace(here.batch, allows_capture=False)
                    here = Step(here.requests, batch, here.prompt_tokens)
                outputs = task.compute(self._transformer, here)
                if shared is not None:
                    outputs = (*outputs, *shared.are_kept_finite())
            if capture is not None and padded is not None:
                num_rows = sizes[1] if capture.rows == "sequences" else sizes[0]
                outputs = tuple(output[:num_rows] for output in outputs)
            copies, is_done = self._copy_out(outputs, is_static=captured is not None)
            pinned.is_free = is_done
        return copies, is_done, captured

    def recover(self) -> None:
        """Waits until nothing runs. Raises RuntimeError where the device does not answer."""
        torch.cuda.synchronize(self._device)

    def release_memory(self) -> bool:
        """Destroys the graphs; False where there are none."""
        with self._lock:
            return self._graphs is not None and self._graphs.clear()

    @property
    def num_graphs(self) -> int:
        return 0 if self._graphs is None else len(self._graphs)

    def _start_shared(self, shared: SharedPrefixes) -> SharedPrefixes:
        """The prefixes on the device, with their hidden states where a padded pass gives them."""
        has_adapters = shared.batch.adapters is not None  # their rows are planned on the host
        if self._trees is not None and not shared.kept_rows and not has_adapters:
            states = self._trees.run(shared.batch, self._graphs)
            if states is not None:
                rows = upload(shared.rows, self._device)
                return replace(shared, rows=rows, hidden_states=states)
        return shared.pin().to(self._device, non_blocking=True)

    def _max_seqlen(self, bucket: Bucket, step: Step, *, is_padded: bool) -> int:
        """The longest sequence of the batch, or, if padded, of any batch that its bucket holds."""
        if not is_padded:
            return step.batch.max_seqlen
        return min(bucket.total_tokens, self._transformer.spec.max_positions)

    def _find_graph(
        self,
        graphs: GraphCache,
        layout: EncodeLayout,
        capture: Capture,
        step: Step,
        task: Computation,
        adapters: AdapterRows | None,
    ) -> CapturedStep | None:
        sizes = (layout.num_ints, layout.bucket.total_tokens)
        version, tables = read_by_graphs(adapters)
        key, keep = (layout.bucket, capture.key, version), (task, tables)
        max_seqlen = self._max_seqlen(layout.bucket, step, is_padded=True)
        compute = partial(_compute, self._transformer, layout, step, task, max_seqlen, adapters)
        return graphs.find_or_capture(key, lambda: graphs.capture(key, compute, *sizes, keep=keep))

    def _copy_out(
        self, outputs: tuple[torch.Tensor, ...], *, is_static: bool
    ) -> tuple[tuple[torch.Tensor, ...], torch.cuda.Event]:
        """Pinned copies come from torch's cache, which takes them back when no view is left."""
        if is_static or sum(output.nbytes for output in outputs) < _OVERLAPPED_BYTES:
            return _copy(outputs, self._stream)
        self._copy_stream.wait_stream(self._stream)
        for output in outputs:
            output.record_stream(self._copy_stream)
        with OnStream(self._copy_stream):
            return _copy(outputs, self._copy_stream)

    def __del__(self) -> None:
        graphs: GraphCache | None = getattr(self, "_graphs", None)
        if graphs is not None:
            graphs.finish()


def _compute(
    transformer: Transformer,
    layout: EncodeLayout,
    step: Step,
    task: Computation,
    max_seqlen: int,
    adapters: AdapterRows | None,
    block: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """The outputs of a padded step, from its block on the device."""
    here = layout.read(block, step, max_seqlen=max_seqlen, adapters=adapters)
    return task.compute(transformer, here)


def _copy(
    outputs: tuple[torch.Tensor, ...], stream: torch.cuda.Stream
) -> tuple[tuple[torch.Tensor, ...], torch.cuda.Event]:
    """Onto the host, on the current stream, which is `stream`."""
    copies = []
    for output in outputs:
        host = torch.empty(output.shape, dtype=output.dtype, pin_memory=True)
        copies.append(host.copy_(output, non_blocking=True))
    is_done = torch.cuda.Event()
    is_done.record(stream)
    return tuple(copies), is_done
