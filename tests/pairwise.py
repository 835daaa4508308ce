"""Parametrisation of large grids in which every pair of values occurs, not every combination."""

from collections.abc import Mapping, Sequence
from itertools import combinations, product

import pytest


def pairwise(grid: Mapping[str, Sequence], *, indirect: Sequence[str] = ()) -> pytest.MarkDecorator:
    """pytest.mark.parametrize over rows in which any two parameters take every pair of values.

    grid: values for each name, or for several names that go together ("causal,window": tuples).
        A value may be a pytest.param with an id and marks.
    """
    columns = [[_param(value, names) for value in values] for names, values in grid.items()]
    rows = []
    for indices in covering_rows([len(values) for values in columns]):
        chosen = [column[index] for column, index in zip(columns, indices, strict=True)]
        ids = [one.id or "-".join(map(_word, one.values)) for one in chosen]
        values = [value for one in chosen for value in one.values]
        marks = [mark for one in chosen for mark in one.marks]
        rows.append(pytest.param(*values, id="-".join(ids), marks=marks))
    return pytest.mark.parametrize(",".join(grid), rows, indirect=list(indirect))


def covering_rows(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Rows of indices below `sizes` that hold every pair of every two columns; always the same."""
    missing = {
        ((a, i), (b, j)): None  # a dict keeps its order
        for a, b in combinations(range(len(sizes)), 2)
        for i, j in product(range(sizes[a]), range(sizes[b]))
    }
    rows = []
    while missing:
        row = dict(next(iter(missing)))
        for column in range(len(sizes)):
            if column not in row:
                gains = [
                    len(_pairs(row | {column: i}) & missing.keys()) for i in range(sizes[column])
                ]
                row[column] = gains.index(max(gains))
        for pair in _pairs(row):
            missing.pop(pair, None)
        rows.append(tuple(row[column] for column in range(len(sizes))))
    return rows


def _pairs(row: Mapping[int, int]) -> set[tuple[tuple[int, int], ...]]:
    return set(combinations(sorted(row.items()), 2))


def _param(value: object, names: str):
    if hasattr(value, "marks") and hasattr(value, "values"):
        return value
    return pytest.param(*value) if "," in names else pytest.param(value)


def _word(value: object) -> str:
    return str(value).removeprefix("torch.").replace(" ", "")
