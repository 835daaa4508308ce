"""Questions with their contexts, as rows of (question, chunk of the context)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import tokenizers

from bytetx.checkpoint.tokenizer import Text, Tokenizer, flatten_int_lists
from bytetx.encode.request import Alignment, Requests
from bytetx.errors import InputError, TooLongError
from bytetx.requests.chunks import check_chunks, chunk_starts
from bytetx.requests.inputs import InputReader, no_requests
from bytetx.requests.token_ids import Errors


@dataclass(slots=True)
class QuestionReader(InputReader):
    """Turns (question, context) pairs into requests.

    A context that is too long becomes several rows, each with the whole question.
    chunk_tokens: of a row, special tokens included.
    """

    chunk_tokens: int = 0

    def read_texts(self, texts: Mapping[int, Text], errors: Errors) -> Requests:
        for index, text in texts.items():
            if isinstance(text, str):
                errors[index] = _no_pair(index)
        given = {index: text for index, text in texts.items() if index not in errors}
        given = dict(self.checked_texts(given, errors))
        if not given or self.tokenizer is None:
            return no_requests()
        tokenizer = self.tokenizer.untruncated()
        encodings = tokenizer.encode(list(given.values()), with_offsets=True)
        rows: list[_QuestionRow] = []
        for (index, text), encoding in zip(given.items(), encodings, strict=True):
            rows += self._rows(index, text[1], encoding, errors)
        requests = _as_requests(rows, has_types=self._has_types(tokenizer))
        self.check_range(requests, errors)
        return requests

    def _has_types(self, tokenizer: Tokenizer) -> bool:
        return self.spec.num_token_types > 1 and tokenizer.has_token_types

    def _rows(
        self, index: int, context: str, encoding: tokenizers.Encoding, errors: Errors
    ) -> "list[_QuestionRow]":
        sequence_ids = encoding.sequence_ids
        places = [place for place, sequence in enumerate(sequence_ids) if sequence == 1]
        first = places[0] if places else len(sequence_ids)
        last = places[-1] + 1 if places else first
        room = self.chunk_tokens - (len(sequence_ids) - (last - first))
        if last - first > room and room <= self.stride:
            errors[index] = TooLongError(
                f"texts[{index}] has a question that leaves {max(room, 0)} of {self.chunk_tokens} "
                f"tokens for the context; it needs more than the stride of {self.stride}: shorten "
                "the question, or give a smaller stride"
            )
            return []
        starts = chunk_starts(last - first, room, self.stride)
        error = check_chunks(
            index,
            starts,
            num_tokens=len(sequence_ids),
            room=self.chunk_tokens,
            most=self.max_chunk_tokens,
        )
        if error is not None:
            errors[index] = error
            return []
        all_ids, types = encoding.ids, encoding.type_ids
        words, offsets, special = encoding.word_ids, encoding.offsets, encoding.special_tokens_mask
        before, after = list(range(first)), list(range(last, len(all_ids)))
        rows: list[_QuestionRow] = []
        for start in starts:
            chunk = range(first + start, min(first + start + room, last))
            kept = [*before, *chunk, *after]
            alignment = Alignment(
                context,
                [offsets[i] for i in kept],
                [words[i] for i in kept],
                [special[i] for i in kept],
                [sequence_ids[i] for i in kept],
            )
            ids = [all_ids[i] for i in kept]
            rows.append(_QuestionRow(index, len(rows), ids, [types[i] for i in kept], alignment))
        return rows

    def read_ids(self, items: Mapping[int, object], errors: Errors) -> Requests:
        errors.update((index, _no_pair(index)) for index in items)
        return no_requests()


@dataclass(frozen=True, slots=True)
class _QuestionRow:
    index: int
    number: int
    token_ids: list[int]
    type_ids: list[int]
    alignment: Alignment


def _as_requests(rows: list[_QuestionRow], *, has_types: bool) -> Requests:
    if not rows:
        return no_requests()
    seqlens = np.array([len(row.token_ids) for row in rows], dtype=np.int32)
    token_ids = flatten_int_lists([row.token_ids for row in rows], total=int(seqlens.sum()))
    assert token_ids is not None  # the tokenizer checked them when it was loaded
    types = None
    if has_types:
        types = np.fromiter(chain.from_iterable(row.type_ids for row in rows), dtype=np.int32)
    requests = Requests(
        np.array([row.index for row in rows], dtype=np.int64),
        seqlens,
        token_ids,
        np.zeros(len(rows), dtype=bool),
        types,
        alignments=[row.alignment for row in rows],
    )
    return replace(requests, chunks=np.array([row.number for row in rows], dtype=np.int32))


def _no_pair(index: int) -> InputError:
    return InputError(f"texts[{index}] must be a (question, context) pair of str")
