"""WordPieces: BERT's token ids of single texts from the native core, without the library's own
offsets, strings and marks of each token."""

import os
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import tokenizers
from tokenizers import models

from bytetx.checkpoint.text_prefix import members, state_of
from bytetx.ops import host

_WORD, _ALONE, _SPACE = range(3)  # CharacterKind of csrc/cpu/wordpiece.h
_TRUNCATED = 1  # TextState there: above it are those of texts that were not read

# These treat each character on its own, but for the order of combining marks.
_NORMALIZERS = {"BertNormalizer", "Lowercase"}
# Of texts that the library reads first: to make the native reader takes 40 ms, which a program
# that embeds a text or two would only wait for.
_LEAST_CHARACTERS = 4096
_MAX_CHARACTERS = 1 << 16  # that are learnt; texts with others are left to the library
_MAX_THREADS = 8
_CHARACTERS_PER_THREAD = 1 << 15  # about 100 us of work, far above what it takes to start one

_SAMPLE = "The Quick-brown fox's 2.5 kg, (jumped) over\t13 lazy dogs? unbelievably! $x_y <a@b.c> #1"


@dataclass(frozen=True, slots=True)
class WordPieceIds:
    """Token ids of some texts, special tokens included.

    token_ids: int32 [total_tokens].  seqlens: int32 [num_texts].  is_truncated: bool [num_texts].
    unread: places of texts that are left to the tokenizer's own library and have no tokens here.
    """

    token_ids: np.ndarray
    seqlens: np.ndarray
    is_truncated: np.ndarray
    unread: list[int]


class WordPieces:
    """The native WordPiece of one tokenizer, made once enough text has been read.

    Which characters are letters, what becomes of capitals and accents, and the tokens around a text
    are asked of the tokenizer itself, character by character; so both give the same ids.  The
    backend is not changed meanwhile.
    """

    def __init__(self, backend: tokenizers.Tokenizer):
        self._backend = backend
        self._num_read = 0  # characters of texts that were left to the library
        self._num_learnt = 0  # characters that texts had

    def read(self, texts: Sequence[str], *, max_tokens: int) -> WordPieceIds | None:
        """The ids of texts, each cut to max_tokens; None where the library is to read them all.

        No more of a text is read than max_tokens need.
        """
        if self._num_read < _LEAST_CHARACTERS:
            self._num_read += sum(map(len, texts))
            if self._num_read < _LEAST_CHARACTERS:
                return None
        native_reader, frame_tokens = self._native
        if native_reader is None or max_tokens <= frame_tokens:
            return None
        ids, lengths, states = native_reader.encode(
            texts if isinstance(texts, list) else list(texts),
            max_tokens,
            _num_threads(texts),
            self._learn,
        )
        is_truncated, unread = np.zeros(len(texts), dtype=bool), list[int]()
        if states is not None:
            state = np.frombuffer(states, dtype=np.uint8)
            is_truncated, unread = state == _TRUNCATED, np.flatnonzero(state > _TRUNCATED).tolist()
        token_ids = np.frombuffer(ids, dtype=np.int32)
        return WordPieceIds(token_ids, np.frombuffer(lengths, dtype=np.int32), is_truncated, unread)

    @cached_property
    def _native(self) -> tuple[Any, int]:
        """The native class of this tokenizer, or None; and the tokens around each text."""
        make = host.word_piece()
        if make is None or not _is_supported(self._backend):
            return None, 0
        model, vocabulary = self._backend.model, self._backend.get_vocab(with_added_tokens=False)
        unk_token_id = vocabulary.get(model.unk_token)
        if unk_token_id is None or not _fits(vocabulary):
            return None, 0
        if (frame := _frame(self._backend)) is None:
            return None, 0
        reader = make(
            vocabulary,
            unk_token_id,
            model.continuing_subword_prefix,
            model.max_input_chars_per_word,
            *frame,
            [token.content for token in self._backend.get_added_tokens_decoder().values()],
        )
        reader.learn([(code_point, self._normalized(code_point)) for code_point in range(128)])
        num_framing = len(frame[0]) + len(frame[1])
        expected = self._backend.encode(_SAMPLE, add_special_tokens=False).ids
        found, _, _ = reader.encode([_SAMPLE], len(expected) + num_framing, 1, lambda _: None)
        ids = np.frombuffer(found, dtype=np.int32).tolist()
        if ids != [*frame[0], *expected, *frame[1]]:
            return None, 0
        return reader, num_framing

    @cached_property
    def _decomposes(self) -> bool:
        """Whether the normalizer brings texts into Unicode's form D, to strip accents."""
        parts = members(state_of(self._backend.normalizer), "normalizers")
        bert = [part for part in parts if part["type"] == "BertNormalizer"]
        return any(
            part["lowercase"] if part["strip_accents"] is None else part["strip_accents"]
            for part in bert
        )

    def _learn(self, code_points: Sequence[int]) -> None:
        room = _MAX_CHARACTERS - self._num_learnt
        self._num_learnt += len(code_points)
        self._native[0].learn(
            [
                (code_point, self._normalized(code_point) if place < room else None)
                for place, code_point in enumerate(code_points)
            ]
        )

    def _normalized(self, code_point: int) -> list[tuple[int, bytes]] | None:
        """Return what the tokenizer makes of a character: (kind, UTF-8) of each resulting one.

        None where it might be something else beside other characters, or is of no known kind.
        """
        character = chr(code_point)
        if unicodedata.category(character) in ("Cn", "Cs"):  # unassigned; half a surrogate pair
            return None
        normalizer, pre_tokenizer = self._backend.normalizer, self._backend.pre_tokenizer
        assert pre_tokenizer is not None  # every supported tokenizer has one
        text = character if normalizer is None else normalizer.normalize_str(character)
        found = []
        for each in text:
            if self._decomposes and unicodedata.combining(each):  # such neighbours are sorted then
                return None
            words = [word for word, _ in pre_tokenizer.pre_tokenize_str(f"a{each}a")]
            if words not in ([f"a{each}a"], ["a", each, "a"], ["a", "a"]):
                return None
            kind = (_WORD, _SPACE, _ALONE)[len(words) - 1]
            found.append((kind, b"" if kind == _SPACE else each.encode()))
        return found


def _is_supported(backend: tokenizers.Tokenizer) -> bool:
    """Whether the tokenizer is BERT's: characters on their own, words, WordPiece."""
    model, truncation = backend.model, backend.truncation
    normalizers = members(state_of(backend.normalizer), "normalizers")
    pre_tokenizers = members(state_of(backend.pre_tokenizer), "pretokenizers")
    return (
        isinstance(model, models.WordPiece)
        and not backend.encode_special_tokens  # else texts that name them have other ids
        and all(part["type"] in _NORMALIZERS for part in normalizers)
        and [part["type"] for part in pre_tokenizers] == ["BertPreTokenizer"]
        and (truncation is None or truncation["direction"] == "right")
        # These are looked for in what the normalizer made of a text.
        and not any(token.normalized for token in backend.get_added_tokens_decoder().values())
    )


def _fits(vocabulary: Mapping[str, int]) -> bool:
    """Whether ids are int32, and the trie's nodes can be numbered in 24 bits."""
    num_nodes = 4 * sum(map(len, vocabulary))  # at most: one a byte of UTF-8
    if num_nodes >= 1 << 24:
        num_nodes = sum(len(token.encode()) for token in vocabulary)
    return num_nodes < 1 << 24 and max(vocabulary.values(), default=0) < 1 << 31


def _frame(backend: tokenizers.Tokenizer) -> tuple[list[int], list[int]] | None:
    """The ids before and after those of a single text; None where there is no such frame."""
    for word in ("a", "e", "1"):
        plain = backend.encode(word, add_special_tokens=False).ids
        whole = backend.encode(word).ids
        num_added = backend.num_special_tokens_to_add(False)
        starts = [i for i in range(len(whole)) if whole[i : i + len(plain)] == plain]
        if len(whole) == len(plain) + num_added and len(starts) == 1:
            return whole[: starts[0]], whole[starts[0] + len(plain) :]
    return None


def _num_threads(texts: Sequence[str]) -> int:
    num_characters = sum(map(len, texts))
    if num_characters < 2 * _CHARACTERS_PER_THREAD:
        return 1
    return min(num_characters // _CHARACTERS_PER_THREAD, _num_cores(), _MAX_THREADS)


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
