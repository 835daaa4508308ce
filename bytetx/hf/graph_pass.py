"""GraphPasses: a wrapped encoder's padded batches as CUDA graphs, over the engine's buckets.

A call launches a kernel that packs its ids into a graph's block, the graph, and a kernel that
writes the graph's rows into a new padded batch. The first pass of a bucket runs eagerly, the second
is captured, later ones are replayed (bytetx.runtime.cuda_graphs).

The host chooses the bucket and so must know the number of tokens; where the mask lies on the GPU,
reading it waits for the GPU. A small batch takes the bucket for all its padded positions instead:
the pads' rows are fillers, and nothing is waited for. That costs less than the wait, behind which
the GPU idles until the host has launched again: about 0.1 ms, in which a BERT-base computes about
350 tokens (H200).
"""

import threading
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch

from bytetx.buckets import FILLER_TOKENS, Bucket, bucket_of
from bytetx.hf.padding import MaskFacts
from bytetx.nn.token_budget import default_token_budget
from bytetx.nn.transformer import Transformer
from bytetx.ops.padded_ids import IdTables, PackedIds, PaddedIds
from bytetx.ops.padding import pack_padded, unpack_padded
from bytetx.ops.pooling import pool
from bytetx.packed import PackedBatch
from bytetx.runtime.batch_layout import BatchLayout, batch_layout
from bytetx.runtime.cuda_graphs import CapturedStep, GraphCache
from bytetx.runtime.on_stream import StreamOrder

# Padded positions of a batch that is not measured first; in random batches about half are pads.
MOST_UNMEASURED = 1024


@dataclass(frozen=True, slots=True)
class Wants:
    """Which rows a call reads: all of them in a padded batch, each sequence's first, or both."""

    padded: bool
    first: bool


@dataclass(frozen=True, slots=True)
class PaddedRows:
    """The results of a pass; new tensors.

    padded: [num_rows, num_columns, hidden_size], zeros at pads.
    first: [num_rows, hidden_size], zeros of a row without tokens.
    """

    padded: torch.Tensor | None
    first: torch.Tensor | None


@dataclass(slots=True)
class _BlockViews:
    """Views of a graph's block, which live as long as the graph."""

    packed: PackedIds | None = None


def takes_graphs(transformer: Transformer) -> bool:
    """Whether a model's passes can be CUDA graphs."""
    return transformer.embeddings.word.is_cuda and transformer.is_capturable


class GraphPasses:
    """The graphs of one wrapped model; threads and streams may share it."""

    def __init__(self, transformer: Transformer):
        self.transformer = transformer
        word, spec = transformer.embeddings.word, transformer.spec
        self.device = word.device
        self._max_tokens = default_token_budget(spec, self.device)
        workspace_bytes = partial(spec.workspace_bytes, itemsize=word.element_size())
        self._graphs = GraphCache(device=self.device, workspace_bytes=workspace_bytes)
        # The last hidden states of whichever graph ran last, by the rows that there is room for.
        self._states: dict[int, torch.Tensor] = {}
        self._lock = threading.Lock()
        self._order = StreamOrder(self.device)
        self._tables = _tables_of(transformer)
        layers = transformer.layers
        # Then a mask with holes, or a row that starts with a pad, may need the original forward.
        self.depends_on_distances = (
            layers.buckets is not None
            or layers.relative_bias is not None
            or any(map(spec.layer_spec.window_of, range(spec.num_layers)))
        )
        # The packing kernel tells of bad ids; the forward pass only makes their rows NaN.
        self._notes = None
        if word.is_cuda:
            with torch.inference_mode():
                self._notes = torch.zeros(3, dtype=torch.int32, device=self.device)

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def takes(self, num_rows: int, num_columns: int, facts: MaskFacts | None) -> bool:
        """Whether there are buckets for a batch.  facts: None where it was not measured."""
        if num_columns > self.transformer.spec.max_positions:
            return False
        return self._layout(num_rows, num_columns, facts) is not None

    def run(
        self,
        padded: PaddedIds,
        wants: Wants,
        *,
        facts: MaskFacts | None,
        bad_ids: torch.Tensor | None,
    ) -> PaddedRows:
        """Runs a batch that `takes` takes; nothing waits for the GPU.

        bad_ids: int32 [3] on the device, where ids outside their tables are noted.
        """
        num_rows, num_columns = padded.input_ids.shape
        layout = self._layout(num_rows, num_columns, facts)
        assert layout is not None  # `takes` said so
        bucket = layout.bucket
        if facts is not None and not facts.has_pads:
            padded = replace(padded, mask=None)
        seqlens = None
        if facts is not None and facts.device_seqlens is not None and padded.mask is not None:
            seqlens = facts.device_seqlens.to(self.device, non_blocking=True)
        with self._lock, self._order:
            with torch.inference_mode():
                capture = partial(self._capture, layout, wants)
                captured = self._graphs.find_or_capture((layout, wants), capture)
                packed = _packed_of(captured, layout, self.device)
                places = pack_padded(
                    padded,
                    packed,
                    num_texts=bucket.num_texts,
                    filler_tokens=FILLER_TOKENS,
                    position_offset=self.transformer.spec.position_offset,
                    seqlens=seqlens,
                    tables=None if bad_ids is None else self._tables,
                    bad_ids=bad_ids,
                )
                if captured is None:
                    x, first = self._forward(layout, packed, wants)
                else:
                    captured.graph.replay()
                    x = self._states_of(bucket) if wants.padded else None
                    first = captured.outputs[0] if wants.first else None
            # In the caller's own mode: outside of inference mode the results may take part in
            # autograd (a trained head on a frozen encoder).
            return _results(x, first, places, num_rows=num_rows, num_columns=num_columns)

    def release_memory(self) -> bool:
        """Destroys the graphs; False where there are none."""
        with self._lock:
            had_graphs = self._graphs.clear()  # which write the states
            self._states.clear()
            return had_graphs

    def __del__(self) -> None:
        graphs: GraphCache | None = getattr(self, "_graphs", None)
        if graphs is not None:
            graphs.finish()

    def _layout(
        self, num_rows: int, num_columns: int, facts: MaskFacts | None
    ) -> BatchLayout | None:
        return _layout_of(
            num_rows,
            num_rows * num_columns if facts is None else facts.total_tokens,
            max_tokens=self._max_tokens,
            is_measured=facts is not None,
            has_types=self.transformer.spec.num_token_types > 0,
        )

    def _capture(self, layout: BatchLayout, wants: Wants) -> CapturedStep | None:
        if wants.padded:
            self._states_of(layout.bucket)  # allocated outside of the graph, which writes it
        return self._graphs.capture(
            (layout, wants),
            partial(self._compute, layout, wants),
            layout.num_ints,
            layout.bucket.total_tokens,
            keep=_BlockViews(),
        )

    def _compute(
        self, layout: BatchLayout, wants: Wants, block: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """The computation that a graph captures."""
        x, first = self._forward(layout, _packed_in(block, layout), wants)
        if x is not None:
            self._states_of(layout.bucket).copy_(x)
        return () if first is None else (first,)

    def _forward(
        self, layout: BatchLayout, packed: PackedIds, wants: Wants
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        bucket = layout.bucket
        batch = PackedBatch(
            input_ids=packed.input_ids,
            position_ids=packed.position_ids,
            token_type_ids=packed.token_type_ids,
            cu_seqlens=packed.cu_seqlens,
            # Only the device knows the lengths.
            seqlens=torch.zeros(bucket.batch_size, dtype=torch.int32),
            max_seqlen=min(bucket.total_tokens, self.transformer.spec.max_positions),
            bad_ids=self._notes,
        )
        x = self.transformer.forward(batch)
        first = None
        if wants.first:
            longest = batch.max_seqlen
            first = pool(x, batch.cu_seqlens, mode="cls", max_seqlen=longest).to(x.dtype)
        return x if wants.padded else None, first

    def _states_of(self, bucket: Bucket) -> torch.Tensor:
        """[total_tokens, hidden_size], where all graphs of these sizes leave their rows.

        A call unpacks them before the next graph runs, so that a graph need not own them.
        """
        tokens = bucket.total_tokens
        room = 1 << (tokens - 1).bit_length()
        if room not in self._states:
            word, width = self.transformer.embeddings.word, self.transformer.spec.output_size
            self._states[room] = torch.empty((room, width), dtype=word.dtype, device=self.device)
        return self._states[room][:tokens]


# Computed anew, it would be 5 of the 55 us that a call of one text takes before the launch.
@lru_cache(maxsize=1024)
def _layout_of(
    num_rows: int, total_tokens: int, *, max_tokens: int, is_measured: bool, has_types: bool
) -> BatchLayout | None:
    """The layout of a batch's bucket; None where there is none, or no token.

    total_tokens: where the batch is not measured all its positions, of which each may be a pad.
    """
    bucket = bucket_of(total_tokens, num_rows, max_tokens=max_tokens)
    if bucket is None or total_tokens == 0:
        return None
    if not is_measured:
        bucket = replace(bucket, num_fillers=-(-bucket.total_tokens // FILLER_TOKENS))
    return batch_layout(bucket, has_token_types=has_types)


def _tables_of(transformer: Transformer) -> IdTables:
    table = transformer.embeddings
    sizes = (0 if t is None else t.shape[0] for t in (table.word, table.position, table.token_type))
    return IdTables(*sizes)


def _packed_of(
    captured: CapturedStep | None, layout: BatchLayout, device: torch.device
) -> PackedIds:
    """Where a pass is packed: in its graph's block, or in a new one."""
    if captured is None:
        return _packed_in(torch.empty(layout.num_ints, dtype=torch.int32, device=device), layout)
    kept = captured.keep
    assert isinstance(kept, _BlockViews)  # _find_graph made it
    if kept.packed is None:
        kept.packed = _packed_in(captured.block, layout)
    return kept.packed


def _packed_in(block: torch.Tensor, layout: BatchLayout) -> PackedIds:
    views = layout.views(block)
    types = views.get("token_type_ids")
    return PackedIds(views["cu_seqlens"], views["input_ids"], views["position_ids"], types)


def _results(
    x: torch.Tensor | None,
    first: torch.Tensor | None,
    places: torch.Tensor | None,
    *,
    num_rows: int,
    num_columns: int,
) -> PaddedRows:
    """New tensors; places: of pack_padded."""
    padded = None
    if x is not None and places is not None:
        padded = unpack_padded(x, places)
    elif x is not None:
        padded = x[: num_rows * num_columns].clone()
    if padded is not None:
        padded = padded.view(num_rows, num_columns, padded.shape[1])
    return PaddedRows(padded, None if first is None else first[:num_rows].clone())
