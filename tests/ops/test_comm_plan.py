"""How layers that carry their communication run: the table's lines, and the rule beyond them."""

import json
from collections.abc import Iterator
from dataclasses import replace
from importlib.resources import files

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytetx.ops import comm_plan, native
from bytetx.ops.comm_plan import (
    TABLE_FILE,
    CommPlan,
    Layer,
    fused_plans,
    is_built,
    override_plans,
    plan_comm,
    tile_index,
)

TILINGS = [
    ("64x32", 64, 32, True),
    ("64x64", 64, 64, True),
    ("128x128", 128, 128, True),
    ("128x128", 128, 128, False),
]
CUBLAS, LINEAR = CommPlan("cublas"), CommPlan("linear")
SMALL_M = CommPlan("fused_small_m", "one_shot", "64x32", 4)
WIDE = CommPlan("fused", "peer_store", "128x192")
NARROW = CommPlan("fused", "peer_store", "128x128")
FUSED_REDUCE = replace(NARROW, fuse_reduce=True)
COPY_ENGINE = CommPlan("cublas", "copy_engine")
SUM = Layer("gemm_all_reduce", 2, 1024, 4096)
LINES = {
    ("gemm_all_reduce", 2, 1024, 4096, False): [(64, SMALL_M), (256, CUBLAS)],
    ("gemm_all_reduce", 2, 8192, 8192, False): [
        (64, CUBLAS),
        (256, replace(SMALL_M, tile="not-built")),
    ],
    ("gemm_all_reduce", 4, 1024, 1024, False): [(64, LINEAR)],
    ("gemm_reduce_scatter", 2, 1024, 512, False): [(512, WIDE), (1024, NARROW), (4096, CUBLAS)],
    ("gemm_reduce_scatter", 2, 8192, 4096, False): [
        (512, FUSED_REDUCE),
        (2048, COPY_ENGINE),
        (4096, replace(FUSED_REDUCE, tile="not-built")),
    ],
    ("all_gather_gemm", 2, 4096, 1024, True): [(4096, LINEAR)],
}


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(native, "gemm_all_reduce_tilings", lambda: TILINGS)
    monkeypatch.setattr(comm_plan, "_table", lambda: LINES)
    plan_comm.cache_clear()
    tile_index.cache_clear()
    yield
    plan_comm.cache_clear()
    tile_index.cache_clear()


@pytest.mark.parametrize(
    ("m", "plan"), [(1, SMALL_M), (64, SMALL_M), (65, CUBLAS), (256, CUBLAS), (9999, CUBLAS)]
)
def test_rows_take_the_first_plan_that_was_measured_with_as_many(m: int, plan: CommPlan) -> None:
    assert plan_comm(SUM, m) == plan


@pytest.mark.parametrize(("m", "plan"), [(300, WIDE), (750, NARROW), (5000, CUBLAS)])
def test_sharded_rows_take_the_nearest_plan(m: int, plan: CommPlan) -> None:
    assert plan_comm(Layer("gemm_reduce_scatter", 2, 1024, 512), m) == plan


def test_plans_of_reduce_scatters() -> None:
    layer = Layer("gemm_reduce_scatter", 2, 8192, 4096)
    assert [plan_comm(layer, m) for m in (512, 2048)] == [FUSED_REDUCE, COPY_ENGINE]
    by_rule = plan_comm(layer, 4096)
    assert by_rule.is_fused and not by_rule.fuse_reduce and by_rule.tile != "not-built"


def test_a_plan_is_read_as_it_was_written() -> None:
    for plan in (SMALL_M, FUSED_REDUCE, COPY_ENGINE, LINEAR):
        assert CommPlan(**json.loads(json.dumps(plan.to_json()))) == plan
    assert SMALL_M.to_json() == {
        "gemm": "fused_small_m",
        "transport": "one_shot",
        "tile": "64x32",
        "split_k": 4,
    }
    assert str(SMALL_M) == "fused_small_m/one_shot/64x32/split_k=4"
    assert str(FUSED_REDUCE) == "fused/peer_store/128x128/fuse_reduce"
    assert LINEAR.to_json() == {"gemm": "linear"}


def test_a_small_m_tile_and_a_large_one_of_the_same_name_are_two() -> None:
    assert tile_index("gemm_all_reduce", "fused_small_m", "128x128") == 2
    assert tile_index("gemm_all_reduce", "fused", "128x128") == 3
    with pytest.raises(ValueError, match="gemm_all_reduce has no tile 64x64 of the GEMM fused"):
        tile_index("gemm_all_reduce", "fused", "64x64")


def test_a_size_that_was_not_measured_takes_the_nearest_one() -> None:
    assert plan_comm(replace(SUM, n=1536, k=3072), 64) == SMALL_M
    assert plan_comm(replace(SUM, n=8192, k=14336), 64) == CUBLAS


def test_other_ops_and_groups_are_no_neighbours() -> None:
    assert plan_comm(replace(SUM, tp=4), 64) == LINEAR
    by_rule = plan_comm(replace(SUM, tp=8), 64)
    assert (by_rule.gemm, by_rule.transport, by_rule.tile) == ("fused_small_m", "two_shot", "64x64")
    assert plan_comm(Layer("all_gather_gemm", 2, 4096, 1024), 4096).is_fused
    assert not plan_comm(Layer("all_gather_gemm", 2, 4096, 1024, is_gated=True), 4096).is_fused


def test_a_group_size_that_was_not_measured_takes_the_plans_of_the_nearest() -> None:
    """Where its ranks have as many rows."""
    layer = Layer("gemm_reduce_scatter", 8, 1024, 128)
    assert [plan_comm(layer, m) for m in (1200, 4096, 16384)] == [WIDE, NARROW, CUBLAS]
    assert plan_comm(replace(layer, tp=3), 750 * 3 // 2) == NARROW
    assert plan_comm(replace(layer, is_even=False), 16384).is_fused  # the rule's


def test_of_many_ranks_more_rows_go_in_two_exchanges() -> None:
    """Rows that go to all cost each link as many times their bytes as there are other ranks."""
    layer = replace(SUM, tp=8, n=12288, k=6144)

    def transport(layer: Layer, m: int) -> str:
        return plan_comm(layer, m).transport

    assert (plan_comm(layer, 16).gemm, plan_comm(layer, 16).tile) == ("fused_small_m", "16x64")
    assert transport(layer, 16) == "two_shot"
    assert transport(layer, 512) == "two_shot" and not plan_comm(layer, 512).is_fused
    assert transport(replace(layer, n=1024), 64) == "two_shot"
    assert transport(replace(layer, n=1024), 16) == "one_shot"
    assert transport(replace(layer, tp=2), 512) != "two_shot"


def test_measurements_override_the_table() -> None:
    with override_plans({SUM: LINEAR}):
        assert plan_comm(SUM, 64) == LINEAR
        assert plan_comm(replace(SUM, n=8192, k=8192), 64) == CUBLAS
    assert plan_comm(SUM, 64) == SMALL_M


def test_a_tiling_that_was_not_built_is_the_rules_to_choose() -> None:
    layer = replace(SUM, n=8192, k=8192)
    assert plan_comm(layer, 256) == plan_comm(replace(layer, is_even=False), 256)


@given(st.integers(1, 9999), st.integers(1, 64), st.integers(1, 99), st.integers(1, 99))
def test_uneven_shares_agree_on_whether_a_kernel_runs(m: int, n: int, k: int, other: int) -> None:
    """Each rank asks with a share of k of its own; its split-k may differ."""
    plans = [plan_comm(replace(SUM, n=128 * n, k=64 * own, is_even=False), m) for own in (k, other)]
    assert replace(plans[0], split_k=1) == replace(plans[1], split_k=1)


def test_the_table_that_ships() -> None:
    """Each plan is one that the tuner could have written for the layer."""
    lines = json.loads((files("bytetx.ops") / TABLE_FILE).read_text())["lines"]
    small_m = {f"{rows}x{columns}" for rows in (16, 32, 64) for columns in (64, 128)}
    tiles = {
        "fused_small_m": small_m | {"128x128", "256x64"},
        "fused": {"128x192", "128x128"},
        "linear": {None},
        "cublas": {None},
    }
    transports = {
        "all_gather_gemm": {"collective", "peer_store", "copy_engine"},
        "gemm_reduce_scatter": {"collective", "peer_store", "copy_engine"},
        "gemm_all_reduce": {"collective", "one_shot", "two_shot"},
        "column_gemm": {"collective"},
    }
    for line in lines:
        rows = [m for m, _ in line["plans"]]
        assert rows == sorted(set(rows)) and len(rows) > 1
        assert line["tp"] in (2, 4, 8)
        for plan in (CommPlan(**fields) for _, fields in line["plans"]):
            assert plan.tile in tiles[plan.gemm] and plan.transport in transports[line["op"]]
            assert plan.is_fused or plan.split_k == 1
            assert 1 <= plan.split_k <= 8
            assert plan.gemm == "cublas" or plan.transport != "copy_engine"
            assert not plan.fuse_reduce or plan.gemm == "fused"


def test_every_fused_plan_is_built() -> None:
    for op in ("gemm_all_reduce", "gemm_reduce_scatter", "all_gather_gemm"):
        layer = Layer(op, 2, 64, 64)
        assert fused_plans(layer) and all(is_built(layer, plan) for plan in fused_plans(layer))
    assert not fused_plans(Layer("column_gemm", 2, 64, 64))
