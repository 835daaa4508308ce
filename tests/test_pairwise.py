"""Grids of tests by pairs: every pair of values of two parameters occurs, in few rows."""

from itertools import combinations, product

import pytest
from pairwise import covering_rows, pairwise


@pytest.mark.parametrize(
    ("sizes", "most"),
    [((2, 2), 4), ((3, 1, 2), 6), ((2, 5, 4, 2, 4), 24), ((6, 3, 3, 2, 2, 2), 22), ((7,) * 4, 80)],
)
def test_every_pair_occurs(sizes: tuple[int, ...], most: int) -> None:
    rows = covering_rows(sizes)
    assert rows == covering_rows(sizes)
    assert len(set(rows)) == len(rows) <= most
    for a, b in combinations(range(len(sizes)), 2):
        assert {(row[a], row[b]) for row in rows} == set(product(range(sizes[a]), range(sizes[b])))


def test_names_that_go_together_marks_and_ids() -> None:
    on_gpu = pytest.param("cuda", marks=pytest.mark.gpu)
    grid = {"device": ["cpu", on_gpu], "causal,window": [(False, 0), (True, 7)], "size": [3]}
    names, rows = pairwise(grid, indirect=["device"]).mark.args
    assert names == "device,causal,window,size"
    assert {row.values for row in rows} == {
        (device, *mask, 3) for device in ("cpu", "cuda") for mask in ((False, 0), (True, 7))
    }
    assert all(bool(row.marks) == (row.values[0] == "cuda") for row in rows)
    assert sorted(row.id for row in rows)[0] == "cpu-False-0-3"
