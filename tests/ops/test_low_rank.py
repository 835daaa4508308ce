"""Low-rank changes of row segments: against f64, in torch and by the Triton kernels."""

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
    add_low_rank,
    max_tiles,
    row_tiles,
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
    return d, x, segments_of(ROWS[rows]), LowRankChanges.of(changes)


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
    for backend in LOW_RANK.backends:
        if backend.why_missing(x.device) is None:
            ours = d.clone()
            backend.run(x, segments, changes, None)(ours)
            assert_right(ours, right)
    add_low_rank(d, x, segments, changes)
    assert_right(d, right)


def run_triton(d: Tensor, x: Tensor, segments: RowSegments, changes: LowRankChanges) -> None:
    pytest.importorskip("triton")
    from bytetx.ops import triton_kernels

    tiles = tiles_on(x.device, segments, len(x))
    add = triton_kernels.start_low_rank(
        x,
        tiles,
        n=changes.n,
        addresses=changes.addresses,
        ranges=changes.ranges,
        max_rank=changes.max_rank,
        has_bias=changes.has_bias,
    )
    add(d)


@pairwise({"rows": list(ROWS), "n": [8, 130], "k": [16, 200, 1100], "ranks": [RANKS, (3, 100, 16)]})
def test_triton_computes_the_same(rows: str, n: int, k: int, ranks: tuple[int, ...]) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    d, x, segments, changes = operands(rows, n, k, torch.float32, device, ranks)
    right = exact(d, x, segments, changes)
    run_triton(d, x, segments, changes)
    assert_right(d, right)


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
    run_triton(d, x, segments, changes)
    assert_right(d, right)
    assert torch.equal(d[:, 128:256], before[:, 128:256])


@pytest.mark.parametrize("rows", list(ROWS))
@pytest.mark.parametrize("size", [1, 16, 128])
def test_tiles_hold_each_row_once(rows: str, size: int) -> None:
    segments, total = segments_of(ROWS[rows]), sum(count for count, _ in ROWS[rows])
    numbers, table = row_tiles(segments, size)
    owners = np.full(total, -1)
    for first, count, owner in table.tolist():
        assert 0 < count <= size
        assert (owners[numbers[first : first + count]] == -1).all()
        owners[numbers[first : first + count]] = owner
    assert owners.tolist() == [owner for count, owner in ROWS[rows] for _ in range(count)]
    table = tiles_on(torch.device("cpu"), segments, total).table
    assert len(table) <= max_tiles(total, len(ROWS[rows]))


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
        add_low_rank(d, x, segments, LowRankChanges.of(changes.by_owner[:2]))
    with pytest.raises(ValueError, match="x must"):
        add_low_rank(d, x[:, :8].contiguous(), segments, changes)
    first, *others = changes.by_owner
    assert first is not None
    narrow = LowRankChange(first.a[:, :8].contiguous(), first.b)
    with pytest.raises(ValueError, match="a must"):
        LowRankChanges.of((*others, narrow))
    with pytest.raises(ValueError, match="not None"):
        LowRankChanges.of((None, None))
    with pytest.raises(ValueError, match="d must"):
        add_low_rank(d[1:], x, segments, changes)
    with pytest.raises(ValueError, match="x has 10 rows"):
        add_low_rank(d[:10], x[:10], segments, changes)


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
