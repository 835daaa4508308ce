"""A GLiNER2 model's outputs for texts and a schema: scores of spans, counts, logits of classes."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

import numpy as np
import torch

from bytetx.encode.request import Requests
from bytetx.encode.step import Capture, Step
from bytetx.errors import InputError
from bytetx.nn.schema_head import SchemaHead
from bytetx.nn.transformer import Transformer
from bytetx.requests.schema import ExtractionSchema, SchemaPrompt, schema_prompt, schema_words
from bytetx.requests.words import WordAlignment, WordReader
from bytetx.tasks.call import TaskCall, list_sink
from bytetx.tasks.classify import sigmoid
from bytetx.tasks.context import TaskContext
from bytetx.tasks.results import Results
from bytetx.tasks.task import TextOptions
from bytetx.tasks.word_rows import alignments_of, read_labels, read_words

R = TypeVar("R")

# (first word, last word, the number of its field or label, score)
Found = tuple[int, int, int, float]


@dataclass(frozen=True, slots=True)
class TextScores:
    """The scores of one text.

    groups: f32 [num_words, max_width, count, num_fields] for each group of the schema, the chance
    of each span by its first word and its width; words of the prompt come first, and spans that
    end behind the text have no meaning.
    logits: f32 [num_classes] of all classifications; empty where no word of the text was read.
    """

    alignment: WordAlignment
    prompt: SchemaPrompt
    groups: Sequence[np.ndarray]
    logits: np.ndarray

    def spans(self, group: int, instance: int, threshold: float | Sequence[float]) -> list[Found]:
        """Spans of the text's words whose chance is at least the threshold of their field."""
        if not self.groups[group].shape[2]:
            return []
        chances = self.groups[group][len(self.prompt.words) :, :, instance]
        first, width, fields = np.nonzero(chances >= np.asarray(threshold, dtype=np.float32))
        is_inside = first + width < len(chances)
        first, width, fields = first[is_inside], width[is_inside], fields[is_inside]
        columns = (first, first + width, fields, chances[first, width, fields])
        return list(zip(*(column.tolist() for column in columns), strict=True))

    def entities(self, threshold: float) -> list[Found]:
        """Spans of the first group, in the order of the text."""
        return self.spans(0, 0, threshold) if self.groups else []

    def choice(self, group: int, instance: int, field: int, choice: str) -> float | None:
        """The chance of a choice; None where the tokenizer has no token of it."""
        word = self.prompt.choices.get(choice.lower())
        return None if word is None else float(self.groups[group][word, 0, instance, field])


def schema_call(
    context: TaskContext,
    name: str,
    texts: Iterable[str],
    schema: ExtractionSchema,
    options: TextOptions,
    result: Callable[[TextScores], R],
    *,
    key: Hashable,
) -> TaskCall[Results[R]]:
    """A call of a task that reads a schema.  key: of what `result` does besides.

    Raises InputError where the checkpoint is no GLiNER2 model.
    """
    head = context.need_head(context.heads.extraction, "span extraction")
    if not isinstance(head, SchemaHead):
        raise InputError(
            "this checkpoint is a GLiNER model of version 1, which reads labels and no schemas; "
            "use extract, or load a GLiNER2 model"
        )
    tokenizer, most = context.need_tokenizer(), context.spec.max_positions
    prompt = schema_prompt(schema, tokenizer, most=most)
    reader = WordReader(
        context.spec,
        tokenizer,
        truncate=options.truncate,
        keeps_errors=options.on_error == "return",
        label_prompt=prompt,
        max_words=head.spec.max_words,
        max_tokens=most,
        words=schema_words(),
        reads_sentences=True,
    )
    job = SchemaTask(head, schema, prompt, result, key)
    return TaskCall(name, texts, job, reader, list_sink)


@dataclass(frozen=True, slots=True)
class SchemaTask(Generic[R]):
    """result: of a text.  own_key: of what it does besides the schema."""

    head: SchemaHead
    schema: ExtractionSchema
    prompt: SchemaPrompt
    result: Callable[[TextScores], R]
    own_key: Hashable
    shares_pass: ClassVar[bool] = True

    @property
    def key(self) -> Hashable:
        return ("schema", id(self.head), self.schema, self.own_key)

    @property
    def capture(self) -> Capture | None:
        return None  # it reads where the words of each text are

    def compute(self, transformer: Transformer, step: Step) -> tuple[torch.Tensor, ...]:
        return self.reduce(transformer.forward(step.batch), step)

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
        labels = read_labels(self.head, self.prompt.labels, hidden_states, found.starts)
        sizes = [1 + len(group.fields) for group in schema.groups]
        sizes += [1 + len(one.labels) for one in schema.classifications]
        parts = labels.split(sizes, dim=1)
        groups, classes = parts[: len(schema.groups)], parts[len(schema.groups) :]
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
        logits = hidden_states.new_empty((num_texts, 0), dtype=torch.float32)
        if classes:
            rows = torch.cat([part[:, 1:] for part in classes], dim=1)
            logits = self.head.classify(rows.flatten(0, 1)).view(num_texts, -1)
        none = labels.new_empty((0, labels.shape[2]))
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
        texts = alignments_of(requests)
        places = np.flatnonzero(requests.seqlens).tolist()
        own = len(self.prompt.words)
        num_words = np.array([own + len(texts[place].words) for place in places], dtype=np.int64)
        sizes = num_words * self.head.spec.max_width * self._queries(counts).sum(axis=1)
        return np.split(scores, np.cumsum(sizes)[:-1]) if places else []

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
        return TextScores(alignment, self.prompt, groups, np.empty(0))

    def _scores(
        self, alignment: WordAlignment, scores: np.ndarray, queries: np.ndarray, logits: np.ndarray
    ) -> TextScores:
        num_words = len(self.prompt.words) + len(alignment.words)
        width, ends = self.head.spec.max_width, np.cumsum(queries)
        chances = sigmoid(scores.reshape(num_words, width, int(queries.sum())))
        parts = np.split(chances, ends[:-1], axis=2) if len(ends) else []
        groups = [
            part.reshape(num_words, width, part.shape[2] // len(group.fields), len(group.fields))
            for part, group in zip(parts, self.schema.groups, strict=True)
        ]
        return TextScores(alignment, self.prompt, groups, logits)
