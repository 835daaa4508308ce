"""Common prefixes of a causal model's texts: which there are, and a step that has each once."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from bytetx.encode.request import Requests
from bytetx.sequence_tree import MAX_ANCESTORS, SequenceTree, rows_of

# Fewer tokens than this in common are computed for each text.
MIN_PREFIX_TOKENS = 32
ID_BYTES = 4  # a token id in a word
# The part of a text that counts as shared, at most: what a step's results take is bounded by it.
MOST_SHARED = 31 / 32
# A step is left as it is where sharing saves less than this part of its tokens.
_LEAST_SAVING = 16


@dataclass(frozen=True, slots=True)
class PrefixOrder:
    """Texts in an order in which those with a common prefix are neighbours.

    texts: int64 [num_texts].  num_shared: int32 [num_texts], tokens that each has in common with
    the one after it, at least MIN_PREFIX_TOKENS or 0.
    """

    texts: np.ndarray
    num_shared: np.ndarray


def prefix_order(requests: Requests) -> PrefixOrder | None:
    """Groups of texts with common prefixes, the largest first; None where there is none.

    A group's place is that of its longest text; the texts of no group are in between.
    """
    order, shared = _sorted(requests, words_of(requests))
    if not shared.any():
        return None
    starts = np.append(0, np.flatnonzero(shared[:-1] == 0) + 1)
    sizes = np.diff(np.append(starts, len(order)))
    longest = np.maximum.reduceat(requests.seqlens[order], starts)
    groups = np.argsort(-longest, kind="stable")
    rows = rows_of(starts[groups], sizes[groups])
    most = most_shared(requests.seqlens[order[rows]])
    return PrefixOrder(order[rows], np.minimum(shared[rows], most))


def most_shared(seqlens: np.ndarray) -> np.ndarray:
    """int32: tokens of texts that a step need not count where they are shared."""
    most: np.ndarray = np.minimum(np.ceil(seqlens * MOST_SHARED), seqlens - 1)
    return most.clip(0).astype(np.int32)


@dataclass(frozen=True, slots=True)
class SharedRows:
    """The tokens of texts with each common prefix once.

    tree: of the prefixes and of what is left of each text, and at the end, as keys alone, the
        prefixes that are computed already.
    kept: int64 [tree.num_rows], which of the texts' tokens those of the tree are.
    rows: int64 [total_tokens], the row of each text's tokens in the tree.
    prefix_lens: int64 [num_texts], tokens of each text in prefixes that the tree computes, and in
        those above them; 0 where there are none.
    """

    tree: SequenceTree
    kept: np.ndarray
    rows: np.ndarray
    prefix_lens: np.ndarray


@dataclass(frozen=True, slots=True)
class Roots:
    """Prefixes that are computed already.

    of_texts: int64 [num_texts], the one that each text begins with, -1 where there is none.
    lengths: tokens of each, a multiple of what share_prefixes is given, fewer than its texts have.
    """

    of_texts: np.ndarray
    lengths: list[int]


def share_prefixes(
    requests: Requests,
    *,
    multiple: int = 1,
    words: Sequence[bytes] | None = None,
    roots: Roots | None = None,
    least_saved: int = 1,
) -> SharedRows | None:
    """The texts' common prefixes as sequences of their own; None where they are too short.

    Each text keeps one token or more for itself.  multiple: of tokens, that a prefix must have.
    words: words_of(requests), where they are at hand.  roots: below which the others are.
    least_saved: tokens that have to be saved; 0: none, so that there is always a tree.
    """
    always = least_saved == 0
    if len(requests) < 2 and roots is None and not always:
        return None
    order, shared = _sorted(requests, words_of(requests) if words is None else words)
    if not shared.any() and roots is None and not always:
        return None
    if roots is None:
        roots = Roots(np.full(len(order), -1, dtype=np.int64), [])
    elif len(order) > 1:
        order = order[np.argsort(roots.of_texts[order], kind="stable")]
        shared = _in_common(requests, order)
    tree = _Tree(requests.seqlens[order], shared[:-1], multiple, roots, roots.of_texts[order])
    tree.divide()
    return tree.rows(requests, order, least_saved=least_saved)


class _Tree:
    """Prefixes of sorted texts, found from the longest common one of all down to pairs."""

    def __init__(
        self,
        seqlens: np.ndarray,
        shared: np.ndarray,
        multiple: int,
        roots: Roots,
        root_of_text: np.ndarray,
    ):
        """shared: tokens that each text has in common with the next.  root_of_text: of the sorted
        texts; those with the same one are together."""
        self._seqlens, self._multiple = seqlens, multiple
        # A text keeps its last token.
        most = np.minimum(seqlens[:-1], seqlens[1:]) - 1
        self._shared = np.minimum(shared, most)
        self._num_roots = len(roots.lengths)
        self._parent_of_text = root_of_text.astype(np.int64)
        self._start_of_text = np.append(roots.lengths, 0)[root_of_text].astype(np.int64)
        # Of each prefix: a text that has it, its first token and the one behind, its parent.
        self._prefixes = [(0, 0, length, -1) for length in roots.lengths]
        self._depths = [0] * self._num_roots

    def divide(self) -> None:
        """Finds all prefixes."""
        changes = np.flatnonzero(np.diff(self._parent_of_text)) + 1
        bounds = [0, *changes.tolist(), len(self._seqlens)]
        waiting = [
            (first, last, int(self._start_of_text[first]), int(self._parent_of_text[first]))
            for first, last in zip(bounds, bounds[1:], strict=False)
        ]
        while waiting:
            first, last, start, parent = waiting.pop()
            depth = 0 if parent < 0 else self._depths[parent] + 1
            if last - first < 2 or depth == MAX_ANCESTORS:
                continue
            inside = self._shared[first : last - 1]
            least = self._end_at_least(start + MIN_PREFIX_TOKENS)
            end = int(inside.min()) // self._multiple * self._multiple
            if end >= least:
                self._prefixes.append((first, start, end, parent))
                self._depths.append(depth)
                start, parent = end, len(self._depths) - 1
                self._parent_of_text[first:last] = parent
                self._start_of_text[first:last] = start
                least = self._end_at_least(start + MIN_PREFIX_TOKENS)
            cuts = np.flatnonzero(inside < least) + first + 1
            bounds = [first, *cuts.tolist(), last]
            waiting += [(a, b, start, parent) for a, b in zip(bounds, bounds[1:], strict=False)]

    def _end_at_least(self, tokens: int) -> int:
        return -(-tokens // self._multiple) * self._multiple

    def rows(self, requests: Requests, order: np.ndarray, *, least_saved: int) -> SharedRows | None:
        """The tree in the order of its levels, the sequences of one parent together."""
        num_prefixes, num_texts = len(self._prefixes), len(order)
        new = self._prefixes[self._num_roots :]
        saved = int(self._start_of_text.sum()) - sum(end - start for _, start, end, _ in new)
        is_worth_it = saved >= max(least_saved, requests.total_tokens / _LEAST_SAVING)
        if least_saved and not is_worth_it:
            return None
        found = np.array(self._prefixes, dtype=np.int64).reshape(-1, 4)
        texts = np.append(found[:, 0], np.arange(num_texts))
        starts = np.append(found[:, 1], self._start_of_text)
        ends = np.append(found[:, 2], self._seqlens)
        parents = np.append(found[:, 3], self._parent_of_text)
        depths = np.append(self._depths, np.zeros(num_texts, dtype=np.int64))
        depths[num_prefixes:] = np.where(
            self._parent_of_text < 0, 0, depths[self._parent_of_text] + 1
        )
        depths[: self._num_roots] = MAX_ANCESTORS + 1  # the last sequences are keys alone
        ranks = np.lexsort((np.arange(len(texts)), parents, depths))
        place = np.empty(len(texts), dtype=np.int64)
        place[ranks] = np.arange(len(texts))
        above = parents[ranks]
        lengths = (ends - starts)[ranks]
        computed = len(ranks) - self._num_roots
        tree = SequenceTree(
            np.where(above < 0, -1, place[above]).astype(np.int32),
            lengths.astype(np.int32),
            num_rows=int(lengths[:computed].sum()),
        )
        firsts = requests.cu_seqlens[:-1][order][texts] + starts
        kept = rows_of(firsts[ranks[:computed]], lengths[:computed])
        own = np.empty(num_texts, dtype=np.int64)  # the sequence that each text ends with
        own[order] = place[num_prefixes:]
        lens = np.empty(num_texts, dtype=np.int64)
        lens[order] = np.where(self._parent_of_text < self._num_roots, 0, self._start_of_text)
        return SharedRows(tree, kept, tree.rows_of(own), lens)


def word_of(token_ids: np.ndarray) -> bytes:
    """Token ids in ID_BYTES each, the highest first: bytes compare as ids do."""
    return token_ids.astype(">i4").tobytes()


def words_of(requests: Requests) -> list[bytes]:
    """The word of each text, of its prefix_ids."""
    text = word_of(requests.prefix_ids)
    bounds = (ID_BYTES * requests.cu_seqlens).tolist()
    return [text[start:stop] for start, stop in pairwise(bounds)]


def _sorted(requests: Requests, words: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """The texts in the order of their tokens, as words in a dictionary, and what neighbours share.

    Returns (texts, tokens in common with the next one), int64 and int32 [num_texts]; less than
    MIN_PREFIX_TOKENS in common are 0.
    """
    order = np.array(sorted(range(len(words)), key=words.__getitem__), dtype=np.int64)
    return order, _in_common(requests, order)


def _in_common(requests: Requests, order: np.ndarray) -> np.ndarray:
    """int32 [num_texts]: tokens that each text has in common with the next one in an order."""
    ids, bounds, texts = requests.prefix_ids, requests.cu_seqlens.tolist(), order.tolist()
    shared = np.zeros(len(texts), dtype=np.int32)
    heads = [ids[a : min(a + MIN_PREFIX_TOKENS, b)].tobytes() for a, b in pairwise(bounds)]
    for at, (a, b) in enumerate(pairwise(texts)):
        if heads[a] != heads[b] or len(heads[a]) < ids.itemsize * MIN_PREFIX_TOKENS:
            continue
        own, other = ids[bounds[a] : bounds[a + 1]], ids[bounds[b] : bounds[b + 1]]
        shared[at] = common_length(own, other)
    return shared


def common_tokens(word: bytes, other: bytes) -> int:
    """Tokens at the start of two words that are the same."""
    return common_length(np.frombuffer(word, np.int32), np.frombuffer(other, np.int32))


def common_length(a: np.ndarray, b: np.ndarray) -> int:
    """Tokens at the start of two texts that are the same."""
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    where = int(differs.argmax()) if length else 0
    return where if length and differs[where] else length
