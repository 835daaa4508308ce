"""CUDA graphs of the passes of one rank: each rank replays its own, the collectives in it as well.

A rank of a group runs a pass because rank 0 sent it a message, so that rank 0 cannot capture more
than its own part. Here every rank captures its layers, padded to a bucket. Ranks that communicate
inside the layers have the same rows, and with them the same bucket; what one of them runs eagerly
or captures first, another one may replay, for both launch the same kernels of the same sizes.
"""

from collections.abc import Sequence
from functools import partial

import torch

from bytetx.buckets import bucket_of
from bytetx.nn.kv_cache import KvCache
from bytetx.nn.layers import OnKv, OnLayer
from bytetx.nn.transformer import Placement, Transformer
from bytetx.packed import PackedBatch
from bytetx.parallel.tp import GroupCollectives, Tally
from bytetx.runtime.batch_layout import BatchLayout, batch_layout
from bytetx.runtime.cuda_graphs import CapturedStep, GraphCache
from bytetx.runtime.pinned_buffers import PinnedRing

# Longer passes take the GPU longer than the host, whatever the model.
_MAX_TOKENS = 32768


class PassGraphs:
    """Runs passes without a cache on the current stream: the first of a bucket's sizes eagerly, the
    second captured, later ones replayed. Not thread-safe."""

    def __init__(
        self,
        transformer: Transformer,
        *,
        collectives: Sequence[GroupCollectives] = (),
        device: torch.device,
        max_tokens: int = _MAX_TOKENS,
    ):
        """collectives: those that its layers may use.  max_tokens: of the longest graph."""
        self._transformer, self._device, self._max_tokens = transformer, device, max_tokens
        self._collectives = collectives
        itemsize = transformer.embeddings.word.element_size()
        workspace_bytes = partial(transformer.spec.workspace_bytes, itemsize=itemsize)
        self._graphs = GraphCache(device=device, workspace_bytes=workspace_bytes)
        self._ring = PinnedRing()
        self._output: torch.Tensor | None = None

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def run(self, batch: PackedBatch, *, captures: bool = True) -> torch.Tensor | None:
        """Hidden states of a batch on the host: its rows, and behind them those of fillers.

        The next run may overwrite them. None where the batch is not one for graphs, on every rank
        that has the same sizes.
        captures: False runs it eagerly, padded all the same, so that it gives the same bits.
        """
        if any(x is not None for x in (batch.inputs_embeds, batch.bias_positions, batch.past)):
            return None
        bucket = bucket_of(batch.total_tokens, batch.batch_size, max_tokens=self._max_tokens)
        if bucket is None:
            return None
        layout = batch_layout(bucket, has_token_types=batch.token_type_ids is not None)
        pinned = self._ring.take(layout.num_ints)
        layout.write(pinned.array, batch)
        source = pinned.tensor[: layout.num_ints]
        if (gather := self._transformer.blocks.weight_gather) is not None:
            gather.prepare()
        captured = None
        if captures:
            capture = partial(self._capture, layout, batch.seqlens)
            captured = self._graphs.find_or_capture(layout, capture)
        if captured is not None:
            for collectives, tally in zip(self._collectives, _kept(captured).tallies, strict=True):
                collectives.add(tally)
            captured.block.copy_(source, non_blocking=True)
            captured.graph.replay()
            states = _kept(captured).output
        else:
            block = source.to(self._device, non_blocking=True)
            states = _forward(self._transformer, layout, batch.seqlens, block)
            if self._output is None or len(self._output) < len(states):
                rows = 1 << (len(states) - 1).bit_length()
                self._output = states.new_empty((rows, *states.shape[1:]))
        pinned.is_free = torch.cuda.Event()
        pinned.is_free.record()
        return states

    def clear(self) -> bool:
        """Frees the graphs once they have run; False where there were none."""
        return self._graphs.clear()

    def _capture(self, layout: BatchLayout, seqlens: torch.Tensor) -> CapturedStep | None:
        """All graphs write to one output, which whoever reads it does before the next one runs."""
        rows = layout.bucket.total_tokens
        if self._output is None or len(self._output) < rows:
            return None  # an eager pass of these sizes was of another cache
        kept = _GraphOutput(self._output[:rows])
        compute = partial(_store, kept.output, self._transformer, layout, seqlens)
        before = [collectives.tally() for collectives in self._collectives]
        captured = self._graphs.capture(layout, compute, layout.num_ints, rows, keep=kept)
        for collectives, begun in zip(self._collectives, before, strict=True):
            kept.tallies.append(collectives.tally() - begun)
            collectives.restore(begun)  # replays count
        return captured

    def __del__(self) -> None:
        graphs: GraphCache | None = getattr(self, "_graphs", None)
        if graphs is not None:
            graphs.finish()


def _forward(
    transformer: Transformer, layout: BatchLayout, seqlens: torch.Tensor, block: torch.Tensor
) -> torch.Tensor:
    """The hidden states of a padded batch, from its block on the device."""
    max_seqlen = min(layout.bucket.total_tokens, transformer.spec.max_positions)
    batch, _ = layout.read(block, seqlens=seqlens, max_seqlen=max_seqlen)
    return transformer.forward(batch)


def _store(
    output: torch.Tensor,
    transformer: Transformer,
    layout: BatchLayout,
    seqlens: torch.Tensor,
    block: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    output.copy_(_forward(transformer, layout, seqlens, block))
    return ()


class _GraphOutput:
    """A graph's output, and the counts that each replay adds to the ledger of each group."""

    def __init__(self, output: torch.Tensor):
        self.output = output
        self.tallies: list[Tally] = []


def _kept(captured: CapturedStep) -> _GraphOutput:
    assert isinstance(captured.keep, _GraphOutput)
    return captured.keep


class RankPlacement(Placement):
    """Takes whole batches, which may lie on the host alone, and runs this rank's part of them."""

    def __init__(self, local: Transformer, graphs: PassGraphs | None):
        """local: this rank's part of the model.  graphs: of its passes, or None."""
        self.local, self.graphs = local, graphs

    def release(self) -> None:
        """Frees the graphs once they have run."""
        if self.graphs is not None:
            self.graphs.clear()


class GraphedPlacement(RankPlacement):
    """Runs its part of every sequence: a pass without a cache is a graph where its batch is known
    on the host."""

    def forward(
        self,
        batch: PackedBatch,
        *,
        cache: KvCache | None = None,
        on_layer: OnLayer | None = None,
        on_kv: OnKv | None = None,
    ) -> torch.Tensor:
        host, graphs = batch.host, self.graphs
        if graphs is not None and host is not None and cache is None and on_layer is None:
            states = graphs.run(host, captures=batch.allows_capture)
            if states is not None:
                return states[: batch.total_tokens].clone()
        here = on_device(batch, self.local.embeddings.word.device)
        return self.local.forward(here, cache=cache, on_layer=on_layer, on_kv=on_kv)


def on_device(batch: PackedBatch, device: torch.device) -> PackedBatch:
    """The batch where a model's weights are."""
    return batch if batch.device.type == device.type else batch.to(device, non_blocking=True)
