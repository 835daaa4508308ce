"""The native kernels of ops.padding, on checked arguments."""

import torch
from torch import Tensor

from bytetx.ops import native
from bytetx.ops.padded_ids import IdTables, PackedIds, PaddedIds

_NONE = (0, 0, 4, False)


def has_kernels(device: torch.device) -> bool:
    return device.type == "cuda" and native.kernel("pack_padded", device) is not None


def count_tokens(mask: Tensor) -> Tensor:
    """ops.padding.count_tokens on a checked mask."""
    num_rows, num_columns = mask.shape
    if mask.numel() == 0:
        return torch.zeros((3, num_rows), dtype=torch.int32, device=mask.device)
    counts = torch.empty((3, num_rows), dtype=torch.int32, device=mask.device)
    native.require_kernel("count_tokens", mask.device)(
        _matrix(mask),
        counts.data_ptr(),
        num_rows,
        num_columns,
        *native.launch_args(mask.device),
    )
    return counts


def pack_padded(
    padded: PaddedIds,
    packed: PackedIds,
    *,
    num_texts: int,
    filler_tokens: int,
    position_offset: int,
    seqlens: Tensor | None,
    tables: IdTables | None,
    bad_ids: Tensor | None,
) -> Tensor | None:
    """ops.padding.pack_padded on checked arguments."""
    ids, device = padded.input_ids, padded.input_ids.device
    num_rows, num_columns = ids.shape
    rows = None
    if padded.mask is not None:
        rows = torch.empty(num_rows * num_columns, dtype=torch.int32, device=device)
    native.require_kernel("pack_padded", device)(
        _matrix(ids),
        _matrix(padded.mask),
        _matrix(padded.token_type_ids),
        _matrix(padded.position_ids),
        _address(seqlens),
        packed.cu_seqlens.data_ptr(),
        packed.input_ids.data_ptr(),
        packed.position_ids.data_ptr(),
        _address(packed.token_type_ids),
        _address(rows),
        _address(bad_ids),
        num_rows,
        num_columns,
        num_texts,
        packed.cu_seqlens.shape[0] - 1,
        packed.input_ids.shape[0],
        filler_tokens,
        position_offset,
        0 if tables is None else tables.word,
        0 if tables is None else tables.position,
        0 if tables is None else tables.token_type,
        *native.launch_args(device),
    )
    return rows


def unpack_padded(x: Tensor, rows: Tensor) -> Tensor:
    """ops.padding.unpack_padded on checked arguments."""
    out = torch.empty((rows.shape[0], x.shape[1]), dtype=x.dtype, device=x.device)
    native.require_kernel("unpack_padded", x.device)(
        x.data_ptr(),
        rows.data_ptr(),
        out.data_ptr(),
        rows.shape[0],
        x.shape[1] * x.element_size(),
        *native.launch_args(x.device),
    )
    return out


def _matrix(t: Tensor | None) -> tuple[int, int, int, bool]:
    """(address, row stride, bytes of an item, whether it is floating): PaddedMatrix."""
    if t is None:
        return _NONE
    row_stride = 0 if t.shape[0] == 1 else t.stride(0)
    return t.data_ptr(), row_stride, t.element_size(), t.is_floating_point()


def _address(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()
