"""Texts by the token ids that they begin with: those that begin alike are found together."""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, TypeVar

import numpy as np

from bytetx.encode.prefixes import MIN_PREFIX_TOKENS, common_tokens, word_of

T = TypeVar("T")

Place = tuple[bytes, int]  # the head of a text, and the number of its entry


@dataclass(slots=True)
class _Group(Generic[T]):
    """Values of texts with the same head, by the numbers of their entries.

    unsorted: token ids of the texts that nobody looked among yet.  words: of the others, sorted.
    """

    values: dict[int, T] = field(default_factory=dict)
    unsorted: dict[int, np.ndarray] = field(default_factory=dict)
    words: list[tuple[bytes, int]] = field(default_factory=list)
    word_of_number: dict[int, bytes] = field(default_factory=dict)

    def remove(self, number: int) -> None:
        del self.values[number]
        if self.unsorted.pop(number, None) is None:
            entry = (self.word_of_number.pop(number), number)
            del self.words[bisect_left(self.words, entry)]

    def near(self, word: bytes) -> Iterator[tuple[int, T]]:
        """As PrefixIndex.near."""
        for number, ids in self.unsorted.items():
            self.word_of_number[number] = own = word_of(ids)
            self.words.insert(bisect_left(self.words, (own, number)), (own, number))
        self.unsorted.clear()
        after = bisect_left(self.words, (word,))
        before = after - 1
        most_before, most_after = self._in_common(before, word), self._in_common(after, word)
        while most_before or most_after:
            if most_before >= most_after:
                yield most_before, self.values[self.words[before][1]]
                before -= 1
                most_before = self._in_common(before, word)
            else:
                yield most_after, self.values[self.words[after][1]]
                after += 1
                most_after = self._in_common(after, word)

    def _in_common(self, at: int, word: bytes) -> int:
        """Tokens that the text at a position has in common; 0 where there is none."""
        return common_tokens(self.words[at][0], word) if 0 <= at < len(self.words) else 0


class PrefixIndex(Generic[T]):
    """Values by texts of more than MIN_PREFIX_TOKENS, whose heads are so many tokens.

    What a text costs that no other one begins like is its head.
    """

    def __init__(self) -> None:
        self._groups: dict[bytes, _Group[T]] = {}
        self._numbers = count()

    def __bool__(self) -> bool:
        return bool(self._groups)

    def has(self, ids: np.ndarray) -> bool:
        """Whether a text here has the head of this one."""
        return _head(ids) in self._groups

    def put(self, ids: np.ndarray, value: T) -> Place:
        """Adds a value. Returns its place, by which it can be removed.

        ids: int32 [num_tokens], which are not copied.
        """
        head, number = _head(ids), next(self._numbers)
        group = self._groups.get(head)
        if group is None:
            group = self._groups[head] = _Group()
        group.values[number], group.unsorted[number] = value, ids
        return head, number

    def remove(self, place: Place) -> None:
        """Removes a value that is here."""
        head, number = place
        group = self._groups[head]
        group.remove(number)
        if not group.values:
            del self._groups[head]

    def near(self, ids: np.ndarray) -> Iterator[tuple[int, T]]:
        """(tokens at its start that a text here has in common with this one, its value), the most
        first, of all with the same head. Nothing may be added or removed meanwhile."""
        group = self._groups.get(_head(ids))
        return iter(()) if group is None else group.near(word_of(ids))


def _head(ids: np.ndarray) -> bytes:
    return ids[:MIN_PREFIX_TOKENS].tobytes()
