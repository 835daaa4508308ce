"""Low-rank changes of row segments: against f64, in torch and by the Triton kernels."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from pairwise import pairwise
from torch import Tensor

from bytetx.adapter_rows import AdapterRows, RowSegments
from bytetx.ops.gated import gated_linear, prepare_gated
from bytetx.ops.linear import linear, prepare_linear
from bytetx.ops.low_rank import (
    LOW_RANK,
    AdaptedWeight,
    LowRankChange,
    LowRankChanges,
    RowTiles,
    max_tiles,
    row_tiles,
    start_low_rank,
    tiles_on,
)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Segments as (rows, owner); -1: of no owner.
ROWS: dict[str, list[tuple[int, int]]] = {
    "none": [(3, -1)],
    "one": [(70, 0)],
    "apart": [(1, 0), (33, -1), (2, 1), (40, 0), (1, 1), (5, -1)],
    "decode": [(1, i % 3) for i in range(9)],
    "last": [(4, -1), (65, 2)],
    "many": [(200, 0), (150, 1), (3, -1), (190, 0), (70, 2)],
}
RANKS = (1, 17, 64)


def segments_of(parts: list[tuple[int, int]]) -> RowSegments:
    bounds = np.cumsum([0, *(rows for rows, _ in parts)])
    return RowSegments.of(np.array([owner for _, owner in parts]), bounds)


def changes_of(by_owner: Sequence[LowRankChange | None]) -> LowRankChanges:
    given = [change for change in by_owner if change is not None]
    changes = LowRankChanges.for_these(given, num_owners=len(by_owner))
    for owner, change in enumerate(by_owner):
        changes.put(owner, change)
    return changes


def operands(
    rows: str,
    n: int,
    k: int,
    dtype: torch.dtype,
    device: str,
    ranks: tuple[int, ...] = RANKS,
) -> tuple[Tensor, Tensor, RowSegments, LowRankChanges]:
    torch.manual_seed(n + k + len(rows))
    m = sum(count for count, _ in ROWS[rows])
    x = torch.randn(m, k, device=device).to(dtype)
    d = torch.randn(m, n, device=device).to(dtype)
    changes: list[LowRankChange | None] = [
        LowRankChange(
            (torch.randn(rank, k, device=device) / k**0.5).to(dtype),
            (torch.randn(n, rank, device=device) / rank**0.5).to(dtype),
        )
        for rank in ranks
    ]
    if rows == "decode":
        changes[1] = None
    if rows in ("apart", "last", "many"):  # without factors where the rank is 0
        for owner, rank in ((1, 0), (2, ranks[2])):
            own = changes[owner]
            assert own is not None
            bias = torch.randn(n, device=device).to(dtype)
            a, b = own.a[:rank].contiguous(), own.b[:, :rank].contiguous()
            changes[owner] = LowRankChange(a, b, bias)
    return d, x, segments_of(ROWS[rows]), changes_of(changes)


def exact(d: Tensor, x: Tensor, segments: RowSegments, changes: LowRankChanges) -> Tensor:
    right = d.double()
    for start, stop, owner in zip(segments.starts, segments.stops, segments.owners, strict=True):
        change = changes.by_owner[owner]
        if change is not None:
            right[start:stop] += x[start:stop].double() @ change.a.double().T @ change.b.double().T
            if change.bias is not None:
                right[start:stop] += change.bias.double()
    return right


def assert_right(ours: Tensor, right: Tensor) -> None:
    """Products of a few units, two of them one after another, each rounded once."""
    eps = torch.finfo(ours.dtype).eps
    torch.testing.assert_close(ours.double(), right, rtol=4 * eps, atol=16 * eps)


@pytest.mark.parametrize("device", DEVICES)
@pairwise(
    {
        "rows": list(ROWS),
        "n": [8, 130],
        "k": [16, 200],
        "dtype": [torch.float32, torch.bfloat16],
    }
)
def test_each_row_gets_its_owners_change(
    rows: str, n: int, k: int, dtype: torch.dtype, device: str
) -> None:
    d, x, segments, changes = operands(rows, n, k, dtype, device)
    right = exact(d, x, segments, changes)
    residual = torch.randn_like(d)
    for backend in LOW_RANK.backends:
        if backend.why_missing(x.device) is None and backend.takes(x.device, dtype):
            run = partial(backend.run, x, segments, changes, None)
            assert_right(changed(d, run(None)), right)
            assert_right(changed(d, run(residual)), right + residual.double())
    assert_right(changed(d, start_low_rank(x, segments, changes)), right)


def changed(
    product: Tensor, started: tuple[Tensor | None, Callable[[Tensor], None] | None]
) -> Tensor:
    """A product's rows as the layer computes them from here."""
    residual, add = started
    d = product.clone() if residual is None else product + residual
    if add is not None:
        add(d)
    return d


def run_triton(
    x: Tensor,
    segments: RowSegments,
    changes: LowRankChanges,
    residual: Tensor | None = None,
    tiles: RowTiles | None = None,
) -> tuple[Tensor | None, Callable[[Tensor], None] | None]:
    pytest.importorskip("triton")
    from bytetx.ops import triton_kernels

    return triton_kernels.start_low_rank(
        x,
        tiles_on(x.device, segments, len(x)) if tiles is None else tiles,
        residual,
        n=changes.n,
        addresses=changes.addresses,
        ranges=changes.ranges,
        max_rank=changes.max_rank,
        has_bias=changes.has_bias,
    )


@pairwise({"rows": list(ROWS), "n": [8, 130], "k": [16, 200, 1100], "ranks": [RANKS, (3, 100, 16)]})
def test_triton_computes_the_same(rows: str, n: int, k: int, ranks: tuple[int, ...]) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    d, x, segments, changes = operands(rows, n, k, torch.float32, device, ranks)
    right = exact(d, x, segments, changes)
    assert_right(changed(d, run_triton(x, segments, changes)), right)
    wide = torch.randn(len(x), n + 3, device=device)[:, :n]  # rows apart
    started = run_triton(x, segments, changes, wide)
    assert_right(changed(d, started), right + wide.double())


@pytest.mark.gpu
@pairwise(
    {
        "rows": ["one", "apart", "decode", "last"],
        "n": [8, 136, 2056],
        "k": [16, 1032, 2056],
        "ranks": [(1, 16, 7), (32, 17, 2), (250, 100, 33)],
        "dtype": [torch.float16, torch.bfloat16],
    }
)
def test_the_native_kernel(
    rows: str, n: int, k: int, ranks: tuple[int, ...], dtype: torch.dtype
) -> None:
    d, x, segments, changes = operands(rows, n, k, dtype, "cuda", ranks)
    backend = LOW_RANK.choose(x.device, dtype)
    if backend.name != "native":
        pytest.skip("the core has no such kernel")
    first = changes.by_owner[2]  # of which some outputs have other ranks than others, some none
    if first is not None and n > 1000:
        half = first.rank // 2
        first.b[:500, half:] = first.b[500:1100] = first.b[1100:, :half] = 0
        changes.put(2, first)
    nothing = torch.zeros_like(d)
    change = exact(nothing, x, segments, changes)
    for residual in (None, d, torch.randn(len(x), n + 8, device="cuda").to(dtype)[:, :n]):
        found, add = backend.run(x, segments, changes, None, residual)
        assert add is None and found.is_contiguous()
        assert_right(found, change if residual is None else change + residual.double())


@pytest.mark.parametrize("rows", ["apart", "decode"])
def test_tiles_behind_the_last_are_left_alone(rows: str) -> None:
    """As of a captured step: as many as any batch of the sizes needs."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    d, x, segments, changes = operands(rows, 130, 48, torch.float32, device)
    tiles = tiles_on(x.device, segments, len(x))
    table = torch.zeros(len(tiles.table) + 70, 3, dtype=torch.int32, device=device)
    table[: len(tiles.table)] = tiles.table
    started = run_triton(x, segments, changes, tiles=replace(tiles, table=table))
    assert_right(changed(d, started), exact(d, x, segments, changes))


@pytest.mark.parametrize("rows", ["apart", "many"])
def test_outputs_that_a_change_leaves_alone(rows: str) -> None:
    """As of the keys, where an adapter changes queries and values: each has ranks of its own."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    d, x, segments, _ = operands(rows, 384, 64, torch.float32, device, (32, 32, 32))
    sizes = {"dtype": d.dtype, "device": d.device, "num_owners": 4, "max_rank": 20}
    changes = LowRankChanges(384, 64, **sizes)
    for owner in range(3):
        change = LowRankChange(torch.randn(32, 64, device=device) / 8, torch.randn(384, 32) / 6)
        change = LowRankChange(change.a, change.b.to(device))
        change.b[:128, 16:] = change.b[256:, :16] = change.b[128:256] = 0
        changes.put(owner, change)
    assert changes.max_rank == 32
    used = changes.ranges[0].tolist()
    assert used[0] == [0, 16] and used[1][1] == 0 and used[2] == [16, 32]
    before, right = d.clone(), exact(d, x, segments, changes)
    d = changed(d, run_triton(x, segments, changes))
    assert_right(d, right)
    assert torch.equal(d[:, 128:256], before[:, 128:256])


@pytest.mark.parametrize("rows", list(ROWS))
def test_tiles_hold_each_row_once(rows: str) -> None:
    segments, total = segments_of(ROWS[rows]), sum(count for count, _ in ROWS[rows])
    numbers, table = row_tiles(segments, total)
    tiles = tiles_on(torch.device("cpu"), segments, total)
    owners, is_held = np.full(total, -1), np.zeros(total, dtype=bool)
    for first, count, owner in table.tolist():
        assert 0 < count <= tiles.size
        own = numbers[first : first + count]
        assert not is_held[own].any()
        owners[own], is_held[own] = owner, True
    right = [owner for count, owner in ROWS[rows] for _ in range(count)]
    assert owners.tolist() == right
    # Few rows: those without an owner, too.
    assert is_held.all() if tiles.size == 16 else (is_held == (owners >= 0)).all()
    assert len(table) == len(tiles.table) <= max_tiles(total, len(ROWS[rows]))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("prepack", [False, True])
def test_the_change_comes_before_the_activation(prepack: bool, device: str) -> None:
    _, x, segments, changes = operands("apart", 64, 48, torch.float32, device)
    w, bias, residual = torch.randn(64, 48) / 7, torch.randn(64), torch.randn(len(x), 64)
    w, bias, residual = w.to(device), bias.to(device), residual.to(device)
    base = prepare_linear(w, bias, prepack=prepack)
    adapted = AdaptedWeight(base, segments, changes)
    inner = exact(x.double() @ w.double().T + bias.double(), x, segments, changes)
    ours = adapted.matmul(x, activation="gelu", residual=residual)
    assert_right(ours, torch.nn.functional.gelu(inner) + residual.double())
    assert_right(adapted.matmul(x), inner)
    nobody = RowSegments.of(np.array([-1]), np.array([0, len(x)]))
    unchanged = AdaptedWeight(base, nobody, changes).matmul(x, activation="gelu")
    assert_right(unchanged, linear(x, base, activation="gelu").double())


@pytest.mark.parametrize("device", DEVICES)
def test_gates_and_values_are_both_changed(device: str) -> None:
    _, x, segments, changes = operands("apart", 64, 48, torch.float32, device)
    gate, up = (torch.randn(32, 48, device=device) / 7 for _ in range(2))
    weight = prepare_gated(gate, up, prepack=True)
    ours = AdaptedWeight(weight, segments, changes).matmul(x, activation="silu")
    both = torch.cat([gate, up]).double()
    inner = exact(x.double() @ both.T, x, segments, changes)
    assert_right(ours, torch.nn.functional.silu(inner[:, :32]) * inner[:, 32:])
    assert_right(
        gated_linear(x, weight, activation="silu"),
        torch.nn.functional.silu(x.double() @ gate.double().T) * (x.double() @ up.double().T),
    )


def test_operands_are_checked() -> None:
    d, x, segments, changes = operands("last", 8, 16, torch.float32, "cpu")
    with pytest.raises(ValueError, match="an entry for each of 3 owners, got 2"):
        start_low_rank(x, segments, changes_of(changes.by_owner[:2]))
    with pytest.raises(ValueError, match="x must"):
        start_low_rank(x[:, :8].contiguous(), segments, changes)
    first, *others = changes.by_owner
    assert first is not None
    narrow = LowRankChange(first.a[:, :8].contiguous(), first.b)
    with pytest.raises(ValueError, match="a must"):
        changes_of((*others, narrow))
    with pytest.raises(ValueError, match="residual must"):
        start_low_rank(x, segments, changes, residual=d[1:])
    _, add = start_low_rank(x, segments, changes)
    assert add is not None
    with pytest.raises(ValueError, match="d must"):
        add(d[1:])
    with pytest.raises(ValueError, match="x has 10 rows"):
        start_low_rank(x[:10], segments, changes)


def test_rows_of_one_adapter_are_found_wherever_they_are() -> None:
    class Slotted:
        """Stands in for an adapter."""

        def __init__(self, slot: int):
            self.slot, self.changes = slot, "changes"

    a, b = Slotted(5), Slotted(2)
    bounds = np.array([0, 1, 3, 3, 4, 5, 5, 6, 8])
    found = AdapterRows.of([None, a, b, None, b, None, a, b], bounds)
    assert found is not None and found.changes == "changes"
    segments = found.segments
    assert segments.starts.tolist() == [1, 4, 5, 6] and segments.stops.tolist() == [3, 5, 6, 8]
    assert segments.owners.tolist() == [5, 2, 5, 2] and segments.num_owners == 6
    rows, parts = segments.by_owner
    assert rows.tolist() == [4, 6, 7, 1, 2, 5] and parts == [(2, 0, 3), (5, 3, 6)]
    joined = AdapterRows.of([a, a], np.array([0, 2, 7]))
    assert joined is not None and joined.segments.stops.tolist() == [7]
    assert AdapterRows.of([None, None], np.array([0, 1, 2])) is None
    assert AdapterRows.of([], np.array([0])) is None
