"""Slots: ranks that each compute some sequences of a batch, of the data and z axes of a grid."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, chain

import numpy as np
import torch

from bytetx.nn.kv_cache import KvCache
from bytetx.nn.layers import OnKv, OnLayer
from bytetx.nn.transformer import Transformer
from bytetx.packed import PackedBatch
from bytetx.parallel.grid import assign_sequences
from bytetx.parallel.tp import GroupCollectives
from bytetx.runtime.rows import rows_of


class SlottedTransformer(Transformer):
    """A transformer that runs its slot's sequences of a batch and gathers those of all slots.

    Every rank is called with the whole batch and returns the hidden states of all of it. Whole
    sequences go to a slot: balanced by their work, or, of sequences with a cache, by the first page
    of their keys, so that each finds its keys where it wrote them. Sequences that share pages must
    share the first one.
    """

    def __init__(self, local: Transformer, slots: GroupCollectives):
        vars(self).update(vars(local))
        self._local, self._slots = local, slots

    @property
    def is_capturable(self) -> bool:
        """How many rows a slot has depends on the lengths."""
        return False

    @torch.inference_mode()
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
        rows, offsets = _rows(batch.seqlens.numpy(), assigned)
        order = _uploaded(rows, batch.device)

        def gather(x: torch.Tensor) -> torch.Tensor:
            found = self._slots.all_gather(x, offsets)
            return torch.empty_like(found).index_copy_(0, order, found)

        slot = self._slots.rank
        own_rows = order[offsets[slot] : offsets[slot + 1]]
        own_batch = take_sequences(batch, assigned[slot], own_rows)
        on_own = None if on_layer is None else (lambda x: on_layer(gather(x)))
        return gather(self._local.forward(own_batch, cache=cache, on_layer=on_own))

    def _assign(self, batch: PackedBatch) -> list[list[int]]:
        """The sequences of each slot; the same on every rank."""
        size = self._slots.size
        if batch.past is None:
            hidden_size = self.spec.hidden_size
            return assign_sequences(batch.seqlens.tolist(), size, hidden_size=hidden_size)
        first_pages = batch.past.page_table[:, 0].tolist()
        found: list[list[int]] = [[] for _ in range(size)]
        for sequence, page in enumerate(first_pages):
            found[page % size].append(sequence)
        return found


def _rows(seqlens: np.ndarray, assigned: Sequence[Sequence[int]]) -> tuple[np.ndarray, list[int]]:
    """The rows of all slots' sequences, slot after slot, int64; and where each slot's begin."""
    order = np.fromiter(chain.from_iterable(assigned), np.int64)
    starts = np.cumsum(seqlens, dtype=np.int64) - seqlens  # in the batch
    rows = rows_of(starts[order], seqlens[order])
    counts = [int(seqlens[own].sum()) for own in assigned]
    return rows, [0, *accumulate(counts)]


def _uploaded(x: np.ndarray, device: torch.device) -> torch.Tensor:
    """Without waiting for what the device does; the copy is staged before the call returns."""
    return torch.from_numpy(x).to(device, non_blocking=True)


def take_sequences(
    batch: PackedBatch, sequences: Sequence[int], index: torch.Tensor
) -> PackedBatch:
    """A batch of some of a batch's sequences.  index: their rows, int64, on its device."""
    chosen = np.array(sequences, dtype=np.int64)
    seqlens = batch.seqlens[torch.from_numpy(chosen)]
    cu_seqlens = np.zeros(len(sequences) + 1, dtype=np.int32)
    np.cumsum(seqlens.numpy(), out=cu_seqlens[1:])

    def taken(x: torch.Tensor | None) -> torch.Tensor | None:
        return None if x is None else x[index]

    past = batch.past
    if past is not None:
        which = _uploaded(chosen, batch.device)
        past = replace(
            past,
            page_table=past.page_table[which],
            kv_seqlens=past.kv_seqlens[which],
            slot_mapping=past.slot_mapping[index],
            prompt_seqlens=None if past.prompt_seqlens is None else past.prompt_seqlens[which],
        )
    return replace(
        batch,
        input_ids=batch.input_ids[index],
        position_ids=batch.position_ids[index],
        token_type_ids=taken(batch.token_type_ids),
        cu_seqlens=_uploaded(cu_seqlens, batch.device),
        seqlens=seqlens,
        max_seqlen=int(seqlens.max()) if len(sequences) else 0,
        inputs_embeds=taken(batch.inputs_embeds),
        bias_positions=taken(batch.bias_positions),
        past=past,
    )
