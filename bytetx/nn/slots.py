"""Slots: ranks that each compute some sequences of a batch, of the data and z axes of a grid."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import torch

from bytetx.nn.kv_cache import KvCache
from bytetx.nn.layers import OnKv, OnLayer
from bytetx.nn.pass_graphs import PassGraphs, RankPlacement, on_device
from bytetx.nn.transformer import Transformer
from bytetx.packed import PackedBatch
from bytetx.parallel.grid import assign_sequences
from bytetx.parallel.tp import GroupCollectives
from bytetx.runtime.upload import Uploader
from bytetx.sequence_tree import rows_of


class SlottedPlacement(RankPlacement):
    """Runs its slot's sequences of a batch and gathers those of all slots.

    Every rank is called with the whole batch and returns the hidden states of all of it. Whole
    sequences go to a slot: balanced by their work, or, of sequences with a cache, by the first page
    of their keys, so that each finds its keys where it wrote them. Sequences that share pages must
    share the first one. The batch may lie on the host alone.
    """

    is_capturable = False  # how many rows a slot has depends on the lengths

    def __init__(
        self, local: Transformer, slots: GroupCollectives, graphs: PassGraphs | None = None
    ):
        """graphs: of local's passes; slots replay different ones, as their rows demand."""
        super().__init__(local, graphs)
        self._slots = slots
        self._upload = Uploader(local.embeddings.word.device).upload

    def forward(
        self,
        batch: PackedBatch,
        *,
        cache: KvCache | None = None,
        on_layer: OnLayer | None = None,
        on_kv: OnKv | None = None,
    ) -> torch.Tensor:
        """on_kv: must be None; no slot has the keys and values of all sequences."""
        if on_kv is not None:
            raise ValueError("on_kv must be None: each slot has the keys of its own sequences")
        assigned = self._assign(batch)
        own = assigned[self._slots.rank]
        rows = _SlotRows(batch.seqlens.numpy(), assigned)
        own_rows = rows.of(self._slots.rank)
        if cache is None and on_layer is None:
            states = self._replay(batch, own, own_rows)
            if states is not None:
                return self._gather(states, rows, *self._upload(rows.sources()))
        here = on_device(batch, self.local.embeddings.word.device)
        sources, index = self._upload(rows.sources(), own_rows)
        own_batch = take_sequences(here, own, index)
        on_own = None if on_layer is None else (lambda x: on_layer(self._gather(x, rows, sources)))
        x = self.local.forward(own_batch, cache=cache, on_layer=on_own)
        return self._gather(x, rows, sources)

    def _replay(
        self, batch: PackedBatch, own: Sequence[int], own_rows: np.ndarray
    ) -> torch.Tensor | None:
        """Hidden states of this slot's sequences and of fillers behind them; None: run eagerly."""
        if self.graphs is None or batch.host is None:
            return None
        own_batch = take_sequences(batch.host, own, torch.from_numpy(own_rows))
        return self.graphs.run(own_batch, captures=batch.allows_capture)

    def _gather(self, x: torch.Tensor, rows: "_SlotRows", sources: torch.Tensor) -> torch.Tensor:
        """This slot's rows, with or without more behind them -> those of the batch, in order."""
        sent = x[: rows.largest]
        if len(sent) < rows.largest:
            sent = x.new_empty((rows.largest, *x.shape[1:]))
            sent[: len(x)] = x
        received = self._slots.all_gather_padded(sent.contiguous(), num_rows=len(sources))
        return received.index_select(0, sources)

    def _assign(self, batch: PackedBatch) -> list[list[int]]:
        """The sequences of each slot; the same on every rank."""
        size = self._slots.size
        if batch.past is None:
            hidden_size = self.local.spec.hidden_size
            return assign_sequences(batch.seqlens.tolist(), size, hidden_size=hidden_size)
        first_pages = batch.past.page_table[:, 0].tolist()
        found: list[list[int]] = [[] for _ in range(size)]
        for sequence, page in enumerate(first_pages):
            found[page % size].append(sequence)
        return found


class _SlotRows:
    """Which rows of a batch each slot has.  largest: the most that one has."""

    def __init__(self, seqlens: np.ndarray, assigned: Sequence[Sequence[int]]):
        order = np.fromiter(chain.from_iterable(assigned), np.int64)
        starts = np.cumsum(seqlens, dtype=np.int64) - seqlens
        # The batch's rows in the order of the slots that have them.
        self._rows = rows_of(starts[order], seqlens[order])
        self._counts = np.array([seqlens[own].sum(dtype=np.int64) for own in assigned])
        self._ends = self._counts.cumsum()
        self.largest = int(self._counts.max())

    def sources(self) -> np.ndarray:
        """int32 [total_tokens]: the index of each batch row in what is gathered: `largest` rows per
        slot."""
        slots = np.arange(len(self._counts))
        moved = slots * self.largest - (self._ends - self._counts)
        found = np.empty(len(self._rows), np.int32)
        found[self._rows] = np.arange(len(self._rows)) + np.repeat(moved, self._counts)
        return found

    def of(self, slot: int) -> np.ndarray:
        """int64, the rows of one slot's sequences."""
        return self._rows[self._ends[slot - 1] if slot else 0 : self._ends[slot]]


def take_sequences(
    batch: PackedBatch, sequences: Sequence[int], index: torch.Tensor
) -> PackedBatch:
    """A batch of some of a batch's sequences.  index: their rows, int64, on its device."""
    chosen = np.array(sequences, dtype=np.int64)
    seqlens = batch.seqlens[torch.from_numpy(chosen)]
    cu_seqlens = np.zeros(len(sequences) + 1, dtype=np.int32)
    np.cumsum(seqlens.numpy(), out=cu_seqlens[1:])

    def taken(x: torch.Tensor | None) -> torch.Tensor | None:
        return None if x is None else _rows_at(x, index)

    past = batch.past
    if past is not None:
        which = _uploaded(chosen, batch.device)
        past = replace(
            past,
            page_table=past.page_table[which],
            kv_seqlens=past.kv_seqlens[which],
            slot_mapping=_rows_at(past.slot_mapping, index),
            prompt_seqlens=None if past.prompt_seqlens is None else past.prompt_seqlens[which],
        )
    return replace(
        batch,
        input_ids=_rows_at(batch.input_ids, index),
        position_ids=_rows_at(batch.position_ids, index),
        token_type_ids=taken(batch.token_type_ids),
        cu_seqlens=_uploaded(cu_seqlens, batch.device),
        seqlens=seqlens,
        max_seqlen=int(seqlens.max()) if len(sequences) else 0,
        inputs_embeds=taken(batch.inputs_embeds),
        bias_positions=taken(batch.bias_positions),
        past=past,
        on_host=None,
    )


def _rows_at(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """x[index]; ids on the host by numpy, for torch starts its threads from some thousand on: ranks
    that share the cores then wait 26 ms for one another (two ranks, 32 cores)."""
    if x.is_cuda or x.is_floating_point():
        return x[index]
    return torch.from_numpy(x.numpy()[index.numpy()])


def _uploaded(x: np.ndarray, device: torch.device) -> torch.Tensor:
    """Without waiting for what the device does; the copy is staged before the call returns."""
    return torch.from_numpy(x).to(device, non_blocking=True)
