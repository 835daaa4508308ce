"""The native kernels of ops.padding, on checked arguments."""

import torch
from torch import Tensor

from bytetx.ops import native
from bytetx.ops.native_params import PaddedMatrix
from bytetx.ops.padded_ids import IdTables, PackedIds, PaddedIds


def count_tokens(mask: Tensor) -> Tensor:
    """ops.padding.count_tokens on a checked mask."""
    num_rows, num_columns = mask.shape
    if mask.numel() == 0:
        return torch.zeros((3, num_rows), dtype=torch.int32, device=mask.device)
    counts = torch.empty((3, num_rows), dtype=torch.int32, device=mask.device)
    native.require_kernel("count_tokens", mask.device)(
        mask=_matrix(mask),
        counts=counts,
        num_rows=num_rows,
        num_columns=num_columns,
        launch=native.launch_args(mask.device),
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
        input_ids=_matrix(ids),
        mask=_matrix(padded.mask),
        token_type_ids=_matrix(padded.token_type_ids),
        position_ids=_matrix(padded.position_ids),
        seqlens=seqlens,
        cu_seqlens=packed.cu_seqlens,
        packed_ids=packed.input_ids,
        packed_positions=packed.position_ids,
        packed_types=packed.token_type_ids,
        rows=rows,
        bad_ids=bad_ids,
        num_rows=num_rows,
        num_columns=num_columns,
        num_texts=num_texts,
        num_sequences=packed.cu_seqlens.shape[0] - 1,
        num_tokens=packed.input_ids.shape[0],
        filler_tokens=filler_tokens,
        position_offset=position_offset,
        num_words=0 if tables is None else tables.word,
        num_positions=0 if tables is None else tables.position,
        num_types=0 if tables is None else tables.token_type,
        launch=native.launch_args(device),
    )
    return rows


def unpack_padded(x: Tensor, rows: Tensor) -> Tensor:
    """ops.padding.unpack_padded on checked arguments."""
    out = torch.empty((rows.shape[0], x.shape[1]), dtype=x.dtype, device=x.device)
    native.require_kernel("unpack_padded", x.device)(
        x=x,
        rows=rows,
        out=out,
        num_places=rows.shape[0],
        row_bytes=x.shape[1] * x.element_size(),
        launch=native.launch_args(x.device),
    )
    return out


def _matrix(t: Tensor | None) -> PaddedMatrix:
    if t is None:
        return PaddedMatrix()
    row_stride = 0 if t.shape[0] == 1 else t.stride(0)
    return PaddedMatrix(t, row_stride, t.element_size(), t.is_floating_point())
