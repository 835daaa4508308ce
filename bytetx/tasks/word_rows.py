"""Rows of the words of texts, and of the labels before them, from the encoder's rows of tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch

from bytetx.encode.request import Requests
from bytetx.encode.step import Step
from bytetx.nn.extraction import ExtractionHead
from bytetx.nn.schema_head import SchemaHead
from bytetx.nn.transformer import Transformer
from bytetx.ops.pooling import pool
from bytetx.requests.words import LabelPrompt, WordAlignment
from bytetx.sequence_tree import rows_of

Head = ExtractionHead | SchemaHead


@dataclass(frozen=True, slots=True)
class WordRows:
    """The words of texts that have tokens.

    rows: f32 [total_words, hidden_size].  num_words: of each text, with those of the prompt.
    starts: int64, the first token of each text.
    """

    rows: torch.Tensor
    num_words: list[int]
    starts: np.ndarray


def alignments_of(requests: Requests) -> Sequence[WordAlignment]:
    assert requests.alignments is not None  # WordReader gives them
    return cast("Sequence[WordAlignment]", requests.alignments)


def forward_for_words(
    transformer: Transformer, head: Head, prompt: LabelPrompt, step: Step
) -> torch.Tensor:
    """Hidden states of words and labels, in those of a pass; other rows have no meaning."""
    starts, tokens, sizes = _words(prompt, step.requests)
    lengths = np.concatenate([np.empty(0, dtype=np.int64), *sizes])
    marks = np.concatenate([prompt.labels, prompt.relations])
    labels = (starts[:, None] + marks).ravel()
    rows = np.unique(np.concatenate([labels, tokens[_pooled(head, lengths)]]))
    read_rows = torch.from_numpy(rows).to(step.batch.device) if len(rows) else None
    return transformer.forward(step.batch, read_rows=read_rows)


def read_words(
    head: Head, prompt: LabelPrompt, hidden_states: torch.Tensor, requests: Requests
) -> WordRows:
    """hidden_states: [total_tokens, hidden_size] of the texts behind their prompts."""
    starts, tokens, sizes = _words(prompt, requests)
    lengths = np.concatenate([np.empty(0, dtype=np.int64), *sizes])
    rows = _pool(head, hidden_states, tokens, lengths)
    return WordRows(rows, [len(size) for size in sizes], starts)


def _words(
    prompt: LabelPrompt, requests: Requests
) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """(int64, the first token of each text that has tokens; int64, the tokens of all their words;
    tokens of each word of each text)."""
    texts = np.flatnonzero(requests.seqlens)
    every, starts = alignments_of(requests), requests.cu_seqlens[:-1][texts].astype(np.int64)
    sizes = [np.concatenate([prompt.words, every[text].num_tokens]) for text in texts.tolist()]
    counts = np.array([size.sum() for size in sizes], dtype=np.int64)
    first = len(prompt.before) - int(prompt.words.sum())
    return starts, rows_of(starts + first, counts), sizes


def read_labels(
    head: Head, places: np.ndarray, hidden_states: torch.Tensor, starts: np.ndarray
) -> torch.Tensor:
    """f32 [num_texts, num_labels, hidden_size].

    places: tokens of a prompt, such as those of its labels.  starts: the first token of each text.
    """
    rows = (starts[:, None] + places).ravel()
    found = head.project(hidden_states[_on(rows, hidden_states)])
    return found.view(len(starts), len(places), -1)


def _pool(
    head: Head, hidden_states: torch.Tensor, tokens: np.ndarray, lengths: np.ndarray
) -> torch.Tensor:
    """The rows of words.  tokens: of all words.  lengths: tokens of each word."""
    places = _pooled(head, lengths)
    rows = head.project(hidden_states[_on(tokens[places], hidden_states)])
    if len(places) == len(lengths):
        return rows
    bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pool(rows, _on(bounds, hidden_states), mode=head.spec.pooling)


def _pooled(head: Head, lengths: np.ndarray) -> np.ndarray:
    """int64, which tokens of all words are read.  lengths: tokens of each word."""
    ends = np.cumsum(lengths)
    if head.spec.pooling in ("cls", "lasttoken"):
        return ends - lengths if head.spec.pooling == "cls" else ends - 1
    return np.arange(lengths.sum())


def _on(rows: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(rows).to(like.device)
