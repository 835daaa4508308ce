"""Keyword arguments of Model's tasks, as type checkers see them; the methods say what they mean."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, TypedDict

import numpy.typing as npt

from bytetx.requests.inputs import Input
from bytetx.tasks.chunks import Overflow
from bytetx.tasks.precision import Precision

Texts = Iterable[Input]
Pairs = Iterable[tuple[str, str]]

# The values of stream and on_error, on which the type of a task's result depends.
No = Literal[False]
Yes = Literal[True]
Raise = Literal["raise"]
Return = Literal["return"]
OnError = Literal["raise", "return"]


class TextOptions(TypedDict, total=False):
    truncate: bool
    show_progress: bool


class OverflowOptions(TextOptions, total=False):
    overflow: Overflow | None
    stride: int


class EmbedOptions(OverflowOptions, total=False):
    task: str | None
    prompt: str | None
    prompt_name: str | None
    dimensions: int | None
    pooling: str | Sequence[str] | None
    normalize: bool | None
    precision: Precision
    ranges: npt.ArrayLike | None


class SparseOptions(TextOptions, total=False):
    task: str | None
    prompt: str | None
    prompt_name: str | None
    max_active_dims: int | None


class TokenOptions(TextOptions, total=False):
    task: Literal["query", "document"]
    prompt: str | None
    prompt_name: str | None
    normalize: bool | None
    precision: Precision
    ranges: npt.ArrayLike | None


class ClassifyOptions(OverflowOptions, total=False):
    top_k: int | None
    raw_scores: bool


class TagOptions(OverflowOptions, total=False):
    aggregation: str
    ignore_labels: Collection[str]


class AnswerOptions(TypedDict, total=False):
    top_k: int
    max_answer_tokens: int
    allow_no_answer: bool
    whole_words: bool
    chunk_tokens: int | None
    stride: int
    show_progress: bool


class FillMaskOptions(TextOptions, total=False):
    top_k: int
    targets: Sequence[str] | None


class StatesOptions(TextOptions, total=False):
    layers: Sequence[int]


class GenerateOptions(TypedDict, total=False):
    chat_template_kwargs: Mapping[str, Any] | None
    kv_cache_tokens: int | None
    max_num_seqs: int | None
    num_speculative_tokens: int
    show_progress: bool
