"""The linear layer that norms its rows on Hopper: every width and dtype against float64."""

import pytest
import torch
import torch.nn.functional as F
from captured import captured

from bytetx.ops import native
from bytetx.ops import norm as op
from bytetx.ops.linear import LinearWeight, prepare_linear
from bytetx.ops.norm import WIDTHS, fused_workspace, linear_norm, run_fused_kernel

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
HALVES = [torch.float16, torch.bfloat16]
EPS = 1e-12
ROWS = [1, 63, 64, 65, 127, 128, 129, 300, 128 * 34 - 1, 128 * 67 + 1, 128 * 130 + 1]
Layer = tuple[torch.Tensor, LinearWeight, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture(autouse=True)
def has_kernel() -> None:
    reason = native.why_no_kernel("linear_norm", CUDA)
    if reason is not None:
        pytest.skip(reason)


def random_layer(m: int, n: int, k: int, dtype: torch.dtype) -> Layer:
    """x, the layer, a residual, the norm's weight and bias."""
    torch.manual_seed(m + n + k)
    options = {"device": CUDA, "dtype": dtype}
    weight = torch.randn(n, k, **options) / k**0.5
    w = prepare_linear(weight, torch.randn(n, **options), prepack=False)
    norm = (torch.randn(n, **options), torch.randn(n, **options))
    return torch.randn(m, k, **options), w, torch.randn(m, n, **options), norm


def plain(layer: Layer, to: torch.dtype) -> torch.Tensor:
    x, w, residual, norm = layer
    h = F.linear(x.to(to), w.weight.to(to), w.bias.to(to)) + residual.to(to)
    return F.layer_norm(h, (w.n,), norm[0].to(to), norm[1].to(to), EPS)


def run(layer: Layer, workspace: torch.Tensor) -> torch.Tensor:
    x, w, residual, norm = layer
    return run_fused_kernel(x, w, residual=residual, norm=norm, eps=EPS, workspace=workspace)


def assert_right(ours: torch.Tensor, layer: Layer) -> None:
    exact = plain(layer, torch.float64)
    error, of_torch = (
        (d.double() - exact).abs().max().item() for d in (ours, plain(layer, ours.dtype))
    )
    assert error <= 2 * of_torch + 1e-6, (error, of_torch)


def poison_free_memory() -> None:
    """Fill the memory that the allocator hands out next with NaN."""
    torch.full((1 << 24,), float("nan"), device=CUDA)


@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("k", [8, 200, 1024])
def test_every_width(n: int, dtype: torch.dtype, k: int) -> None:
    workspace = fused_workspace(max(ROWS), n, CUDA)
    for m in ROWS:
        layer = random_layer(m, n, k, dtype)
        poison_free_memory()
        assert_right(run(layer, workspace), layer)
        assert (workspace == 255).all()


@pytest.mark.parametrize("n", WIDTHS)
def test_a_large_mean_costs_no_digits(n: int) -> None:
    x, w, residual, norm = random_layer(500, n, n, torch.float16)
    layer = (x, w, residual + 100, norm)
    assert_right(run(layer, fused_workspace(500, n, CUDA)), layer)


@pytest.mark.parametrize("n", WIDTHS)
def test_the_same_call_gives_the_same_bits_whatever_the_other_rows(n: int) -> None:
    x, w, residual, norm = random_layer(9000, n, 4 * n, torch.bfloat16)
    workspace = fused_workspace(9000, n, CUDA)
    first = run((x, w, residual, norm), workspace)
    for rows in (9000, 8321, 8321, 130, 1):
        ours = run((x[:rows], w, residual[:rows], norm), workspace)
        assert torch.equal(ours, first[:rows])


@pytest.mark.parametrize("n", WIDTHS)
def test_a_captured_graph_gives_the_same_bits(n: int) -> None:
    layer = random_layer(5000, n, n, torch.float16)
    workspace = fused_workspace(5000, n, CUDA)
    eager = run(layer, workspace)
    graph, outs = captured(lambda: [run(layer, workspace) for _ in range(3)])
    for _ in range(3):
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(out, eager) for out in outs)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("n", WIDTHS)
def test_what_is_not_finite_stays_in_its_row(value: float, n: int) -> None:
    x, w, residual, norm = random_layer(700, n, n, torch.float16)
    workspace = fused_workspace(700, n, CUDA)
    clean = run((x, w, residual, norm), workspace)
    x[7, 5] = value
    dirty = run((x, w, residual, norm), workspace)
    others = torch.arange(len(x), device=CUDA) != 7
    assert torch.equal(dirty[others], clean[others])
    assert not dirty[7].isfinite().any()


@pytest.mark.parametrize("n", [*WIDTHS, 512])
@pytest.mark.parametrize("m", [0, 1, 130, 3000, 20000])
def test_linear_norm_chooses_a_way_that_is_right(m: int, n: int) -> None:
    for k in (n, 4 * n):
        layer = x, w, residual, norm = random_layer(m, n, k, torch.float16)
        poison_free_memory()
        options = {"norm_weight": norm[0], "norm_bias": norm[1], "eps": EPS}
        ours = linear_norm(x, w, residual=residual, **options)
        assert ours.shape == (m, n)
        if m:
            assert_right(ours, layer)


def test_a_graph_whose_workspace_was_not_there_before_takes_two_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(op, "_workspaces", {})
    monkeypatch.setattr(op, "norms_rows", lambda *_, **__: True)
    layer = x, w, residual, norm = random_layer(3000, 768, 768, torch.float16)
    options = {"norm_weight": norm[0], "norm_bias": norm[1], "eps": EPS}
    graph, out = captured(lambda: linear_norm(x, w, residual=residual, **options))
    assert not op._workspaces
    graph.replay()
    assert_right(out, layer)
    assert_right(linear_norm(x, w, residual=residual, **options), layer)
    assert len(op._workspaces) == 1
