"""Embeddings: pooled rows, then the checkpoint's sentence-transformers modules."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from bytetx.arguments import check_dimensions, chosen_modes
from bytetx.encode.pipeline import Finished
from bytetx.encode.step import Capture, Step
from bytetx.errors import InputError, OptionError
from bytetx.nn.sentence_modules import AutoEncoder, Module, Normalize
from bytetx.nn.transformer import Transformer
from bytetx.ops.pooling import POOLING_MODES, pool
from bytetx.tasks.adapted import NamedTaskMixin
from bytetx.tasks.precision import Quantizer, make_quantizer

logger = logging.getLogger("bytetx")

_NO_POOLING = "this checkpoint is {} and names no pooling for embed; use {}, or pass pooling"


@dataclass(frozen=True, slots=True)
class EmbedTask:
    """One vector for each text, f32 where no quantizer is given.

    pooling: modes whose vectors are concatenated.  modules: applied in order after pooling.
    dimensions: keeps the first ones of each vector.  skips_prompt: prompt tokens are not pooled.
    normalize: l2-normalises at the end, after dimensions.  quantizer: applied last.
    """

    pooling: tuple[str, ...]
    modules: tuple[Module, ...]
    dimensions: int | None
    skips_prompt: bool
    normalize: bool
    quantizer: Quantizer | None = None

    @property
    def capture(self) -> Capture:
        modules = tuple(map(id, self.modules))
        options = (self.pooling, self.dimensions, self.skips_prompt, self.normalize)
        precision = None if self.quantizer is None else self.quantizer.key
        return Capture(("embed", modules, *options, precision), rows="sequences")

    def compute(self, transformer: Transformer, step: Step) -> tuple[torch.Tensor, ...]:
        return self.reduce(transformer.forward(step.batch), step)

    @torch.inference_mode()
    def reduce(self, hidden_states: torch.Tensor, step: Step) -> tuple[torch.Tensor, ...]:
        """[batch_size, dimensions] from the last hidden states."""
        batch = step.batch
        first_tokens = step.prompt_tokens if self.skips_prompt else None
        return (
            self.vectors(
                hidden_states, batch.cu_seqlens, first_tokens, max_seqlen=batch.max_seqlen
            ),
        )

    def vectors(
        self,
        rows: torch.Tensor,
        cu_seqlens: torch.Tensor,
        first_tokens: torch.Tensor | None = None,
        *,
        max_seqlen: int,
    ) -> torch.Tensor:
        """The pooled rows of each sequence through all modules; arguments as of ops.pool."""
        modules = self._all_modules()
        # The pooling kernel also normalises; torch would read the rows three more times.
        is_normalized = (
            len(self.pooling) == 1 and bool(modules) and isinstance(modules[0], Normalize)
        )
        pooled = [
            pool(
                rows,
                cu_seqlens,
                mode=mode,
                first_tokens=first_tokens,
                normalize=is_normalized,
                max_seqlen=max_seqlen,
            )
            for mode in self.pooling
        ]
        x = pooled[0] if len(pooled) == 1 else torch.cat(pooled, dim=1)
        for module in modules[is_normalized:]:
            x = module(x)
        return x

    def mean(self, chunks: list[np.ndarray]) -> np.ndarray:
        """The vector of a text from the f32 vectors of its chunks, in the task's precision.

        It has unit length where theirs have; one chunk's vector stays as it is.
        """
        mean: np.ndarray = chunks[0]
        if len(chunks) > 1:
            wide = np.stack(chunks).mean(axis=0, dtype=np.float64)
            if self.normalize or any(isinstance(module, Normalize) for module in self.modules):
                wide /= max(float(np.linalg.norm(wide)), 1e-12)
            mean = wide.astype(np.float32)
        if self.quantizer is not None:
            mean = self.quantizer.on_host(mean[None])[0]
        return mean

    def _all_modules(self) -> tuple[Callable[[torch.Tensor], torch.Tensor], ...]:
        """All that is applied to the pooled rows, in order."""
        modules: list[Callable[[torch.Tensor], torch.Tensor]] = [*self.modules]
        if self.dimensions is not None:
            modules.append(lambda x: x[:, : self.dimensions].contiguous())
        if self.normalize:
            modules.append(Normalize())
        if self.quantizer is not None:
            modules.append(self.quantizer)
        return tuple(modules)

    def finish(self, outputs: tuple[np.ndarray, ...], step: Step) -> np.ndarray:
        """[num_texts, dimensions]: a row for each text."""
        return outputs[0]


class DenseMixin(NamedTaskMixin):
    """What Model's methods for dense vectors share."""

    def _embed_task(
        self,
        *,
        dimensions: int | None = None,
        pooling: str | Sequence[str] | None = None,
        normalize: bool | None = None,
        precision: str = "float32",
        ranges: npt.ArrayLike | None = None,
        with_latents: bool = False,
    ) -> EmbedTask:
        """with_latents: the caller reads the latents of a SparseAutoEncoder."""
        sentence, modules = self.checkpoint.sentence, self.checkpoint.modules
        if sentence.static is not None:
            raise InputError(_NO_POOLING.format("a sparse encoder", "embed_sparse"))
        modes = sentence.pooling
        if not with_latents and modules and isinstance(modules[-1], AutoEncoder):
            raise InputError(
                "this checkpoint is a sparse encoder (its last module is SparseAutoEncoder) and "
                "gives no dense vectors; use embed_sparse"
            )
        if pooling is None and not sentence.is_declared:
            if sentence.splade is not None:
                raise InputError(_NO_POOLING.format("a sparse encoder", "embed_sparse"))
            if sentence.multi_vector is not None:
                raise InputError(_NO_POOLING.format("a multi-vector model", "embed_tokens"))
        if pooling is not None:
            modes = chosen_modes(pooling, known=POOLING_MODES)
        elif not sentence.is_declared:
            logger.info("%s names no pooling: mean is used", self.checkpoint.folder)
        if normalize is False:
            modules = tuple(module for module in modules if not isinstance(module, Normalize))
        normalizes = any(isinstance(module, Normalize) for module in modules)
        size = output_size(self.spec.output_size, modes, modules)
        check_dimensions(dimensions, size=size)
        return EmbedTask(
            modes,
            modules,
            dimensions,
            skips_prompt=not sentence.include_prompt,
            normalize=bool(normalize) or (normalizes and dimensions is not None),
            quantizer=make_quantizer(
                precision, ranges, dim=dimensions or size, device=self.checkpoint.device
            ),
        )


def output_size(hidden_size: int, pooling: tuple[str, ...], modules: tuple[Module, ...]) -> int:
    """The length of a vector before `dimensions`; OptionError where a module does not fit."""
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
    """Rows of all texts in one array, allocated at once where their number is known.

    The row of a text that failed is NaN, or 0 in a dtype of integers.
    """

    def __init__(self, size: int, *, num_texts: int | None, dtype: np.dtype | None = None):
        dtype = np.dtype(np.float32) if dtype is None else dtype
        self._rows = np.empty((1024 if num_texts is None else num_texts, size), dtype=dtype)
        self._no_vector = np.nan if dtype.kind == "f" else 0
        self._num_rows = 0
        self.errors: dict[int, InputError] = {}

    def put(self, step: Finished[np.ndarray]) -> None:
        """Writes the rows of one step; the last step of a window writes its failures, too."""
        end = step.window.start + step.window.num_texts
        if end > len(self._rows):
            self._resize(max(end, 2 * len(self._rows)))
        self._num_rows = end
        if len(step.indices):
            self._rows[step.indices] = step.results
        for failure in (*step.failures, *(step.window.failures if step.is_last else ())):
            self._rows[failure.index] = self._no_vector
            self.errors[failure.index] = failure.error

    def vectors(self) -> np.ndarray:
        """[num_texts, size]."""
        if self._num_rows < len(self._rows):
            self._resize(self._num_rows)
        return self._rows

    def _resize(self, num_rows: int) -> None:
        # In place: for large arrays the system moves pages, so that no second copy ever exists.
        self._rows.resize((num_rows, self._rows.shape[1]), refcheck=False)
