"""The options of quantised vectors: a precision, and the ranges that a file of vectors has."""

import numpy as np
import typer

from bytetx.errors import InputError

# Those of bytetx.tasks.precision, which imports torch.
_PRECISIONS = ("float32", "float16", "int8", "uint8", "binary", "ubinary")


def check_precision(precision: str, *, has_ranges: bool) -> None:
    """Raises typer.BadParameter for an unknown precision, and where ranges lack or do not belong.

    Rows are written as they come, so that a job cannot wait for the ranges of all its vectors.
    """
    if precision not in _PRECISIONS:
        raise typer.BadParameter(
            f"--precision must be one of {', '.join(_PRECISIONS)}, got {precision!r}"
        )
    if (precision in ("int8", "uint8")) == has_ranges:
        return
    if has_ranges:
        raise typer.BadParameter(f"--ranges go with --precision int8 or uint8, got {precision!r}")
    raise typer.BadParameter(
        f"--precision {precision} needs --ranges: a .npy of float vectors of the same model, "
        "such as bytetx embed writes for a sample of the texts"
    )


def read_ranges(path: str) -> np.ndarray:
    """f32 [2, dim]: the minimum and maximum of each column of a .npy; rows with NaN are left out.

    Raises InputError where the file is no matrix of floats or has fewer than two rows.
    """
    try:
        vectors = np.load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"--ranges {path} cannot be read as .npy: {error}") from error
    if not isinstance(vectors, np.ndarray) or vectors.ndim != 2 or vectors.dtype.kind != "f":
        raise InputError(f"--ranges {path} must hold a matrix of float vectors in .npy")
    whole = vectors[np.isfinite(vectors).all(axis=1)]
    if len(whole) < 2:
        raise InputError(f"--ranges {path} has {len(whole)} vectors, and ranges need at least two")
    return np.stack([whole.min(axis=0), whole.max(axis=0)]).astype(np.float32)
