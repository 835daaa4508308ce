"""TreePasses: hidden states of batches that have each common prefix once, also as CUDA graphs.

A tree is planned on the host. Its plan lies in the step's block, at a place that depends on the
bucket alone, so that one graph serves all trees of these sizes. Kernel by kernel, 28 layers take
the host 9 ms, in which other threads hardly get the interpreter.
"""

from dataclasses import replace
from functools import lru_cache, partial

import numpy as np
import torch

from bytetx.buckets import Bucket, bucket_of, round_tokens
from bytetx.nn.transformer import Transformer
from bytetx.ops.attention_plan import num_table_ints
from bytetx.packed import PackedBatch
from bytetx.runtime.batch_layout import BatchLayout
from bytetx.runtime.cuda_graphs import CapturedStep, GraphCache
from bytetx.runtime.pinned_buffers import PinnedRing
from bytetx.runtime.step_layout import BlockField
from bytetx.sequence_tree import SequenceTree


class TreePasses:
    """Runs passes on the current stream: the first of a bucket's sizes kernel by kernel, the second
    captured, later ones replayed. Not thread-safe."""

    def __init__(
        self, transformer: Transformer, *, device: torch.device, max_tokens: int, ring: PinnedRing
    ):
        """max_tokens: of the longest graph.  ring: what steps are copied from."""
        self._transformer, self._device, self._ring = transformer, device, ring
        self._max_tokens = max_tokens
        tile_rows = transformer.layers.tree_tile_rows(device)
        windows = tuple(sorted(transformer.layers.windows))
        self._layout = partial(_layout, tile_rows=tile_rows, windows=windows)
        self._states: torch.Tensor | None = None  # what all graphs write to

    def run(self, batch: PackedBatch, graphs: GraphCache | None) -> torch.Tensor | None:
        """Hidden states of a batch with a tree that lies on the host, and of fillers behind it.

        None where its sizes exceed every bucket, or some of its keys were computed before. The next
        run may overwrite them.  graphs: None runs kernel by kernel, padded all the same.
        """
        bucket = bucket_of(batch.total_tokens, batch.batch_size, max_tokens=self._max_tokens)
        if bucket is None or batch.computed or batch.tree is None:
            return None
        layout = self._layout(bucket)
        tree = layout.padded(batch.tree)
        pinned = self._ring.take(layout.num_ints)
        sizes = layout.tile_rows, layout.num_tiles
        tables = self._transformer.layers.tree_tables(tree, *sizes)
        layout.write(pinned.array, batch, tables)
        source, captured = pinned.tensor[: layout.num_ints], None
        if graphs is not None:
            captured = graphs.find_or_capture(layout, partial(self._capture, graphs, layout, tree))
        if captured is not None:
            captured.block.copy_(source, non_blocking=True)
            captured.graph.replay()
            assert isinstance(captured.keep, torch.Tensor)
            states = captured.keep
        else:
            states = self._forward(layout, tree, source.to(self._device, non_blocking=True))
        pinned.is_free = torch.cuda.Event()
        pinned.is_free.record()
        return states

    def _capture(
        self, graphs: GraphCache, layout: "_TreeLayout", tree: SequenceTree
    ) -> CapturedStep | None:
        rows, word = layout.bucket.total_tokens, self._transformer.embeddings.word
        if self._states is None:
            sizes = (round_tokens(self._max_tokens), self._transformer.spec.output_size)
            try:
                self._states = word.new_empty(sizes)
            except torch.OutOfMemoryError:
                return None  # steps matter more
        states = self._states[:rows]

        def compute(block: torch.Tensor) -> tuple[torch.Tensor, ...]:
            states.copy_(self._forward(layout, tree, block))
            return ()

        return graphs.capture(layout, compute, layout.num_ints, rows, keep=states)

    def _forward(
        self, layout: "_TreeLayout", tree: SequenceTree, block: torch.Tensor
    ) -> torch.Tensor:
        max_seqlen = min(layout.bucket.total_tokens, self._transformer.spec.max_positions)
        return self._transformer.forward(layout.read(block, tree, max_seqlen=max_seqlen))


class _TreeLayout:
    """The block of a batch with a tree of a bucket's sizes. There is one object for each.

    num_tiles: places for tiles of attention, enough for any tree of these sizes.
    """

    def __init__(self, bucket: Bucket, *, tile_rows: int, windows: tuple[int, ...]):
        self.bucket, self.tile_rows = bucket, tile_rows
        # A tile that is not full ends a sequence.
        self.num_tiles = bucket.total_tokens // tile_rows + bucket.batch_size
        num_ints = num_table_ints(bucket.total_tokens, tile_rows, self.num_tiles)
        self._fields = {window: BlockField(f"window_{window}", (num_ints,)) for window in windows}
        self._batch = BatchLayout(bucket, has_token_types=False, columns=self._fields.values())
        self.num_ints = self._batch.num_ints

    def padded(self, tree: SequenceTree) -> SequenceTree:
        """The tree with empty sequences and fillers behind it, up to the bucket's sizes."""
        seqlens = np.diff(self._batch.padded(tree.starts))
        parents = np.full(len(seqlens), -1, dtype=np.int32)
        parents[: len(tree)] = tree.parents
        return SequenceTree(parents, seqlens.astype(np.int32))

    def write(self, block: np.ndarray, batch: PackedBatch, tables: dict[int, np.ndarray]) -> None:
        """Fills a host block.  tables: of attention, by window."""
        columns = {field.name: tables[window] for window, field in self._fields.items()}
        self._batch.write(block, batch, columns)

    def read(self, block: torch.Tensor, tree: SequenceTree, *, max_seqlen: int) -> PackedBatch:
        """The padded batch as views of a device block."""
        seqlens = torch.from_numpy(tree.seqlens)
        batch, columns = self._batch.read(block, seqlens=seqlens, max_seqlen=max_seqlen)
        tables = {window: columns[field.name] for window, field in self._fields.items()}
        return replace(batch, tree=tree, tree_tables=tables)


@lru_cache(maxsize=256)
def _layout(bucket: Bucket, *, tile_rows: int, windows: tuple[int, ...]) -> _TreeLayout:
    return _TreeLayout(bucket, tile_rows=tile_rows, windows=windows)
