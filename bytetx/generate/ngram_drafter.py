"""NgramDrafter: guesses the next tokens of a sequence from its own earlier text (prompt lookup)."""

from array import array
from collections.abc import Sequence
from itertools import islice

# Two tokens are followed by the same third one too seldom; of four, many repetitions begin late.
_MIN_NGRAM = 3
_MAX_NGRAM = 8  # earlier n-grams that agree in more tokens count as equal
_MAX_PLACES = 8  # that are compared, the latest first: a lookup takes a few microseconds
_FIRST_DRAFT = 2  # tokens
_MAX_PAUSE = 64  # tokens


class NgramDrafter:
    """Drafts of one sequence, whose tokens only grow.

    The draft is what followed the latest earlier n-gram that agrees with the last tokens in as many
    tokens as possible, at least _MIN_NGRAM. One near the end is followed by fewer tokens than a
    draft has; the draft then goes on with its own start, which is right for text that repeats
    itself.

    N-grams are found by their last _MIN_NGRAM tokens. The index takes a new token in constant time,
    so that a step costs the same after 100 000 tokens.

    A draft has at most one token more than three times as many as were right of the last one.
    After drafts of which none was right there are none for a while: 1, 2, 4, ... tokens, up to
    _MAX_PAUSE. A draft that was right in part makes the next pause the shortest again.
    """

    __slots__ = ("_last_ends", "_longest", "_num_misses", "_previous_ends", "_resumes_at")

    def __init__(self) -> None:
        # An n-gram's end is the number of tokens up to it; 0: there is none.
        self._last_ends: dict[tuple[int, ...], int] = {}
        # [i]: the previous end of the n-gram that ends at i + _MIN_NGRAM.
        self._previous_ends = array("i")
        self._num_misses = self._resumes_at = 0
        self._longest = _FIRST_DRAFT

    def draft(self, token_ids: Sequence[int], most: int) -> list[int]:
        """At most `most` tokens that may follow token_ids; none where nothing is known.

        token_ids: the sequence so far, which continues that of the last call.
        """
        most = min(most, self._longest)
        if len(token_ids) < self._resumes_at or most < 1:
            return []
        self._index(token_ids)
        end = self._find(token_ids)
        if not end:
            return []
        draft = list(token_ids[end : end + most])
        period = len(token_ids) - end
        while len(draft) < most:
            draft.append(draft[-period])
        return draft

    def count(self, num_accepted: int, num_tokens: int) -> None:
        """Take note of the last draft's accepted tokens and of the sequence's tokens now."""
        self._longest = 3 * num_accepted + 1
        if num_accepted:
            self._num_misses = 0
            return
        self._resumes_at = num_tokens + min(1 << self._num_misses, _MAX_PAUSE)
        self._num_misses += 1

    def _index(self, token_ids: Sequence[int]) -> None:
        """Adds the n-grams that end after those of the last call."""
        first = len(self._previous_ends)
        last_ends, append = self._last_ends, self._previous_ends.append
        tail = token_ids[first:]
        ngrams = zip(*(islice(tail, start, None) for start in range(_MIN_NGRAM)), strict=False)
        for end, ngram in enumerate(ngrams, start=first + _MIN_NGRAM):
            append(last_ends.get(ngram, 0))
            last_ends[ngram] = end

    def _find(self, token_ids: Sequence[int]) -> int:
        """The end of the best earlier n-gram; 0 where there is none."""
        num_tokens = len(token_ids)
        if num_tokens < _MIN_NGRAM:
            return 0
        previous_ends = self._previous_ends
        best, best_length, end = 0, 0, previous_ends[-1]
        for _ in range(_MAX_PLACES):
            if not end:
                break
            length = _MIN_NGRAM
            while length < min(end, _MAX_NGRAM) and (
                token_ids[end - length - 1] == token_ids[num_tokens - length - 1]
            ):
                length += 1
            if length > best_length:
                best, best_length = end, length
            if length == _MAX_NGRAM:
                break
            end = previous_ends[end - _MIN_NGRAM]
        return best


def num_accepted(draft: Sequence[int], tokens: Sequence[int]) -> int:
    """How many tokens of a draft are right: the start that equals what the model chose.

    tokens: len(draft) + 1 choices, each after the draft's tokens before it.
    """
    count = 0
    while count < len(draft) and draft[count] == tokens[count]:
        count += 1
    return count
