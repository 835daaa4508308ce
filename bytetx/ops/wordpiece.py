"""WordPiece in the native core: a list of str to token ids behind one another."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from bytetx.ops import native


class TextStatus(IntEnum):
    """What became of a text; only the first two have tokens. TextStatus in csrc/cpu/wordpiece.h."""

    WHOLE = 0
    CUT = 1  # to max_tokens
    FOREIGN = 2  # it needs the reference tokenizer
    UNKNOWN = 3  # it has a character that is to be learnt first


class CharKind(IntEnum):
    """What a character does to a word. CharKind in csrc/cpu/wordpiece.h."""

    LETTER = 0  # is part of it
    BORDER = 1  # ends it
    MARK = 2  # ends it and is a word of its own
    FOREIGN = 3  # only the reference tokenizer knows


# A character's parts, in order; none at all where it is dropped.
CharParts = Sequence[tuple[CharKind, str]]


@dataclass(frozen=True, slots=True)
class EncodedTexts:
    """token_ids: int32 [total_tokens].  seqlens: int32 [num_texts].  status: int8 [num_texts].

    unknown_chars: characters to learn, after which texts of status UNKNOWN can be encoded.
    """

    token_ids: np.ndarray
    seqlens: np.ndarray
    status: np.ndarray
    unknown_chars: frozenset[str]


def has_wordpiece() -> bool:
    """Whether the native core is there."""
    return native.wordpiece_class() is not None


class WordPiece:
    """A vocabulary and what is known of characters. Safe to use from several threads.

    vocab: ids by token, the continuing ones with their prefix.  max_word_chars: a longer word is
    one unknown token.  head, tail: special tokens of every text.  added_tokens: a text that spells
    one of them is FOREIGN.
    """

    def __init__(
        self,
        vocab: Mapping[str, int],
        *,
        continuing_prefix: str,
        unk_id: int,
        max_word_chars: int,
        head: Sequence[int],
        tail: Sequence[int],
        added_tokens: Sequence[str],
    ):
        self._num_special = len(head) + len(tail)
        self._native = native.wordpiece_class()(
            list(vocab.items()),
            continuing_prefix,
            unk_id,
            max_word_chars,
            list(head),
            list(tail),
            list(added_tokens),
        )

    def learn(self, char: str, parts: CharParts) -> None:
        """Says what a character becomes."""
        self._native.learn(ord(char), [(int(kind), ord(part)) for kind, part in parts])

    def encode(self, texts: list[str], *, max_tokens: int, num_threads: int) -> EncodedTexts:
        """Each text's ids, cut to max_tokens; Python's lock is free meanwhile."""
        chars = np.fromiter(map(len, texts), dtype=np.int64, count=len(texts))
        room = np.minimum(chars + self._num_special, max_tokens)  # a token has a character
        token_ids = np.empty(int(room.sum()), dtype=np.int32)
        seqlens = np.empty(len(texts), dtype=np.int32)
        status = np.empty(len(texts), dtype=np.int8)
        total_tokens, unknown = self._native.encode(
            texts,
            max_tokens,
            token_ids.ctypes.data,
            seqlens.ctypes.data,
            status.ctypes.data,
            num_threads,
        )
        unknown_chars = frozenset(map(chr, unknown))
        return EncodedTexts(token_ids[:total_tokens], seqlens, status, unknown_chars)
