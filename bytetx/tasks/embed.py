"""Embeddings: pooled rows, then the checkpoint's sentence-transformers modules."""

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import ClassVar, cast

import numpy as np
import numpy.typing as npt
import torch

from bytetx.arguments import check_dimensions, chosen_modes
from bytetx.encode.request import Requests, RunStats
from bytetx.encode.step import Capture, Step, Task, are_finite, last_tokens
from bytetx.errors import InputError, OptionError
from bytetx.nn.sentence_modules import AutoEncoder, Module, Normalize, TanhQuantizer
from bytetx.nn.transformer import Transformer
from bytetx.ops.pooling import POOLING_MODES, largest, pool
from bytetx.tasks.call import TaskCall
from bytetx.tasks.context import TaskContext
from bytetx.tasks.precision import (
    Precision,
    Quantizer,
    make_quantizer,
    quantize_all,
    quantized,
)
from bytetx.tasks.results import Embeddings
from bytetx.tasks.task import OverflowOptions, PromptOptions, TaskOptions, Texts, option, task

logger = logging.getLogger("bytetx")

_NO_POOLING = "this checkpoint is {} and names no pooling for embed; use {}, or pass pooling"


@dataclass(frozen=True, slots=True)
class EmbedTask:
    """One vector for each text, f32 where no quantizer is given.

    pooling: modes whose vectors are concatenated.  modules: applied in order after pooling.
    size: numbers of each vector.  dimensions: keeps the first ones of each.
    skips_prompt: prompt tokens are not pooled.
    normalize: l2-normalises at the end, after dimensions.  quantizer: applied last.
    """

    pooling: tuple[str, ...]
    modules: tuple[Module, ...]
    size: int
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
        reads_last = self.pooling == ("lasttoken",) and not self.skips_prompt
        if reads_last and step.shared is not None:
            step = last_tokens(step)
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
        modules: list[Callable[[torch.Tensor], torch.Tensor]] = [*self.modules]
        if self.dimensions is not None:
            modules.append(lambda x: x[:, : self.dimensions].contiguous())
        if self.normalize:
            modules.append(Normalize())
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
        return (x, largest(x)) if self.quantizer is None else quantized(x, self.quantizer)

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

    def are_finite(self, outputs: tuple[np.ndarray, ...], step: Step) -> np.ndarray:
        return are_finite(outputs[1])

    def finish(self, outputs: tuple[np.ndarray, ...], step: Step) -> np.ndarray:
        """[num_texts, dimensions]: a row for each text."""
        return outputs[0]


@dataclass(frozen=True, slots=True)
class MeanWordsTask(EmbedTask):
    """The mean of a table's rows, without a hidden state for each token where that can be."""

    def compute(self, transformer: Transformer, step: Step) -> tuple[torch.Tensor, ...]:
        if not transformer.is_table:  # it scales or rotates in ways of its own, or is on a GPU
            return EmbedTask.compute(self, transformer, step)
        return self._of_words(transformer, step.batch.input_ids, step.batch.cu_seqlens)

    def without_step(self, transformer: Transformer, requests: Requests) -> np.ndarray | None:
        """Finite rows of requests that need no step; None where they need one."""
        if not transformer.is_table:
            return None
        ids, ends = torch.from_numpy(requests.token_ids), torch.from_numpy(requests.cu_seqlens)
        rows, largest_numbers = (one.numpy() for one in self._of_words(transformer, ids, ends))
        return rows if np.isfinite(largest_numbers).all() else None

    @torch.inference_mode()
    def _of_words(
        self, transformer: Transformer, ids: torch.Tensor, cu_seqlens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        means = transformer.mean_words(ids, cu_seqlens)
        ends = torch.arange(len(means) + 1, dtype=torch.int32)  # a row of a text is its own mean
        return self.vectors(means, ends, max_seqlen=1)


@dataclass(frozen=True, kw_only=True)
class DenseOptions(TaskOptions):
    """Options of tasks that give dense vectors."""

    dimensions: int | None = option(
        None, "Keep the first ones, and normalise again where the model normalises.", min=1
    )
    pooling: str | Sequence[str] | None = option(
        None, "Mode (or modes, joined) instead of the checkpoint's: cls, mean, max, ..."
    )
    normalize: bool | None = option(None, "Unit length; None is as the checkpoint says.")
    precision: Precision = option(
        "float32",
        "float32, float16, int8, uint8, or binary and ubinary (int8 and uint8 with the signs of 8 "
        "dimensions in each byte), as sentence-transformers' quantize_embeddings; int8 is exact "
        "where the checkpoint's own vectors are whole numbers.",
    )
    ranges: npt.ArrayLike | None = option(
        None,
        "f32 [2, dimensions], the minima and maxima that int8 and uint8 divide into 256 steps.",
    )


@dataclass(frozen=True, kw_only=True)
class EmbedOptions(PromptOptions, DenseOptions, OverflowOptions):
    """Options of embed."""


@task(item=np.ndarray)
def embed(context: TaskContext, texts: Texts, options: EmbedOptions) -> TaskCall[Embeddings]:
    """One vector per text, as sentence-transformers' encode gives it.

    A failed text's vector is NaN (0 in integers), its error in `errors`. With overflow="chunk" a
    long text's vector is the mean of those of its chunks; see embed_chunks. Without ranges, int8
    and uint8 take those of the vectors of this call, which a stream cannot know.
    Raises InputError where the checkpoint gives no dense vectors.
    """
    vectors = dense_task(context, options)
    reader = context.reader(options)
    context.set_prompts(reader, options)
    quantizer = vectors.quantizer
    by_all = options.precision if quantizer is not None and quantizer.needs_ranges else None
    size, dtype = vectors.size, None
    if quantizer is not None and by_all is None:
        size, dtype = quantizer.size(size), quantizer.dtype

    new_sink = partial(VectorSink, size=size, dtype=dtype, precision=by_all)
    # The rows of one array; numpy's types do not say that it is a sequence of them.
    rows = cast("Task[np.ndarray]", replace(vectors, quantizer=None) if reader.cuts else vectors)
    why_no_stream = None
    if by_all is not None:
        why_no_stream = (
            f"a stream with precision {by_all} needs ranges (f32 [2, dimensions], minima and "
            "maxima), because its first vector comes before the last one is known"
        )
    return TaskCall(
        "embed",
        texts,
        rows,
        reader,
        new_sink,
        merge=vectors.mean if reader.cuts else None,
        why_no_stream=why_no_stream,
    )


def dense_task(
    context: TaskContext, options: DenseOptions, *, with_latents: bool = False
) -> EmbedTask:
    """The pooling, modules and precision that a checkpoint and the options ask for.

    with_latents: the caller reads the latents of a SparseAutoEncoder.
    Raises InputError where the checkpoint gives no dense vectors.
    """
    checkpoint = context.checkpoint
    sentence, modules = checkpoint.sentence, checkpoint.modules
    if sentence.sparse_static is not None:
        raise InputError(_NO_POOLING.format("a sparse encoder", "embed_sparse"))
    modes = sentence.pooling
    if not with_latents and modules and isinstance(modules[-1], AutoEncoder):
        raise InputError(
            "this checkpoint is a sparse encoder (its last module is SparseAutoEncoder) and "
            "gives no dense vectors; use embed_sparse"
        )
    if options.pooling is None and not sentence.is_declared:
        if sentence.splade is not None:
            raise InputError(_NO_POOLING.format("a sparse encoder", "embed_sparse"))
        if sentence.multi_vector is not None:
            raise InputError(_NO_POOLING.format("a multi-vector model", "embed_tokens"))
    if options.pooling is not None:
        modes = chosen_modes(options.pooling, known=POOLING_MODES)
    elif not sentence.is_declared:
        has_chat = checkpoint.chat_template is not None
        _report_pooling(checkpoint.folder, modes[0], has_chat=has_chat)
    if options.normalize is False:
        modules = tuple(module for module in modules if not isinstance(module, Normalize))
    normalizes = any(isinstance(module, Normalize) for module in modules)
    if options.precision in ("binary", "ubinary"):  # signs of what is not rounded yet
        modules = tuple(module for module in modules if not isinstance(module, TanhQuantizer))
    size = output_size(context.output_size, modes, modules)
    kept = options.dimensions
    if kept is not None:
        check_dimensions(kept, size=size)
    if kept is None and sentence.truncate_dim is not None and not with_latents:
        kept = min(sentence.truncate_dim, size)
    quantizer, precision = None, options.precision
    if not isinstance(precision, str) or precision != "float32" or options.ranges is not None:
        quantizer = make_quantizer(
            precision,
            options.ranges,
            dim=kept or size,
            device=checkpoint.device,
            is_whole=bool(modules)
            and isinstance(modules[-1], TanhQuantizer)
            and not options.normalize,
        )
    is_mean = not context.spec.num_layers and modes == ("mean",) and sentence.include_prompt
    return (MeanWordsTask if is_mean else EmbedTask)(
        modes,
        modules,
        kept or size,
        kept,
        skips_prompt=not sentence.include_prompt,
        # A checkpoint's truncate_dim cuts after it normalises, as in sentence-transformers.
        normalize=bool(options.normalize) or (normalizes and options.dimensions is not None),
        quantizer=quantizer,
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
        num_texts: int | None,
        *,
        size: int,
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
        """The rows that have been put so far."""
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
