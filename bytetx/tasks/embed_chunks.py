"""Several vectors a text: one for each chunk of a long text, or for each span of one pass."""

from collections.abc import Collection, Hashable, Sequence, Sized
from dataclasses import dataclass
from numbers import Integral
from typing import cast

import numpy as np
import numpy.typing as npt
import torch

from bytetx.encode.finite import are_finite
from bytetx.encode.request import Alignment, Requests, Span
from bytetx.encode.step import Step, Task
from bytetx.errors import InputError, OptionError, shown
from bytetx.nn.transformer import Transformer
from bytetx.requests.spans import SpanReader
from bytetx.tasks.adapted import routed
from bytetx.tasks.call import Call
from bytetx.tasks.embed import DenseMixin, EmbedTask
from bytetx.tasks.one_pass import keeps_bad_texts
from bytetx.tasks.options import OnError, Texts
from bytetx.tasks.precision import Precision, needs_ranges
from bytetx.tasks.vectors import TokenEmbeddings, token_sink


@dataclass(frozen=True, slots=True)
class EmbedSpansTask:
    """The vectors of spans of characters of each text, pooled from one pass over the text.

    The texts' alignments have the spans.  num_prompt_characters: in front of each text.
    Source: late chunking (arXiv 2409.04701).
    """

    task: EmbedTask
    num_prompt_characters: int

    @property
    def key(self) -> Hashable:
        return ("spans", self.task.key, self.num_prompt_characters)

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
        offsets = offsets - self.num_prompt_characters
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


class ChunkMixin(DenseMixin):
    """Model.embed_chunks and Model.embed_spans."""

    @routed
    def embed_chunks(
        self,
        texts: Texts,
        *,
        task: str | None = None,
        stride: int = 0,
        prompt: str | None = None,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        pooling: str | Sequence[str] | None = None,
        normalize: bool | None = None,
        precision: Precision = "float32",
        ranges: npt.ArrayLike | None = None,
        on_error: OnError = "raise",
        show_progress: bool = False,
    ) -> TokenEmbeddings:
        """A vector for each chunk of each text: embed with overflow="chunk" without the mean.

        A chunk has as many tokens as the model takes, and shares stride of them with the next one.
        Other options are those of embed; int8 and uint8 need ranges.
        Returns packed vectors: those of text i lie from cu_seqlens[i] to cu_seqlens[i + 1].
        """
        call = self._chunks_call(
            texts,
            stride=stride,
            task=task,
            prompt=prompt,
            prompt_name=prompt_name,
            dimensions=dimensions,
            pooling=pooling,
            normalize=normalize,
            precision=precision,
            ranges=ranges,
            on_error=on_error,
        )
        return self._perform(call, show_progress=show_progress)

    @routed
    def embed_spans(
        self,
        texts: Sequence[str],
        spans: Sequence[Sequence[Span]],
        *,
        task: str | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        pooling: str | Sequence[str] = "mean",
        normalize: bool | None = None,
        precision: Precision = "float32",
        ranges: npt.ArrayLike | None = None,
        truncate: bool = False,
        on_error: OnError = "raise",
        show_progress: bool = False,
    ) -> TokenEmbeddings:
        """A vector for each span of each text, pooled from one pass over the text (late chunking).

        spans: for each text, (start, end) in characters; they may overlap and leave gaps. A token
        belongs to every span that has one of its characters; a span without any, as one that was
        cut off, is a vector of zeros before the checkpoint's modules.
        pooling: of the tokens of a span.  Other options are those of embed; int8 and uint8 need
        ranges.
        Returns packed vectors: those of text i lie from cu_seqlens[i] to cu_seqlens[i + 1].
        """
        call = self._spans_call(
            texts,
            spans,
            task=task,
            prompt=prompt,
            prompt_name=prompt_name,
            dimensions=dimensions,
            pooling=pooling,
            normalize=normalize,
            precision=precision,
            ranges=ranges,
            truncate=truncate,
            on_error=on_error,
        )
        return self._perform(call, show_progress=show_progress)

    def _chunks_call(
        self,
        texts: Texts,
        *,
        stride: int,
        task: str | None,
        prompt: str | None,
        prompt_name: str | None,
        dimensions: int | None,
        pooling: str | Sequence[str] | None,
        normalize: bool | None,
        precision: Precision,
        ranges: npt.ArrayLike | None,
        on_error: OnError,
    ) -> Call[TokenEmbeddings]:
        vectors = self._rows_task(
            dimensions=dimensions,
            pooling=pooling,
            normalize=normalize,
            precision=precision,
            ranges=ranges,
        )
        reader = self._overflow_reader(
            overflow="chunk", stride=stride, truncate=False, on_error=on_error
        )
        reader.prompt = self._prompt_of(task, prompt, prompt_name)
        rows = cast("Task[np.ndarray]", vectors)  # the rows of one array
        job = self._with_adapter(task, rows)
        empty = self._no_vectors(vectors, dimensions)
        return Call("embed_chunks", texts, job, reader, token_sink(empty), merge=np.stack)

    def _spans_call(
        self,
        texts: Sequence[str],
        spans: Sequence[Sequence[Span]],
        *,
        task: str | None,
        prompt: str | None,
        prompt_name: str | None,
        dimensions: int | None,
        pooling: str | Sequence[str] | None,
        normalize: bool | None,
        precision: Precision,
        ranges: npt.ArrayLike | None,
        truncate: bool,
        on_error: OnError,
    ) -> Call[TokenEmbeddings]:
        _check_spans(texts, spans)
        vectors = self._rows_task(
            dimensions=dimensions,
            pooling=pooling,
            normalize=normalize,
            precision=precision,
            ranges=ranges,
        )
        reader = SpanReader(
            self.spec,
            self._need_tokenizer(),
            prompt=self._prompt_of(task, prompt, prompt_name),
            truncate=truncate,
            with_alignment=True,
            keeps_errors=keeps_bad_texts(on_error),
            spans=spans,
        )
        rows: Task[np.ndarray] = EmbedSpansTask(vectors, len(reader.prompt))
        job = self._with_adapter(task, rows)
        empty = self._no_vectors(vectors, dimensions)
        return Call("embed_spans", texts, job, reader, token_sink(empty))

    def _rows_task(
        self,
        *,
        dimensions: int | None,
        pooling: str | Sequence[str] | None,
        normalize: bool | None,
        precision: Precision,
        ranges: npt.ArrayLike | None,
    ) -> EmbedTask:
        task = self._embed_task(
            dimensions=dimensions,
            pooling=pooling,
            normalize=normalize,
            precision=precision,
            ranges=ranges,
        )
        if needs_ranges(task.quantizer):
            raise OptionError(
                f"precision {precision} of several vectors a text needs ranges (f32 [2, "
                "dimensions], minima and maxima)"
            )
        return task

    def _no_vectors(self, task: EmbedTask, dimensions: int | None) -> np.ndarray:
        """No rows, of the task's size and dtype."""
        size = task.size(self.spec.output_size)
        quantizer = task.quantizer
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
