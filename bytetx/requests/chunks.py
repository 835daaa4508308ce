"""Chunks of a long text: where they begin, what they cost together, and their tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import tokenizers

from bytetx.checkpoint.tokenizer import flatten_int_lists
from bytetx.encode.request import Alignment
from bytetx.errors import TooLongError

# Beyond so many tokens the library's lists are not asked for as wholes, which no other thread
# could interrupt: a million offsets take 0.2 s.
_MAX_LIST_TOKENS = 1 << 15


@dataclass(frozen=True, slots=True)
class Chunk:
    """One row of a text.  token_ids: int32.  alignment: where it was asked for."""

    token_ids: np.ndarray
    alignment: Alignment | None


def chunk_starts(num_tokens: int, room: int, stride: int) -> range:
    """Where the chunks of so many tokens begin; one chunk where all of them have room."""
    if num_tokens <= room:
        return range(1)
    return range(0, num_tokens - stride, room - stride)


def check_chunks(
    index: int, starts: range, *, num_tokens: int, room: int, most: int | None
) -> TooLongError | None:
    """Why a text's chunks are too many: more tokens in all than `most`, the queue's."""
    total = len(starts) * min(room, num_tokens)
    if most is None or len(starts) < 2 or total <= most:
        return None
    return TooLongError(
        f"texts[{index}] makes {len(starts)} chunks of {room} tokens with this stride, {total} "
        f"tokens in all, and the queue takes {most} (max_queued_tokens); give a smaller stride, or "
        "shorten it"
    )


def cut_encoding(
    encoding: tokenizers.Encoding,
    *,
    text: str | None,
    index: int,
    max_tokens: int,
    stride: int,
    most: int | None,
) -> Sequence[Chunk]:
    """The chunks of an encoding that was not cut, each in the special tokens that frame it.

    text: for alignments; None for none.  Raises TooLongError, as check_chunks says.
    """
    special = encoding.special_tokens_mask
    head = next((place for place, mark in enumerate(special) if not mark), len(special))
    tail = next((place for place, mark in enumerate(reversed(special)) if not mark), 0)
    num_tokens, room = len(special) - head - tail, max_tokens - head - tail
    starts = chunk_starts(num_tokens, room, stride)
    error = check_chunks(index, starts, num_tokens=num_tokens, room=room, most=most)
    if error is not None:
        raise error
    ids = flatten_int_lists([encoding.ids], total=len(special))
    assert ids is not None  # the tokenizer checked its ids when it was loaded
    end = head + num_tokens
    bounds = [(head + start, min(head + start + room, end)) for start in starts]
    rows = [np.concatenate([ids[:head], ids[a:b], ids[end:]]) for a, b in bounds]
    if text is None:
        return [Chunk(row, None) for row in rows]
    offsets, words = offsets_of(encoding), _word_ids(encoding)
    return [
        Chunk(
            row,
            Alignment(
                text,
                [*offsets[:head], *offsets[a:b], *offsets[end:]],
                [*words[:head], *words[a:b], *words[end:]],
                [*special[:head], *special[a:b], *special[end:]],
            ),
        )
        for row, (a, b) in zip(rows, bounds, strict=True)
    ]


def offsets_of(encoding: tokenizers.Encoding) -> list[tuple[int, int]]:
    if len(encoding) <= _MAX_LIST_TOKENS:
        return list(encoding.offsets)
    return [encoding.token_to_chars(place) or (0, 0) for place in range(len(encoding))]


def _word_ids(encoding: tokenizers.Encoding) -> list[int | None]:
    if len(encoding) <= _MAX_LIST_TOKENS:
        return list(encoding.word_ids)
    return [encoding.token_to_word(place) for place in range(len(encoding))]
