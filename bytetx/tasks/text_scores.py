"""Scores of a text for a schema, by GLiNER2 models, and the device's part of tasks with one."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

import numpy as np
import torch

from bytetx.encode.request import Requests
from bytetx.encode.step import Capture, Step
from bytetx.nn.schema_head import SchemaHead
from bytetx.nn.transformer import Transformer
from bytetx.requests.schema import ExtractionSchema, SchemaPrompt
from bytetx.requests.words import WordAlignment
from bytetx.tasks.overlaps import Found
from bytetx.tasks.word_rows import WordRows, alignments_of, forward_for_words, read_labels

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class TextScores(ABC):
    """The scores of one text.

    logits: f32 [num_classes] of all classifications; empty where no word of the text was read.
    """

    alignment: WordAlignment
    prompt: SchemaPrompt
    logits: np.ndarray

    def inside(self, spans: Sequence[Found]) -> list[Found]:
        """Spans without the end of a sentence that the text has not."""
        words = self.alignment.words.tolist()
        return [one for one in spans if words[one[0]][0] < words[one[1]][1]]

    @abstractmethod
    def num_instances(self, group: int) -> int:
        """How many times the text has a group of fields."""

    @abstractmethod
    def spans(self, group: int, instance: int, limits: Sequence[float]) -> list[list[Found]]:
        """For each field, the spans that stay, the best one first, in the text or with the end of a
        sentence that it has not.  limits: the least chance of each field's spans."""

    @abstractmethod
    def entities(self, threshold: float) -> list[Found]:
        """All spans of the first group whose chance is at least the threshold."""

    @abstractmethod
    def choice(self, group: int, instance: int, field: int, choice: str) -> float | None:
        """The chance of a choice; None where the tokenizer has no token of it."""

    @abstractmethod
    def field_logits(self, group: int, span: Found, fields: Sequence[int]) -> np.ndarray:
        """Scores of a span that was found, before the sigmoid; f32 [len(fields)]."""

    @abstractmethod
    def relations(self, group: int, limit: float) -> list[tuple[Found, Found, float | None]]:
        """(head, tail, chance); heads and tails lie in the text.  limit: the least chance."""


@dataclass(frozen=True, slots=True)
class SchemaTask(ABC, Generic[R]):
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
        return self.reduce(forward_for_words(transformer, self.head, self.prompt, step), step)

    @abstractmethod
    def reduce(self, hidden_states: torch.Tensor, step: Step) -> tuple[torch.Tensor, ...]:
        """Outputs of the texts that have tokens."""

    @abstractmethod
    def are_finite(self, outputs: tuple[np.ndarray, ...], step: Step) -> np.ndarray:
        """Whether all that is said of each text is finite, bool [num_texts]."""

    @abstractmethod
    def finish(self, outputs: tuple[np.ndarray, ...], step: Step) -> list[R]:
        """The result of each text."""

    def parts(
        self, hidden_states: torch.Tensor, found: WordRows
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Rows of groups and of classifications, each f32 [num_texts, 1 + num_fields,
        hidden_size], its own row first."""
        labels = read_labels(self.head, self.prompt.labels, hidden_states, found.starts)
        sizes = [1 + len(group.fields) for group in self.schema.groups]
        sizes += [1 + len(one.labels) for one in self.schema.classifications]
        parts, num_groups = list(labels.split(sizes, dim=1)), len(self.schema.groups)
        return parts[:num_groups], parts[num_groups:]

    def classify(self, classes: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """Logits of all classes, f32 [num_texts, num_classes]."""
        if not classes:
            return like.new_empty((len(like), 0), dtype=torch.float32)
        rows = torch.cat([part[:, 1:] for part in classes], dim=1)
        return self.head.classify(rows.flatten(0, 1)).view(len(rows), -1)

    def read_texts(self, requests: Requests) -> list[WordAlignment]:
        """The texts that have tokens."""
        texts = alignments_of(requests)
        return [texts[place] for place in np.flatnonzero(requests.seqlens).tolist()]
