"""Rows of the words of texts, and of the labels before them, from the encoder's rows of tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch

from bytetx.encode.request import Requests
from bytetx.nn.extraction import ExtractionHead
from bytetx.nn.schema_head import SchemaHead
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


def read_words(
    head: Head, prompt: LabelPrompt, hidden_states: torch.Tensor, requests: Requests
) -> WordRows:
    """hidden_states: [total_tokens, hidden_size] of the texts behind their prompts."""
    texts = np.flatnonzero(requests.seqlens)
    every, starts = alignments_of(requests), requests.cu_seqlens[:-1][texts].astype(np.int64)
    sizes = [np.concatenate([prompt.words, every[text].num_tokens]) for text in texts.tolist()]
    lengths = np.concatenate([np.empty(0, dtype=np.int64), *sizes])
    counts = np.array([size.sum() for size in sizes], dtype=np.int64)
    first = len(prompt.before) - int(prompt.words.sum())
    tokens = rows_of(starts + first, counts)
    rows = _pool(head, hidden_states, tokens, lengths)
    return WordRows(rows, [len(size) for size in sizes], starts)


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
    mode, ends = head.spec.pooling, np.cumsum(lengths)
    if mode in ("cls", "lasttoken"):
        places = ends - lengths if mode == "cls" else ends - 1
        return head.project(hidden_states[_on(tokens[places], hidden_states)])
    bounds = np.concatenate([[0], ends]).astype(np.int32)
    rows = head.project(hidden_states[_on(tokens, hidden_states)])
    return pool(rows, _on(bounds, hidden_states), mode=mode)


def _on(rows: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(rows).to(like.device)
