"""GLiNER2.5's models of boundaries: candidates of a text, and what fields say of each."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import numpy as np
import torch

from bytetx.encode.step import Step
from bytetx.nn.boundary_head import BoundaryHead
from bytetx.requests.words import WordAlignment
from bytetx.tasks.classify import sigmoid
from bytetx.tasks.overlaps import Found, kept_spans
from bytetx.tasks.relation_pairs import RelationPair, distinct_pairs
from bytetx.tasks.text_scores import SchemaTask, TextScores
from bytetx.tasks.word_rows import alignments_of, read_words

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class BoundaryTextScores(TextScores):
    """columns: the first column of each group.  relation_numbers: of each group, -1 for none.
    overlap: as of kept_spans.

    candidates: int64 [n, 2], words before and with the span, of the prompt's words and the text's.
    fields: f32 [n, num_fields], before the sigmoid; so are choices, f32 [num_prompt_words,
    num_fields].  is_absent: bool [num_fields], fields that the text has not.
    pairs: int64 [num_relations, n, 2], heads and tails among the candidates, -1 for none.
    pair_chances: f32 [num_relations, n].  argument_chances: f32 [candidates, num_fields].
    """

    columns: Sequence[int]
    relation_numbers: Sequence[int]
    overlap: str
    candidates: np.ndarray
    fields: np.ndarray
    choices: np.ndarray
    is_absent: np.ndarray
    pairs: np.ndarray
    pair_chances: np.ndarray
    argument_chances: np.ndarray

    def num_instances(self, group: int) -> int:
        return int(len(self.candidates) > 0)

    def spans(self, group: int, instance: int, limits: Sequence[float]) -> list[list[Found]]:
        first = self.columns[group]
        chances = sigmoid(self.fields[:, first : first + len(limits)])
        above = chances >= np.asarray(limits, dtype=np.float32)
        places, fields = np.nonzero(above & ~self.is_absent[first : first + len(limits)])
        by_field: list[list[Found]] = [[] for _ in limits]
        for place, field in zip(places.tolist(), fields.tolist(), strict=True):
            by_field[field].append(self._found(place, field, float(chances[place, field])))
        return [self._in_text(kept_spans(own, self.overlap)) for own in by_field]

    def _found(self, place: int, field: int, chance: float) -> Found:
        """A candidate as words of the text; words of the prompt are below 0."""
        start, end = (self.candidates[place] - len(self.prompt.words)).tolist()
        return start, end - 1, field, chance

    def _in_text(self, spans: Sequence[Found]) -> list[Found]:
        return [span for span in spans if span[0] >= 0]

    def entities(self, threshold: float) -> list[Found]:
        if not self.columns:
            return []
        chances = sigmoid(self.fields)
        above = (chances >= np.float32(threshold)) & ~self.is_absent
        found = (
            self._found(place, field, float(chances[place, field]))
            for place, field in zip(*(one.tolist() for one in np.nonzero(above)), strict=True)
        )
        return self._in_text(list(found))

    def choice(self, group: int, instance: int, field: int, choice: str) -> float | None:
        word = self.prompt.choices.get(choice.lower())
        if word is None:
            return None
        return float(sigmoid(self.choices[word, self.columns[group] + field]))

    def field_logits(self, group: int, span: Found, fields: Sequence[int]) -> np.ndarray:
        own = np.array([span[0], span[1] + 1]) + len(self.prompt.words)
        [place] = np.flatnonzero((self.candidates == own).all(axis=1))
        found: np.ndarray = self.fields[place, [self.columns[group] + one for one in fields]]
        return found

    def relations(self, group: int, limit: float) -> list[tuple[Found, Found, float | None]]:
        first = self.columns[group]
        number = self.relation_numbers[group]
        text, words = cast(str, self.alignment.text), self.alignment.words.tolist()
        found = []
        pairs = zip(self.pairs[number].tolist(), self.pair_chances[number].tolist(), strict=True)
        for (head, tail), chance in pairs:
            if head < 0 or chance < limit:
                continue
            ends = [
                self._found(place, field, float(self.argument_chances[place, first + field]))
                for field, place in enumerate((head, tail))
            ]
            if len(self.inside(self._in_text(ends))) == len(ends):
                found.append(RelationPair(ends[0], ends[1], chance))
        return [(one.head, one.tail, one.score) for one in distinct_pairs(found, text, words)]


@dataclass(frozen=True, slots=True)
class BoundaryTask(SchemaTask[R]):
    """The device's part of a call whose model scores candidates."""

    head: BoundaryHead

    @property
    def _columns(self) -> list[int]:
        sizes = [len(group.fields) for group in self.schema.groups]
        return [0, *np.cumsum(sizes).tolist()]

    @property
    def _relation_numbers(self) -> list[int]:
        is_relation = [group.is_relation for group in self.schema.groups]
        return [sum(is_relation[:place]) if own else -1 for place, own in enumerate(is_relation)]

    @torch.inference_mode()
    def reduce(self, hidden_states: torch.Tensor, step: Step) -> tuple[torch.Tensor, ...]:
        """(candidates of all texts, int64 [total, 2]; what fields say of these, f32 [total,
        num_fields], those of words of the prompt behind each text's; of texts, that they have none,
        f32 [num_texts, num_fields]; pairs, int64 [num_texts, num_relations, n, 2], and what
        relations say of these, f32; logits of classes, f32 [num_texts, num_classes])."""
        found = read_words(self.head, self.prompt, hidden_states, step.requests)
        num_texts = len(found.num_words)
        starts = self._columns[:-1]
        numbers, spec = self._relation_numbers, self.head.spec.relations
        most = 0 if spec is None else spec.max_pairs
        shape = (num_texts, max(numbers, default=-1) + 1, most)
        like = found.rows.new_empty((num_texts, 0))
        pairs = torch.full((*shape, 2), -1, device=like.device)
        chances = like.new_zeros(shape)
        if not num_texts or not self.schema.groups:
            _, classes = self.parts(hidden_states, found) if num_texts else ([], [])
            none = torch.empty((0, 2), dtype=torch.int64, device=like.device)
            logits = self.classify(classes, like)
            return none, like.new_empty((0, self._columns[-1])), like, pairs, chances, logits
        groups, classes = self.parts(hidden_states, found)
        fields = torch.cat([part[:, 1:] for part in groups], dim=1)
        words = torch.arange(len(self.prompt.words), device=like.device)
        extra = torch.stack([words, words + 1], dim=1)
        texts = self.head.candidates(found.rows, fields, found.num_words, extra)
        absent = self.head.absent(fields.flatten(0, 1)).view(num_texts, -1)
        if self.head.relations is not None and shape[1]:
            rows = found.rows.split(found.num_words)
            for group, number in enumerate(numbers):
                own = slice(starts[group], starts[group] + 2)
                for text, one in enumerate(texts if number >= 0 else ()):
                    count = self.head.num_candidates(found.num_words[text])
                    pairs[text, number], chances[text, number] = self.head.relations(
                        rows[text], fields[text, own], one.spans[:count], one.logits[:count, own]
                    )
        return (
            torch.cat([one.spans for one in texts]),
            torch.cat([one.logits for one in texts]),
            absent,
            pairs,
            chances,
            self.classify(classes, like),
        )

    def are_finite(self, outputs: tuple[np.ndarray, ...], step: Step) -> np.ndarray:
        found = np.ones(len(step.requests), dtype=bool)
        places = np.flatnonzero(step.requests.seqlens)
        for place, parts in zip(places, self._split(outputs, step), strict=True):
            found[place] = all(np.isfinite(part).all() for part in parts)
        return found

    def _split(self, outputs: tuple[np.ndarray, ...], step: Step) -> list[tuple[np.ndarray, ...]]:
        """The outputs of each text that has tokens."""
        spans, fields, *others = outputs
        own, sizes = len(self.prompt.words), []
        for text in self.read_texts(step.requests) if self.schema.groups else []:
            sizes.append(self.head.num_candidates(own + len(text.words)) + own)
        ends = np.cumsum(sizes, dtype=np.int64)[:-1]
        parts = [np.split(spans, ends), np.split(fields, ends)]
        if not sizes:
            parts = [[one] * len(others[0]) for one in (spans, fields)]
        return list(zip(*parts, *others, strict=True))

    def finish(self, outputs: tuple[np.ndarray, ...], step: Step) -> list[R]:
        every, results = iter(self._split(outputs, step)), []
        texts = alignments_of(step.requests)
        for alignment, size in zip(texts, step.requests.seqlens.tolist(), strict=True):
            results.append(self.result(self._scores(alignment, next(every) if size else None)))
        return results

    def _scores(
        self, alignment: WordAlignment, parts: tuple[np.ndarray, ...] | None
    ) -> BoundaryTextScores:
        """parts: None of a text of which no word was read: it has no candidates, no classes."""
        spec, columns, own = self.head.spec, self._columns, len(self.prompt.words)
        if parts is None:
            nothing = np.empty((0, columns[-1]), dtype=np.float32)
            pairs = np.empty((max(self._relation_numbers, default=-1) + 1, 0, 2), dtype=np.int64)
            none, no = np.empty((0, 2), dtype=np.int64), np.empty(0, dtype=np.float32)
            parts = (none, nothing, np.zeros(columns[-1]), pairs, pairs[..., 0], no)
        spans, fields, absent, pairs, relations, classes = parts
        count = max(len(spans) - own, 0)
        choices, spans, fields = fields[count:], spans[:count], fields[:count]
        is_span = spans[:, 1] > spans[:, 0]
        places = np.cumsum(is_span) - 1
        # The place after the last one is of pairs that are none.
        places = np.append(np.where(is_span, places, -1), -1)
        temperature = 1.0 if spec.relations is None else spec.relations.temperature
        is_absent = np.zeros(columns[-1], dtype=bool)
        for number, group in enumerate(self.schema.groups):
            if group.is_entities and spec.abstains_above is not None:
                fields_of = slice(columns[number], columns[number + 1])
                is_absent[fields_of] = sigmoid(absent[fields_of]) > spec.abstains_above
        return BoundaryTextScores(
            alignment,
            self.prompt,
            classes / spec.class_temperature,
            columns,
            self._relation_numbers,
            spec.overlap,
            spans[is_span],
            fields[is_span] / spec.temperature,
            choices / spec.temperature,
            is_absent,
            places[pairs],
            sigmoid(relations / temperature),
            sigmoid(fields[is_span]),
        )
