"""Which of the spans that overlap stay."""

from bisect import bisect_right
from collections.abc import Sequence

# (first word, last word, the number of its field or label, score)
Found = tuple[int, int, int, float]


def disjoint(spans: Sequence[Found]) -> list[Found]:
    """Spans without those that overlap better ones, the best one first."""
    kept: list[Found] = []
    is_taken = bytearray(max((span[1] + 1 for span in spans), default=0))
    for span in sorted(spans, key=lambda span: -span[3]):
        first, last = span[:2]
        if not any(is_taken[first : last + 1]):
            is_taken[first : last + 1] = b"\1" * (last + 1 - first)
            kept.append(span)
    return kept


def kept_spans(spans: Sequence[Found], overlap: str) -> list[Found]:
    """The best one first.  spans: no two have the same ends.

    overlap: flat, those that overlap none and have the largest sum of scores; nested, those that
    cross no better ones; longest, those inside no others.
    """
    best = sorted(spans, key=lambda span: (-span[3], *span[:2]))
    if overlap == "longest":
        return [one for one in best if not any(_is_inside(one, other) for other in best)]
    if overlap == "nested":
        kept: list[Found] = []
        for one in best:
            if not any(_crosses(one, other) for other in kept):
                kept.append(one)
        return kept
    stays = set(_largest_sum(best))
    return [one for place, one in enumerate(best) if place in stays]


def _is_inside(one: Found, other: Found) -> bool:
    return other[0] <= one[0] and one[1] <= other[1] and one[:2] != other[:2]


def _crosses(one: Found, other: Found) -> bool:
    first, second = sorted((one[:2], other[:2]))
    return first[0] < second[0] <= first[1] < second[1]


def _largest_sum(spans: Sequence[Found]) -> list[int]:
    """Places of spans that do not overlap and have the largest sum of scores; of equal sums, those
    that are more."""
    order = sorted(range(len(spans)), key=lambda place: (spans[place][1], spans[place][0]))
    ends = [spans[place][1] for place in order]
    # Of the first spans: (sum, how many, whether the last one is in, those before it).
    best: list[tuple[float, int]] = [(0.0, 0)]
    before: list[int] = []
    for number, place in enumerate(order):
        before.append(bisect_right(ends, spans[place][0] - 1, 0, number))
        total, count = best[before[-1]]
        best.append(max((total + spans[place][3], count + 1), best[-1]))
    chosen, number = [], len(order)
    while number:
        if best[number] == best[number - 1]:
            number -= 1
        else:
            chosen.append(order[number - 1])
            number = before[number - 1]
    return chosen
