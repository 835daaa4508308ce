"""How layers that carry their communication run: the table's lines, and the rule beyond them."""

import json
from collections.abc import Iterator
from dataclasses import replace
from importlib.resources import files

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytetx.ops import comm_plan, native
from bytetx.ops.comm_plan import CUBLAS, LINEAR, TABLE_FILE, CommPlan, Layer, plan_comm, planned

PUSHES = [("64x32", 64, 32, True), ("64x64", 64, 64, True), ("128x128", 128, 128, True)]
SUM = Layer("gemm_all_reduce", 2, 1024, 4096)
LINES = {
    ("gemm_all_reduce", 2, 1024, 4096, False): [(64, "64x32", 4), (256, CUBLAS, 1)],
    ("gemm_all_reduce", 2, 8192, 8192, False): [(64, CUBLAS, 1), (256, "not-built", 1)],
    ("gemm_all_reduce", 4, 1024, 1024, False): [(64, LINEAR, 1)],
    ("gemm_reduce_scatter", 2, 1024, 512, False): [
        (512, "128x192", 1),
        (1024, "128x128", 1),
        (4096, CUBLAS, 1),
    ],
    ("gemm_reduce_scatter", 2, 8192, 4096, False): [
        (512, "adding-128x128", 1),
        (1024, "copied-128x192", 1),
        (2048, "copied", 1),
        (4096, "copied-not-built", 1),
    ],
    ("all_gather_gemm", 2, 4096, 1024, True): [(4096, LINEAR, 1)],
}


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(native, "gemm_all_reduce_tilings", lambda: PUSHES)
    monkeypatch.setattr(comm_plan, "_table", lambda: LINES)
    plan_comm.cache_clear()
    yield
    plan_comm.cache_clear()


@pytest.mark.parametrize(
    ("m", "plan"), [(1, "64x32"), (64, "64x32"), (65, CUBLAS), (256, CUBLAS), (9999, CUBLAS)]
)
def test_rows_take_the_first_plan_that_was_measured_with_as_many(m: int, plan: str) -> None:
    assert plan_comm(SUM, m).way == plan


@pytest.mark.parametrize(("m", "plan"), [(300, "128x192"), (750, "128x128"), (5000, CUBLAS)])
def test_dealt_rows_take_the_nearest_plan(m: int, plan: str) -> None:
    assert plan_comm(Layer("gemm_reduce_scatter", 2, 1024, 512), m).way == plan


def test_a_way_and_its_tiling_are_one_name() -> None:
    layer = Layer("gemm_reduce_scatter", 2, 8192, 4096)
    adding, copied, whole, other = (plan_comm(layer, m) for m in (512, 1024, 2048, 4096))
    assert adding.is_fused and adding.adds_parts and adding.tiling == "128x128"
    assert copied.is_copied and copied.adds_parts and copied.tiling == "128x192"
    assert whole.is_copied and whole.is_cublas and not whole.adds_parts
    assert other.is_fused and not other.adds_parts  # the rule's


def test_a_size_that_was_not_measured_takes_the_nearest_one() -> None:
    assert plan_comm(replace(SUM, n=1536, k=3072), 64) == CommPlan("64x32", 4)
    assert plan_comm(replace(SUM, n=8192, k=14336), 64) == CommPlan(CUBLAS)


def test_other_ops_and_groups_are_no_neighbours() -> None:
    assert plan_comm(replace(SUM, tp=4), 64).way == LINEAR
    assert plan_comm(replace(SUM, tp=8), 64).way == "dealt-64x64"  # the rule's
    assert plan_comm(Layer("all_gather_gemm", 2, 4096, 1024), 4096).is_fused
    assert not plan_comm(Layer("all_gather_gemm", 2, 4096, 1024, is_gated=True), 4096).is_fused


def test_dealt_rows_of_a_group_that_was_not_measured_go_as_in_the_nearest_one() -> None:
    """Where its ranks have as many rows."""
    layer = Layer("gemm_reduce_scatter", 8, 1024, 128)
    assert [plan_comm(layer, m).way for m in (1200, 4096, 16384)] == ["128x192", "128x128", CUBLAS]
    assert plan_comm(replace(layer, tp=3), 750 * 3 // 2).way == "128x128"
    assert plan_comm(replace(layer, is_even=False), 16384).is_fused  # the rule's


def test_of_many_ranks_more_rows_go_in_two_exchanges() -> None:
    """Rows that go to all cost each link as many times their bytes as there are other ranks."""
    layer = replace(SUM, tp=8, n=12288, k=6144)
    assert plan_comm(layer, 16).way == "dealt-16x64"
    assert plan_comm(layer, 512).is_two_shot and not plan_comm(layer, 512).is_fused
    assert plan_comm(replace(layer, n=1024), 64).is_two_shot
    assert not plan_comm(replace(layer, n=1024), 16).is_two_shot
    assert not plan_comm(replace(layer, tp=2), 512).is_two_shot


def test_who_measures_plans_goes_before_the_table() -> None:
    with planned({SUM: CommPlan(LINEAR)}):
        assert plan_comm(SUM, 64).way == LINEAR
        assert plan_comm(replace(SUM, n=8192, k=8192), 64).way == CUBLAS
    assert plan_comm(SUM, 64).way == "64x32"


def test_a_tiling_that_was_not_built_is_the_rules_to_choose() -> None:
    layer = replace(SUM, n=8192, k=8192)
    assert plan_comm(layer, 256) == plan_comm(replace(layer, is_even=False), 256)


@given(st.integers(1, 9999), st.integers(1, 64), st.integers(1, 99), st.integers(1, 99))
def test_uneven_shares_agree_on_whether_a_kernel_runs(m: int, n: int, k: int, other: int) -> None:
    """Each rank asks with a share of k of its own; its split-k may differ."""
    plans = [plan_comm(replace(SUM, n=128 * n, k=64 * own, is_even=False), m) for own in (k, other)]
    assert plans[0].is_fused == plans[1].is_fused
    assert plans[0].way == plans[1].way


def test_the_table_that_ships() -> None:
    lines = json.loads((files("bytetx.ops") / TABLE_FILE).read_text())["lines"]
    for line in lines:
        rows = [m for m, _, _ in line["plans"]]
        assert rows == sorted(set(rows)) and len(rows) > 1
        assert line["tp"] in (2, 4, 8)
        assert all(1 <= split_k <= 8 for _, _, split_k in line["plans"])
