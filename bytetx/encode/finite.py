"""Texts whose logits or vectors are not finite are errors of their own.

A task gives `ops.largest` of its logits or vectors as one more output of its step, from before
anything that could hide them (a quantiser, a threshold, a top-k, an activation), so that it is
computed on the device and leaves it with the results.
"""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from bytetx.encode.step import Step, Task
from bytetx.errors import NotFiniteError

R = TypeVar("R")


def are_finite(numbers: np.ndarray, num_rows: np.ndarray | None = None) -> np.ndarray:
    """bool [num_texts]: whether all numbers of each text are finite.

    numbers: of each row, [total_rows].  num_rows: int [num_texts], rows of each text, one after the
    other; None means one each.
    """
    rows: np.ndarray = np.isfinite(numbers)
    if num_rows is None:
        return rows
    texts = np.ones(len(num_rows), dtype=bool)
    if not rows.all():
        texts[np.repeat(np.arange(len(num_rows)), num_rows)[~rows]] = False
    return texts


def finish_finite(
    task: Task[R], outputs: tuple[np.ndarray, ...], step: Step
) -> tuple[Sequence[R], np.ndarray | None]:
    """The results of the texts whose numbers are finite.

    Returns them with a mask, bool [num_texts], of these texts; None where all are.
    """
    is_finite = task.are_finite(outputs, step)
    if is_finite.all():
        return task.finish(outputs, step), None
    with np.errstate(all="ignore"):  # results that are not finite are dropped below
        results = task.finish(outputs, step)
    if isinstance(results, np.ndarray):
        return results[is_finite], is_finite
    return [results[text] for text in np.flatnonzero(is_finite).tolist()], is_finite


def not_finite_error(index: int) -> NotFiniteError:
    """index: of the text in its call."""
    return NotFiniteError(
        f"text {index} gave numbers that are not finite (NaN or infinity), so it has no result; "
        "other texts are not affected: load the model in a dtype of wider range (bfloat16 or "
        "float32), or check the checkpoint's weights"
    )
