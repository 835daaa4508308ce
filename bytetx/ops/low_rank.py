"""Low-rank changes of a linear layer, another one for each segment of its rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn, TypeAlias

import numpy as np
import torch
from torch import Tensor

from bytetx.adapter_rows import RowSegments
from bytetx.ops import native, triton_backend
from bytetx.ops.check import is_aligned, require_contiguous, require_tensor
from bytetx.ops.gated import GatedWeight
from bytetx.ops.registry import Operation
from bytetx.ops.weight import QuantizedWeight, Weight
from bytetx.packed import upload
from bytetx.sequence_tree import rows_of

# Shape class: dtype.  run(x, segments, changes, tiles, residual) as of start_low_rank.
LOW_RANK = Operation("low_rank")
# Rows of a batch up to which tiles are small: in decode steps an owner has few.
_FEW_ROWS = 512
_TILE_SIZES = (16, 128)
RANGE_COLUMNS = 128  # outputs of which LowRankChanges.ranges says which ranks change them
_RANK_STEP = 16
_KEPT_RANK = 64  # the largest that one kernel computes at once
_NATIVE_RANK = 256  # the largest of the native kernel
_VEC = 8  # numbers of half types in 16 bytes


# What a layer's product adds, and what then adds to it in place; see start_low_rank.
StartedChange: TypeAlias = tuple[Tensor | None, Callable[[Tensor], None] | None]


@dataclass(frozen=True, slots=True)
class RowTiles:
    """The rows of a batch that have an owner, in tiles of one owner, on a GPU.

    rows: int32, row numbers.  table: int32 [num_tiles, 3], of each tile: where its rows start in
    `rows`, how many it has, at most `size`, and its owner.  Tiles without rows are the last.
    Tiles for few rows hold all rows of the batch, those without an owner as of owner -1.
    """

    rows: torch.Tensor
    table: torch.Tensor
    size: int


@dataclass(frozen=True, slots=True, eq=False)
class LowRankChange:
    """x @ a.T @ b.T + bias, which is added to a layer's x @ w.T; a scale is part of b.

    a: [rank, k].  b: [n, rank]; rank may be 0.  bias: [n], or None.  All contiguous, of one dtype
    and on one device.
    """

    a: Tensor
    b: Tensor
    bias: Tensor | None = None

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    @property
    def num_bytes(self) -> int:
        return self.a.nbytes + self.b.nbytes + (0 if self.bias is None else self.bias.nbytes)


class LowRankChanges:
    """The changes of one layer by the numbers of their owners; threads may share it.

    Passes, and CUDA graphs, read those of their rows' owners while others are put in place.
    by_owner: None where an owner changes nothing here.
    n, k, dtype: of the layer.  max_rank: no change may exceed it.  has_bias: whether one may have a
    bias.
    addresses: int64 [num_owners, 4] on the device of the changes: of a, of b, the rank, and the
        address of the bias, 0 where there is none.
    ranges: int32 [num_owners, ceil(n / RANGE_COLUMNS), 2], likewise: the first and one past the
        last column of b that is not zero everywhere in these rows of b.
    """

    def __init__(
        self,
        n: int,
        k: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        num_owners: int,
        max_rank: int,
        has_bias: bool = False,
    ):
        self.n, self.k, self.dtype, self.has_bias = n, k, dtype, has_bias
        self.max_rank = max(-(-max_rank // _RANK_STEP), 1) * _RANK_STEP
        self.by_owner: list[LowRankChange | None] = [None] * num_owners
        blocks = -(-n // RANGE_COLUMNS)
        self.addresses = torch.zeros(num_owners, 4, dtype=torch.int64, device=device)
        self.ranges = torch.zeros(num_owners, blocks, 2, dtype=torch.int32, device=device)

    @classmethod
    def for_these(
        cls,
        given: Sequence[LowRankChange],
        *,
        num_owners: int,
        before: "LowRankChanges | None" = None,
    ) -> "LowRankChanges":
        """Without changes yet, and with room for each of these.

        before: of the same layer, whose changes fit, too, where they have at most _KEPT_RANK ranks:
        else owners that come and go in turn would have new tables each time.
        """
        ranks = [change.rank for change in given]
        has_bias = any(change.bias is not None for change in given)
        if before is None:
            first = given[0]
            n, k = first.b.shape[0], first.a.shape[1]
            dtype, device = first.a.dtype, first.a.device
        else:
            n, k, dtype, device = before.n, before.k, before.dtype, before.addresses.device
            ranks.append(min(before.max_rank, _KEPT_RANK))
            has_bias = has_bias or before.has_bias
        sizes = {"num_owners": num_owners, "max_rank": max(ranks)}
        return cls(n, k, dtype=dtype, device=device, has_bias=has_bias, **sizes)

    def admits(self, change: LowRankChange) -> bool:
        """Whether max_rank and has_bias allow it."""
        return change.rank <= self.max_rank and (self.has_bias or change.bias is None)

    def put(self, owner: int, change: LowRankChange | None) -> None:
        """Give an owner that no pass has yet its change; on a GPU in the current stream's order.

        Raises ValueError where it differs from the others in n, k, dtype or device.
        """
        addresses, ranges = (0, 0, 0, 0), None
        if change is not None:
            self._require("a", change.a, (change.rank, self.k))
            self._require("b", change.b, (self.n, change.rank))
            if change.bias is not None:
                self._require("bias", change.bias, (self.n,))
            change = _aligned(change)
            bias = 0 if change.bias is None else change.bias.data_ptr()
            addresses = (change.a.data_ptr(), change.b.data_ptr(), change.rank, bias)
            ranges = _ranges(change.b) if change.rank else None
        self.addresses[owner].copy_(torch.tensor(addresses, dtype=torch.int64))
        self.ranges[owner] = 0 if ranges is None else ranges
        self.by_owner[owner] = change

    def _require(self, name: str, t: Tensor, shape: tuple[int, ...]) -> None:
        require_tensor(name, t, shape=shape, dtypes=(self.dtype,), device=self.addresses.device)
        require_contiguous(name, t)


def _aligned(change: LowRankChange) -> LowRankChange:
    """The change with tensors that kernels read 16 bytes at a time."""
    given = (change.a, change.b, change.bias)
    if all(t is None or is_aligned(t) for t in given):
        return change
    a, b, bias = (None if t is None else t.clone() for t in given)
    assert a is not None and b is not None
    return LowRankChange(a, b, bias)


def _ranges(b: Tensor) -> Tensor:
    """As of LowRankChanges, of one change."""
    n, rank = b.shape
    blocks = -(-n // RANGE_COLUMNS)
    is_used = torch.zeros(blocks * RANGE_COLUMNS, rank, dtype=torch.bool, device=b.device)
    torch.ne(b, 0, out=is_used[:n])
    used = is_used.view(blocks, RANGE_COLUMNS, rank).any(1)
    columns = torch.arange(rank, device=b.device)
    first = torch.where(used, columns, rank).amin(1)
    end = torch.where(used, columns + 1, 0).amax(1)
    return torch.stack([first, end], dim=1).int()


def tile_size(total_rows: int) -> int:
    """Rows of a tile, from the rows of a batch."""
    return _TILE_SIZES[total_rows > _FEW_ROWS]


def max_tiles(total_rows: int, num_sequences: int) -> int:
    """No batch of these sizes has more tiles: one that is not full is the last of an owner.

    Rows without an owner count as those of one more.
    """
    return min(total_rows // tile_size(total_rows) + num_sequences + 1, total_rows)


def row_tiles(segments: RowSegments, total_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """The arrays of RowTiles, int32, on the host; rows of an owner keep their order."""
    rows, parts = segments.by_owner
    size = tile_size(total_rows)
    if total_rows <= _FEW_ROWS:
        others = np.ones(total_rows, dtype=bool)
        others[rows] = False
        parts = [*parts, (-1, len(rows), total_rows)]
        rows = np.concatenate([rows, np.flatnonzero(others)])
    owners, starts, stops = np.array(parts, dtype=np.int64).reshape(-1, 3).T
    num_tiles = -(-(stops - starts) // size)
    part = np.repeat(np.arange(len(parts)), num_tiles)
    first = starts[part] + size * rows_of(np.zeros_like(num_tiles), num_tiles)
    table = np.stack([first, np.minimum(stops[part] - first, size), owners[part]], axis=1)
    return rows.astype(np.int32), table.astype(np.int32)


def tiles_on(device: torch.device, segments: RowSegments, total_rows: int) -> RowTiles:
    """The tiles of a batch of so many rows."""
    rows, table = (upload(torch.from_numpy(t), device) for t in row_tiles(segments, total_rows))
    return RowTiles(rows, table, tile_size(total_rows))


def captures_low_rank(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a CUDA graph may hold start_low_rank: torch's products read segments on the host."""
    return LOW_RANK.choose(device, dtype).name != "torch"


def start_low_rank(
    x: Tensor,
    segments: RowSegments,
    changes: LowRankChanges,
    *,
    tiles: RowTiles | None = None,
    residual: Tensor | None = None,
) -> StartedChange:
    """(the residual of a layer's product of these rows, a function that then adds to it in place)

    Of few rows a GPU gives a new residual that holds the change of each segment's owner; otherwise
    the residual is the one given, and the second result adds the changes. Ranks may differ.
    x: [m, k], contiguous, unchanged until the second has run.  residual: [m, n] in x's dtype.
    tiles: what a GPU reads instead of the segments, for several layers; None makes them.
    Raises ValueError on shape, dtype or device mismatch.
    Source: LoRA (arXiv 2106.09685), section 4.1; segments of one step as in S-LoRA
    (arXiv 2311.03285), section 5, without padding to the largest rank.
    """
    device = changes.addresses.device
    require_tensor("x", x, shape=(None, changes.k), dtypes=(changes.dtype,), device=device)
    require_contiguous("x", x)
    shape = (x.shape[0], changes.n)
    if residual is not None:
        require_tensor("residual", residual, shape=shape, dtypes=(x.dtype,), device=device)
    if len(changes.by_owner) < segments.num_owners:
        raise ValueError(
            f"changes must have an entry for each of {segments.num_owners} owners, got "
            f"{len(changes.by_owner)}"
        )
    if len(segments.stops) and segments.stops[-1] > x.shape[0]:
        raise ValueError(f"segments end at row {segments.stops[-1]}, x has {x.shape[0]} rows")
    before, add = LOW_RANK.choose(x.device, x.dtype).run(x, segments, changes, tiles, residual)
    if add is None:
        return before, None

    def add_to(d: Tensor) -> None:
        require_tensor("d", d, shape=shape, dtypes=(x.dtype,), device=device)
        add(d)

    return before, add_to


def _takes_native(device: torch.device, dtype: torch.dtype) -> bool:
    return dtype != torch.float32 and triton_backend.why_no_triton(device) is None


@LOW_RANK.native_kernel("cuda", takes=_takes_native)
def _run_native(
    x: Tensor,
    segments: RowSegments,
    changes: LowRankChanges,
    tiles: RowTiles | None,
    residual: Tensor | None,
) -> StartedChange:
    """Few rows; the Triton kernel takes many as near to the memory's rate."""
    (m, k), n = x.shape, changes.n
    tiles = tiles_on(x.device, segments, m) if tiles is None else tiles
    fits = tiles.size == _TILE_SIZES[0] and changes.max_rank <= _NATIVE_RANK
    fits = fits and n % _VEC == 0 and k % _VEC == 0 and is_aligned(x)
    if residual is not None:
        fits = fits and is_aligned(residual) and residual.stride(0) % _VEC == 0
    if not fits:
        return _run_triton(x, segments, changes, tiles, residual)
    out = x.new_empty((m, n))
    native.require_kernel("low_rank", x.device)(
        x=x,
        residual=residual,
        residual_stride=0 if residual is None else residual.stride(0),
        out=out,
        rows=tiles.rows,
        tiles=tiles.table,
        addresses=changes.addresses,
        ranges=changes.ranges,
        num_tiles=len(tiles.table),
        n=n,
        k=k,
        max_rank=changes.max_rank,
        dtype=native.DTYPE_CODES[x.dtype],
        launch=native.launch_args(x.device),
    )
    return out, None


@LOW_RANK.triton_kernel(beside="")
def _run_triton(
    x: Tensor,
    segments: RowSegments,
    changes: LowRankChanges,
    tiles: RowTiles | None,
    residual: Tensor | None,
) -> StartedChange:
    found: StartedChange = triton_backend.kernels(x.device).start_low_rank(
        x,
        tiles_on(x.device, segments, x.shape[0]) if tiles is None else tiles,
        residual,
        n=changes.n,
        addresses=changes.addresses,
        ranges=changes.ranges,
        max_rank=changes.max_rank,
        has_bias=changes.has_bias,
    )
    return found


@LOW_RANK.in_torch()
def _run_torch(
    x: Tensor,
    segments: RowSegments,
    changes: LowRankChanges,
    tiles: RowTiles | None,
    residual: Tensor | None,
) -> StartedChange:
    """Two products for each owner of rows, which are gathered where they are apart."""

    def add(d: Tensor) -> None:
        rows, parts = segments.by_owner
        first = int(rows[0]) if len(rows) else 0
        are_in_order = bool((rows == np.arange(first, first + len(rows))).all())
        index = None if are_in_order else torch.from_numpy(rows).to(x.device)
        for owner, start, stop in parts:
            change = changes.by_owner[owner]
            if change is None:
                continue
            if index is None:
                own = slice(first + start, first + stop)
                d[own].addmm_(x[own] @ change.a.T, change.b.T)
                if change.bias is not None:
                    d[own] += change.bias
                continue
            apart = index[start:stop]
            sums = x[apart] @ change.a.T @ change.b.T
            d.index_add_(0, apart, sums if change.bias is None else sums + change.bias)

    return residual, add


@dataclass(frozen=True, slots=True, eq=False)
class AdaptedWeight(QuantizedWeight):
    """A layer's weight for the rows of one step, some of which have a change each.

    It has no kernels of its own: the change is added before the activation and what follows it.
    Other members: as of bytetx.ops.weight.Weight.
    """

    base: Weight
    segments: RowSegments
    changes: LowRankChanges
    tiles: RowTiles | None = None

    @property
    def n(self) -> int:
        return self.base.n

    @property
    def k(self) -> int:
        return self.base.k

    @property
    def dtype(self) -> torch.dtype:
        return self.base.dtype

    @property
    def sum_bias(self) -> Tensor | None:
        return self.base.sum_bias

    def shard(self, *, outputs: range | None = None, inputs: range | None = None) -> NoReturn:
        raise TypeError("a weight with adapters is of one step, and is not divided")

    def matmul(
        self, x: Tensor, *, activation: str = "none", residual: Tensor | None = None
    ) -> Tensor:
        base = self.base
        # All rows of a gated weight: the change is that of gates and values, before their product.
        fused = base.fused if isinstance(base, GatedWeight) else base
        is_last = activation == "none" and fused is base  # nothing comes between product and sum
        before, add = start_low_rank(
            x,
            self.segments,
            self.changes,
            tiles=self.tiles,
            residual=residual if is_last else None,
        )
        d = fused.matmul(x, residual=before)
        if add is not None:
            add(d)
        d = base.activated(d, activation)
        return d if residual is None or is_last else d.add_(residual)
