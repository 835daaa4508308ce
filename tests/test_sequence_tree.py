"""SequenceTree: positions, rows of keys, tiles."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tree_cases import chain, make_tree, rows_of, trees

from bytetx.sequence_tree import MAX_ANCESTORS, SequenceTree

LENGTHS = st.sampled_from([0, 1, 2, 5, 7, 8, 9, 15, 16, 17, 30])


def test_positions_continue_and_keys_are_the_ancestors_then_its_own() -> None:
    tree = make_tree([-1, 0, 1, 0, -1], [3, 2, 2, 1, 2])
    assert tree.prefix_lens.tolist() == [0, 3, 5, 3, 0]
    assert tree.positions().tolist() == [0, 1, 2, 3, 4, 5, 6, 3, 0, 1]
    rows, cu_keys = tree.key_rows()
    assert cu_keys.tolist() == [0, 3, 8, 15, 19, 21]
    assert rows[8:].tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 7, 8, 9]


def test_sequences_that_are_keys_alone_have_none() -> None:
    tree = make_tree([2, -1, -1], [2, 1, 4], keys_alone=1)
    assert (tree.num_rows, tree.total_keys, tree.num_query_sequences) == (3, 7, 2)
    rows, cu_keys = tree.key_rows()
    assert (rows.tolist(), cu_keys.tolist()) == ([3, 4, 5, 6, 0, 1, 2], [0, 6, 7])
    assert tree.positions().tolist() == [4, 5, 0, 0, 1, 2, 3]


@given(tree=trees(LENGTHS))
def test_rows_of_keys(tree: SequenceTree) -> None:
    rows, cu_keys = tree.key_rows()
    assert rows.dtype == np.int32 and cu_keys.dtype == np.int64
    positions = tree.positions()
    for i, (begin, end) in enumerate(zip(cu_keys, cu_keys[1:], strict=False)):
        assert tree.starts[i] < tree.num_rows
        assert rows[begin:end].tolist() == rows_of(tree, chain(tree, i)).tolist()
        assert positions[rows[begin:end]].tolist() == list(range(end - begin))
    assert tree.starts[len(cu_keys) - 1] == tree.num_rows


@given(
    tree=trees(LENGTHS, most=20),
    tile_rows=st.sampled_from([4, 8, 16]),
    window=st.sampled_from([0, 0, 1, 5, 20]),
    batch_invariant=st.booleans(),
)
def test_tiles(tree: SequenceTree, tile_rows: int, window: int, batch_invariant: bool) -> None:
    """They cover every row once, never hold two parents, and have the keys of all their rows."""
    found = tree.tiles(tile_rows, window=window, batch_invariant=batch_invariant)
    assert found.tiles.shape == (len(found.ancestors), 4)
    assert found.row_bounds.shape == (tree.num_rows, 2)
    assert all(table.dtype == np.int32 for table in found)
    covered = np.zeros(tree.num_rows, dtype=np.int64)
    sequence_of = np.repeat(np.arange(len(tree)), tree.seqlens)
    for (row, rows, first_key, key_end), ancestors in zip(*found[:2], strict=True):
        assert 0 < rows <= tile_rows
        covered[row : row + rows] += 1
        sequences = np.unique(sequence_of[row : row + rows])
        assert len(np.unique(tree.parents[sequences])) == 1
        assert key_end == row + rows
        seen = max(tree.starts[sequences[0]], row + 1 - window if window else 0)
        assert first_key == seen
        above = chain(tree, int(sequences[0]))[:-1]
        expected = [tree.starts[i : i + 2].tolist() for i in above]
        assert ancestors.tolist() == expected + [[0, 0]] * (MAX_ANCESTORS - len(above))
        if batch_invariant:
            assert len(sequences) == 1 and (row - tree.starts[sequences[0]]) % tile_rows == 0
    assert (covered == 1).all()
    for row, bounds in enumerate(found.row_bounds.tolist()):
        assert bounds == tree.starts[sequence_of[row] :][:2].tolist()


def test_tiles_are_filled_and_the_longest_run_first() -> None:
    tree = make_tree([-1, 0, 0, 0, -1], [20, 3, 3, 3, 2])
    assert tree.tiles(8).tiles.tolist() == [
        [26, 3, 26, 29],
        [20, 6, 20, 26],
        [16, 4, 0, 20],
        [8, 8, 0, 16],
        [0, 8, 0, 8],
        [29, 2, 29, 31],
    ]


def test_no_sequences() -> None:
    tree = make_tree([], [])
    assert tree.positions().tolist() == []
    assert [len(table) for table in tree.key_rows()] == [0, 1]
    assert [len(table) for table in tree.tiles(64)] == [0, 0, 0]


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ([-1, 3, 0], "below 3, or -1, got -1 to 3"),
        ([-1, -2, 0], "below 3, or -1, got -2 to 0"),
        ([-1, 0], r"one entry a sequence \(3\), got 2"),
        ([0, -1, -1], "none may be its own; sequence 0 has more"),
        ([-1, 2, 1], "none may be its own; sequence 1 has more"),
    ],
)
def test_parents_that_cannot_be_are_refused(parents: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_tree(parents, [1, 2, 3])


def test_a_tree_too_deep_is_refused() -> None:
    depth = MAX_ANCESTORS + 1
    make_tree(range(-1, depth - 1), [1] * depth)
    with pytest.raises(ValueError, match=f"at most {MAX_ANCESTORS} ancestors.* {depth} has more"):
        make_tree(range(-1, depth), [1] * (depth + 1))


@pytest.mark.parametrize("num_rows", [2, 7])
def test_rows_that_end_inside_of_a_sequence_are_refused(num_rows: int) -> None:
    with pytest.raises(ValueError, match=f"num_rows must end a sequence, got {num_rows}"):
        SequenceTree(np.array([-1, 0]), np.array([3, 3]), num_rows)
