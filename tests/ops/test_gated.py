"""Gated linear layers: the fused weight against two products, in float64."""

import pytest
import torch
from torch.nn import functional as F

from bytetx.ops import native
from bytetx.ops.gated import gate, gated_linear, prepare_gated
from bytetx.ops.linear import run_kernel
from bytetx.ops.linear_plan import LinearPlan

ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def check(
    device: str, dtype: torch.dtype, activation: str, *, m: int, n: int, k: int, has_bias: bool
) -> None:
    torch.manual_seed(m + n + k)
    x = torch.randn(m, k, device=device, dtype=dtype)
    gate, up = (torch.randn(n, k, device=device, dtype=dtype) / k**0.5 for _ in range(2))
    biases = [torch.randn(n, device=device, dtype=dtype) for _ in range(2)] if has_bias else []
    gate_bias, up_bias = biases or (None, None)
    weight = prepare_gated(gate, up, gate_bias=gate_bias, up_bias=up_bias, prepack=True)
    ours = gated_linear(x, weight, activation=activation)
    act = ACTIVATIONS[activation]

    def plain(to: torch.dtype) -> torch.Tensor:
        def product(w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            return F.linear(x.to(to), w.to(to), None if bias is None else bias.to(to))

        return act(product(gate, gate_bias)) * product(up, up_bias)

    exact = plain(torch.float64)
    error, of_torch = ((d.double() - exact).abs().max() for d in (ours, plain(dtype)))
    assert ours.shape == (m, n) and ours.dtype == dtype
    assert error <= 2 * of_torch + 1e-6


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("m", [1, 65, 700])
@pytest.mark.parametrize(("n", "k"), [(64, 96), (352, 128), (33, 40)])
def test_gates_times_values(device: str, activation: str, m: int, n: int, k: int) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16)[: 3 if device == "cuda" else 2]:
        check(device, dtype, activation, m=m, n=n, k=k, has_bias=m != 65)


# (index, split_k) of every way to cut a gated product, known before a GPU is looked for.
CUTS = [
    (index, split_k)
    for index, (_, _, columns, is_small_m) in enumerate(native.linear_tilings())
    if columns in (64, 128)
    for split_k in ((1, 2, 3, 4, 6, 8) if is_small_m else (1,))
]


@pytest.mark.gpu
@pytest.mark.parametrize(("index", "split_k"), CUTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("m", "n", "k"), [(200, 352, 1096), (5000, 2080, 3080)])
def test_every_tiling_that_gates(
    index: int, split_k: int, dtype: torch.dtype, m: int, n: int, k: int
) -> None:
    """The larger weight's tiles come in several bands of rows."""
    torch.manual_seed(index + split_k)
    x = torch.randn(m, k, device="cuda", dtype=dtype)
    gate, up = torch.randn(2, n, k, device="cuda", dtype=dtype) / k**0.5
    weight = prepare_gated(gate, up, prepack=False).fused
    plan = LinearPlan(index, split_k)
    poison = torch.full((m, n), float("nan"), device="cuda", dtype=dtype)
    del poison  # whose memory is next
    ours = run_kernel(x, weight, plan=plan, activation="silu", is_gated=True)

    def plain(to: torch.dtype) -> torch.Tensor:
        return F.silu(F.linear(x.to(to), gate.to(to))) * F.linear(x.to(to), up.to(to))

    exact = plain(torch.float64)
    error, of_torch = ((d.double() - exact).abs().max() for d in (ours, plain(dtype)))
    assert error <= 2 * of_torch + 1e-6


def test_no_rows() -> None:
    weight = prepare_gated(torch.randn(64, 32), torch.randn(64, 32), prepack=False)
    assert gated_linear(torch.empty(0, 32), weight, activation="silu").shape == (0, 64)


def test_what_does_not_fit_is_said() -> None:
    gate, up = torch.randn(64, 32), torch.randn(64, 32)
    with pytest.raises(ValueError, match=r"up must have shape \[64, 32\]"):
        prepare_gated(gate, up[:32], prepack=False)
    with pytest.raises(ValueError, match="both, or neither"):
        prepare_gated(gate, up, gate_bias=torch.zeros(64), prepack=False)
    with pytest.raises(ValueError, match="activation must be one of gelu, gelu_tanh, silu"):
        gated_linear(torch.randn(2, 32), prepare_gated(gate, up, prepack=False), activation="relu")


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gates_of_another_gemm(activation: str, dtype: torch.dtype) -> None:
    """The kernel on a product that is there, against float64 of that product."""
    for m, n in ((1, 32), (3, 352), (64, 14336), (700, 96), (2049, 1024)):
        halves = (torch.randn(n, 32, device="cuda", dtype=dtype) for _ in range(2))
        weight = prepare_gated(*halves, prepack=False)
        both = 3 * torch.randn(m, 2 * n, device="cuda", dtype=dtype)
        gates, values = both.view(m, n // 32, 2, 32).unbind(2)

        poison = torch.full((m, n), float("nan"), device="cuda", dtype=dtype)
        del poison  # whose memory is next
        found, act = gate(both, weight, activation=activation), ACTIVATIONS[activation]
        exact = (act(gates.double()) * values.double()).reshape(m, n)
        plain = (act(gates) * values).reshape(m, n)
        error, of_torch = ((d.double() - exact).abs().max() for d in (found, plain))
        assert found.shape == (m, n) and error <= 2 * of_torch + 1e-6
