"""InputBatch: a planned step of generation as the flat int32 arrays that kernels take."""

from dataclasses import dataclass

import numpy as np

from bytetx.adapter_rows import AdapterRows


@dataclass(frozen=True, slots=True)
class InputBatch:
    """The arrays of a PackedBatch and its Past, on the host.

    input_ids, positions, slot_mapping: int32 [total_tokens].  An id below 0 is ~slot_index: it
    stands for the token that the sequence in this slot sampled last, which the host may not know
    yet.  A position is the token's index in its sequence.  slot_mapping: page * page_size + offset.
    cu_seqlens: int32 [batch_size + 1].
    seqlens, kv_seqlens, slot_indices: int32 [batch_size]; tokens of this step, keys with those of
    this step, and the slot of each sequence.
    page_table: int32 [batch_size, max_pages]; entries after a sequence's last page are arbitrary.
    num_logits: int32 [batch_size]; logits_rows: int32 [num_logits.sum()], the rows whose logits are
    needed, in order.  num_samples: int32 [batch_size], how many of a sequence's last rows sample: 0
    or 1, or more with a draft.
    is_decode: whether each row is the token that its sequence sampled last.
    adapters: of the rows; None where no sequence has one.
    """

    input_ids: np.ndarray
    positions: np.ndarray
    slot_mapping: np.ndarray
    cu_seqlens: np.ndarray
    seqlens: np.ndarray
    kv_seqlens: np.ndarray
    slot_indices: np.ndarray
    page_table: np.ndarray
    num_logits: np.ndarray
    logits_rows: np.ndarray
    num_samples: np.ndarray
    page_size: int
    is_decode: bool
    adapters: AdapterRows | None = None
