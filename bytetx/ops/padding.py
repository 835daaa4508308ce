"""A padded batch to packed rows and back: checks, choice of kernel."""

from types import ModuleType

import torch
from torch import Tensor

from bytetx.ops import padding_kernel, reference, triton_backend
from bytetx.ops.check import describe, is_operand, require_contiguous, require_tensor
from bytetx.ops.padded_ids import IdTables, PackedIds, PaddedIds
from bytetx.ops.registry import Operation

# run() gives the module whose functions take checked arguments.
PAD = Operation("pack_padded")
PAD.native_kernel("cuda")(lambda device: padding_kernel)
PAD.triton_kernel()(triton_backend.kernels)
PAD.in_torch()(lambda device: reference)

_IDS = (torch.int32, torch.int64)


def count_tokens(mask: Tensor) -> Tensor:
    """int32 [3, num_rows]: each row's tokens, its runs of tokens, and whether it starts with one.

    mask: [num_rows, num_columns] of any dtype but complex, non-zero = token; columns contiguous.
    One kernel on a GPU.  Raises ValueError where mask is no such tensor.
    """
    _check_rows("mask", mask, mask.shape[:1])
    counts: Tensor = _backend(mask.device).count_tokens(mask)
    return counts


def pack_padded(
    padded: PaddedIds,
    packed: PackedIds,
    *,
    num_texts: int,
    filler_tokens: int,
    position_offset: int,
    seqlens: Tensor | None = None,
    tables: IdTables | None = None,
    bad_ids: Tensor | None = None,
) -> Tensor | None:
    """Writes the tokens of a padded batch behind one another; nothing waits for the GPU.

    num_texts: sequences for texts; those past the batch's rows are empty.  The sequences after them
    are fillers of at most filler_tokens tokens each, over the rows that are no token of the batch:
    token 0 at position 0.  packed must have room for the tokens, and fillers for the rest.
    position_offset: position id of the first column.  Where it is not 0, the token
    position_offset - 1 (the pad token) has that number as its position and the others are counted,
    as Hugging Face has it.  padded.position_ids win.
    seqlens: int32 [num_rows], the tokens of each row, where count_tokens has been asked; otherwise
    each row counts those before it.
    bad_ids: int32 [3] that an id of the batch's tokens is written to where it is outside of
    `tables` (see bytetx.ops.embedding.embed).
    Returns int32 [num_rows * num_columns], the packed row of each padded position, -1 at pads; None
    where there is no mask.  Ids beyond int32 become the nearest int32.
    Raises ValueError on shape, dtype or device mismatch.
    """
    _check(padded, packed, num_texts=num_texts, seqlens=seqlens)
    if (tables is None) != (bad_ids is None):
        raise ValueError("tables and bad_ids must be given both, or neither")
    rows: Tensor | None = _backend(padded.input_ids.device).pack_padded(
        padded,
        packed,
        num_texts=num_texts,
        filler_tokens=filler_tokens,
        position_offset=position_offset,
        seqlens=seqlens,
        tables=tables,
        bad_ids=bad_ids,
    )
    return rows


def unpack_padded(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows], with zeros where rows is -1.

    x: [num_tokens, width], contiguous.  rows: int32 [num_padded], below num_tokens.
    Returns a new [num_padded, width] of x's dtype.  Raises ValueError on shape, dtype or device
    mismatch.
    """
    require_tensor("x", x, shape=(None, None))
    require_contiguous("x", x)
    require_tensor("rows", rows, shape=(None,), dtypes=(torch.int32,), device=x.device)
    require_contiguous("rows", rows)
    unpacked: Tensor = _backend(x.device).unpack_padded(x, rows)
    return unpacked


def _backend(device: torch.device) -> ModuleType:
    """The module whose functions take checked arguments on this device."""
    module: ModuleType = PAD.choose(device).run(device)
    return module


def _check(padded: PaddedIds, packed: PackedIds, *, num_texts: int, seqlens: Tensor | None) -> None:
    ids = padded.input_ids
    _check_rows("input_ids", ids, ids.shape, dtypes=_IDS)
    if padded.mask is not None:
        _check_rows("mask", padded.mask, ids.shape, device=ids.device)
    for name in ("token_type_ids", "position_ids"):
        given = getattr(padded, name)
        if given is not None:
            num_rows = 1 if given.shape[:1] == (1,) else ids.shape[0]
            shape = (num_rows, ids.shape[1])
            _check_rows(name, given, shape, dtypes=_IDS, device=ids.device)
    num_tokens, num_ends, index = (
        packed.input_ids.shape[0],
        packed.cu_seqlens.shape[0],
        ids.get_device(),
    )
    outputs = (
        ("cu_seqlens", packed.cu_seqlens, num_ends),
        ("packed input_ids", packed.input_ids, num_tokens),
        ("packed position_ids", packed.position_ids, num_tokens),
        ("packed token_type_ids", packed.token_type_ids, num_tokens),
        ("seqlens", seqlens, ids.shape[0]),
    )
    for name, t, size in outputs:
        # The way of every right argument: a third of the time of require_tensor.
        if t is not None and not is_operand(t, (size,), torch.int32, index):
            require_tensor(name, t, shape=(size,), dtypes=(torch.int32,), device=ids.device)
            require_contiguous(name, t)
    if not ids.shape[0] <= num_texts < packed.cu_seqlens.shape[0]:
        raise ValueError(
            f"num_texts must be at least the batch's {ids.shape[0]} rows and below the "
            f"{packed.cu_seqlens.shape[0]} entries of cu_seqlens, got {num_texts}"
        )


def _check_rows(
    name: str,
    t: Tensor,
    shape: tuple[int, ...],
    *,
    dtypes: tuple[torch.dtype, ...] | None = None,
    device: torch.device | None = None,
) -> None:
    """A matrix whose columns are contiguous; rows may be any distance apart."""
    if (
        t.shape == shape
        and t.dim() == 2
        and dtypes is not None
        and t.dtype in dtypes
        and (device is None or t.device == device)
        and t.stride(-1) == 1
    ):
        return
    fits = t.dim() == 2 and t.shape[: len(shape)] == shape and not t.is_complex()
    fits = fits and (dtypes is None or t.dtype in dtypes) and device in (None, t.device)
    if not fits:
        kinds = "a matrix" if dtypes is None else " or ".join(str(d)[6:] for d in dtypes)
        where = "" if device is None else f" on {device}"
        raise ValueError(f"{name} must be {kinds} {list(shape)}{where}, got {describe(t)}")
    if t.shape[1] > 1 and t.stride(1) != 1:
        raise ValueError(
            f"{name} must have contiguous columns, got strides {list(t.stride())} for "
            f"{describe(t)}; pass {name}.contiguous()"
        )
