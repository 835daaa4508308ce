"""Sequences of token ids to columns, without a loop over tokens."""

import sys
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeGuard, TypeVar

import numpy as np

from bytetx.checkpoint.tokenizer import flatten_int_lists
from bytetx.errors import InputError, shown

Ids = Sequence[int] | np.ndarray
Errors = dict[int, InputError]  # by index in the caller's order

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class IdColumns:
    """Concatenated sequences of ids.

    indices: int64 [num_texts], in the caller's order.  seqlens: int32 [num_texts].
    token_ids: [total_tokens], any integer type; whether they fit the model is not checked yet.
    """

    indices: np.ndarray
    seqlens: np.ndarray
    token_ids: np.ndarray


def cut_ids(items: Mapping[int, object], limit: int) -> tuple[Mapping[int, object], dict[int, int]]:
    """(the items with no more than `limit` ids, how many those that had more had, by index).

    What is cut off is not looked at: range(10**9) costs nothing.
    """
    cut: dict[int, object] = {}
    lengths: dict[int, int] = {}
    for index, item in items.items():
        if isinstance(item, Sized) and not isinstance(item, bytes | dict | set):
            length = _length(item)
            if length > limit:
                cut[index], lengths[index] = _beginning(item, limit), length
    return ({**items, **cut} if cut else items), lengths


def _length(item: Sized) -> int:
    try:
        return len(item)
    except OverflowError:  # a range that is longer than sys.maxsize
        return sys.maxsize
    except TypeError:  # an array without dimensions
        return 0


def _beginning(item: Any, limit: int) -> object:
    try:
        return item[:limit]
    except (TypeError, ValueError, LookupError):  # it knows no slices
        return list(islice(iter(item), limit))


def flatten_ids(items: Mapping[int, object], *, vocab_size: int, errors: Errors) -> IdColumns:
    """The items that are one-dimensional sequences of integers; `errors` names the others.

    items: by index in the caller's order.
    """
    given = list(items.values())
    rows: Sequence[Sized] = []
    token_ids = None
    if are_all(given, list):
        rows, token_ids = given, _flatten_lists(given)
    elif are_all(given, np.ndarray):
        rows, token_ids = given, _flatten_arrays(given)
    if token_ids is None:  # several kinds, or something is wrong: check one by one
        checked: dict[int, np.ndarray] = {}
        for index, item in items.items():
            try:
                checked[index] = _checked_ids(item, index, vocab_size)
            except InputError as error:
                errors[index] = error.with_traceback(None)
        items, rows = checked, list(checked.values())
        token_ids = np.concatenate([np.empty(0, dtype=np.int32), *checked.values()])
    return IdColumns(
        np.fromiter(items, dtype=np.int64, count=len(rows)),
        np.fromiter(map(len, rows), dtype=np.int32, count=len(rows)),
        token_ids,
    )


def check_range(ids: np.ndarray, index: int, vocab_size: int) -> None:
    """Raises InputError where an id of text `index` is none of the model's."""
    low, high = ids.min(), ids.max()
    if low < 0 or high >= vocab_size:
        raise InputError(
            f"texts[{index}] holds token id {shown(int(low if low < 0 else high))}; ids of this "
            f"model lie between 0 and {vocab_size - 1}; were they made by another tokenizer?"
        )


def no_tokens(index: int) -> InputError:
    return InputError(
        f"texts[{index}] has no tokens, so the model has nothing to read; an empty str is fine "
        "where the tokenizer adds special tokens, an empty sequence of ids is not"
    )


def are_all(items: Sequence[object], kind: type[T]) -> TypeGuard[Sequence[T]]:
    """Whether every item is of exactly this type; False for no items."""
    return set(map(type, items)) == {kind}


def _flatten_lists(items: Sequence[list[int]]) -> np.ndarray | None:
    """Ids of lists, or None where one is empty or holds anything but int."""
    return flatten_int_lists(items, total=sum(map(len, items))) if all(items) else None


def _flatten_arrays(items: Sequence[np.ndarray]) -> np.ndarray | None:
    """Ids of one-dimensional arrays of one integer type, or None where one item is not that."""
    kinds = {(item.dtype, item.ndim, item.size > 0) for item in items}
    dtype, ndim, has_ids = kinds.pop()
    if kinds or ndim != 1 or not has_ids or dtype.kind not in "iu":
        return None
    return np.concatenate(items)


def _checked_ids(item: object, index: int, vocab_size: int) -> np.ndarray:
    """Token ids as int32 [num_tokens], from any one-dimensional sequence of integers."""
    if item is None or isinstance(item, bytes | dict | set | int | float):
        raise _not_an_input(item, index)
    try:
        ids = np.asarray(item)
    except (TypeError, ValueError) as error:
        raise _not_an_input(item, index) from error
    # Numbers beyond 64 bits come as objects; they are token ids out of range.
    is_integers = ids.dtype.kind in "iu" or all(type(number) is int for number in ids.flat)
    if ids.ndim != 1 or not is_integers:
        raise _not_an_input(item, index)
    if not len(ids):
        raise no_tokens(index)
    check_range(ids, index, vocab_size)
    return ids.astype(np.int32)


def _not_an_input(item: object, index: int) -> InputError:
    given = type(item).__name__
    if isinstance(item, tuple) and len(item) == 2:
        given = f"a pair ({', '.join(type(part).__name__ for part in item)})"
    return InputError(
        f"texts[{index}] is {given}; give a str, a pair (str, str), or a sequence of "
        "integer token ids"
    )
