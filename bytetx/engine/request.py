"""Request: one text as the engine sees it, its failure, and the counts of a whole run."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from bytetx.errors import InputError

# A padded run is counted in batches of this size, sentence-transformers' default.
_PADDED_BATCH_SIZE = 32


@dataclass(frozen=True, slots=True)
class Alignment:
    """Where each token of a text comes from; one entry a token in every list.

    offsets: (start, end) characters of the text.  word_ids: the word's index, None for special
    tokens.  special_tokens_mask: 1 where the tokenizer added the token.
    """

    text: str | None
    offsets: list[tuple[int, int]] | None
    word_ids: list[int | None] | None
    special_tokens_mask: list[int]


@dataclass(frozen=True, slots=True)
class Request:
    """One text, ready to run.

    index: place in the caller's order.  token_ids: special tokens included.
    token_type_ids: None means 0 everywhere.  prompt_tokens: tokens of the prompt at the start.
    alignment: only where the task asked for it.
    """

    index: int
    token_ids: Sequence[int]
    token_type_ids: Sequence[int] | None = None
    prompt_tokens: int = 0
    is_truncated: bool = False
    alignment: Alignment | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Failure:
    """A text that cannot run, and why."""

    index: int
    error: InputError


@dataclass(frozen=True, slots=True)
class RunStats:
    """What a run computed.

    num_pad_tokens: pad tokens that a padded run in batches of 32, in arrival order, would have
    computed on top.  num_truncated: texts cut to the model's positions.  num_errors: texts that
    failed.  seconds: wall time, tokenisation included.
    """

    num_texts: int = 0
    num_tokens: int = 0
    num_pad_tokens: int = 0
    num_truncated: int = 0
    num_errors: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class RunCounter:
    """Counts a run as its texts finish; `stats()` may be asked at any time."""

    _num_texts: int = 0
    _num_tokens: int = 0
    _num_truncated: int = 0
    _num_errors: int = 0
    _num_pad_tokens: int = 0
    _open_batch: list[int] = field(default_factory=list)
    _start: float = field(default_factory=time.perf_counter)
    _seconds: float | None = None

    def add(self, item: Request | Failure) -> None:
        """Counts one text; texts come in the caller's order."""
        self._num_texts += 1
        if isinstance(item, Failure):
            self._num_errors += 1
            return
        self._num_tokens += item.num_tokens
        self._num_truncated += item.is_truncated
        self._open_batch.append(item.num_tokens)
        if len(self._open_batch) == _PADDED_BATCH_SIZE:
            self._num_pad_tokens += _pad_tokens(self._open_batch)
            self._open_batch.clear()

    def stop(self) -> None:
        """Ends the clock; a second call changes nothing."""
        if self._seconds is None:
            self._seconds = time.perf_counter() - self._start

    def stats(self) -> RunStats:
        running = time.perf_counter() - self._start
        return RunStats(
            num_texts=self._num_texts,
            num_tokens=self._num_tokens,
            num_pad_tokens=self._num_pad_tokens + _pad_tokens(self._open_batch),
            num_truncated=self._num_truncated,
            num_errors=self._num_errors,
            seconds=running if self._seconds is None else self._seconds,
        )


def _pad_tokens(seqlens: list[int]) -> int:
    return len(seqlens) * max(seqlens, default=0) - sum(seqlens)
