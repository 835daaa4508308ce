"""Results of the tasks: one for each text in the caller's order, with the run's counts."""

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, SupportsIndex, TypeVar

import numpy as np

from bytetx.encode.request import RunStats
from bytetx.errors import InputError
from bytetx.generate.outputs import FinishReason, TokenLogprob

T = TypeVar("T")

# exp of a larger number overflows a double.
_MAX_EXPONENT = 709.0


@dataclass(frozen=True, slots=True)
class Label:
    """One class of a text and its score (a probability, or a logit with raw_scores).

    index: the number of the class, in the order of the checkpoint or of the schema: two classes may
    have one name.
    """

    label: str
    score: float
    index: int


@dataclass(frozen=True, slots=True)
class Hit:
    """One document of a reranking: its index in the input, its score, and the document."""

    index: int
    score: float
    document: str


@dataclass(frozen=True, slots=True)
class Entity:
    """A tagged token, or a group of tokens with one tag.

    entity: the tag; without its B-/I- prefix where tokens were grouped.
    start, end: characters of the text, None where token ids were given.
    index: of the token in the sequence.  word_id: of the word in the text.  Both are those of the
    first token of a group.
    """

    entity: str
    score: float
    word: str
    start: int | None
    end: int | None
    index: int
    word_id: int | None


@dataclass(frozen=True, slots=True)
class SpanRelation:
    """A relation of a span to another one.

    tail: the place of the other span in the list of the text's spans.  score: from 0 to 1.
    """

    label: str
    tail: int
    score: float


@dataclass(frozen=True, slots=True)
class ExtractedSpan:
    """A span of a text that has a label.

    start, end: characters of the text.  score: from 0 to 1.  relations: of which it is the head,
    the likeliest first.
    """

    start: int
    end: int
    text: str
    label: str
    score: float
    relations: tuple[SpanRelation, ...] = ()


@dataclass(frozen=True, slots=True)
class AttributedSpan(ExtractedSpan):
    """An entity of a schema with entity_attributes.

    attributes: its labels of each group that applies to it; one, or any number where the group says
    multi_label.
    """

    attributes: dict[str, list[Label]] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class FieldValue:
    """A value of a structure's field, or an end of a relation.

    start, end: characters of the text; None of a choice.  score: from 0 to 1.
    """

    text: str
    score: float
    start: int | None = None
    end: int | None = None


@dataclass(frozen=True, slots=True)
class Relation:
    """Two spans of a text that a relation holds between.

    score: from 0 to 1; None of models that score its ends alone.
    """

    head: FieldValue
    tail: FieldValue
    score: float | None = None


Structure = dict[str, FieldValue | list[FieldValue] | None]


@dataclass(frozen=True, slots=True)
class Extraction:
    """The answers of a text to a schema; each table has all names of the schema, in its order.

    entities: in the order of the text; of AttributedSpan where the schema has attributes.
    classifications: the best label, or several, the best one
    first, where the schema says multi_label.  structures: instances; a field has a list of values
    in the order of the text, or one value or None where the schema says dtype "str".
    """

    entities: list[ExtractedSpan]
    classifications: dict[str, list[Label]]
    structures: dict[str, list[Structure]]
    relations: dict[str, list[Relation]]


@dataclass(frozen=True, slots=True)
class Answer:
    """A span of a context that answers a question; no text where the context has no answer.

    score: the probability of its first token times that of its last one.
    start, end: characters of the context.
    """

    answer: str
    score: float
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Fill:
    """One token for one mask of a text.

    mask_index: which mask of the text, from 0.  sequence: the text with this mask filled.
    """

    mask_index: int
    score: float
    token: int
    token_str: str
    sequence: str


@dataclass(frozen=True, slots=True)
class Likelihood:
    """How likely a causal model finds a text; natural logarithms.

    log_likelihood: the sum over tokens.  token_log_likelihoods: f32, of each token given those
    before it, without the first token.
    """

    log_likelihood: float
    token_log_likelihoods: np.ndarray

    @property
    def num_tokens(self) -> int:
        """Tokens that were scored: all but the first."""
        return len(self.token_log_likelihoods)

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-likelihood of a token; NaN where no token was scored."""
        if not self.num_tokens:
            return math.nan
        mean = -self.log_likelihood / self.num_tokens
        return math.exp(mean) if mean < _MAX_EXPONENT else math.inf


@dataclass(frozen=True, slots=True)
class GeneratedText:
    """One generated text.

    text: without special tokens, and without the stop string.  token_ids: all sampled tokens,
    including a stop token.  finish_reason: "stop" (stop: the string or token that ended it),
    "length" or "abort".  logprobs: one for each token, where SamplingParams.logprobs is set.
    """

    text: str
    token_ids: Sequence[int]
    finish_reason: FinishReason
    stop: str | int | None = None
    logprobs: Sequence[TokenLogprob] | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """The outputs of one prompt, SamplingParams.n of them; the properties are the first one's.

    prompt_logprobs: of the prompt's tokens from the second to the last one, where requested.
    """

    num_prompt_tokens: int
    outputs: tuple[GeneratedText, ...]
    prompt_logprobs: Sequence[TokenLogprob] | None = None

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> Sequence[int]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.outputs[0].finish_reason

    @property
    def logprobs(self) -> Sequence[TokenLogprob] | None:
        return self.outputs[0].logprobs


class Results(list[T]):
    """A list of results with the run's counts; a failed text has its InputError as result."""

    def __init__(self, items: Iterable[T], stats: RunStats, errors: Mapping[int, InputError]):
        super().__init__(items)
        self.stats = stats
        self.errors = errors


@dataclass(frozen=True, slots=True, repr=False)
class Embeddings:
    """Vectors [num_texts, dimensions] in the caller's order, f32 or in the precision asked for.

    errors: InputError of each text that failed, by its index; its vector is NaN (0 in integers).
    """

    vectors: np.ndarray
    stats: RunStats
    errors: Mapping[int, InputError] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.vectors.shape

    def __repr__(self) -> str:
        return short_repr(self, shape=self.shape, dtype=self.vectors.dtype)

    def __len__(self) -> int:
        return len(self.vectors)

    def __getitem__(self, index: SupportsIndex | slice | np.ndarray) -> np.ndarray:
        return self.vectors[index]

    def __iter__(self) -> Iterator[np.ndarray]:
        return iter(self.vectors)

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.vectors, dtype=dtype, copy=copy)


def short_repr(result: object, **facts: object) -> str:
    """One line on a result of many numbers.  facts: beside the number of its errors."""
    errors = getattr(result, "errors", None)
    if errors is not None:
        facts["errors"] = len(errors)
    named = ", ".join(f"{name}={fact}" for name, fact in facts.items())
    return f"{type(result).__name__}({named})"


class Stream(Iterator[T], Generic[T]):
    """Results one by one in the caller's order; `stats` has the counts so far.

    `close()` ends the run early; so does dropping the stream.
    """

    def __init__(self, blocks: Generator[list[T], None, None], stats: Callable[[], RunStats]):
        self._results = _flatten(blocks)
        self._stats = stats

    def __iter__(self) -> "Stream[T]":
        return self

    def __next__(self) -> T:
        return next(self._results)

    @property
    def stats(self) -> RunStats:
        return self._stats()

    def close(self) -> None:
        self._results.close()


def _flatten(blocks: Generator[list[T], None, None]) -> Generator[T, None, None]:
    try:
        for block in blocks:
            yield from block
    finally:
        blocks.close()
