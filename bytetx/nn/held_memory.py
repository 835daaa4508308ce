"""Memory that a loaded model's weights take."""

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import TypeVar

import torch

T = TypeVar("T")


def weights_bytes(owners: Sequence[object]) -> int:
    """Bytes of all tensors that some objects hold, such as a model and its heads; shared ones count
    once."""
    sizes: dict[int, int] = {}
    for tensor in parts_of(owners, torch.Tensor):
        if tensor.is_mkldnn:  # its storage is oneDNN's own
            sizes[id(tensor)] = tensor.numel() * tensor.element_size()
        else:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(sizes.values())


def parts_of(owner: object, kind: type[T]) -> Iterator[T]:
    """All objects of a type in nested collections, dataclasses and objects of this package."""
    if isinstance(owner, kind):
        yield owner
    elif isinstance(owner, list | tuple):
        for part in owner:
            yield from parts_of(part, kind)
    elif isinstance(owner, dict):
        yield from parts_of(list(owner.values()), kind)
    elif type(owner).__module__.startswith("bytetx."):
        # Objects of the compiled modules have neither.
        own = getattr(owner, "__dict__", ())
        names = [f.name for f in fields(owner)] if is_dataclass(owner) else list(own)
        for name in names:
            yield from parts_of(getattr(owner, name), kind)
