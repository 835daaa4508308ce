"""Linear layers of 8-bit integers: the kernel against its formula in float64, and its rounding."""

import cpu_kernels
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from bytetx.ops.int8_linear import (
    Int8LinearWeight,
    prepare_int8_linear,
    run_int8_linear,
    why_no_int8_linear,
)
from bytetx.ops.linear import ACTIVATIONS, LinearWeight, linear, prepare_linear

needs_kernel = pytest.mark.skipif(
    why_no_int8_linear() is not None, reason=f"int8: {why_no_int8_linear()}"
)

# (m, n, k): one row, rests of tiles of 6 and 12 rows and 16 and 32 outputs, k no multiple of 4 or
# 16, more rows than a block, and a model's sizes.
SHAPES = [(1, 32, 4), (5, 33, 7), (13, 100, 61), (49, 31, 1), (130, 96, 384), (60, 384, 1536)]


def layer(n: int, k: int, dtype: torch.dtype, *, has_bias: bool = True) -> LinearWeight:
    bias = torch.randn(n).to(dtype) if has_bias else None
    return prepare_linear(torch.randn(n, k).to(dtype), bias, prepack=False)


def plain_of(weight: torch.Tensor) -> LinearWeight:
    return prepare_linear(weight, prepack=False)


def restored(w: Int8LinearWeight) -> torch.Tensor:
    """The weight that the 8 bits stand for, f64 [n, k]."""
    features = w.panels.shape[1] * 4
    rows = w.panels.transpose(1, 2).reshape(-1, features)[: w.n, : w.k].double() - 128
    return rows * w.scale[: w.n, None].double()


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Rows of x in 256 steps between the least and the largest value, 0 among them; f64."""
    x = x.double()
    low, high = x.amin(1, keepdim=True).clamp(max=0), x.amax(1, keepdim=True).clamp(min=0)
    scale = (high - low) / 255
    zero = (-128 - low / scale).round()
    return (((x / scale).round() + zero).clamp(-128, 127) - zero) * scale


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("isa", cpu_kernels.VECTOR_ISAS)
def test_kernel_computes_its_formula(
    isa: str, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    m, n, k = shape
    torch.manual_seed(m * n + k)
    plain, x = layer(n, k, dtype), torch.randn(m, k).to(dtype)
    w = prepare_int8_linear(plain)
    assert plain.bias is not None
    sums = rounded(x) @ restored(w).T + plain.bias.double()
    for index, activation in enumerate(ACTIVATIONS):
        expected = cpu_kernels.EXACT_ACTIVATIONS[activation](sums)
        got = run_int8_linear(x, w, activation=index, isa=isa).double()
        # A value that lies between two of the 256 steps may be rounded to either, in f32 and f64:
        # one step in some thousand. What is left is the result's own rounding.
        error = (got - expected).norm() / expected.norm()
        assert error < (1e-3 if dtype == torch.float32 else 5e-3), activation


@needs_kernel
@pytest.mark.parametrize("isa", cpu_kernels.VECTOR_ISAS)
@pytest.mark.parametrize("largest", [1.0, 3e38])
def test_the_largest_sums_and_values(isa: str, largest: float) -> None:
    """Every product at its largest, in the longest rows that are taken; and the edge of f32."""
    k = 1 << 16
    w = prepare_int8_linear(plain_of(torch.cat((torch.ones(1, k), -torch.ones(1, k)))))
    x = torch.full((2, k), largest)
    x[1] = -largest
    got = run_int8_linear(x / k, w, activation=0, isa=isa).double() / largest
    expected = torch.tensor([[1.0, -1.0], [-1.0, 1.0]]).double()
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_instruction_set_multiplies_the_same_integers(dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    w = prepare_int8_linear(layer(70, 130, dtype))
    x = torch.randn(31, 130).to(dtype)
    results = [run_int8_linear(x, w, activation=0, isa=isa) for isa in cpu_kernels.VECTOR_ISAS]
    assert all(torch.equal(result, results[0]) for result in results)


@needs_kernel
def test_results_are_near_the_exact_product() -> None:
    torch.manual_seed(0)
    plain, x = layer(384, 768, torch.float32), torch.randn(200, 768)
    expected = linear(x, plain)
    error = (prepare_int8_linear(plain).matmul(x) - expected).norm() / expected.norm()
    # Normal rows span about 6.5 deviations in 255 steps, each rounded by up to half a step; so do
    # the weights: 0.0074 each.
    assert 0.005 < error < 0.0148


@needs_kernel
def test_rows_with_few_negative_values_use_all_steps() -> None:
    torch.manual_seed(1)
    plain, x = layer(64, 512, torch.float32), F.gelu(torch.randn(50, 512) * 3)
    expected = linear(x, plain)
    error = (prepare_int8_linear(plain).matmul(x) - expected).norm() / expected.norm()
    # Symmetric rounding spends half of its steps below zero, and is twice as far off.
    assert error < 0.0125


@needs_kernel
@pytest.mark.parametrize("m", [1, 11, 12, 13, 47, 48, 49, 97])
def test_a_row_does_not_depend_on_the_others(m: int) -> None:
    torch.manual_seed(2)
    w, x = prepare_int8_linear(layer(70, 130, torch.float32)), torch.randn(97, 130)
    whole = w.matmul(x, activation="gelu")
    assert torch.equal(w.matmul(x[:m].contiguous(), activation="gelu"), whole[:m])
    order = torch.randperm(97)
    assert torch.equal(w.matmul(x[order], activation="gelu"), whole[order])


@needs_kernel
def test_threads_change_no_bit() -> None:
    torch.manual_seed(3)
    w, x = prepare_int8_linear(layer(200, 96, torch.bfloat16)), torch.randn(30, 96).bfloat16()
    before = torch.get_num_threads()
    try:
        results = []
        for num_threads in (1, 2, 7):
            torch.set_num_threads(num_threads)
            results.append(w.matmul(x))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@needs_kernel
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_gives_nan_alone(bad: float) -> None:
    torch.manual_seed(4)
    w, x = prepare_int8_linear(layer(40, 20, torch.float32)), torch.randn(14, 20)
    expected = w.matmul(x)
    x[3, 7] = bad
    got = w.matmul(x)
    assert got[3].isnan().all()
    rest = [row for row in range(14) if row != 3]
    assert torch.equal(got[rest], expected[rest])


@needs_kernel
def test_zeros_give_the_bias() -> None:
    plain = layer(40, 20, torch.float32)
    got = prepare_int8_linear(plain).matmul(torch.zeros(3, 20))
    assert plain.bias is not None
    # Zero is one of the 256 steps; what it adds to the sums is taken off in f32.
    torch.testing.assert_close(got, plain.bias.expand(3, -1), rtol=0, atol=1e-4)
    assert torch.equal(prepare_int8_linear(plain).matmul(torch.full((3, 20), 1e-38)), got)


@needs_kernel
def test_no_rows_and_a_residual() -> None:
    w = prepare_int8_linear(layer(40, 20, torch.float32, has_bias=False))
    assert w.matmul(torch.empty(0, 20)).shape == (0, 40)
    x, residual = torch.randn(5, 20), torch.randn(5, 40)
    assert torch.equal(w.matmul(x, residual=residual), w.matmul(x) + residual)


@needs_kernel
@settings(max_examples=40, deadline=None)
@given(
    m=st.integers(1, 60), n=st.integers(1, 80), k=st.integers(1, 90), seed=st.integers(0, 1 << 30)
)
def test_any_shape(m: int, n: int, k: int, seed: int) -> None:
    torch.manual_seed(seed)
    plain, x = layer(n, k, torch.float32), torch.randn(m, k) + torch.randn(1)
    w = prepare_int8_linear(plain)
    assert plain.bias is not None
    terms = x.double().abs() @ restored(w).abs().T + 1
    expected = rounded(x) @ restored(w).T + plain.bias.double()
    # Up to one step of a few values apart, of all that is added up.
    assert ((w.matmul(x).double() - expected).abs() / terms).max() < 0.02


def test_weights_keep_their_values_to_half_a_step() -> None:
    torch.manual_seed(5)
    weight = torch.randn(33, 70) * torch.logspace(-30, 3, 33)[:, None]
    weight[4] = 0
    w = prepare_int8_linear(plain_of(weight))
    assert ((restored(w) - weight).abs() <= 0.51 * w.scale[:33, None] + 0.2 * weight.abs()).all()
    assert torch.equal(restored(w)[4], torch.zeros(70).double())
    assert w.bias.shape == w.scale.shape == (64,) and not w.scale[33:].any()


def test_what_is_not_plain_is_refused() -> None:
    with pytest.raises(ValueError, match="plain must be a plain weight"):
        prepare_int8_linear(prepare_linear(torch.randn(32, 8), prepack=True))
    with pytest.raises(ValueError, match="weight must be float32 or bfloat16, got float16"):
        prepare_int8_linear(plain_of(torch.randn(4, 4, dtype=torch.float16)))
    with pytest.raises(ValueError, match="1 to 65536 input features, got 0"):
        prepare_int8_linear(plain_of(torch.empty(4, 0)))
