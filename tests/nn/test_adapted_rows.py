"""The slots of a model's adapters, whose tables passes and CUDA graphs share."""

import gc
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from bytetx.adapter_rows import AdapterRows
from bytetx.nn.adapted_rows import AdaptedRows, Adapter, AdapterSlots, LayerChanges
from bytetx.ops.linear import LinearWeight, prepare_linear
from bytetx.ops.low_rank import LowRankChange

CPU = torch.device("cpu")


def adapter_of(
    name: str, w: LinearWeight, rank: int, slots: AdapterSlots, bias: torch.Tensor | None = None
) -> Adapter:
    change = LowRankChange(torch.randn(rank, w.k), torch.randn(w.n, rank), bias)
    return Adapter.of(name, Path(name), {id(w): change}, slots)


def rows_of(adapters: list[Adapter | None]) -> AdaptedRows:
    rows = AdapterRows.of(adapters, np.arange(len(adapters) + 1))
    assert rows is not None
    return AdaptedRows(rows, len(adapters), CPU)


def change_of(adapter: Adapter, w: LinearWeight) -> LowRankChange:
    change = adapter.changes.of_weight[id(w)].by_owner[adapter.slot]
    assert change is not None
    return change


def plain(n: int = 24) -> LinearWeight:
    return prepare_linear(torch.randn(n, 16), torch.randn(n), prepack=False)


def assert_own(given: list[Adapter | None], w: LinearWeight) -> None:
    """Each row has the change of its adapter."""
    x = torch.randn(len(given), 16)
    wanted = w.matmul(x)
    for i, adapter in enumerate(given):
        if adapter is not None:
            change = change_of(adapter, w)
            wanted[i] += x[i] @ change.a.T @ change.b.T
            if change.bias is not None:
                wanted[i] += change.bias
    torch.testing.assert_close(rows_of(given).column_parallel(x, w), wanted, atol=1e-4, rtol=1e-5)


def test_passes_with_other_adapters_give_each_row_its_own() -> None:
    torch.manual_seed(0)
    w, slots = plain(), AdapterSlots()
    a, b, c = (adapter_of(name, w, rank, slots) for name, rank in (("a", 1), ("b", 4), ("c", 7)))
    for given in ([a] * 5, [b, None, a, b, b], [c, c, None, None, a], [None, b, b, c, a]):
        assert_own(given, w)


def test_a_weight_that_no_adapter_of_the_pass_changes_runs_as_it_is() -> None:
    w, other, slots = plain(), plain(), AdapterSlots()
    first, second = adapter_of("a", w, 2, slots), adapter_of("b", other, 2, slots)
    x = torch.randn(3, 16)
    assert torch.equal(rows_of([second] * 3).column_parallel(x, w), w.matmul(x))
    assert_own([first, None, first], w)


def test_larger_tables_are_complete_before_passes_read_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where the adapter that they grow for changes no layer, as one with heads alone."""
    w, slots = plain(), AdapterSlots()
    others = [adapter_of(str(i), w, 2, slots) for i in range(8)]
    before, finished = slots.current, []
    monkeypatch.setattr(
        LayerChanges, "finish", lambda self: finished.append((self, slots.current is before))
    )
    heads = Adapter.of("heads", Path("heads"), {}, slots)
    assert slots.current is not before and finished == [(slots.current, True)]
    assert_own([*others, None], w)
    assert torch.equal(rows_of([heads]).column_parallel(x := torch.randn(1, 16), w), w.matmul(x))


def test_an_adapter_that_nobody_has_leaves_the_memory() -> None:
    w, slots = plain(), AdapterSlots()
    kept, given_up = adapter_of("kept", w, 2, slots), adapter_of("gone", w, 3, slots)
    assert_own([kept, given_up, None], w)
    changes = weakref.ref(change_of(given_up, w).a)
    del given_up
    gc.collect()
    assert changes() is None
    assert_own([kept, None, kept], w)


def test_a_new_adapter_takes_a_free_slot_of_the_same_tables() -> None:
    """A captured pass of the others still runs."""
    w, slots = plain(), AdapterSlots()
    first, second = adapter_of("a", w, 2, slots), adapter_of("b", w, 7, slots)
    changes, slot = slots.current, second.slot
    del second
    again = adapter_of("c", w, 9, slots)
    assert again.slot == slot and slots.current is changes
    assert_own([first, again, None], w)
    assert changes.of_weight[id(w)].addresses[slot].tolist()[2] == 9


@pytest.mark.parametrize("why", ["rank", "bias", "weight", "number"])
def test_tables_grow(why: str) -> None:
    w, other, slots = plain(), plain(), AdapterSlots()
    first = adapter_of("a", w, 2, slots)
    before = slots.current
    more = 8 if why == "number" else 1
    ranks, weight = {"rank": 17}.get(why, 2), other if why == "weight" else w
    bias = torch.randn(w.n) if why == "bias" else None
    added = [adapter_of(str(i), weight, ranks, slots, bias) for i in range(more)]
    assert slots.current.version == before.version + 1
    assert before.of_weight[id(w)].by_owner[first.slot] is change_of(first, w)
    assert len({adapter.slot for adapter in (first, *added)}) == more + 1
    assert_own([first, None, first], w)
    assert_own([*added, None], weight)


def test_adapters_in_turn_have_one_table() -> None:
    """Each alone, with other weights, ranks and biases: graphs of earlier ones still serve."""
    w, other, slots = plain(), plain(), AdapterSlots()
    bias = torch.randn(w.n)
    kinds = [(w, 5, None), (other, 40, None), (w, 20, bias), (w, 3, None)]
    for weight, rank, own in kinds:
        assert_own([adapter_of("a", weight, rank, slots, own)], weight)
    version = slots.current.version
    for weight, rank, own in kinds:
        assert_own([adapter_of("a", weight, rank, slots, own), None], weight)
    assert slots.current.version == version
    adapter_of("wide", w, 200, slots)
    adapter_of("new", plain(), 4, slots)  # tables are made anew, without the rank of the wide one
    assert slots.current.of_weight[id(w)].max_rank == 64


def test_a_change_that_does_not_fit_leaves_its_slot_free() -> None:
    w, slots = plain(), AdapterSlots()
    first = adapter_of("a", w, 2, slots)
    wrong = LowRankChange(torch.randn(2, 15), torch.randn(w.n, 2))
    with pytest.raises(ValueError, match="a must"):
        Adapter.of("wrong", Path("wrong"), {id(w): wrong}, slots)
    second = adapter_of("b", w, 2, slots)
    assert second.slot == 1
    assert_own([first, second], w)


def test_threads_add_and_give_up_adapters_while_others_pass() -> None:
    w, slots = plain(), AdapterSlots()
    errors: list[BaseException] = []

    def churn(seed: int) -> None:
        try:
            mine = [adapter_of(f"{seed}", w, 1 + seed, slots)]
            for i in range(40):
                mine.append(adapter_of(f"{seed}-{i}", w, 1 + (seed * i) % 21, slots))
                if len(mine) > 3:
                    mine.pop(i % 3)
                rows = [*mine, None]
                assert_own(rows, w)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=churn, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    gc.collect()
    alive = adapter_of("last", w, 1, slots)
    assert alive.slot == 0
