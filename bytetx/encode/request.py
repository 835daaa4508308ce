"""Requests: the engine's texts, in columns; failures; the counts of a run and of an engine."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any, Protocol

import numpy as np

from bytetx.adapter_rows import AdapterRows, SlottedAdapter
from bytetx.errors import InputError, OptionError
from bytetx.sequence_tree import rows_of

# A padded run is counted in batches of this size, sentence-transformers' default.
_PADDED_BATCH_SIZE = 32


Span = tuple[int, int]  # start and end


@dataclass(frozen=True, slots=True)
class Alignment:
    """Where each token of a text comes from; one entry per token in every list.

    offsets: (start, end) characters of the text.  word_ids: the word's index, None for special
    tokens.  special_tokens_mask: 1 where the tokenizer added the token.  sequence_ids: of a pair, 0
    for tokens of its first text, 1 for the second (which text then is), None for special tokens.
    spans: of characters that the caller named, where the task takes them.
    """

    text: str | None
    offsets: list[tuple[int, int]] | None
    word_ids: list[int | None] | None
    special_tokens_mask: list[int]
    sequence_ids: list[int | None] | None = None
    spans: Sequence[Span] = ()

    def at(self, is_kept: np.ndarray) -> "Alignment":
        """The same text with some of its tokens.  is_kept: bool, of each."""

        def some(column: "list[Any] | None") -> "list[Any] | None":
            return None if column is None else list(compress(column, is_kept))

        return replace(
            self,
            offsets=some(self.offsets),
            word_ids=some(self.word_ids),
            special_tokens_mask=some(self.special_tokens_mask) or [],
            sequence_ids=some(self.sequence_ids),
        )


# Stands in for the alignment of texts whose task needs none, beside others that do.
_NO_ALIGNMENT = Alignment(None, None, None, [])


class TextAdapter(SlottedAdapter, Protocol):
    """An adapter as the queue and the caches of prefixes know it."""

    def first_id(self, token_id: int) -> int:
        """A number for a text's first token that no other adapter has, nor any token."""
        ...


@dataclass(frozen=True, slots=True)
class Requests:
    """Texts that are ready to run, in columns, so that no operation loops over texts.

    indices: int64 [num_texts], in the caller's order.  seqlens: int32 [num_texts].
    token_ids: int32 [total_tokens], special tokens included.  is_truncated: bool [num_texts].
    token_type_ids: int32 [total_tokens], None means 0 everywhere.
    prompt_tokens: int32 [num_texts], tokens of the prompt at each start, None means 0 everywhere.
    alignments: one per text, only where the task asked for them.
    unseen_tokens: int32 [num_texts], tokens at each end that see the others and that no token sees,
    None means 0 everywhere.
    chunks: int32 [num_texts], the number of each row among the chunks of its text, whose index all
    of them have; None where each row is a whole text.
    adapters: object [num_texts], the TextAdapter of each text or None; None where no text has one.
    """

    indices: np.ndarray
    seqlens: np.ndarray
    token_ids: np.ndarray
    is_truncated: np.ndarray
    token_type_ids: np.ndarray | None = None
    prompt_tokens: np.ndarray | None = None
    alignments: Sequence[Alignment] | None = None
    unseen_tokens: np.ndarray | None = None
    chunks: np.ndarray | None = None
    adapters: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.seqlens)

    def with_adapters(self, given: TextAdapter | Sequence[TextAdapter | None]) -> "Requests":
        """The same texts with an adapter for all, or with that of each by its index."""
        adapters = np.empty(len(self), dtype=object)
        if not isinstance(given, list | tuple):
            adapters.fill(given)
        else:
            indices = self.indices.tolist()
            if indices and max(indices) >= len(given):
                raise OptionError(f"adapter has {len(given)} entries, and there are more texts")
            adapters[:] = [given[index] for index in indices]
            if all(adapter is None for adapter in adapters):
                return self
        return replace(self, adapters=adapters)

    @property
    def prefix_ids(self) -> np.ndarray:
        """int32 [total_tokens]: the token ids, by which texts have a prefix in common, where the
        first one of a text with an adapter says so: its keys and values are those of the adapter.
        """
        if self.adapters is None:
            return self.token_ids
        ids, starts = self.token_ids.copy(), self.cu_seqlens.tolist()
        for row in np.flatnonzero((self.adapters != None) & (self.seqlens > 0)).tolist():  # noqa: E711
            ids[starts[row]] = self.adapters[row].first_id(int(ids[starts[row]]))
        return ids

    @property
    def adapter_rows(self) -> AdapterRows | None:
        """The adapters of the texts' tokens; None where no text has one."""
        if self.adapters is None:
            return None
        return AdapterRows.of(self.adapters.tolist(), self.cu_seqlens)

    @property
    def total_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def cu_seqlens(self) -> np.ndarray:
        """int64 [num_texts + 1]: where each text's tokens start, and where the last ones end."""
        cu_seqlens = np.zeros(len(self.seqlens) + 1, dtype=np.int64)
        np.cumsum(self.seqlens, out=cu_seqlens[1:])
        return cu_seqlens

    def split(self) -> list[np.ndarray]:
        """The token ids of each text."""
        return np.split(self.token_ids, self.cu_seqlens[1:-1]) if len(self) else []

    def take(self, rows: np.ndarray) -> "Requests":
        """The texts at `rows`, in that order."""
        return self._at(rows, rows_of(self.cu_seqlens[rows], self.seqlens[rows]))

    def without(self, token_id: int) -> "Requests":
        """The same texts without one of their tokens, wherever it stands."""
        is_kept = self.token_ids != token_id
        if is_kept.all():
            return self
        num_before = np.append(0, np.cumsum(is_kept))
        seqlens = np.diff(num_before[self.cu_seqlens]).astype(np.int32)
        types, alignments = self.token_type_ids, self.alignments
        if alignments is not None:
            kept = np.split(is_kept, self.cu_seqlens[1:-1])
            alignments = [one.at(mask) for one, mask in zip(alignments, kept, strict=True)]
        return replace(
            self,
            seqlens=seqlens,
            token_ids=self.token_ids[is_kept],
            token_type_ids=None if types is None else types[is_kept],
            alignments=alignments,
        )

    def cut(self, bounds: Sequence[int]) -> "list[Requests]":
        """Consecutive parts, views of these columns: texts bounds[0] to bounds[1], and so on."""
        starts = self.cu_seqlens[bounds].tolist()
        return [
            self._at(slice(bounds[i], bounds[i + 1]), slice(starts[i], starts[i + 1]))
            for i in range(len(bounds) - 1)
        ]

    def _at(self, texts: slice | np.ndarray, tokens: slice | np.ndarray) -> "Requests":
        """Some texts, and the tokens that are theirs."""

        def part(column: np.ndarray | None, places: slice | np.ndarray) -> np.ndarray | None:
            return None if column is None else column[places]

        alignments = self.alignments
        if alignments is not None:
            if isinstance(texts, slice):
                alignments = alignments[texts]
            else:
                alignments = [alignments[row] for row in texts]
        return Requests(
            self.indices[texts],
            self.seqlens[texts],
            self.token_ids[tokens],
            self.is_truncated[texts],
            part(self.token_type_ids, tokens),
            part(self.prompt_tokens, texts),
            alignments,
            part(self.unseen_tokens, texts),
            part(self.chunks, texts),
            None if self.adapters is None else self.adapters[texts],
        )


def join_requests(pieces: Sequence[Requests]) -> Requests:
    """The texts of all pieces behind one another, numbered from 0."""
    num_texts = sum(map(len, pieces))
    indices = np.arange(num_texts, dtype=np.int64)
    if len(pieces) == 1:
        return replace(pieces[0], indices=indices)
    alignments = None
    if any(piece.alignments is not None for piece in pieces):
        alignments = [
            alignment
            for piece in pieces
            for alignment in (piece.alignments or [_NO_ALIGNMENT] * len(piece))
        ]
    return Requests(
        indices,
        np.concatenate([piece.seqlens for piece in pieces]),
        np.concatenate([piece.token_ids for piece in pieces]),
        np.concatenate([piece.is_truncated for piece in pieces]),
        _filled([(piece.token_type_ids, piece.total_tokens) for piece in pieces]),
        _filled([(piece.prompt_tokens, len(piece)) for piece in pieces]),
        alignments,
        _filled([(piece.unseen_tokens, len(piece)) for piece in pieces]),
        _filled([(piece.chunks, len(piece)) for piece in pieces]),
        _joined_adapters(pieces),
    )


def _joined_adapters(pieces: Sequence[Requests]) -> np.ndarray | None:
    if all(piece.adapters is None for piece in pieces):
        return None
    columns = [np.full(len(p), None) if p.adapters is None else p.adapters for p in pieces]
    return np.concatenate(columns)


def _filled(columns: Sequence[tuple[np.ndarray | None, int]]) -> np.ndarray | None:
    """int32 columns behind one another, with zeros for a missing one; None where all are."""
    if all(column is None for column, _ in columns):
        return None
    return np.concatenate(
        [np.zeros(size, dtype=np.int32) if column is None else column for column, size in columns]
    )


@dataclass(frozen=True, slots=True)
class Failure:
    """A text that cannot run, and why."""

    index: int
    error: InputError


@dataclass(frozen=True, slots=True)
class Window:
    """Consecutive texts of the caller, from number `start`: those that can run, and failures.

    requests: in the caller's order.  failures: in the caller's order.
    """

    start: int
    num_texts: int
    requests: Requests
    failures: Sequence[Failure] = ()


@dataclass(frozen=True, slots=True)
class RunStats:
    """Counts and times of a run. None is what a run does not measure or count.

    num_pad_tokens: pad tokens that a padded run in batches of 32, in arrival order, would have
    computed on top.  num_truncated: texts cut to the model's positions.  num_errors: texts that
    failed.  seconds: wall time, tokenisation included.  num_draft_tokens, num_accepted_tokens: of
    generation with num_speculative_tokens, drafted tokens and those of them that were right.
    Only an AsyncModel gives: tokenize_seconds, from the call to the token ids, waits for
    a thread included; queue_seconds, from there to the start of the forward pass, and
    compute_seconds, from its start to its results, each the mean over the texts.
    """

    num_texts: int = 0
    num_tokens: int = 0
    num_pad_tokens: int | None = None
    num_truncated: int = 0
    num_errors: int = 0
    seconds: float = 0.0
    tokenize_seconds: float | None = None
    queue_seconds: float | None = None
    compute_seconds: float | None = None
    num_draft_tokens: int | None = None
    num_accepted_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class StepStats:
    """One forward pass.

    time: of its end, as time.time().  total_tokens: of its texts.  computed_tokens: with each
    common prefix once, and none that was kept.  padded_tokens: tokens of the same batch padded to
    its longest text.  seconds: from its start to its results.
    """

    time: float
    num_sequences: int
    total_tokens: int
    computed_tokens: int
    padded_tokens: int
    seconds: float


@dataclass(slots=True)
class EngineCounts:
    """Counts of an engine's texts since it was made; see AsyncStats."""

    num_done: int = 0
    num_failed: int = 0
    num_dropped: int = 0
    num_refused: int = 0
    total_tokens: int = 0
    computed_tokens: int = 0
    padded_tokens: int = 0
    num_steps: int = 0


@dataclass(slots=True)
class RunCounter:
    """Counts a run as its texts finish; `stats()` may be asked at any time.

    The seconds of its phases are set from outside, see RunStats, and so is num_done: the texts that
    have a result or an error.
    """

    tokenize_seconds: float | None = None
    queue_seconds: float | None = None
    compute_seconds: float | None = None
    num_done: int = 0
    _num_texts: int = 0
    _num_tokens: int = 0
    _num_truncated: int = 0
    _num_errors: int = 0
    _failed: set[int] = field(default_factory=set)
    _num_pad_tokens: int = 0
    _open_batch: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    _start: float = field(default_factory=time.perf_counter)
    _seconds: float | None = None

    def add(self, window: Window) -> None:
        """Counts the texts of one window; windows come in the caller's order."""
        requests = window.requests
        self._num_texts += window.num_texts
        self._num_errors += len(window.failures)
        self._num_tokens += requests.total_tokens
        self._num_truncated += int(np.count_nonzero(requests.is_truncated))
        seqlens = requests.seqlens
        if len(self._open_batch):
            seqlens = np.concatenate([self._open_batch, seqlens])
        if len(seqlens) < _PADDED_BATCH_SIZE:
            self._open_batch = seqlens
            return
        num_full = len(seqlens) - len(seqlens) % _PADDED_BATCH_SIZE
        self._num_pad_tokens += _pad_tokens(seqlens[:num_full].reshape(-1, _PADDED_BATCH_SIZE))
        self._open_batch = seqlens[num_full:]

    def add_failures(self, indices: Iterable[int]) -> None:
        """Counts texts that were fine and have no result; one of several chunks may come twice."""
        self._failed.update(indices)

    def stop(self) -> None:
        """Ends the clock; a second call changes nothing."""
        if self._seconds is None:
            self._seconds = time.perf_counter() - self._start

    def seconds(self) -> float:
        """Until now, or until stop()."""
        return time.perf_counter() - self._start if self._seconds is None else self._seconds

    def stats(self) -> RunStats:
        return RunStats(
            num_texts=self._num_texts,
            num_tokens=self._num_tokens,
            num_pad_tokens=self._num_pad_tokens + _pad_tokens(self._open_batch[np.newaxis]),
            num_truncated=self._num_truncated,
            num_errors=self._num_errors + len(self._failed),
            seconds=self.seconds(),
            tokenize_seconds=self.tokenize_seconds,
            queue_seconds=self.queue_seconds,
            compute_seconds=self.compute_seconds,
        )


def _pad_tokens(batches: np.ndarray) -> int:
    """Pad tokens of lengths [num_batches, batch_size], each batch padded to its longest."""
    if batches.shape[1] < 2:  # a text alone is not padded
        return 0
    padded = batches.max(axis=1, initial=0).sum(dtype=np.int64) * batches.shape[1]
    return int(padded - batches.sum(dtype=np.int64))
