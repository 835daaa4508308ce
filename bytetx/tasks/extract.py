"""Spans of texts that have one of the labels a caller names, by GLiNER's models."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, cast

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
from bytetx.tasks.overlaps import Found
from bytetx.tasks.results import ExtractedSpan, Results, SpanRelation
from bytetx.tasks.schema_call import schema_call
from bytetx.tasks.task import TextOptions, option, task
from bytetx.tasks.text_scores import TextScores
from bytetx.tasks.word_rows import alignments_of, forward_for_words, read_labels, read_words

_MOST_RELATIONS = 1 << 16  # that a text may have; each is an object of Python's


@dataclass(frozen=True, kw_only=True)
class ExtractOptions(TextOptions):
    """Options of extract."""

    threshold: float = option(0.5, "Spans with a higher score are extracted, from 0 to 1.")
    nested: bool = option(
        False, "Spans may lie inside one another; else no two spans have a word in common."
    )
    multi_label: bool = option(False, "One span may have several labels.")
    relations: Sequence[str] = option(
        (), "Relations to look for between the spans, any texts, such as 'works for'."
    )
    relation_threshold: float | None = option(
        None, "Relations with a higher score are kept; None is the spans' threshold."
    )
    adjacency_threshold: float | None = option(
        None,
        "Pairs of spans with a higher chance of any relation are asked for theirs, by models that "
        "give one; None is the spans' threshold.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_threshold(self.threshold)
        for name in ("relation_threshold", "adjacency_threshold"):
            if getattr(self, name) is not None:
                check_threshold(getattr(self, name), name=name)

    def limit_of(self, name: Literal["relation_threshold", "adjacency_threshold"]) -> float:
        """As f32, in which scores are compared."""
        own = getattr(self, name)
        return float(np.float32(self.threshold if own is None else own))


Labels = Sequence[str] | Mapping[str, str]


@task(item=list[ExtractedSpan])
def extract(
    context: TaskContext, texts: Iterable[str], labels: Labels, options: ExtractOptions
) -> TaskCall[Results[list[ExtractedSpan]]]:
    """Spans of each text that have one of the labels, in the order of the text (GLiNER).

    labels: any texts, such as "person" or "due date"; a table has what the model reads of each, a
    description. Labels that are given twice count once.
    Of spans that overlap, the one with the highest score stays. A text without words has no spans.
    With relations, each span has those of which it is the head, the best 65536 of a text.
    Raises InputError where the checkpoint has no head for span extraction, or none for relations.
    """
    found = context.need_head(context.heads.extraction, "span extraction")
    head = cast(ExtractionHead | SchemaHead, found)
    names, given = _checked_labels(labels)
    relations = _checked_relations(head, options.relations)
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
        prompt = label_prompt(spec, tokenizer, given, relations, most=tokenizer.max_tokens)
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
    job = ExtractTask(head, names, relations, prompt, options)
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


def _checked_relations(head: ExtractionHead | SchemaHead, given: Sequence[str]) -> tuple[str, ...]:
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise InputError(f"relations must be a list of texts, got {shown(given)}")
    for text in given:
        fault = text_fault(text)
        if fault is not None:
            raise InputError(f"relations: {shown(text)} {fault}")
    if given and isinstance(head, SchemaHead):
        raise InputError(
            "a GLiNER2 model reads relations in a schema; use fill_schema with "
            '{"entities": [...], "relations": [...]}'
        )
    if given and not isinstance(head, SchemaHead) and head.relations is None:
        raise InputError(
            "this checkpoint has no head for relations; leave them out, or load a model of "
            "GLiNER's relation extraction (relex)"
        )
    return tuple(dict.fromkeys(given))


@dataclass(frozen=True, slots=True)
class ExtractTask:
    """labels, relations: their names, in the order of the prompt."""

    head: ExtractionHead
    labels: tuple[str, ...]
    relations: tuple[str, ...]
    prompt: LabelPrompt
    options: ExtractOptions
    shares_pass: ClassVar[bool] = True

    @property
    def key(self) -> Hashable:
        own = self.options
        flags = (own.threshold, own.nested, own.multi_label)
        limits = (own.relation_threshold, own.adjacency_threshold)
        names = (self.labels, self.relations)
        return ("extract", id(self.head), *names, self.prompt.key, flags, limits)

    @property
    def capture(self) -> Capture | None:
        return None  # it reads where the words of each text are

    def compute(self, transformer: Transformer, step: Step) -> tuple[torch.Tensor, ...]:
        return self.reduce(forward_for_words(transformer, self.head, self.prompt, step), step)

    @torch.inference_mode()
    def reduce(self, hidden_states: torch.Tensor, step: Step) -> tuple[torch.Tensor, ...]:
        """(scores before the sigmoid, f32 [total_rows, num_labels]; `largest` of each row; f32
        [num_relations, 5], relations: text, head, tail, label, score; `largest` of those of each
        text, f32 [num_texts]): heads and tails are places among the spans of the text."""
        found = read_words(self.head, self.prompt, hidden_states, step.requests)
        if not found.num_words:
            none = torch.empty((0, len(self.labels)), device=hidden_states.device)
            return none, none.sum(dim=1), none.new_empty((0, 5)), none.new_empty(0)
        labels = self._labels(hidden_states, found.starts)
        words, labels = self.head.read(found.rows, labels, found.num_words)
        scores = self.head.scorer(words, labels, found.num_words)
        related = scores.new_empty((0, 5)), scores.new_empty(0)
        if self.relations:
            names = read_labels(self.head, self.prompt.relations, hidden_states, found.starts)
            related = self._relations(scores, words, names, found.num_words)
        return scores, largest(scores), *related

    def _relations(
        self,
        scores: torch.Tensor,
        words: torch.Tensor,
        names: torch.Tensor,
        num_words: Sequence[int],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The last two of `reduce`.  names: f32 [num_texts, num_relations, hidden_size]."""
        host = scores.float().cpu().numpy()  # which spans there are depends on them
        rows, most, begin, start = [], [], 0, 0
        for text, count in enumerate(num_words):
            stop, end = begin + self.head.scorer.rows_of(count), start + count
            every = self._above(host[begin:stop], count)
            chosen = _choose(every, count, self.options)
            own, largest_score = self._pairs(words[start:end], every, chosen, names[text])
            column = own.new_full((len(own), 1), text)
            rows.append(torch.cat([column, own], dim=1))
            most.append(largest_score)
            begin, start = stop, end
        return torch.cat(rows), torch.stack(most)

    def _pairs(
        self, words: torch.Tensor, every: list[Found], chosen: list[Found], names: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(f32 [num_relations, 4], head, tail, label, score; the largest score before the sigmoid).

        every: the spans of a text.  chosen: those that go together.
        """
        scorer = self.head.relations
        assert scorer is not None
        places: dict[tuple[int, int], int] = {}  # the first span with these ends
        for place, one in enumerate(chosen):
            places.setdefault(one[:2], place)
        if len(places) < 2:
            return words.new_empty((0, 4)), words.new_zeros(())
        read = list(places)
        if scorer.sees_all:  # a model that scores words sees a span once for each of its labels
            read = [one[:2] for one in every]
            if isinstance(self.head.scorer, SpanScorer):
                read = list(dict.fromkeys(read))
        ends = torch.tensor(read, device=words.device)
        spans = scorer.represent(words, ends[:, 0], ends[:, 1])
        is_pair = ~torch.eye(len(places), dtype=torch.bool, device=words.device)
        numbers = {span: number for number, span in reversed(list(enumerate(read)))}
        kept = torch.tensor([numbers[span] for span in places], device=words.device)
        if scorer.adjacency is not None:
            near = scorer.adjacency(spans)[kept][:, kept]
            is_pair &= near > self.options.limit_of("adjacency_threshold")
        logits = scorer.scores(spans[kept], names)
        chances = torch.sigmoid(logits)
        is_found = is_pair[:, :, None] & (chances > self.options.limit_of("relation_threshold"))
        found = torch.nonzero(is_found)  # [n, 3]
        values = chances[is_found]
        if len(values) > _MOST_RELATIONS:
            values, best = values.topk(_MOST_RELATIONS)
            found = found[best]
        own = torch.tensor(list(places.values()), device=words.device)
        columns = [own[found[:, 0]], own[found[:, 1]], found[:, 2], values]
        rows = torch.stack([column.to(torch.float32) for column in columns], dim=1)
        return rows, largest(logits.reshape(1, -1))[0]

    def _labels(self, hidden_states: torch.Tensor, starts: np.ndarray) -> torch.Tensor:
        """f32 [num_texts, num_labels, hidden_size], or of one text where all have the same.

        starts: the first tokens of texts.
        """
        if self.head.labels is not None:
            return self.head.labels.vectors(self.prompt.apart)[None]
        return read_labels(self.head, self.prompt.labels, hidden_states, starts)

    def are_finite(self, outputs: tuple[np.ndarray, ...], step: Step) -> np.ndarray:
        rows = np.array(self._num_rows(step.requests), dtype=np.int64)
        found = are_finite(outputs[1], rows)
        if self.relations:
            found[np.flatnonzero(step.requests.seqlens)] &= np.isfinite(outputs[3])
        return found

    def _num_rows(self, requests: Requests) -> list[int]:
        """Rows of scores of each text; a text without tokens has none."""
        rows, texts = self.head.scorer.rows_of, alignments_of(requests)
        sizes = requests.seqlens.tolist()
        return [rows(len(one.words)) if n else 0 for one, n in zip(texts, sizes, strict=True)]

    def finish(self, outputs: tuple[np.ndarray, ...], step: Step) -> list[list[ExtractedSpan]]:
        ends = np.cumsum(self._num_rows(step.requests))[:-1]
        texts = zip(alignments_of(step.requests), np.split(outputs[0], ends), strict=True)
        results = [self._spans(alignment, scores) for alignment, scores in texts]
        if len(outputs[2]):
            self._relate(results, outputs[2], np.flatnonzero(step.requests.seqlens))
        return results

    def _relate(
        self, results: list[list[ExtractedSpan]], rows: np.ndarray, texts: np.ndarray
    ) -> None:
        """Gives spans their relations.  rows: as of `reduce`.  texts: those that have tokens."""
        related: dict[tuple[int, int], list[SpanRelation]] = {}
        for text, head, tail, label, score in rows[np.argsort(-rows[:, 4], kind="stable")].tolist():
            own = SpanRelation(self.relations[int(label)], int(tail), score)
            related.setdefault((int(texts[int(text)]), int(head)), []).append(own)
        for (text, head), every in related.items():
            results[text][head] = replace(results[text][head], relations=tuple(every))

    def _spans(self, alignment: WordAlignment, scores: np.ndarray) -> list[ExtractedSpan]:
        if not len(scores):
            return []
        found = self._above(scores, len(alignment.words))
        return chosen_spans(found, alignment, self.labels, self.options)

    def _above(self, scores: np.ndarray, num_words: int) -> list[Found]:
        """The spans of a text above the threshold."""
        scorer, threshold = self.head.scorer, self.options.threshold
        if isinstance(scorer, SpanScorer):
            return _spans_of_rows(scores, num_words, scorer.max_width, threshold)
        return _spans_of_words(scores.reshape(num_words, 3, -1), threshold)


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
