"""GLiNER2's models of spans: scores of all spans, counts of instances, logits of classes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from bytetx.encode.request import Requests
from bytetx.encode.step import Step
from bytetx.nn.schema_head import SpanSchemaHead
from bytetx.requests.words import WordAlignment
from bytetx.tasks.classify import sigmoid
from bytetx.tasks.overlaps import Found, disjoint
from bytetx.tasks.text_scores import SchemaTask, TextScores
from bytetx.tasks.word_rows import alignments_of, read_words

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class SpanTextScores(TextScores):
    """groups: f32 [num_words, max_width, count, num_fields] for each group of the schema, what is
    said of each span by its first word and its width, before the sigmoid; words of the prompt come
    first, and spans that end behind the text have no meaning.
    """

    groups: Sequence[np.ndarray]

    def num_instances(self, group: int) -> int:
        return int(self.groups[group].shape[2])

    def spans(self, group: int, instance: int, limits: Sequence[float]) -> list[list[Found]]:
        by_field: list[list[Found]] = [[] for _ in limits]
        for span in self._above(group, instance, np.asarray(limits, dtype=np.float32)):
            by_field[span[2]].append(span)
        return [disjoint(own) for own in by_field]

    def _above(self, group: int, instance: int, limits: np.ndarray) -> list[Found]:
        chances = sigmoid(self.groups[group][len(self.prompt.words) :, :, instance])
        first, width, fields = np.nonzero(chances >= limits)
        is_inside = first + width < len(chances)
        first, width, fields = first[is_inside], width[is_inside], fields[is_inside]
        columns = (first, first + width, fields, chances[first, width, fields])
        return list(zip(*(column.tolist() for column in columns), strict=True))

    def entities(self, threshold: float) -> list[Found]:
        if not self.groups or not self.num_instances(0):
            return []
        return self._above(0, 0, np.array(threshold, dtype=np.float32))

    def choice(self, group: int, instance: int, field: int, choice: str) -> float | None:
        word = self.prompt.choices.get(choice.lower())
        if word is None:
            return None
        return float(sigmoid(self.groups[group][word, 0, instance, field]))

    def field_logits(self, group: int, span: Found, fields: Sequence[int]) -> np.ndarray:
        first, last = span[:2]
        own: np.ndarray = self.groups[group][len(self.prompt.words) + first, last - first, 0]
        return own[list(fields)]

    def relations(self, group: int, limit: float) -> list[tuple[Found, Found, float | None]]:
        found: list[tuple[Found, Found, float | None]] = []
        for instance in range(self.num_instances(group)):
            heads, tails = self.spans(group, instance, (limit, limit))
            heads, tails = self.inside(heads), self.inside(tails)
            if heads and tails:
                found.append((heads[0], tails[0], None))
        return found


@dataclass(frozen=True, slots=True)
class SpanSchemaTask(SchemaTask[R]):
    """The device's part of a call whose model scores every span."""

    head: SpanSchemaHead

    @torch.inference_mode()
    def reduce(self, hidden_states: torch.Tensor, step: Step) -> tuple[torch.Tensor, ...]:
        """(scores of spans, f32, [rows, queries] of each text; counts, int64 [num_texts,
        num_groups], and `largest` of the logits of each, f32; logits of classes, f32 [num_texts,
        num_classes])."""
        found = read_words(self.head, self.prompt, hidden_states, step.requests)
        num_texts, schema = len(found.num_words), self.schema
        if not num_texts:
            none = torch.empty((0, len(schema.groups)))
            return none.view(-1), none.long(), none, none
        groups, classes = self.parts(hidden_states, found)
        queries: list[list[torch.Tensor]] = [[] for _ in range(num_texts)]
        counts = np.zeros((num_texts, len(groups)), dtype=np.int64)
        most = hidden_states.new_empty(counts.shape, dtype=torch.float32)
        if groups:
            heads = torch.stack([part[:, 0] for part in groups], dim=1)  # [texts, groups, size]
            counted, most = (
                own.view(num_texts, -1) for own in self.head.count(heads.flatten(0, 1))
            )
            counts = counted.cpu().numpy()  # how much is computed depends on them
        for number, part in enumerate(groups):
            limit = 1 if schema.groups[number].is_entities else 1 << 30
            own = np.minimum(counts[:, number], limit).tolist()
            for mine, query in zip(queries, self.head.queries(part[:, 1:], own), strict=True):
                mine.append(query.flatten(0, 1))
        logits = self.classify(classes, most)
        none = found.rows[:0]
        every = [torch.cat(own) if own else none for own in queries]
        scores = self.head.score(found.rows, every, found.num_words)
        return scores, torch.from_numpy(counts), most, logits

    def are_finite(self, outputs: tuple[np.ndarray, ...], step: Step) -> np.ndarray:
        scores, counts, most, logits = outputs
        found = np.ones(len(step.requests), dtype=bool)
        places = np.flatnonzero(step.requests.seqlens)
        texts = zip(places, self._split(scores, counts, step.requests), most, logits, strict=True)
        for place, *parts in texts:
            found[place] = all(np.isfinite(part).all() for part in parts)
        return found

    def _split(
        self, scores: np.ndarray, counts: np.ndarray, requests: Requests
    ) -> list[np.ndarray]:
        """Scores of each text that has tokens."""
        texts, own = self.read_texts(requests), len(self.prompt.words)
        num_words = np.array([own + len(text.words) for text in texts], dtype=np.int64)
        sizes = num_words * self.head.spec.max_width * self._queries(counts).sum(axis=1)
        return np.split(scores, np.cumsum(sizes)[:-1]) if texts else []

    def _queries(self, counts: np.ndarray) -> np.ndarray:
        """int64 [num_texts, num_groups]"""
        fields = [len(group.fields) for group in self.schema.groups]
        limits = [1 if group.is_entities else 1 << 30 for group in self.schema.groups]
        found: np.ndarray = np.minimum(counts, np.array(limits, dtype=np.int64)) * np.array(
            fields, dtype=np.int64
        )
        return found

    def finish(self, outputs: tuple[np.ndarray, ...], step: Step) -> list[R]:
        scores, counts, _, logits = outputs
        texts, results = alignments_of(step.requests), []
        queries = self._queries(counts)
        every = iter(zip(self._split(scores, counts, step.requests), queries, logits, strict=True))
        for alignment, size in zip(texts, step.requests.seqlens.tolist(), strict=True):
            if size:
                results.append(self.result(self._scores(alignment, *next(every))))
            else:
                results.append(self.result(self._unread(alignment)))
        return results

    def _unread(self, alignment: WordAlignment) -> TextScores:
        """The scores of a text of which no word was read: no instances, no classes."""
        sizes = (0, self.head.spec.max_width, 0)
        groups = [np.empty((*sizes, len(group.fields))) for group in self.schema.groups]
        return SpanTextScores(alignment, self.prompt, np.empty(0), groups)

    def _scores(
        self, alignment: WordAlignment, scores: np.ndarray, queries: np.ndarray, logits: np.ndarray
    ) -> TextScores:
        num_words = len(self.prompt.words) + len(alignment.words)
        width, ends = self.head.spec.max_width, np.cumsum(queries)
        whole = scores.reshape(num_words, width, int(queries.sum()))
        parts = np.split(whole, ends[:-1], axis=2) if len(ends) else []
        groups = [
            part.reshape(num_words, width, part.shape[2] // len(group.fields), len(group.fields))
            for part, group in zip(parts, self.schema.groups, strict=True)
        ]
        return SpanTextScores(alignment, self.prompt, logits, groups)
