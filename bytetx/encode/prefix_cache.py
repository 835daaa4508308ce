"""Prefixes that texts of many steps have in common, computed once and kept: a bounded cache."""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Generic, TypeVar

import numpy as np

from bytetx.encode.prefixes import (
    ID_BYTES,
    MIN_PREFIX_TOKENS,
    Roots,
    SharedRows,
    common_tokens,
    words_of,
)
from bytetx.encode.request import Requests
from bytetx.packed import ComputedTokens
from bytetx.runtime.forking import OwnProcess

# Token ids of earlier texts that are remembered, in bytes, and of one text, in tokens.
_SEEN_BYTES, _MOST_SEEN_TOKENS = 4 << 20, 4096
# Prefixes of a step at most: those that it takes from the cache, and those that it adds.
_MOST_ROOTS, _MOST_KEPT = 64, 8

T = TypeVar("T")


class _WordTable(Generic[T]):
    """Token ids as words, of which none begins with another; found by what they begin with.

    num_bytes: of the words, without their values.
    """

    def __init__(self) -> None:
        self._sorted: list[bytes] = []
        self._by_use: OrderedDict[bytes, T] = OrderedDict()  # the one not used for longest first
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._sorted)

    def longest(self, word: bytes) -> tuple[bytes, int]:
        """The word that has the most tokens at its start in common with one, and how many."""
        at, found = bisect_left(self._sorted, word), (b"", 0)
        for other in self._sorted[max(at - 1, 0) : at + 1]:
            common = common_tokens(word, other)
            if common > found[1]:
                found = other, common
        return found

    def use(self, word: bytes) -> T:
        """Returns the value of a word that is here."""
        self._by_use.move_to_end(word)
        return self._by_use[word]

    def covers(self, word: bytes) -> bool:
        """Whether a word begins with this one; that is used, then."""
        at = bisect_left(self._sorted, word)
        if at == len(self._sorted) or not self._sorted[at].startswith(word):
            return False
        self._by_use.move_to_end(self._sorted[at])
        return True

    def put(self, word: bytes, value: T) -> list[T]:
        """Adds a word that none here covers. Returns the values of words that it covers."""
        covered, at = [], bisect_left(self._sorted, word)
        while at > 0 and word.startswith(self._sorted[at - 1]):
            at -= 1
            covered.append(self._remove(self._sorted[at]))
        insort(self._sorted, word)
        self._by_use[word] = value
        self.num_bytes += len(word)
        return covered

    def pop(self) -> T:
        """Removes the word that was not used for longest."""
        return self._remove(next(iter(self._by_use)))

    def _remove(self, word: bytes) -> T:
        del self._sorted[bisect_left(self._sorted, word)]
        self.num_bytes -= len(word)
        return self._by_use.pop(word)


@dataclass(frozen=True, slots=True, eq=False)
class CacheUse:
    """The part that a step takes from the cache, and the part that it should add.

    words: the token ids of each text.  roots, computed: prefixes from the cache; None and none
    where there are none.  kept: (text, tokens at its start) of each prefix to be added.
    """

    words: Sequence[bytes]
    roots: Roots | None
    computed: tuple[ComputedTokens, ...]
    kept: Sequence[tuple[int, int]]

    @property
    def saved_tokens(self) -> int:
        """Tokens that the step need not compute."""
        return 0 if self.roots is None else sum(self.roots.lengths)


class PrefixCache:
    """Keeps the keys, values and last hidden states of prefixes, the least recently used out first.

    A prefix is kept where a text begins as one of an earlier step did.  Later texts continue it or
    its first tokens.  Threads may share a cache; a forked child's is empty.
    """

    def __init__(
        self, max_bytes: int, *, bytes_per_token: int, multiple: int = 1, least_saved: int = 0
    ):
        """multiple: of tokens, that a prefix must have.  least_saved: tokens below which a step
        takes nothing from the cache, and which a prefix has that is kept."""
        self.max_bytes, self._multiple, self._least_saved = max_bytes, multiple, least_saved
        self._most_tokens = max_bytes // bytes_per_token
        self._reset()

    def _reset(self) -> None:
        self._process, self._lock = OwnProcess(), Lock()
        self._entries: _WordTable[ComputedTokens] = _WordTable()
        self._seen: _WordTable[None] = _WordTable()
        self.num_bytes = self.saved_tokens = 0

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, requests: Requests) -> CacheUse | None:
        """The prefixes of a step's texts that are here or should be; None for short texts alone."""
        if requests.seqlens.max(initial=0) <= MIN_PREFIX_TOKENS:
            return None
        if not self._process.is_this:  # another thread of the parent may have held the lock
            self._reset()
        words = words_of(requests)
        roots: dict[tuple[bytes, int], list[int]] = {}
        kept: dict[bytes, int] = {}
        with self._lock:
            for index, word in enumerate(words):
                most = len(word) // ID_BYTES - 1  # a text's last token is always computed
                if most < MIN_PREFIX_TOKENS:
                    continue
                entry, common = self._entries.longest(word)
                has = self._rounded(min(common, most))
                if has:
                    roots.setdefault((entry, has), []).append(index)
                common = min(self._seen.longest(word)[1], most, self._most_tokens)
                wanted = self._rounded(common)
                if wanted >= max(has + MIN_PREFIX_TOKENS, self._least_saved):
                    kept.setdefault(word[: ID_BYTES * wanted], index)
            taken = self._worthwhile(roots)
            computed = tuple(self._entries.use(entry).first(has) for (entry, has), _ in taken)
        if not taken:
            return CacheUse(words, None, (), self._chosen(kept))
        of_texts = np.full(len(words), -1, dtype=np.int64)
        for number, (_, texts) in enumerate(taken):
            of_texts[texts] = number
        lengths = [has for (_, has), _ in taken]
        return CacheUse(words, Roots(of_texts, lengths), computed, self._chosen(kept))

    def finish(
        self,
        use: CacheUse,
        found: SharedRows | None,
        kept: Sequence[ComputedTokens],
        are_finite: Sequence[bool],
    ) -> None:
        """Adds what a step computed, once that is known to be done.

        kept, are_finite: of use.kept, in the same order; none where no pass kept them.
        """
        seen = set()
        for index, word in enumerate(use.words):
            # Texts that continue a prefix of this step are remembered by that.
            tokens = 0 if found is None else int(found.prefix_lens[index])
            tokens = min(tokens or len(word) // ID_BYTES, _MOST_SEEN_TOKENS)
            if tokens > MIN_PREFIX_TOKENS:
                seen.add(word[: ID_BYTES * tokens])
        with self._lock:
            self.saved_tokens += 0 if found is None else use.saved_tokens
            for (index, tokens), computed, is_finite in zip(
                use.kept, kept, are_finite, strict=False
            ):
                if is_finite:
                    self._add(use.words[index][: ID_BYTES * tokens], computed)
            for word in seen:
                if not self._seen.covers(word):
                    self._seen.put(word, None)
            while self._seen.num_bytes > _SEEN_BYTES:
                self._seen.pop()

    def clear(self) -> bool:
        """Drops all prefixes, as where memory is short, and forgets the texts, so that the next
        pass keeps none; False where there was nothing."""
        with self._lock:
            had_some = len(self._entries) + len(self._seen) > 0
            self._entries, self._seen, self.num_bytes = _WordTable(), _WordTable(), 0
        return had_some

    def _add(self, word: bytes, computed: ComputedTokens) -> None:
        if computed.num_bytes > self.max_bytes or self._entries.covers(word):
            return
        self.num_bytes -= sum(old.num_bytes for old in self._entries.put(word, computed))
        self.num_bytes += computed.num_bytes
        while self.num_bytes > self.max_bytes:
            self.num_bytes -= self._entries.pop().num_bytes

    def _rounded(self, tokens: int) -> int:
        """The longest prefix of at most so many tokens; 0 where that is too short."""
        tokens = tokens // self._multiple * self._multiple
        return tokens if tokens >= MIN_PREFIX_TOKENS else 0

    def _worthwhile(
        self, roots: dict[tuple[bytes, int], list[int]]
    ) -> list[tuple[tuple[bytes, int], list[int]]]:
        """The prefixes that save the most; none where all together save too little."""
        taken = sorted(roots.items(), key=lambda root: -root[0][1] * len(root[1]))[:_MOST_ROOTS]
        return taken if sum(has for (_, has), _ in taken) >= self._least_saved else []

    def _chosen(self, kept: dict[bytes, int]) -> list[tuple[int, int]]:
        """The longest of the prefixes to be added; those that others begin with come with them."""
        chosen, left = list[bytes](), self._most_tokens
        for word in sorted(kept, key=len, reverse=True):
            tokens = len(word) // ID_BYTES
            if len(chosen) == _MOST_KEPT:
                break
            if tokens <= left and not any(longer.startswith(word) for longer in chosen):
                chosen.append(word)
                left -= tokens
        return [(kept[word], len(word) // ID_BYTES) for word in chosen]
