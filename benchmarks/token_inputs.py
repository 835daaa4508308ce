"""Random token ids of given lengths: packed for us, and as rivals of whole models take them."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from benchmarks.lengths import prefix_sums
from bytetx.checkpoint.spec import ModelSpec
from bytetx.packed import PackedBatch, pack

Forward = Callable[[], Tensor]


class WholeModel(Protocol):
    """One set of weights as ours and as the rivals' models."""

    @property
    def spec(self) -> ModelSpec: ...

    def runs(self, inputs: "TokenInputs") -> dict[str, Forward]:
        """Each engine's forward pass to hidden states [total_tokens, hidden_size]; "ours" first."""
        ...


class PaddedBatch(NamedTuple):
    """Some of the sequences, padded with id 0 to the longest of them."""

    input_ids: Tensor  # int64 [batch_size, max_seqlen]
    mask: Tensor  # int64 [batch_size, max_seqlen]
    rows: Tensor  # int64 [total_tokens], where real tokens lie in the flattened batch


class TokenInputs:
    """Random token ids of sequences of the given lengths, packed and padded."""

    def __init__(
        self, lengths: np.ndarray, *, vocab_size: int, device: torch.device | str = "cuda"
    ):
        rng = np.random.default_rng(0)
        self._ids = [rng.integers(5, vocab_size, length).astype(np.int32) for length in lengths]
        self.lengths, self.max_seqlen, self.device = lengths, int(lengths.max()), device
        self.batch: PackedBatch = pack(self._ids, has_token_types=False, device=device)
        self.cu_seqlens = prefix_sums(lengths, device)
        self.packed_ids = torch.from_numpy(np.concatenate(self._ids)).long().to(device)[None]
        self.position_ids = torch.cat([torch.arange(n) for n in lengths]).to(device)[None]

    def padded(self, batch_size: int) -> list[PaddedBatch]:
        """All sequences in the order given, in batches of batch_size."""
        starts = range(0, len(self._ids), batch_size)
        return [self._pad(self._ids[start : start + batch_size]) for start in starts]

    def _pad(self, ids: list[np.ndarray]) -> PaddedBatch:
        input_ids = torch.zeros(len(ids), max(map(len, ids)), dtype=torch.int64)
        mask = torch.zeros_like(input_ids)
        for row, sequence in enumerate(ids):
            input_ids[row, : len(sequence)] = torch.from_numpy(sequence)
            mask[row, : len(sequence)] = 1
        rows = mask.flatten().nonzero().flatten()
        return PaddedBatch(*(tensor.to(self.device) for tensor in (input_ids, mask, rows)))


def padded_run(model: Any, inputs: TokenInputs, *, batch_size: int) -> Forward:
    """transformers' forward pass over padded batches in the order given.

    model: one of transformers' base models.
    """
    batches = inputs.padded(batch_size)

    def run() -> Tensor:
        found = []
        for batch in batches:
            out = model(input_ids=batch.input_ids, attention_mask=batch.mask).last_hidden_state
            found.append(out.flatten(0, 1).index_select(0, batch.rows))
        return torch.cat(found)

    return run
