"""Embeddings: pooled rows, then the checkpoint's sentence-transformers modules."""

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import ClassVar, cast

import numpy as np
import numpy.typing as npt
import torch

from bytetx.arguments import check_dimensions, chosen_modes
from bytetx.encode.finite import are_finite
from bytetx.encode.request import RunStats
from bytetx.encode.step import Capture, Step, Task
from bytetx.errors import InputError, OptionError
from bytetx.nn.sentence_modules import AutoEncoder, Module, Normalize
from bytetx.nn.transformer import Transformer
from bytetx.ops.pooling import POOLING_MODES, pool
from bytetx.tasks.adapted import NamedTaskMixin
from bytetx.tasks.call import Call
from bytetx.tasks.chunks import Overflow
from bytetx.tasks.options import OnError, Texts
from bytetx.tasks.precision import (
    Precision,
    Quantizer,
    make_quantizer,
    needs_ranges,
    quantize_all,
    quantized,
)
from bytetx.tasks.results import Embeddings

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
    shares_pass: ClassVar[bool] = True

    @property
    def key(self) -> Hashable:
        return self.capture

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
        """([batch_size, dimensions], f32 [batch_size]) from the last hidden states: `vectors`."""
        batch = step.batch
        first_tokens = step.prompt_tokens if self.skips_prompt else None
        return self.vectors(
            hidden_states, batch.cu_seqlens, first_tokens, max_seqlen=batch.max_seqlen
        )

    def vectors(
        self,
        rows: torch.Tensor,
        cu_seqlens: torch.Tensor,
        first_tokens: torch.Tensor | None = None,
        *,
        max_seqlen: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The pooled rows of each sequence through all modules, and `largest` of each.

        The arguments are those of ops.pool.
        """
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
        return quantized(x, self.quantizer)

    def size(self, hidden_size: int) -> int:
        """Numbers of each vector."""
        return self.dimensions or output_size(hidden_size, self.pooling, self.modules)

    def mean(self, chunks: list[np.ndarray]) -> np.ndarray:
        """The vector of a text from the f32 vectors of its chunks, in the task's precision.

        It has unit length where theirs have; one chunk's vector stays as it is.
        """
        mean: np.ndarray = chunks[0]
        if len(chunks) > 1:
            wide = np.stack(chunks).mean(axis=0, dtype=np.float64)
            normalizes = any(isinstance(module, Normalize) for module in self.modules)
            if self.normalize or (normalizes and self.dimensions is None):
                wide /= max(float(np.linalg.norm(wide)), 1e-12)
            mean = wide.astype(np.float32)
        if self.quantizer is not None:
            mean = self.quantizer.on_host(mean[None])[0]
        return mean

    def _all_modules(self) -> tuple[Callable[[torch.Tensor], torch.Tensor], ...]:
        """All that is applied to the pooled rows before they are quantised, in order."""
        modules: list[Callable[[torch.Tensor], torch.Tensor]] = [*self.modules]
        if self.dimensions is not None:
            modules.append(lambda x: x[:, : self.dimensions].contiguous())
        if self.normalize:
            modules.append(Normalize())
        return tuple(modules)

    def are_finite(self, outputs: tuple[np.ndarray, ...], step: Step) -> np.ndarray:
        return are_finite(outputs[1])

    def finish(self, outputs: tuple[np.ndarray, ...], step: Step) -> np.ndarray:
        """[num_texts, dimensions]: a row for each text."""
        return outputs[0]


class DenseMixin(NamedTaskMixin):
    """What Model's methods for dense vectors share."""

    def _embed_call(
        self,
        texts: Texts,
        *,
        task: str | None,
        prompt: str | None,
        prompt_name: str | None,
        dimensions: int | None,
        pooling: str | Sequence[str] | None,
        normalize: bool | None,
        precision: Precision,
        ranges: npt.ArrayLike | None,
        overflow: Overflow | None,
        stride: int,
        truncate: bool,
        on_error: OnError,
    ) -> Call[Embeddings]:
        """Model.embed, ready to run."""
        vectors = self._embed_task(
            dimensions=dimensions,
            pooling=pooling,
            normalize=normalize,
            precision=precision,
            ranges=ranges,
        )
        reader = self._overflow_reader(
            overflow=overflow, stride=stride, truncate=truncate, on_error=on_error
        )
        reader.prompt = self._prompt_of(task, prompt, prompt_name)
        size = vectors.size(self.spec.output_size)
        dtype = None
        if vectors.quantizer is not None and not needs_ranges(vectors.quantizer):
            size, dtype = vectors.quantizer.size(size), vectors.quantizer.dtype

        def new_sink(num_texts: int | None) -> VectorSink:
            by_all = precision if needs_ranges(vectors.quantizer) else None
            return VectorSink(size, num_texts=num_texts, dtype=dtype, precision=by_all)

        # The rows of one array; numpy's types do not say that it is a sequence of them.
        rows = cast(
            "Task[np.ndarray]", replace(vectors, quantizer=None) if reader.cuts else vectors
        )
        return Call(
            "embed",
            texts,
            self._with_adapter(task, rows),
            reader,
            new_sink,
            merge=vectors.mean if reader.cuts else None,
        )

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
            has_chat = self.checkpoint.chat_template is not None
            _report_pooling(self.checkpoint.folder, modes[0], has_chat=has_chat)
        if normalize is False:
            modules = tuple(module for module in modules if not isinstance(module, Normalize))
        normalizes = any(isinstance(module, Normalize) for module in modules)
        size = output_size(self.spec.output_size, modes, modules)
        check_dimensions(dimensions, size=size)
        kept = dimensions
        if kept is None and sentence.truncate_dim is not None and not with_latents:
            kept = min(sentence.truncate_dim, size)
        return EmbedTask(
            modes,
            modules,
            kept,
            skips_prompt=not sentence.include_prompt,
            # What the checkpoint cuts off stays cut off: sentence-transformers normalises before.
            normalize=bool(normalize) or (normalizes and dimensions is not None),
            quantizer=make_quantizer(
                precision, ranges, dim=kept or size, device=self.checkpoint.device
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


@lru_cache(64)
def _report_pooling(folder: Path, mode: str, *, has_chat: bool) -> None:
    """Says once for each checkpoint which pooling it gets that names none."""
    logger.info("%s names no pooling: %s is used, as by sentence-transformers", folder, mode)
    if has_chat and mode == "lasttoken":
        logger.warning(
            "%s has no modules.json: embed reads texts as they are, and sentence-transformers puts "
            "each into the chat template",
            folder,
        )


class VectorSink:
    """Rows of all texts in one array, allocated at once where their number is known.

    The row of a text that failed is NaN, or 0 in a dtype of integers.
    """

    def __init__(
        self,
        size: int,
        *,
        num_texts: int | None,
        dtype: np.dtype | None = None,
        precision: str | None = None,
    ):
        """precision: of int8 or uint8 by the ranges of all vectors, where f32 ones are put."""
        dtype = np.dtype(np.float32) if dtype is None else dtype
        self._rows = np.empty((1024 if num_texts is None else num_texts, size), dtype=dtype)
        self._grows = num_texts is None
        self._no_vector = np.nan if dtype.kind == "f" else 0
        self._precision = precision
        self._errors: dict[int, InputError] = {}

    @property
    def rows(self) -> np.ndarray:
        """What has been put so far."""
        return self._rows

    def put_rows(self, indices: np.ndarray, results: Sequence[np.ndarray]) -> None:
        if self._grows:
            self._reserve(int(indices.max()) + 1)
        self._rows[indices] = results

    def fail(self, index: int, error: InputError) -> None:
        self._errors[index] = error

    def result(self, num_texts: int, stats: RunStats) -> Embeddings:
        """[num_texts, size]"""
        if num_texts != len(self._rows):
            self._resize(num_texts)
        errors = dict(sorted(self._errors.items()))
        if errors:
            self._rows[list(errors)] = self._no_vector
        vectors = self._rows
        if self._precision is not None:
            vectors = quantize_all(vectors, self._precision, failed=list(errors))
        return Embeddings(vectors, stats, errors)

    def _reserve(self, num_rows: int) -> None:
        if num_rows > len(self._rows):
            self._resize(max(num_rows, 2 * len(self._rows)))

    def _resize(self, num_rows: int) -> None:
        # In place: for large arrays the system moves pages, so that no second copy ever exists.
        self._rows.resize((num_rows, self._rows.shape[1]), refcheck=False)
