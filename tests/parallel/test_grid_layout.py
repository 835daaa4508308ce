"""Grids: the numbers of ranks, groups, names, and which texts a slot gets."""

import pytest

from bytetx.errors import OptionError
from bytetx.parallel.grid import AXES, Grid, assign_sequences, grids_of, parse_grid


@pytest.mark.parametrize("size", [1, 2, 4, 8, 12])
def test_ranks_and_groups_of_every_grid(size: int) -> None:
    for grid in grids_of(size):
        places = [grid.coordinates(rank) for rank in range(size)]
        assert len(set(places)) == size
        assert [grid.rank(at) for at in places] == list(range(size))
        for axis in AXES:
            groups = {grid.group(axis, rank) for rank in range(size)}
            assert sorted(rank for group in groups for rank in group) == list(range(size))
            assert all(len(group) == grid.length(axis) for group in groups)
            for group in groups:
                assert [getattr(places[r], axis) for r in group] == list(range(len(group)))
        slots = {grid.slots(rank) for rank in range(size)}
        assert all([grid.slot(r) for r in s] == list(range(grid.num_slots)) for s in slots)


def test_how_many_grids_there_are() -> None:
    assert [len(list(grids_of(n))) for n in (2, 4, 8)] == [4, 10, 20]


def test_x_changes_fastest() -> None:
    grid = Grid(data=2, z=2, y=2, x=2)
    assert grid.group("x", 0) == (0, 1)
    assert grid.group("y", 0) == (0, 2)
    assert grid.group("z", 0) == (0, 4)
    assert grid.group("data", 0) == (0, 8)


def test_names() -> None:
    assert parse_grid("data2.z4") == Grid(data=2, z=4)
    for grid in grids_of(12):
        assert parse_grid(str(grid)) == grid


@pytest.mark.parametrize("text", ["", "w2", "z0", "z2.z2", "2", "y2,z2", "y-1"])
def test_what_is_no_grid(text: str) -> None:
    with pytest.raises(OptionError, match="data2.z2"):
        parse_grid(text)


def test_texts_are_whole_and_balanced() -> None:
    seqlens = [100, 1, 1, 50, 49, 0, 3]
    slots = assign_sequences(seqlens, 2, hidden_size=64)
    assert sorted(i for slot in slots for i in slot) == list(range(7))
    assert slots[0] == [0]  # its attention weighs, too
    assert assign_sequences([5], 3, hidden_size=64) == [[0], [], []]
    equal = assign_sequences([7] * 12, 4, hidden_size=64)
    assert [len(slot) for slot in equal] == [3] * 4
