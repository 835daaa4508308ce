"""Low-rank changes of row segments: against f64, in torch and by the Triton kernels."""

import numpy as np
import pytest
import torch
from pairwise import pairwise
from torch import Tensor

from bytetx.ops.gated import gated_linear, prepare_gated
from bytetx.ops.linear import linear, prepare_linear
from bytetx.ops.low_rank import (
    LOW_RANK,
    AdaptedWeight,
    LowRankChange,
    LowRankChanges,
    add_low_rank,
)
from bytetx.packed import AdapterRows, RowSegments

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Segments as (rows, owner); -1: of no owner.
ROWS: dict[str, list[tuple[int, int]]] = {
    "none": [(3, -1)],
    "one": [(70, 0)],
    "apart": [(1, 0), (33, -1), (2, 1), (40, 0), (1, 1), (5, -1)],
    "decode": [(1, i % 3) for i in range(9)],
    "last": [(4, -1), (65, 2)],
}
RANKS = (1, 17, 64)


def segments_of(parts: list[tuple[int, int]]) -> RowSegments:
    ends = np.cumsum([rows for rows, _ in parts])
    starts = ends - [rows for rows, _ in parts]
    owners = np.array([owner for _, owner in parts])
    own = owners >= 0
    return RowSegments(starts[own], ends[own], owners[own], len(RANKS))


def operands(
    rows: str, n: int, k: int, dtype: torch.dtype, device: str
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
        for rank in RANKS
    ]
    if rows == "decode":
        changes[1] = None
    if rows in ("apart", "last"):  # without factors where the rank is 0
        for owner, rank in ((1, 0), (2, RANKS[2])):
            own = changes[owner]
            assert own is not None
            bias = torch.randn(n, device=device).to(dtype)
            a, b = own.a[:rank].contiguous(), own.b[:, :rank].contiguous()
            changes[owner] = LowRankChange(a, b, bias)
    return d, x, segments_of(ROWS[rows]), LowRankChanges(tuple(changes))


def exact(
    d: Tensor, x: Tensor, segments: RowSegments, changes: LowRankChanges, *, has_bias: bool = True
) -> Tensor:
    right = d.double()
    for start, stop, owner in zip(segments.starts, segments.stops, segments.owners, strict=True):
        change = changes.by_owner[owner]
        if change is not None:
            right[start:stop] += x[start:stop].double() @ change.a.double().T @ change.b.double().T
            if change.bias is not None and has_bias:
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
    products = exact(d, x, segments, changes, has_bias=False)
    right = exact(d, x, segments, changes)
    for backend in LOW_RANK.backends:
        if backend.why_missing(x.device) is None:
            ours = d.clone()
            backend.run(ours, x, segments, changes)
            assert_right(ours, products)
    add_low_rank(d, x, segments, changes)
    assert_right(d, right)


@pairwise({"rows": list(ROWS), "n": [8, 130], "k": [16, 200]})
def test_triton_computes_the_same(rows: str, n: int, k: int) -> None:
    pytest.importorskip("triton")
    from bytetx.ops import triton_kernels

    device = "cuda" if torch.cuda.is_available() else "cpu"
    d, x, segments, changes = operands(rows, n, k, torch.float32, device)
    right = exact(d, x, segments, changes, has_bias=False)
    triton_kernels.add_low_rank(
        d,
        x,
        segments,
        addresses=changes.addresses,
        has_change=changes.has_product,
        max_rank=changes.max_rank,
    )
    assert_right(d, right)


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
    nobody = RowSegments(*(np.zeros(0, dtype=np.int64),) * 3, len(RANKS))
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
    d, x, segments, changes = operands("apart", 8, 16, torch.float32, "cpu")
    with pytest.raises(ValueError, match="one entry for each of 3 owners, got 2"):
        add_low_rank(d, x, segments, LowRankChanges(changes.by_owner[:2]))
    with pytest.raises(ValueError, match="x must"):
        add_low_rank(d, x[:, :8].contiguous(), segments, changes)
    first, *others = changes.by_owner
    assert first is not None
    narrow = LowRankChange(first.a[:, :8].contiguous(), first.b)
    with pytest.raises(ValueError, match="a must"):
        LowRankChanges((*others, narrow))
    with pytest.raises(ValueError, match="not None"):
        LowRankChanges((None, None))
    with pytest.raises(ValueError, match="d must"):
        add_low_rank(d[1:], x, segments, changes)
    with pytest.raises(ValueError, match="x has 10 rows"):
        add_low_rank(d[:10], x[:10], segments, changes)


def test_rows_of_one_adapter_are_found_wherever_they_are() -> None:
    class Named:
        """Stands in for an adapter."""

    a, b = Named(), Named()
    rows = np.array([None, a, a, None, b, a, b, b], dtype=object)
    found = AdapterRows.of(rows)
    assert found is not None and found.adapters == (a, b)
    segments = found.segments
    assert segments.starts.tolist() == [1, 4, 5, 6] and segments.stops.tolist() == [3, 5, 6, 8]
    assert segments.owners.tolist() == [0, 1, 0, 1]
    apart = segments.rows_of(0)
    assert isinstance(apart, Tensor) and apart.tolist() == [1, 2, 5]
    assert AdapterRows.of(np.array([None, None], dtype=object)) is None
    assert AdapterRows.of(None) is None
