"""How GEMMs are cut: the table's lines, the rule, and what a missing tiling does."""

import json
from collections.abc import Iterator
from importlib.resources import files

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytetx.ops import linear_plan, native
from bytetx.ops.linear_plan import (
    CUBLAS,
    TABLE_FILE,
    Line,
    LinearPlan,
    leaves_residual,
    norms_rows,
    plan_gated,
    plan_linear,
    plan_parts,
)

TILINGS = [
    ("128x192", 128, 192, False),
    ("192x128", 192, 128, False),
    ("128x128", 128, 128, False),
    ("small-m-64x32", 64, 32, True),
    ("small-m-128x64", 128, 64, True),
    ("small-m-128x128", 128, 128, True),
]


@pytest.fixture
def kernel_tilings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernel's tilings, whether it is built here or not, and an empty table."""
    monkeypatch.setattr(native, "linear_tilings", lambda: TILINGS)
    monkeypatch.setattr(linear_plan, "_table", dict)
    clear()
    yield
    clear()


def clear() -> None:
    plans = (plan_linear, plan_gated, plan_parts, leaves_residual, norms_rows)
    for cached in (linear_plan.tilings, *plans):
        cached.cache_clear()


def test_the_shipped_table_is_well_formed() -> None:
    table = json.loads((files("bytetx.ops") / TABLE_FILE).read_text(encoding="utf-8"))
    seen = set()
    for line in table["lines"]:
        key = (line["n"], line["k"], line["dtype"], line["epilogue"])
        assert key not in seen
        seen.add(key)
        assert line["dtype"] in ("fp16", "bf16")
        assert line["epilogue"] in ("bias", "gelu", "residual", "gated")
        rows = [plan[0] for plan in line["plans"]]
        assert rows == sorted(set(rows)) and rows
        assert all(1 <= split_k <= 8 for _, _, split_k in line["plans"])
        for key in ("residual_in_norm", "normalized"):
            assert set(line.get(key, ())) <= set(rows)
        parts = line.get("parts", [])
        assert not parts or line["epilogue"] == "residual"
        assert [rows for rows, *_ in parts] == sorted({rows for rows, *_ in parts})
        assert all(1 <= split_k <= line["k"] // 64 for _, _, split_k in parts)


def test_the_shipped_table_names_tilings_that_exist() -> None:
    names = {row[0] for row in native.linear_tilings()}
    if not names:
        pytest.skip("the kernels are not built here")
    table = json.loads((files("bytetx.ops") / TABLE_FILE).read_text(encoding="utf-8"))
    used = {name for line in table["lines"] for _, name, _ in line["plans"]}
    assert used <= names | {CUBLAS}
    in_parts = {name for line in table["lines"] for _, name, _ in line.get("parts", ())}
    assert in_parts <= {t.name for t in linear_plan.tilings() if t.is_small_m} | {None}


@pytest.mark.usefixtures("kernel_tilings")
def test_a_line_serves_rows_up_to_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [(64, "small-m-64x32", 2), (512, CUBLAS, 1), (4096, "128x192", 1)]
    line = Line(tuple(lines), frozenset([512]), frozenset([4096]))
    table = {(768, 768, "fp16", "bias"): line, (768, 768, "fp16", "residual"): line}
    monkeypatch.setattr(linear_plan, "_table", lambda: table)

    def plan(m: int, epilogue: str = "bias", dtype: str = "fp16") -> LinearPlan:
        return plan_linear(m, 768, 768, dtype=dtype, epilogue=epilogue)

    assert plan(1) == plan(64) == LinearPlan(3, 2)
    assert plan(65) == plan(512) == LinearPlan(None)
    assert plan(513) == plan(10**6) == LinearPlan(0)
    assert plan(64, epilogue="gelu") == LinearPlan(3, 2)  # the bias line stands in
    assert plan(64, dtype="bf16") == LinearPlan(3, 2)  # and f16 for bf16
    left = [leaves_residual(m, 768, 768, dtype="fp16") for m in (64, 65, 512, 513)]
    assert left == [False, True, True, False]
    assert not leaves_residual(100, 768, 96, dtype="fp16")  # not in the table
    normalized = [norms_rows(m, 768, 768, dtype="bf16") for m in (512, 513, 10**6)]
    assert normalized == [False, True, True]
    assert not norms_rows(4096, 768, 96, dtype="fp16")


@pytest.mark.usefixtures("kernel_tilings")
def test_the_norm_adds_up_parts_of_so_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    plans, parts = ((4096, "128x192", 1),), ((64, None, 1), (128, "small-m-128x64", 11))
    line, plain = Line(plans, parts=parts), Line(plans)
    table = {(768, 3072, "fp16", "residual"): line, (768, 768, "fp16", "residual"): plain}
    monkeypatch.setattr(linear_plan, "_table", lambda: table)
    found = {m: plan_parts(m, 768, 3072, dtype="bf16") for m in (0, 1, 64, 65, 128, 129)}
    plan = LinearPlan(4, 11)
    assert found == {0: None, 1: None, 64: None, 65: plan, 128: plan, 129: None}
    assert plan_parts(100, 768, 768, dtype="fp16") is None
    assert plan_parts(100, 768, 96, dtype="fp16") is None


@pytest.mark.usefixtures("kernel_tilings")
def test_an_activation_is_fused_where_cublas_wins_with_the_bias_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bias, residual = Line(((65536, CUBLAS, 1),)), Line(((65536, "192x128", 1),))
    table = {(1024, 4096, "fp16", "bias"): bias, (1024, 4096, "fp16", "residual"): residual}
    monkeypatch.setattr(linear_plan, "_table", lambda: table)

    def plan(epilogue: str) -> LinearPlan:
        return plan_linear(65536, 1024, 4096, dtype="fp16", epilogue=epilogue)

    assert plan("bias") == LinearPlan(None)
    assert plan("gelu") == plan("residual") == LinearPlan(1)


@pytest.mark.usefixtures("kernel_tilings")
def test_a_tiling_that_this_build_lacks_falls_back_to_the_rule(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    by_rule = plan_linear(100, 768, 768, dtype="fp16", epilogue="bias")
    table = {(768, 768, "fp16", "bias"): Line(((4096, "of another version", 1),))}
    monkeypatch.setattr(linear_plan, "_table", lambda: table)
    plan_linear.cache_clear()
    assert plan_linear(100, 768, 768, dtype="fp16", epilogue="bias") == by_rule


@pytest.mark.usefixtures("kernel_tilings")
def test_small_m_of_logits_are_left_to_cublas() -> None:
    plans = [plan_linear(m, 151936, 1024, dtype="bf16", epilogue="bias") for m in (1, 256, 257)]
    assert plans[:2] == [LinearPlan(None)] * 2 != plans[1:]


@pytest.mark.usefixtures("kernel_tilings")
def test_large_products_take_tiles_for_many_rows() -> None:
    """Shapes of GPT-3 and Llama-70B; small-m tiles took 1.7 times as long at 9832 rows."""
    layers = [(18432, 12288), (12288, 24576), (49152, 12288), (10240, 8192), (8192, 28672)]
    for m in (1024, 1536, 3072, 9832, 16384):
        for n, k in layers:
            plan = plan_linear(m, n, k, dtype="bf16", epilogue="bias")
            assert plan.tiling is not None and not TILINGS[plan.tiling][3], (m, n, k)


@given(m=st.integers(0, 10**6), n=st.integers(1, 400), k=st.integers(1, 2000))
def test_the_rule_names_a_tiling_that_the_kernel_takes(m: int, n: int, k: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "linear_tilings", lambda: TILINGS)
        patch.setattr(linear_plan, "_table", dict)
        clear()
        plan = plan_linear(m, 32 * n, 8 * k, dtype="fp16", epilogue="bias")
        gated = plan_gated(m, 64 * n, 8 * k, dtype="fp16")
    clear()
    assert plan.tiling is not None and 1 <= plan.split_k <= 8
    assert plan.split_k == 1 or TILINGS[plan.tiling][3]
    assert gated.tiling is not None and TILINGS[gated.tiling][2] % 64 == 0


def test_without_kernels_the_plan_is_cublas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "linear_tilings", list)
    monkeypatch.setattr(linear_plan, "_table", dict)
    clear()
    assert plan_linear(100, 768, 768, dtype="fp16", epilogue="bias") == LinearPlan(None)
    assert plan_gated(100, 768, 768, dtype="fp16") == LinearPlan(None)
    clear()
