"""Memory that a loaded model's weights take."""

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import TypeVar

import torch

from bytetx.nn.heads import MAX_COPIED_HEAD_BYTES
from bytetx.nn.loading import LoadedCheckpoint
from bytetx.nn.quantization import SAVED, weight_format
from bytetx.ops.linear import LinearWeight

T = TypeVar("T")


def weights_bytes(owners: Sequence[object]) -> int:
    """Bytes of all tensors that some objects hold, such as a model and its heads; shared ones count
    once."""
    sizes: dict[int, int] = {}
    for tensor in parts_of(owners, torch.Tensor):
        if tensor.is_mkldnn:  # its storage is oneDNN's own
            sizes[id(tensor)] = tensor.numel() * tensor.element_size()
        else:
            key = tensor.untyped_storage().data_ptr() or tensor.untyped_storage()._cdata
            sizes[key] = tensor.untyped_storage().nbytes()  # one without numbers has no address
    return sum(sizes.values())


def expected_bytes(checkpoint: LoadedCheckpoint) -> int:
    """Bytes that the weights will have in memory, of a checkpoint without numbers.

    For codes it is an estimate from their bits.
    """
    transformer, heads = checkpoint.transformer, checkpoint.heads
    held = weights_bytes([transformer, heads])
    word = transformer.embeddings.word
    if checkpoint.device.type == "cpu" and word.nbytes <= MAX_COPIED_HEAD_BYTES:
        # A tied head is laid out for the CPU, beside the table.
        is_tied = any(one.weight is word for one in parts_of([heads], LinearWeight))
        held += word.nbytes if is_tied else 0
    if checkpoint.quantization == SAVED:
        return sum(checkpoint.saved_formats.values())
    if checkpoint.quantization is not None:
        bits = weight_format(checkpoint.quantization, checkpoint.spec).bits
        return held if bits is None else int(held * bits / (8 * checkpoint.dtype.itemsize))
    return held


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
