"""Sequences of token ids in columns: the fast ways give what one sequence after another gives."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytetx.errors import InputError
from bytetx.ops import int_lists, native
from bytetx.ops.int_lists import flatten_int_lists
from bytetx.requests.token_ids import flatten_ids

INT32 = st.integers(-(2**31), 2**31 - 1)
VOCAB_SIZE = 100
# Numbers that are none, numbers that an int32 does not hold, and what only looks like a number.
STRANGE = st.sampled_from(
    [None, 1.5, True, False, "7", 2**31, -(2**31) - 1, 2**70, np.int64(3), []]
)
KINDS: list[Callable[[list[int]], object]] = [
    *(list, tuple, np.array),
    lambda ids: np.array(ids, dtype=np.uint16),
    lambda ids: np.array(ids)[::-1][::-1],
]


@given(st.lists(st.lists(INT32, max_size=5), max_size=6))
def test_numbers_of_lists_lie_behind_one_another(lists: list[list[int]]) -> None:
    expected = [number for each in lists for number in each]
    flat = flatten_int_lists(lists, total=len(expected))
    assert flat.dtype == np.int32 and flat.tolist() == expected


@given(st.lists(st.lists(INT32 | STRANGE, min_size=1, max_size=4), min_size=1, max_size=4))
def test_only_int32_is_flattened(lists: list[list[object]]) -> None:
    numbers = [number for each in lists for number in each]
    fits = [type(number) is int and -(2**31) <= number < 2**31 for number in numbers]
    flat = flatten_int_lists(lists, total=len(numbers))
    assert (flat is not None) == all(fits)


def test_without_the_native_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "flatten_int_lists", lambda: None)
    assert int_lists.flatten_int_lists([[1, 2], [3]], total=3).tolist() == [1, 2, 3]
    for bad in ([1.5], [True], [2**31], ["7"]):
        assert int_lists.flatten_int_lists([[1], bad], total=2) is None


@given(
    st.lists(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=6), min_size=1),
    st.data(),
)
def test_every_kind_of_sequence_is_the_same(texts: list[list[int]], data: st.DataObject) -> None:
    is_uniform = data.draw(st.booleans())
    kind = data.draw(st.sampled_from(KINDS))
    items = {
        3 * i: (kind if is_uniform else data.draw(st.sampled_from(KINDS)))(ids)
        for i, ids in enumerate(texts)
    }
    errors: dict[int, InputError] = {}
    columns = flatten_ids(items, vocab_size=VOCAB_SIZE, errors=errors)
    assert errors == {}
    assert columns.indices.tolist() == list(items)
    assert columns.seqlens.tolist() == list(map(len, texts))
    assert columns.token_ids.tolist() == [token_id for ids in texts for token_id in ids]


@given(st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=4), min_size=1), st.data())
def test_one_bad_sequence_costs_no_other(texts: list[list[int]], data: st.DataObject) -> None:
    bad = data.draw(st.sampled_from([[], None, 5, [1.5], [True], [2**70], [[1]], np.zeros(2)]))
    place = data.draw(st.integers(0, len(texts)))
    items = dict(enumerate([*texts[:place], bad, *texts[place:]]))
    errors: dict[int, InputError] = {}
    columns = flatten_ids(items, vocab_size=VOCAB_SIZE, errors=errors)
    assert list(errors) == [place] and f"texts[{place}]" in str(errors[place])
    assert columns.indices.tolist() == [index for index in items if index != place]
    assert columns.token_ids.tolist() == [token_id for ids in texts for token_id in ids]
