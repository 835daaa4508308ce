"""The tables of a model's adapters that passes share."""

import gc
import weakref
from pathlib import Path

import numpy as np
import torch

from bytetx.nn.adapted_rows import AdaptedRows, Adapter, AdapterTables
from bytetx.ops.linear import LinearWeight, prepare_linear
from bytetx.ops.low_rank import LowRankChange
from bytetx.packed import AdapterRows


def adapter_of(name: str, w: LinearWeight, rank: int) -> Adapter:
    change = LowRankChange(torch.randn(rank, w.k), torch.randn(w.n, rank))
    return Adapter(name, Path(name), {id(w): change})


def rows_of(adapters: list[Adapter | None]) -> AdapterRows:
    each = np.empty(len(adapters), dtype=object)
    each[:] = adapters
    rows = AdapterRows.of(each)
    assert rows is not None
    return rows


def test_passes_with_other_adapters_give_each_row_its_own() -> None:
    torch.manual_seed(0)
    w = prepare_linear(torch.randn(24, 16), torch.randn(24), prepack=False)
    tables, x = AdapterTables(), torch.randn(5, 16)
    a, b, c = (adapter_of(name, w, rank) for name, rank in (("a", 1), ("b", 4), ("c", 7)))
    for given in ([a] * 5, [b, None, a, b, b], [c, c, None, None, a], [None, b, b, c, a]):
        ours = AdaptedRows(rows_of(given), tables).column_parallel(x, w)
        wanted = w.matmul(x)
        for i, adapter in enumerate(given):
            if adapter is not None:
                change = adapter.changes[id(w)]
                wanted[i] += x[i] @ change.a.T @ change.b.T
        torch.testing.assert_close(ours, wanted, atol=1e-4, rtol=1e-5)


def test_a_weight_that_no_adapter_of_the_pass_changes_runs_as_it_is() -> None:
    w, other = (prepare_linear(torch.randn(24, 16), None, prepack=False) for _ in range(2))
    tables, x = AdapterTables(), torch.randn(3, 16)
    first = adapter_of("a", w, 2)
    AdaptedRows(rows_of([first] * 3), tables).column_parallel(x, w)
    rows = AdaptedRows(rows_of([adapter_of("b", other, 2)] * 3), tables)
    assert torch.equal(rows.column_parallel(x, w), w.matmul(x))


def test_an_adapter_that_nobody_has_leaves_the_memory() -> None:
    w = prepare_linear(torch.randn(24, 16), None, prepack=False)
    tables, x = AdapterTables(), torch.randn(3, 16)
    kept, given_up = adapter_of("kept", w, 2), adapter_of("gone", w, 3)
    AdaptedRows(rows_of([kept, given_up, None]), tables).column_parallel(x, w)
    changes = weakref.ref(given_up.changes[id(w)].a)
    del given_up
    gc.collect()
    assert changes() is None
    ours = AdaptedRows(rows_of([kept, None, kept]), tables).column_parallel(x, w)
    assert not torch.equal(ours[0], w.matmul(x)[0]) and torch.equal(ours[1], w.matmul(x)[1])
