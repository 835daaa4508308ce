"""Which rows of a packed batch are those of some of its sequences."""

import numpy as np


def rows_of(starts: np.ndarray, seqlens: np.ndarray) -> np.ndarray:
    """The rows of sequences, one sequence after the other: seqlens[i] of them from starts[i] on.

    starts, seqlens: integers [n].  Returns int64 [seqlens.sum()].
    """
    ends = np.cumsum(seqlens, dtype=np.int64)
    # The distance from each new row to the old one, and then the old row.
    rows = np.repeat(starts - (ends - seqlens), seqlens)
    rows += np.arange(len(rows))
    return rows
