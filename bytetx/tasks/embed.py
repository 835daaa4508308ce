"""Embeddings: pooled rows through what modules.json says follows."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from bytetx.encode.pipeline import Finished
from bytetx.encode.step import Capture, Step
from bytetx.errors import InputError, OptionError
from bytetx.nn.sentence_modules import Module, Normalize
from bytetx.nn.transformer import Transformer
from bytetx.ops.pooling import pool


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

    @property
    def capture(self) -> Capture:
        modules = tuple(map(id, self.modules))
        options = (self.pooling, self.dimensions, self.skips_prompt, self.normalize)
        return Capture(("embed", modules, *options), rows="sequences")

    @torch.inference_mode()
    def compute(self, transformer: Transformer, step: Step) -> tuple[torch.Tensor, ...]:
        hidden_states = transformer.forward(step.batch)
        following = self._following()
        # The pooling kernel normalises on its way; torch would read the rows three times again.
        is_normed = len(self.pooling) == 1 and isinstance(next(iter(following), None), Normalize)
        pooled = [
            pool(
                hidden_states,
                step.batch.cu_seqlens,
                mode=mode,
                first_tokens=step.prompt_tokens if self.skips_prompt else None,
                normalize=is_normed,
                max_seqlen=step.batch.max_seqlen,
            )
            for mode in self.pooling
        ]
        x = pooled[0] if len(pooled) == 1 else torch.cat(pooled, dim=1)
        for module in following[is_normed:]:
            x = module(x)
        return (x,)

    def _following(self) -> tuple[Callable[[torch.Tensor], torch.Tensor], ...]:
        """What becomes of the pooled rows, in order."""
        following: list[Callable[[torch.Tensor], torch.Tensor]] = [*self.modules]
        if self.dimensions is not None:
            following.append(lambda x: x[:, : self.dimensions].contiguous())
        if self.normalize:
            following.append(Normalize())
        return tuple(following)

    def finish(self, outputs: tuple[np.ndarray, ...], step: Step) -> np.ndarray:
        """f32 [num_texts, dimensions]: a row a text."""
        return outputs[0]


def output_size(hidden_size: int, pooling: tuple[str, ...], modules: tuple[Module, ...]) -> int:
    """Numbers in a vector before any cut. Raises OptionError where a module does not fit."""
    size = hidden_size * len(pooling)
    for module in modules:
        needed = getattr(module, "in_features", size)
        if needed != size:
            raise OptionError(
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

    def put(self, step: Finished[np.ndarray]) -> None:
        """Rows of one step, at their places; with a window's last step come its failures."""
        end = step.window.start + step.window.num_texts
        if end > len(self._rows):
            self._resize(max(end, 2 * len(self._rows)))
        self._num_rows = end
        if len(step.indices):
            self._rows[step.indices] = step.results
        for failure in (*step.failures, *(step.window.failures if step.is_last else ())):
            self._rows[failure.index] = np.nan
            self.errors[failure.index] = failure.error

    def vectors(self) -> np.ndarray:
        """f32 [num_texts, size]."""
        if self._num_rows < len(self._rows):
            self._resize(self._num_rows)
        return self._rows

    def _resize(self, num_rows: int) -> None:
        # In place: for large arrays the system moves pages, so that no second copy ever exists.
        self._rows.resize((num_rows, self._rows.shape[1]), refcheck=False)
