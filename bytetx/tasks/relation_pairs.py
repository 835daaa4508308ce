"""Pairs of spans that a relation holds between, each said once."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from bytetx.tasks.overlaps import Found

# (first character, the one behind the last)
Place = tuple[int, int]


@dataclass(frozen=True, slots=True)
class RelationPair:
    """head, tail: spans of words.  score: from 0 to 1."""

    head: Found
    tail: Found
    score: float


def distinct_pairs(
    pairs: Sequence[RelationPair], text: str, words: Sequence[Sequence[int]]
) -> list[RelationPair]:
    """Pairs in the order of the text, by their heads and then their tails.

    A head or a tail inside a longer one is that one. Of pairs with the same texts, the one whose
    ends are nearest stays; pairs with some words of another's head or tail, and the same other end,
    do not. words: characters of each word.
    """

    def place(span: Found) -> Place:
        return words[span[0]][0], words[span[1]][1]

    if len(pairs) > 1:
        heads = _longest([pair.head for pair in pairs], place)
        tails = _longest([pair.tail for pair in pairs], place)
        pairs = [
            replace(pair, head=heads[place(pair.head)], tail=tails[place(pair.tail)])
            for pair in pairs
        ]
        pairs = _best_of_each(pairs, lambda pair: (place(pair.head), place(pair.tail)), _by_score)
        pairs = _without_parts(_nearest(pairs, text, place), text, place)

    def order(pair: RelationPair) -> tuple[int, int, float]:
        return place(pair.head)[0], place(pair.tail)[0], -pair.score

    return sorted(pairs, key=order)


def _longest(spans: Iterable[Found], place: Callable[[Found], Place]) -> dict[Place, Found]:
    """By each span's place, the longest one that it is inside."""
    by_place = {place(span): span for span in spans}

    def around(inner: Place) -> Found:
        outer = [one for one in by_place if one[0] <= inner[0] and one[1] >= inner[1]]
        return by_place[max(outer, key=lambda one: (one[1] - one[0], -one[0]))]

    return {inner: around(inner) for inner in by_place}


def _by_score(pair: RelationPair) -> tuple[float, ...]:
    return (-pair.score,)


def _best_of_each(
    pairs: Iterable[RelationPair],
    key: Callable[[RelationPair], object],
    rank: Callable[[RelationPair], tuple[float, ...]],
) -> list[RelationPair]:
    """Keep the first pair of the least rank of those with an equal key."""
    best: dict[object, RelationPair] = {}
    for pair in pairs:
        previous = best.get(key(pair))
        if previous is None or rank(pair) < rank(previous):
            best[key(pair)] = pair
    return list(best.values())


def _said(text: str, place: Place) -> str:
    return " ".join(text[slice(*place)].casefold().split())


def _nearest(
    pairs: Sequence[RelationPair], text: str, place: Callable[[Found], Place]
) -> list[RelationPair]:
    def rank(pair: RelationPair) -> tuple[float, ...]:
        (head, head_end), (tail, tail_end) = place(pair.head), place(pair.tail)
        return max(head - tail_end, tail - head_end, 0), -pair.score, head, tail

    def key(pair: RelationPair) -> tuple[str, str]:
        return _said(text, place(pair.head)), _said(text, place(pair.tail))

    return _best_of_each(pairs, key, rank)


def _without_parts(
    pairs: Sequence[RelationPair], text: str, place: Callable[[Found], Place]
) -> list[RelationPair]:
    said = [
        tuple(frozenset(_said(text, place(end)).split()) for end in (pair.head, pair.tail))
        for pair in pairs
    ]

    def is_part(one: tuple[frozenset[str], ...]) -> bool:
        return any(
            (one[0] < other[0] and one[1] == other[1]) or (one[1] < other[1] and one[0] == other[0])
            for other in said
        )

    return [pair for pair, own in zip(pairs, said, strict=True) if not is_part(own)]
