"""LastTokens: the token that each sequence sampled last, kept on the device for the next step."""

import torch
from torch import Tensor

from bytetx.ops.argmax import argmax


class LastTokens:
    """The last sampled token of each slot, on the device: int32 [max_num_seqs + 1].

    The additional slot at the end belongs to padding rows.
    """

    def __init__(self, max_num_seqs: int, *, device: torch.device):
        self._tokens = torch.zeros(max_num_seqs + 1, dtype=torch.int32, device=device)

    @property
    def padding_slot_index(self) -> int:
        return len(self._tokens) - 1

    def gather(self, slot_indices: Tensor) -> Tensor:
        """int32 [n]: the tokens of these slots."""
        return self._tokens.index_select(0, slot_indices)

    def resolve(self, input_ids: Tensor) -> Tensor:
        """The ids, where each id below 0 (~slot_index) is replaced by its slot's token."""
        is_slot = input_ids < 0
        slot_indices = torch.where(is_slot, ~input_ids, 0)
        return torch.where(is_slot, self.gather(slot_indices), input_ids)

    def store(self, slot_indices: Tensor, tokens: Tensor) -> None:
        """tokens: int32 [n]; -1, where no token could be sampled, is stored as 0 and never used."""
        self._tokens.index_copy_(0, slot_indices.long(), tokens.clamp(min=0))

    def store_argmax(self, logits: Tensor, slot_indices: Tensor) -> Tensor:
        """int32 [n]: the most likely token of each row, also stored; -1 where there is none."""
        return argmax(logits, slot_indices=slot_indices, last_tokens=self._tokens)
