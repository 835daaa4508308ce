"""Lists of int -> one int32 array, without a loop in Python over what is in them."""

from array import array
from collections.abc import Sequence

import numpy as np

from bytetx.ops import native


def flatten_int_lists(lists: Sequence[list[int]], *, total: int) -> np.ndarray | None:
    """int32 [total], the numbers behind one another; None where one is no int or beyond int32.

    total: the sum of the lists' lengths.
    """
    flatten = native.flatten_int_lists()
    if flatten is not None:
        flat = np.empty(total, dtype=np.int32)
        return flat if flatten(list(lists), flat.ctypes.data, total) else None
    if any(type(number) is not int for numbers in lists for number in numbers[:1]):
        return None  # an array would take True for 1
    numbers = array("i")
    try:
        for each in lists:
            numbers.fromlist(each)
    except (TypeError, OverflowError):
        return None
    return np.array(numbers, dtype=np.int32, copy=None)
