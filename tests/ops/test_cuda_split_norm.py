"""The linear layer whose shares of k its norm adds up, on Hopper: every tiling against float64."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from captured import assert_replays_give_the_same_bits

from bytetx.nn.layer import LocalRows
from bytetx.ops import native
from bytetx.ops import norm as op
from bytetx.ops.linear import LinearWeight, prepare_linear
from bytetx.ops.linear_plan import LinearPlan, tilings
from bytetx.ops.norm import LayerNorm, RmsNorm, run_split_kernel

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
HALVES = [torch.float16, torch.bfloat16]
EPS = 1e-5
NAMES = [f"small-m-{size}" for size in ("64x32", "64x64", "64x96", "128x32", "128x64", "128x96")]
NAMES.append("small-m-128x128")
Norm = tuple[torch.Tensor, torch.Tensor | None]


@pytest.fixture(autouse=True)
def has_kernel() -> None:
    reason = native.why_no_kernel("split_norm", CUDA)
    if reason is not None:
        pytest.skip(reason)


def plan_of(name: str, split_k: int) -> LinearPlan:
    return LinearPlan(next(t.index for t in tilings() if t.name == name), split_k)


class Layer:
    """x [m, k], the layer, a residual, and the norm's weight and bias."""

    def __init__(self, m: int, n: int, k: int, dtype: torch.dtype, *, is_rms: bool = False):
        torch.manual_seed(m + n + k)
        options: dict[str, Any] = {"device": CUDA, "dtype": dtype}
        weight = torch.randn(n, k, **options) / k**0.5
        bias = None if is_rms else torch.randn(n, **options)
        self.w: LinearWeight = prepare_linear(weight, bias, prepack=False)
        self.x, self.residual = torch.randn(m, k, **options), torch.randn(m, n, **options)
        shift = None if is_rms else torch.randn(n, **options)
        self.norm: Norm = (torch.randn(n, **options), shift)
        self.is_rms = is_rms

    def in_dtype(self, to: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(h), h) in torch's operations."""
        bias = None if self.w.bias is None else self.w.bias.to(to)
        h = F.linear(self.x.to(to), self.w.weight.to(to), bias) + self.residual.to(to)
        weight, shift = (None if t is None else t.to(to) for t in self.norm)
        if self.is_rms:
            return F.rms_norm(h, (self.w.n,), weight, EPS), h
        return F.layer_norm(h, (self.w.n,), weight, shift, EPS), h

    def run(self, plan: LinearPlan, *, sum_out: torch.Tensor | None = None) -> torch.Tensor:
        poison_free_memory()
        options: dict[str, Any] = {"norm": self.norm, "is_rms": self.is_rms, "eps": EPS}
        options |= {"residual": self.residual, "sum_out": sum_out}
        return run_split_kernel(self.x, self.w, plan=plan, **options)


def assert_right(ours: torch.Tensor, exact: torch.Tensor, of_torch: torch.Tensor) -> None:
    error, allowed = ((d.double() - exact).abs().max().item() for d in (ours, of_torch))
    assert error <= 2 * allowed + 1e-6, (error, allowed)


def assert_layer_is_right(layer: Layer, plan: LinearPlan) -> None:
    h = torch.full_like(layer.residual, float("nan"))
    ours = layer.run(plan, sum_out=h)
    exact, of_torch = layer.in_dtype(torch.float64), layer.in_dtype(ours.dtype)
    assert_right(ours, exact[0], of_torch[0])
    assert_right(h, exact[1], of_torch[1])
    assert torch.equal(layer.run(plan), ours)


def poison_free_memory() -> None:
    """Fill the memory that the allocator hands out next with NaN."""
    torch.full((1 << 24,), float("nan"), device=CUDA)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("is_rms", [False, True])
def test_every_tiling(name: str, dtype: torch.dtype, is_rms: bool) -> None:
    for m, n, k, split_k in (
        *((1, 384, 8, 1), (15, 768, 200, 2), (64, 1024, 1024, 16), (65, 32, 520, 3)),
        *((128, 768, 3072, 6), (129, 96, 1024, 5), (300, 1056, 768, 4), (700, 384, 1536, 2)),
    ):
        layer = Layer(m, n, k, dtype, is_rms=is_rms)
        assert_layer_is_right(layer, plan_of(name, split_k))


@pytest.mark.parametrize("n", [64, 256, 512, 640, 2048, 2080, 4096, 8192])
def test_every_width_of_rows(n: int) -> None:
    for is_rms in (False, True):
        layer = Layer(70, n, 512, torch.bfloat16, is_rms=is_rms)
        assert_layer_is_right(layer, plan_of("small-m-128x64", 4))


def test_more_shares_than_blocks_are_as_many_as_blocks() -> None:
    layer = Layer(33, 768, 192, torch.float16)
    expected = layer.run(plan_of("small-m-64x64", 3))
    assert torch.equal(layer.run(plan_of("small-m-64x64", 9)), expected)


def test_a_large_mean_costs_no_digits() -> None:
    layer = Layer(100, 768, 768, torch.float16)
    layer.residual += 100
    assert_layer_is_right(layer, plan_of("small-m-64x64", 4))


def test_bits_do_not_depend_on_other_rows() -> None:
    layer = Layer(300, 768, 3072, torch.bfloat16)
    plan = plan_of("small-m-128x64", 8)
    whole = layer.run(plan)
    for rows in (299, 128, 64, 1):
        part = Layer(300, 768, 3072, torch.bfloat16)
        part.x, part.residual = layer.x[:rows], layer.residual[:rows]
        assert torch.equal(part.run(plan), whole[:rows])


def test_a_captured_graph_gives_the_same_bits() -> None:
    layer = Layer(128, 1024, 4096, torch.float16)
    plan = plan_of("small-m-64x64", 8)

    def several() -> torch.Tensor:
        for _ in range(3):
            d = layer.run(plan)
        return d

    assert_replays_give_the_same_bits(several)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_row(value: float) -> None:
    layer = Layer(200, 768, 768, torch.float16)
    plan = plan_of("small-m-64x96", 3)
    clean = layer.run(plan)
    layer.x[7, 5] = value
    dirty = layer.run(plan)
    others = torch.arange(200, device=CUDA) != 7
    assert torch.equal(dirty[others], clean[others])
    assert not dirty[7].isfinite().any()


@pytest.mark.parametrize("is_rms", [False, True])
def test_layers_take_it_where_the_plan_says_so(
    is_rms: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = Layer(100, 768, 3072, torch.float16, is_rms=is_rms)
    plan = plan_of("small-m-64x64", 4)
    expected_sum = torch.empty_like(layer.residual)
    expected = layer.run(plan, sum_out=expected_sum)
    kind = RmsNorm if is_rms else LayerNorm
    norm = kind(*layer.norm, EPS)
    monkeypatch.setattr(op, "plan_parts", lambda *_, **__: plan)
    options: dict[str, Any] = {"residual": layer.residual, "norm": norm}
    assert torch.equal(LocalRows().row_parallel_post_norm(layer.x, layer.w, **options), expected)
    normed, h = LocalRows().row_parallel(layer.x, layer.w, **options)
    assert torch.equal(normed, expected)
    assert torch.equal(h, expected_sum)
    odd = torch.empty(layer.x.numel() + 1, device=CUDA, dtype=layer.x.dtype)[1:].view_as(layer.x)
    odd.copy_(layer.x)
    assert norm.parts_plan(layer.x, layer.w, layer.residual) == plan
    assert norm.parts_plan(odd, layer.w, layer.residual) is None
