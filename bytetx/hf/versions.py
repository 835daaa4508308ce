"""How often a tensor was written to."""

import torch


def version_of(tensor: torch.Tensor) -> int:
    """The count of its writes; -1 where nothing counts, as of what inference mode made."""
    try:
        return tensor._version
    except RuntimeError:  # asking is_inference() is not enough: an unpickled parameter denies it
        return -1
