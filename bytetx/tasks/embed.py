"""Embeddings: pooled rows through what modules.json says follows."""

from dataclasses import dataclass

import numpy as np
import torch

from bytetx.engine.runner import Step
from bytetx.errors import InputError
from bytetx.ops.pooling import pool
from bytetx.sentence import Module, Normalize
from bytetx.transformer import Transformer


@dataclass(frozen=True, slots=True)
class EmbedTask:
    """One f32 vector a text.

    pooling: modes whose vectors are joined.  modules: applied in order after pooling.
    dimensions: keep the first ones of each vector.  skips_prompt: prompt tokens are not pooled.
    normalize: l2-normalise at the end (after the cut).
    """

    pooling: tuple[str, ...]
    modules: tuple[Module, ...]
    dimensions: int | None
    skips_prompt: bool
    normalize: bool

    @torch.inference_mode()
    def compute(self, transformer: Transformer, step: Step) -> tuple[torch.Tensor, ...]:
        hidden_states = transformer.forward(step.batch)
        first_tokens = None
        if self.skips_prompt:
            counts = [request.prompt_tokens for request in step.requests]
            first_tokens = torch.tensor(counts, dtype=torch.int32).to(hidden_states.device)
        pooled = [
            pool(
                hidden_states,
                step.batch.cu_seqlens,
                mode=mode,
                first_tokens=first_tokens,
                max_seqlen=step.batch.max_seqlen,
            )
            for mode in self.pooling
        ]
        x = pooled[0] if len(pooled) == 1 else torch.cat(pooled, dim=1)
        for module in self.modules:
            x = module(x)
        if self.dimensions is not None:
            x = x[:, : self.dimensions].contiguous()
        return (Normalize()(x) if self.normalize else x,)

    def finish(self, outputs: tuple[np.ndarray, ...], step: Step) -> list[np.ndarray]:
        return list(outputs[0])


def output_size(hidden_size: int, pooling: tuple[str, ...], modules: tuple[Module, ...]) -> int:
    """Numbers in a vector before any cut. Raises InputError where a module does not fit."""
    size = hidden_size * len(pooling)
    for module in modules:
        needed = getattr(module, "in_features", size)
        if needed != size:
            raise InputError(
                f"the checkpoint's {type(module).__name__} takes {needed} numbers, pooling gives "
                f"{size}; leave pooling to the checkpoint"
            )
        size = getattr(module, "out_features", size)
    return size


class VectorBuffer:
    """Rows in the caller's order in one array, allocated at once where their number is known."""

    def __init__(self, size: int, *, num_texts: int | None):
        self._rows = np.empty((1024 if num_texts is None else num_texts, size), dtype=np.float32)
        self._num_rows = 0
        self.errors: dict[int, InputError] = {}

    def extend(self, results: list[np.ndarray | InputError]) -> None:
        """Adds one window's vectors; an error becomes a row of NaN."""
        end = self._num_rows + len(results)
        if end > len(self._rows):
            self._resize(max(end, 2 * len(self._rows)))
        for i, result in enumerate(results, start=self._num_rows):
            if isinstance(result, InputError):
                self.errors[i] = result
                self._rows[i] = np.nan
            else:
                self._rows[i] = result
        self._num_rows = end

    def vectors(self) -> np.ndarray:
        """f32 [num_texts, size]."""
        if self._num_rows < len(self._rows):
            self._resize(self._num_rows)
        return self._rows

    def _resize(self, num_rows: int) -> None:
        # In place: for large arrays the system moves pages, so that no second copy ever exists.
        self._rows.resize((num_rows, self._rows.shape[1]), refcheck=False)
