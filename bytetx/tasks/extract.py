"""Spans of texts that have one of the labels a caller names, by GLiNER's models."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

import numpy as np
import torch

from bytetx.arguments import check_threshold, text_fault
from bytetx.encode.request import Requests
from bytetx.encode.step import Capture, Step, are_finite
from bytetx.errors import InputError, shown
from bytetx.nn.extraction import ExtractionHead, SpanScorer
from bytetx.nn.schema_head import SchemaHead
from bytetx.nn.transformer import Transformer
from bytetx.ops.pooling import largest
from bytetx.requests.schema import entity_schema
from bytetx.requests.words import (
    LabelPrompt,
    WordAlignment,
    WordReader,
    apart_prompt,
    label_prompt,
)
from bytetx.tasks.call import TaskCall, list_sink
from bytetx.tasks.classify import sigmoid
from bytetx.tasks.context import TaskContext
from bytetx.tasks.results import ExtractedSpan, Results
from bytetx.tasks.schema_scores import Found, TextScores, schema_call
from bytetx.tasks.task import TextOptions, option, task
from bytetx.tasks.word_rows import alignments_of, read_labels, read_words


@dataclass(frozen=True, kw_only=True)
class ExtractOptions(TextOptions):
    """Options of extract."""

    threshold: float = option(0.5, "Spans with a higher score are extracted, from 0 to 1.")
    nested: bool = option(
        False, "Spans may lie inside one another; else no two spans have a word in common."
    )
    multi_label: bool = option(False, "One span may have several labels.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_threshold(self.threshold)


Labels = Sequence[str] | Mapping[str, str]


@task(item=list[ExtractedSpan])
def extract(
    context: TaskContext, texts: Iterable[str], labels: Labels, options: ExtractOptions
) -> TaskCall[Results[list[ExtractedSpan]]]:
    """Spans of each text that have one of the labels, in the order of the text (GLiNER).

    labels: any texts, such as "person" or "due date"; a table has what the model reads of each, a
    description. Labels that are given twice count once.
    Of spans that overlap, the one with the highest score stays. A text without words has no spans.
    Raises InputError where the checkpoint has no head for span extraction.
    """
    found = context.need_head(context.heads.extraction, "span extraction")
    head = cast(ExtractionHead | SchemaHead, found)
    names, given = _checked_labels(labels)
    if isinstance(head, SchemaHead):
        described = {
            name: None if name == own else own for name, own in zip(names, given, strict=True)
        }

        def spans(scores: TextScores) -> list[ExtractedSpan]:
            found = scores.entities(options.threshold) if names else []
            return chosen_spans(found, scores.alignment, names, options)

        key = ("extract", options.threshold, options.nested, options.multi_label)
        schema = entity_schema(described)
        return schema_call(context, "extract", texts, schema, options, spans, key=key)
    spec, tokenizer = head.spec, context.need_tokenizer()
    if head.labels is None:
        prompt = label_prompt(spec, tokenizer, given, most=tokenizer.max_tokens)
    else:
        prompt = apart_prompt(tokenizer, head.labels.tokenizer, given)
    reader = WordReader(
        context.spec,
        tokenizer,
        truncate=options.truncate,
        keeps_errors=options.on_error == "return",
        label_prompt=prompt,
        max_words=spec.max_words,
    )
    job = ExtractTask(head, names, prompt, options)
    return TaskCall("extract", texts, job, reader, list_sink)


def _checked_labels(labels: Labels) -> tuple[tuple[str, ...], list[str]]:
    """(names, what the model reads of each)"""
    if isinstance(labels, str) or not isinstance(labels, Mapping | Sequence):
        raise InputError(f"labels must be a list of texts or a table, got {shown(labels)}")
    table = labels if isinstance(labels, Mapping) else {}
    for text in [*labels, *table.values()]:
        fault = text_fault(text)
        if fault is not None:
            raise InputError(f"labels: {shown(text)} {fault}")
    names = tuple(dict.fromkeys(labels))
    return names, [table.get(name, name) for name in names]


@dataclass(frozen=True, slots=True)
class ExtractTask:
    """labels: their names, in the order of the prompt."""

    head: ExtractionHead
    labels: tuple[str, ...]
    prompt: LabelPrompt
    options: ExtractOptions
    shares_pass: ClassVar[bool] = True

    @property
    def key(self) -> Hashable:
        own = self.options
        flags = (own.threshold, own.nested, own.multi_label)
        return ("extract", id(self.head), self.labels, self.prompt.key, flags)

    @property
    def capture(self) -> Capture | None:
        return None  # it reads where the words of each text are

    def compute(self, transformer: Transformer, step: Step) -> tuple[torch.Tensor, ...]:
        return self.reduce(transformer.forward(step.batch), step)

    @torch.inference_mode()
    def reduce(self, hidden_states: torch.Tensor, step: Step) -> tuple[torch.Tensor, ...]:
        """(scores before the sigmoid, f32 [total_rows, num_labels], `largest` of each row)"""
        found = read_words(self.head, self.prompt, hidden_states, step.requests)
        if not found.num_words:
            none = torch.empty((0, len(self.labels)), device=hidden_states.device)
            return none, none.sum(dim=1)
        labels = self._labels(hidden_states, found.starts)
        scores = self.head.forward(found.rows, labels, found.num_words)
        return scores, largest(scores)

    def _labels(self, hidden_states: torch.Tensor, starts: np.ndarray) -> torch.Tensor:
        """f32 [num_texts, num_labels, hidden_size], or of one text where all have the same.

        starts: the first tokens of texts.
        """
        if self.head.labels is not None:
            return self.head.labels.vectors(self.prompt.apart)[None]
        return read_labels(self.head, self.prompt, hidden_states, starts)

    def are_finite(self, outputs: tuple[np.ndarray, ...], step: Step) -> np.ndarray:
        return are_finite(outputs[1], np.array(self._num_rows(step.requests), dtype=np.int64))

    def _num_rows(self, requests: Requests) -> list[int]:
        """Rows of scores of each text; a text without tokens has none."""
        rows, texts = self.head.scorer.rows_of, alignments_of(requests)
        sizes = requests.seqlens.tolist()
        return [rows(len(one.words)) if n else 0 for one, n in zip(texts, sizes, strict=True)]

    def finish(self, outputs: tuple[np.ndarray, ...], step: Step) -> list[list[ExtractedSpan]]:
        ends = np.cumsum(self._num_rows(step.requests))[:-1]
        texts = zip(alignments_of(step.requests), np.split(outputs[0], ends), strict=True)
        return [self._spans(alignment, scores) for alignment, scores in texts]

    def _spans(self, alignment: WordAlignment, scores: np.ndarray) -> list[ExtractedSpan]:
        num_words = len(alignment.words)
        if not len(scores):
            return []
        scorer, threshold = self.head.scorer, self.options.threshold
        if isinstance(scorer, SpanScorer):
            found = _spans_of_rows(scores, num_words, scorer.max_width, threshold)
        else:
            found = _spans_of_words(scores.reshape(num_words, 3, -1), threshold)
        return chosen_spans(found, alignment, self.labels, self.options)


def chosen_spans(
    found: Iterable[Found],
    alignment: WordAlignment,
    labels: Sequence[str],
    options: ExtractOptions,
) -> list[ExtractedSpan]:
    """The best spans that go together, in the order of the text."""
    text, words = cast(str, alignment.text), alignment.words.tolist()
    spans = []
    for first, last, label, score in _choose(found, len(words), options):
        start, end = words[first][0], words[last][1]
        if start < end:  # else it is the end of a sentence that the text has not
            spans.append(ExtractedSpan(start, end, text[start:end], labels[label], score))
    return spans


def _spans_of_rows(
    scores: np.ndarray, num_words: int, max_width: int, threshold: float
) -> list[Found]:
    """Spans above the threshold.  scores: f32 [num_words * max_width, num_labels]."""
    found = sigmoid(scores)
    rows, labels = np.nonzero(found > np.float32(threshold))
    first, width = np.divmod(rows, max_width)
    is_inside = first + width < num_words
    first, width, labels = first[is_inside], width[is_inside], labels[is_inside]
    chances = found[rows[is_inside], labels]
    columns = (first, first + width, labels, chances)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def _spans_of_words(scores: np.ndarray, threshold: float) -> list[Found]:
    """Spans from a start to an end with all words between inside; the score is the least of these.

    scores: f32 [num_words, 3, num_labels]: as a start, as an end, inside.
    """
    starts, ends, insides = sigmoid(scores).transpose(1, 0, 2)
    least = np.float32(threshold)
    found: list[Found] = []
    for first, label in zip(
        *(column.tolist() for column in np.nonzero(starts > least)), strict=True
    ):
        inside = insides[first:, label]
        outside = np.flatnonzero(inside < least)
        inside = inside[: outside[0]] if len(outside) else inside
        lasts = np.flatnonzero(ends[first : first + len(inside), label] > least)
        lowest = np.minimum(np.minimum.accumulate(inside), starts[first, label])
        for width in lasts.tolist():
            score = min(lowest[width], ends[first + width, label])
            found.append((first, first + width, label, float(score)))
    return found


def _choose(found: Iterable[Found], num_words: int, options: ExtractOptions) -> list[Found]:
    """The best spans that go together, in the order of the text."""
    chosen: list[Found] = []
    spans: set[tuple[int, int]] = set()
    is_taken = bytearray(num_words)
    for one in sorted(found, key=lambda one: -one[3]):
        span = first, last = one[:2]
        if span in spans:
            fits = options.multi_label
        elif options.nested:
            fits = not any(_cross(span, other) for other in spans)
        else:
            fits = not any(is_taken[first : last + 1])
        if fits:
            chosen.append(one)
            spans.add(span)
            is_taken[first : last + 1] = b"\1" * (last + 1 - first)
    return sorted(chosen, key=lambda one: one[0])


def _cross(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Whether two spans have words in common, and each has one that the other has not."""
    (first, end), (second, last) = sorted((one, other))
    return first < second <= end < last
