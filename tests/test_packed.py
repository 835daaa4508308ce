"""Packing ragged ids: round trips over random lengths, and what is refused."""

import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bytetx.errors import InputError
from bytetx.packed import pack, split, unpack

INT32 = st.integers(-(2**31), 2**31 - 1)
TEXTS = st.lists(st.lists(INT32, max_size=12), max_size=8)
LENGTHS = st.lists(st.sampled_from([0, 0, 1, 1, 2, 7, 3000]), max_size=8)


@given(TEXTS, st.integers(0, 5), st.sampled_from([list, tuple, np.asarray, torch.tensor]))
def test_round_trip(texts: list[list[int]], offset: int, container: type) -> None:
    given_texts = [container(text) if text else [] for text in texts]
    batch = pack(given_texts, has_token_types=True, position_offset=offset)
    assert [rows.tolist() for rows in split(batch.input_ids, batch)] == texts
    assert [rows.tolist() for rows in split(batch.position_ids, batch)] == [
        positions(text, offset) for text in texts
    ]
    assert batch.token_type_ids.tolist() == [0] * batch.total_tokens
    assert batch.batch_size == len(texts)


def positions(text: list[int], offset: int) -> list[int]:
    """Hugging Face's: from the offset, pad tokens (offset - 1) stand still and are not counted."""
    if offset == 0:
        return list(range(len(text)))
    pad = offset - 1
    return [
        pad if token_id == pad else pad + sum(other != pad for other in text[: i + 1])
        for i, token_id in enumerate(text)
    ]


@given(st.lists(st.lists(st.integers(0, 3), max_size=9), max_size=6), st.integers(1, 3))
def test_pad_tokens_in_a_text_take_no_position(texts: list[list[int]], offset: int) -> None:
    batch = pack(texts, position_offset=offset)
    assert [rows.tolist() for rows in split(batch.position_ids, batch)] == [
        positions(text, offset) for text in texts
    ]


@given(LENGTHS)
def test_lengths(lengths: list[int]) -> None:
    batch = pack([[7] * length for length in lengths])
    assert batch.token_type_ids is None
    assert batch.cu_seqlens.tolist() == [0, *np.cumsum(lengths, dtype=int).tolist()]
    assert batch.seqlens.tolist() == lengths
    assert batch.max_seqlen == max(lengths, default=0)
    assert batch.total_tokens == sum(lengths)
    for name in ("input_ids", "position_ids", "cu_seqlens", "seqlens"):
        assert getattr(batch, name).dtype == torch.int32


@given(LENGTHS)
def test_unpack(lengths: list[int]) -> None:
    batch = pack([[7] * length for length in lengths])
    x = torch.randn(batch.total_tokens, 3)
    padded = unpack(x, batch, fill=-1.0)
    assert padded.shape == (len(lengths), max(lengths, default=0), 3)
    for row, rows in zip(padded, split(x, batch), strict=True):
        assert torch.equal(row[: len(rows)], rows)
        assert (row[len(rows) :] == -1.0).all()


@given(LENGTHS)
def test_token_types(lengths: list[int]) -> None:
    ids = [list(range(length)) for length in lengths]
    types = [[index % 2 for index in text] for text in ids]
    batch = pack(ids, token_type_ids=types, has_token_types=True)
    assert [rows.tolist() for rows in split(batch.token_type_ids, batch)] == types


def test_array_dtypes() -> None:
    ids = [3, 2**31 - 1]
    for dtype in (np.int32, np.int64, np.uint32, np.uint64):
        assert pack([np.asarray(ids, dtype)]).input_ids.tolist() == ids
    assert pack([np.asarray([1, 2, 3, 4])[::2]]).input_ids.tolist() == [1, 3]


@pytest.mark.parametrize(
    "bad",
    [
        [1.5],
        ["12"],
        "12",
        [None],
        [[1, 2]],
        [2**31],
        [-(2**31) - 1],
        np.asarray([1.0]),
        np.asarray([2**40]),
        np.asarray([[1, 2]]),
        torch.tensor([0.5]),
    ],
    ids=repr,
)
def test_ids_that_are_no_int32(bad: object) -> None:
    with pytest.raises(InputError, match=r"token_ids\[1\] must hold integers that fit int32"):
        pack([[1], bad])


def test_one_text_in_place_of_a_list() -> None:
    with pytest.raises(InputError, match="one sequence of token ids a text"):
        pack([101, 102])


def test_token_types_of_other_lengths() -> None:
    with pytest.raises(InputError, match=r"token_type_ids\[1\] must be as long .* \(2\), got 1"):
        pack([[1], [1, 2]], token_type_ids=[[0], [0]], has_token_types=True)
    with pytest.raises(InputError, match=r"one sequence for each of token_ids \(2\), got 1"):
        pack([[1], [1, 2]], token_type_ids=[[0]], has_token_types=True)


def test_more_tokens_than_int32_counts() -> None:
    class Huge(list):
        def __len__(self) -> int:
            return 2**30

    with pytest.raises(InputError, match="a batch at most 2147483647"):
        pack([Huge(), Huge()])


def test_to_keeps_lengths_on_the_host() -> None:
    batch = pack([[1, 2], [3]], has_token_types=True).to("meta")
    assert batch.device.type == batch.cu_seqlens.device.type == "meta"
    assert batch.seqlens.device.type == "cpu"


def test_packing_takes_no_time_beside_a_forward_pass() -> None:
    """2000 texts of 90 tokens: 3 ms alone on one core; a loop over tokens takes ten times that."""
    texts = [list(range(90))] * 2000

    def seconds() -> float:
        start = time.thread_time()
        pack(texts, has_token_types=True)
        return time.thread_time() - start

    assert min(seconds() for _ in range(5)) < 0.020
