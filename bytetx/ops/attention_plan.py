"""Planned attention: the Hopper kernel, and the plan of a batch that all its layers share."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from bytetx.ops import native, triton_backend
from bytetx.ops.check import HALF_DTYPES
from bytetx.ops.triton_backend import why_no_triton
from bytetx.sequence_tree import MAX_ANCESTORS, SequenceTree

MAX_HEAD_DIM = 256
# Of Triton's kernel, on Hopper as well, in half types and without a tree.
MAX_WIDE_HEAD_DIM = 512
# A batch-invariant GPU kernel takes so many keys at a time, from the start of a sequence or of an
# ancestor on: ancestors of a multiple of so many tokens change no bits.
TREE_KEY_STEP = 64
_ALIGNMENT_BYTES = 16
# A tree's plan: what the kernel counts in, and each tile with its ancestors.
_HEADER_INTS, _TILE_INTS = 4, 4 + 2 * MAX_ANCESTORS

Array = TypeVar("Array", np.ndarray, Tensor)


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Which rows each tile of the attention kernel owns; made by plan_attention, on the device.

    buffer: uint8, in the layout of csrc/cuda/attention_plan.cuh.  tile_rows: token rows a tile
    holds.  With Triton's kernel, buffer is what sequence_bounds gives and tile_rows is 0.  The rest
    is what the plan was made for and holds for; with batch_invariant every sequence opens a tile.
    A native kernel counts in the buffer, so the calls that share a plan run one after the other, as
    in one stream.
    tree: which sequences continue others; tables: its arrays on the device, on a GPU (tiles,
    ancestors, row_bounds) of SequenceTree.tiles, else (rows, cu_keys) of SequenceTree.key_rows;
    none where no kernel takes them.
    """

    buffer: Tensor
    tile_rows: int
    batch_size: int
    total_tokens: int
    causal: bool
    window: int
    batch_invariant: bool = False
    tree: SequenceTree | None = None
    tables: tuple[Tensor, ...] = ()


def plan_attention(
    cu_seqlens: Tensor,
    *,
    total_tokens: int,
    head_dim: int,
    causal: bool = False,
    window: int = 0,
    has_bias: bool = False,
    softcap: float = 0.0,
    has_sinks: bool = False,
    batch_invariant: bool = False,
    tree: SequenceTree | None = None,
    tables: Tensor | None = None,
) -> AttentionPlan | None:
    """Plans one batch for varlen_attention; None where no kernel takes a plan, or nothing to do.

    cu_seqlens: int32 [batch_size + 1].  total_tokens: rows of q; where it is more than
    cu_seqlens[-1], the rows past that are padding, which no sequence reads and nobody writes.
    causal, window, head_dim, has_bias, softcap, has_sinks: as the calls that will use the plan.
    batch_invariant: every sequence opens a tile and one kernel runs them all, so that a sequence's
    bits depend on it alone; of the native kernel.
    tree: of this batch, where sequences continue others; its plan is made on the host.  Raises
    ValueError where such attention is not causal or has a bias.
    tables: of the tree, as tree_tables gives them, on the device; a captured graph reads there
    those of other trees of the same sizes.
    Costs one small kernel and no synchronisation, so that a captured graph can hold it.
    """
    batch_size = cu_seqlens.shape[0] - 1
    if batch_size == 0 or total_tokens == 0:
        return None
    if tree is not None:
        if not causal or has_bias:
            raise ValueError("attention with a tree must be causal and without a relative_bias")
        made_for = (batch_size, total_tokens, causal, window, batch_invariant)
        return _plan_tree(tree, tables, head_dim, softcap, cu_seqlens.device, *made_for)
    if has_sinks or head_dim > MAX_HEAD_DIM or not has_planned_kernel(cu_seqlens.device):
        device = cu_seqlens.device
        if why_no_triton(device) is not None:
            return None
        bounds = triton_backend.kernels(device).sequence_bounds(cu_seqlens, total_tokens)
        return AttentionPlan(bounds, 0, batch_size, total_tokens, causal, window)
    kernels = _kernels(cu_seqlens.device)
    # Wide tiles have no kernel that changes scores: a head_dim of 0 asks for narrow ones.
    is_plain = not has_bias and softcap == 0
    takes_wide = is_plain and not batch_invariant
    tile_rows = kernels.tile_rows(
        batch_size=batch_size,
        total_tokens=total_tokens,
        head_dim=head_dim if takes_wide else 0,
    )
    num_bytes = kernels.plan_bytes(
        batch_size=batch_size,
        total_tokens=total_tokens,
        tile_rows=tile_rows,
        batch_invariant=batch_invariant,
    )
    buffer = torch.empty(num_bytes, dtype=torch.uint8, device=cu_seqlens.device)
    kernels.plan(
        cu_seqlens=cu_seqlens,
        plan=buffer,
        plan_bytes=num_bytes,
        batch_size=batch_size,
        total_tokens=total_tokens,
        tile_rows=tile_rows,
        window=min(window, native.MAX_WINDOW),
        causal=causal,
        batch_invariant=batch_invariant,
        launch=native.launch_args(cu_seqlens.device),
    )
    sizes = (tile_rows, batch_size, total_tokens)
    return AttentionPlan(buffer, *sizes, causal, window, batch_invariant)


def tree_tile_rows(
    head_dim: int, device: torch.device, *, softcap: float = 0.0, batch_invariant: bool = False
) -> int:
    """Query rows of a tile of a tree; 0 where no kernel takes tiles, as on a CPU."""
    if has_planned_kernel(device):
        # As for one long sequence: what a tile's rows see together is long.
        takes_wide = softcap == 0 and not batch_invariant
        rows: int = _kernels(device).tile_rows(
            batch_size=1, total_tokens=2**30, head_dim=head_dim if takes_wide else 0
        )
        return rows
    if device.type == "cpu" or why_no_triton(device) is not None:
        return 0
    rows = triton_backend.kernels(device).tree_tile_rows(head_dim)
    return rows


def tree_tables(
    tree: SequenceTree,
    tile_rows: int,
    *,
    window: int = 0,
    batch_invariant: bool = False,
    num_tiles: int | None = None,
) -> np.ndarray:
    """int32: a tree's plan in the layout of csrc/cuda/attention_plan.cuh.

    tile_rows: tree_tile_rows.  num_tiles: places for tiles, which those of the tree fit; None means
    just as many as it has.
    """
    found = tree.tiles(tile_rows, window=window, batch_invariant=batch_invariant)
    used = len(found.tiles)
    tables = np.zeros(num_table_ints(tree.num_rows, tile_rows, num_tiles or used), np.int32)
    header, tiles, ancestors, row_bounds = _parts(tables, tree.num_rows, tile_rows)
    header[0] = used
    tiles[:used] = found.tiles
    ancestors[:used] = found.ancestors
    row_bounds[: tree.num_rows] = found.row_bounds
    row_bounds[tree.num_rows :] = tree.total_keys
    return tables


def _bounds_rows(num_rows: int, tile_rows: int) -> int:
    """Rows of row_bounds: tiles are read whole, from an even row on."""
    return num_rows + tile_rows + 2 + num_rows % 2


def num_table_ints(num_rows: int, tile_rows: int, num_tiles: int) -> int:
    """int32s of tree_tables."""
    return _HEADER_INTS + _TILE_INTS * num_tiles + 2 * _bounds_rows(num_rows, tile_rows)


def _parts(tables: Array, num_rows: int, tile_rows: int) -> tuple[Array, Array, Array, Array]:
    """The header, tiles, ancestors and row_bounds of a tree's tables; views."""
    num_bounds = 2 * _bounds_rows(num_rows, tile_rows)
    num_tiles = (len(tables) - _HEADER_INTS - num_bounds) // _TILE_INTS
    lengths = (_HEADER_INTS, 4 * num_tiles, 2 * MAX_ANCESTORS * num_tiles, num_bounds)
    header, tiles, ancestors, bounds = (
        tables[end - length : end] for length, end in zip(lengths, accumulate(lengths), strict=True)
    )
    return (
        header,
        tiles.reshape(-1, 4),
        ancestors.reshape(-1, MAX_ANCESTORS, 2),
        bounds.reshape(-1, 2),
    )


def _plan_tree(
    tree: SequenceTree,
    tables: Tensor | None,
    head_dim: int,
    softcap: float,
    device: torch.device,
    batch_size: int,
    total_tokens: int,
    causal: bool,
    window: int,
    batch_invariant: bool,
) -> AttentionPlan:
    if (len(tree), tree.num_rows) != (batch_size, total_tokens):
        raise ValueError(
            f"tree must be of this batch of {batch_size} sequences and {total_tokens} tokens, got "
            f"{len(tree)} and {tree.num_rows}"
        )
    sizes = (batch_size, total_tokens, causal, window, batch_invariant, tree)
    if device.type == "cpu":
        rows, cu_keys = map(torch.from_numpy, tree.key_rows())
        return AttentionPlan(torch.empty(0, dtype=torch.uint8), 0, *sizes, tables=(rows, cu_keys))
    tile_rows = tree_tile_rows(head_dim, device, softcap=softcap, batch_invariant=batch_invariant)
    if tile_rows == 0:
        return AttentionPlan(torch.empty(0, dtype=torch.uint8), 0, *sizes)
    if tables is None:
        host = tree_tables(tree, tile_rows, window=window, batch_invariant=batch_invariant)
        tables = torch.from_numpy(host)
        if device.type == "cuda":
            tables = tables.pin_memory().to(device, non_blocking=True)
    _, *parts = _parts(tables, total_tokens, tile_rows)
    return AttentionPlan(tables.view(torch.uint8), tile_rows, *sizes, tables=tuple(parts))


def run_planned(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: AttentionPlan,
    *,
    softmax_scale: float,
    softcap: float,
    relative_bias: Tensor | None,
    bias_positions: Tensor | None,
    sinks: None,
    out: Tensor | None,
) -> Tensor:
    """The Hopper kernel on checked arguments that it takes."""
    total_tokens, num_heads, head_dim = q.shape
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    _kernels(q.device).attention(
        q=q,
        k=k,
        v=v,
        out=out,
        plan=plan.buffer,
        relative_bias=relative_bias,
        bias_positions=bias_positions,
        batch_size=plan.batch_size,
        total_tokens=total_tokens,
        num_keys=k.shape[0],
        num_tiles=0 if plan.tree is None else plan.tables[0].shape[0],
        tile_rows=plan.tile_rows,
        num_heads=num_heads,
        num_kv_heads=k.shape[1],
        head_dim=head_dim,
        relative_bias_span=0 if relative_bias is None else (relative_bias.shape[1] + 1) // 2,
        window=min(plan.window, native.MAX_WINDOW),
        causal=plan.causal,
        q_stride=q.stride(0),
        k_stride=k.stride(0),
        v_stride=v.stride(0),
        out_stride=num_heads * head_dim,
        softmax_scale=softmax_scale,
        softcap=softcap,
        dtype=native.DTYPE_CODES[q.dtype],
        batch_invariant=plan.batch_invariant,
        launch=native.launch_args(q.device),
    )
    return out


def run_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: AttentionPlan,
    *,
    softmax_scale: float,
    softcap: float,
    relative_bias: Tensor | None,
    bias_positions: Tensor | None,
    sinks: Tensor | None,
    out: Tensor | None,
) -> Tensor:
    """Triton's kernel on checked arguments that it takes."""
    kernels = triton_backend.kernels(q.device)
    if out is None:
        out = q.new_empty(q.shape)
    window = min(plan.window, native.MAX_WINDOW)
    if plan.tree is not None:
        attended: Tensor = kernels.tree_attention(
            q,
            k,
            v,
            plan.tables,
            tile_rows=plan.tile_rows,
            softmax_scale=softmax_scale,
            window=window,
            softcap=softcap,
            out=out,
        )
        return attended
    assert plan.tile_rows == 0  # a native plan holds no sequence bounds
    attended = kernels.varlen_attention(
        q,
        k,
        v,
        plan.buffer,
        batch_size=plan.batch_size,
        softmax_scale=softmax_scale,
        causal=plan.causal,
        window=window,
        softcap=softcap,
        relative_bias=relative_bias,
        bias_positions=bias_positions,
        sinks=sinks,
        out=out,
    )
    return attended


def is_planned(dtype: torch.dtype, head_dim: int, device: torch.device) -> bool:
    """Whether a model's attention runs by a plan, so that no launch depends on the lengths."""
    if dtype not in HALF_DTYPES or not 0 < head_dim <= MAX_WIDE_HEAD_DIM:
        return False
    if has_planned_kernel(device) and head_dim <= MAX_HEAD_DIM:
        return head_dim * dtype.itemsize % _ALIGNMENT_BYTES == 0
    return why_no_triton(device) is None


@native.cached_lookup
def has_planned_kernel(device: torch.device) -> bool:
    return native.kernel("planned_attention", device) is not None


@dataclass(frozen=True, slots=True)
class _Kernels:
    tile_rows: Callable[..., Any]
    plan_bytes: Callable[..., Any]
    plan: Callable[..., Any]
    attention: Callable[..., Any]


@cache
def _kernels(device: torch.device) -> _Kernels:
    names = (
        "attention_tile_rows",
        "attention_plan_bytes",
        "attention_plan",
        "planned_attention",
    )
    return _Kernels(*(native.require_kernel(name, device) for name in names))
