"""LastTokens: what sequences sampled last, where the next step can read it without the host."""

import torch
from torch import Tensor

from bytetx.ops.most_likely import most_likely


class LastTokens:
    """The token that each seat's sequence sampled last, on the device: int32 [seats + 1].

    The seat beyond the last is of rows that stand for no sequence.
    """

    def __init__(self, max_num_seqs: int, *, device: torch.device):
        self._tokens = torch.zeros(max_num_seqs + 1, dtype=torch.int32, device=device)

    @property
    def idle_seat(self) -> int:
        return len(self._tokens) - 1

    def of(self, seats: Tensor) -> Tensor:
        """int32 [n]: the tokens of these seats."""
        return self._tokens.index_select(0, seats)

    def fill_in(self, input_ids: Tensor) -> Tensor:
        """The ids; those below 0, which are ~seat, become the seats' tokens."""
        is_seat = input_ids < 0
        seats = torch.where(is_seat, ~input_ids, 0)
        return torch.where(is_seat, self.of(seats), input_ids)

    def remember(self, seats: Tensor, tokens: Tensor) -> None:
        """tokens: int32 [n]; -1, where none could be chosen, leaves a token that is never used."""
        self._tokens.index_copy_(0, seats.long(), tokens.clamp(min=0))

    def choose(self, logits: Tensor, seats: Tensor) -> Tensor:
        """int32 [n]: the most likely tokens, which are remembered; -1 where there is none."""
        return most_likely(logits, seats=seats, last_tokens=self._tokens)
