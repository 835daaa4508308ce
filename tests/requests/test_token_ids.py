"""Sequences of token ids in columns: the fast ways give what one sequence after another gives."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from checkpoints import save_checkpoint
from hypothesis import given
from hypothesis import strategies as st

import bytetx
from bytetx.checkpoint.tokenizer import flatten_int_lists
from bytetx.errors import InputError, TooLongError
from bytetx.ops import native
from bytetx.requests.token_ids import cut_ids, flatten_ids

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
    monkeypatch.setitem(native._modules, "cpu", None)
    assert flatten_int_lists([[1, 2], [3]], total=3).tolist() == [1, 2, 3]
    for bad in ([1.5], [True], [2**31], ["7"]):
        assert flatten_int_lists([[1], bad], total=2) is None


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


class Lazy(Sequence[int]):
    """A sequence that knows no slices, and refuses to be read beyond its limit."""

    def __init__(self, length: int, limit: int):
        self.length, self.limit = length, limit

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, place: Any) -> Any:
        if not isinstance(place, int):
            raise TypeError("no slices")
        assert place < self.limit
        return 7


@pytest.mark.parametrize("length", [10**9, 10**30])
def test_what_is_cut_off_is_not_looked_at(length: int) -> None:
    """Not even range(10**9), of which a list would take 40 GB."""
    items = {0: range(5), 2: range(length), 3: [1] * 9, 5: np.arange(20), 6: Lazy(1 << 40, 9)}
    cut, lengths = cut_ids(items, 8)
    assert lengths == {2: min(length, sys.maxsize), 3: 9, 5: 20, 6: 1 << 40}
    errors: dict[int, InputError] = {}
    columns = flatten_ids(cut, vocab_size=VOCAB_SIZE, errors=errors)
    assert not errors and columns.seqlens.tolist() == [5, 8, 8, 8, 8]


def test_sequences_of_any_length_are_cheap(embedder: bytetx.Model) -> None:
    """In every way to give them: an error that says how long they are, or their beginning."""
    given = [range(10**9), range(10**30), Lazy(10**12, 4096)]
    failed = embedder.embed(given, on_error="return")
    for index in range(3):
        assert isinstance(failed.errors[index], TooLongError)
        assert f"texts[{index}] has " in str(failed.errors[index])
    limit = embedder.spec.max_positions
    cut = embedder.embed([range(10**9), list(range(limit))], truncate=True, on_error="return")
    assert np.array_equal(cut.vectors[0], cut.vectors[1]) or 0 in cut.errors


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> bytetx.Model:
    return bytetx.load(save_checkpoint(tmp_path_factory.mktemp("ids") / "e"), device="cpu")
