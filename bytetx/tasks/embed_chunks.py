"""Several vectors per text: one for each chunk of a long text, or for each span of one pass."""

from collections.abc import Collection, Hashable, Sequence, Sized
from dataclasses import dataclass
from numbers import Integral
from typing import cast

import numpy as np
import torch

from bytetx.encode.request import Alignment, Requests, Span
from bytetx.encode.step import Step, Task, are_finite
from bytetx.errors import InputError, OptionError, shown
from bytetx.nn.transformer import Transformer
from bytetx.requests.spans import SpanReader
from bytetx.tasks.call import TaskCall
from bytetx.tasks.context import TaskContext
from bytetx.tasks.embed import DenseOptions, EmbedTask, dense_task
from bytetx.tasks.task import (
    OverflowOptions,
    PromptOptions,
    TextOptions,
    Texts,
    option,
    task,
)
from bytetx.tasks.vectors import TokenEmbeddings, token_sink


@dataclass(frozen=True, slots=True)
class EmbedSpansTask:
    """The vectors of spans of characters of each text, pooled from one pass over the text.

    The texts' alignments have the spans, prompts included.
    Source: late chunking (arXiv 2409.04701).
    """

    task: EmbedTask

    @property
    def key(self) -> Hashable:
        return ("spans", self.task.key)

    @property
    def capture(self) -> None:
        """None: only the host knows which rows a span has."""
        return None

    @torch.inference_mode()
    def compute(self, transformer: Transformer, step: Step) -> tuple[torch.Tensor, ...]:
        rows, cu_seqlens = self._layout(step)
        hidden_states = transformer.forward(step.batch)
        device = hidden_states.device
        picked = hidden_states[torch.from_numpy(rows).to(device)]
        bounds = torch.from_numpy(cu_seqlens).to(device)
        longest = int(np.diff(cu_seqlens).max(initial=0))
        return self.task.vectors(picked, bounds, max_seqlen=longest)

    def are_finite(self, outputs: tuple[np.ndarray, ...], step: Step) -> np.ndarray:
        return are_finite(outputs[1], _num_spans(step.requests))

    def finish(self, outputs: tuple[np.ndarray, ...], step: Step) -> list[np.ndarray]:
        ends = np.cumsum(_num_spans(step.requests))[:-1]
        return [rows.copy() for rows in np.split(outputs[0], ends)]

    def _layout(self, step: Step) -> tuple[np.ndarray, np.ndarray]:
        """(rows of all spans, int64; bounds of each span in them, int32)"""
        rows: list[np.ndarray] = []
        starts = step.requests.cu_seqlens[:-1].tolist()
        for start, alignment in zip(starts, _alignments(step.requests), strict=True):
            rows += [start + tokens for tokens in self._tokens(alignment)]
        cu_seqlens = np.cumsum([0, *map(len, rows)], dtype=np.int32)
        return np.concatenate([np.empty(0, dtype=np.int64), *rows]), cu_seqlens

    def _tokens(self, alignment: Alignment) -> list[np.ndarray]:
        """The tokens that have a character in each span."""
        offsets = np.array(alignment.offsets, dtype=np.int64).reshape(-1, 2)
        is_own = np.array(alignment.special_tokens_mask) == 0
        is_own &= offsets[:, 1] > offsets[:, 0]
        return [
            np.flatnonzero(is_own & (offsets[:, 0] < end) & (offsets[:, 1] > start))
            for start, end in alignment.spans
        ]


def _alignments(requests: Requests) -> Sequence[Alignment]:
    assert requests.alignments is not None  # SpanReader gives them
    return requests.alignments


def _num_spans(requests: Requests) -> np.ndarray:
    """int64 [num_texts]"""
    return np.array([len(alignment.spans) for alignment in _alignments(requests)], dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class ChunksOptions(PromptOptions, DenseOptions):
    """Options of embed_chunks."""

    stride: int = option(0, "Tokens that neighbouring chunks share.", min=0)


@task()
def embed_chunks(
    context: TaskContext, texts: Texts, options: ChunksOptions
) -> TaskCall[TokenEmbeddings]:
    """A vector for each chunk of each text: embed with overflow="chunk" without the mean.

    A chunk has as many tokens as the model takes. int8 and uint8 need ranges.
    Returns packed vectors: those of text i lie from cu_seqlens[i] to cu_seqlens[i + 1].
    """
    vectors = _rows_task(context, options)
    cut = OverflowOptions(overflow="chunk", stride=options.stride, on_error=options.on_error)
    reader = context.reader(cut)
    context.set_prompts(reader, options)
    rows = cast("Task[np.ndarray]", vectors)  # the rows of one array
    sink = token_sink(_no_vectors(vectors))
    return TaskCall("embed_chunks", texts, rows, reader, sink, merge=np.stack)


@dataclass(frozen=True, kw_only=True)
class SpansOptions(PromptOptions, DenseOptions, TextOptions):
    """Options of embed_spans."""

    pooling: str | Sequence[str] = option("mean", "Mode (or modes, joined) of a span's tokens.")


@task()
def embed_spans(
    context: TaskContext,
    texts: Sequence[str],
    spans: Sequence[Sequence[Span]],
    options: SpansOptions,
) -> TaskCall[TokenEmbeddings]:
    """A vector for each span of each text, pooled from one pass over the text (late chunking).

    spans: for each text, (start, end) in characters; they may overlap and leave gaps. A token
    belongs to every span that has one of its characters; a span without any, as one that was cut
    off, is a vector of zeros before the checkpoint's modules.  int8 and uint8 need ranges.
    Returns packed vectors: those of text i lie from cu_seqlens[i] to cu_seqlens[i + 1].
    """
    _check_spans(texts, spans)
    vectors = _rows_task(context, options)
    reader = SpanReader(
        context.spec,
        context.need_tokenizer(),
        truncate=options.truncate,
        with_alignment=True,
        keeps_errors=options.on_error == "return",
        spans=spans,
    )
    context.set_prompts(reader, options)
    sink = token_sink(_no_vectors(vectors))
    return TaskCall("embed_spans", texts, EmbedSpansTask(vectors), reader, sink)


def _rows_task(context: TaskContext, options: DenseOptions) -> EmbedTask:
    job = dense_task(context, options)
    if job.quantizer is not None and job.quantizer.needs_ranges:
        raise OptionError(
            f"precision {options.precision} of several vectors per text needs ranges (f32 [2, "
            "dimensions], minima and maxima)"
        )
    return job


def _no_vectors(job: EmbedTask) -> np.ndarray:
    """No rows, in the job's size and dtype."""
    size, quantizer = job.size, job.quantizer
    if quantizer is None:
        return np.empty((0, size), dtype=np.float32)
    return np.empty((0, quantizer.size(size)), dtype=quantizer.dtype)


def _check_spans(texts: Sequence[str], spans: Sequence[Sequence[Span]]) -> None:
    for name, given in (("texts", texts), ("spans", spans)):
        if isinstance(given, str) or not isinstance(given, Sized):
            raise InputError(f"{name} must be a list for embed_spans, got {type(given).__name__}")
    if len(texts) != len(spans):
        raise InputError(
            f"spans must have one list for each of the texts, got {len(spans)} for {len(texts)}"
        )
    for index, (text, of_text) in enumerate(zip(texts, spans, strict=True)):
        if not isinstance(text, str):
            raise InputError(f"texts[{index}] must be a str for embed_spans")
        if not isinstance(of_text, Collection):
            raise InputError(
                f"spans[{index}] must be a list of (start, end), got {type(of_text).__name__}"
            )
        for span in of_text:
            if not _is_span(span, len(text)):
                raise InputError(
                    f"spans[{index}] has {shown(span)}, which is no (start, end) within the "
                    f"{len(text)} characters of the text"
                )


def _is_span(span: object, num_characters: int) -> bool:
    if not isinstance(span, Collection) or len(span) != 2:
        return False
    start, end = span
    if not isinstance(start, Integral) or not isinstance(end, Integral):
        return False
    return 0 <= int(start) < int(end) <= num_characters
