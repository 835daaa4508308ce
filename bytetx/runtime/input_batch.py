"""InputBatch: a planned step of generation as the flat int32 arrays that kernels take."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class StepColumns:
    """The arrays of a PackedBatch and its Past, on the host.

    input_ids, positions, slot_mapping: int32 [total_tokens]; an id below 0 is ~seat, the token that
    the sequence on this seat sampled last, which the host may not know yet; a position is the
    token's index in its sequence, a slot page * page_size + offset.
    cu_seqlens: int32 [batch_size + 1]; seqlens, kv_seqlens, seats: int32 [batch_size], tokens of
    this step, keys with them, and whose seat.  page_table: int32 [batch_size, max_pages]; places
    behind a sequence's last page hold any number.
    num_logits: int32 [batch_size]; logits_rows: int32 [num_logits.sum()], rows whose logits are
    wanted, in order.  samples: bool [batch_size], whose last row samples.
    is_decode: each row is the token that its sequence sampled last.
    """

    input_ids: np.ndarray
    positions: np.ndarray
    slot_mapping: np.ndarray
    cu_seqlens: np.ndarray
    seqlens: np.ndarray
    kv_seqlens: np.ndarray
    seats: np.ndarray
    page_table: np.ndarray
    num_logits: np.ndarray
    logits_rows: np.ndarray
    samples: np.ndarray
    page_size: int
    is_decode: bool
