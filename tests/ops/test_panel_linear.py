"""Products with weights in panels, and gates: against float64, and the bits of their rows."""

from dataclasses import replace

import cpu_kernels
import pytest
import torch

from bytetx.ops.bf16_linear import bf16_linear
from bytetx.ops.gated import BLOCK
from bytetx.ops.linear import ACTIVATIONS, MAX_FEW_ROWS, has_fixed_bf16, prepare_linear
from bytetx.ops.native_params import PanelMatrix
from bytetx.ops.panel_linear import (
    WORDS,
    f32_linear,
    gate_blocks,
    our_panels,
    pack_weight,
    panel_linear,
    why_no_panels,
)
from bytetx.ops.panels import PanelFinder

pytestmark = pytest.mark.skipif(
    why_no_panels() is not None, reason=f"panel_linear: {why_no_panels()}"
)

# (m, n, k, columns, features of a chain): rows of every tile, rests of panels, odd k, chains.
SHAPES = [
    *((m, 83, 37, 32, 64) for m in range(1, 18)),
    (1, 200, 129, 64, 40),
    (3, 16, 1, 16, 2),
    (5, 130, 300, 48, 100),
    (16, 64, 1536, 64, 1024),
    (70, 65, 66, 64, 66),
    (131, 40, 20, 16, 20),
]

poisoned_memory = cpu_kernels.poisoned_memory
dtype = cpu_kernels.dtype


def panels(
    weight: torch.Tensor, bias: torch.Tensor | None, columns: int, chain: int, *, more: int = 4
) -> tuple[PanelMatrix, torch.Tensor]:
    """(the weight in panels, the memory they lie in), with `more` features of zeros behind k."""
    n, k = weight.shape
    outputs, pair = -(-n // columns) * columns, 1 if weight.dtype == torch.float32 else 2
    features = k + k % 2 + more
    filled = torch.zeros(outputs, features, dtype=weight.dtype)
    filled[:n, :k] = weight
    laid = filled.view(-1, columns, features // pair, pair).transpose(1, 2).contiguous()
    return PanelMatrix(laid, bias, None, n, k, features, columns, chain, WORDS), laid


def operands(
    m: int, n: int, k: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(x [m, k], weight [n, k], bias [n]); results are about as large as 1."""
    torch.manual_seed(m * n + k)
    weight = torch.randn(n, k) / k**0.5
    return torch.randn(m, k).to(dtype), weight.to(dtype), torch.randn(n).to(dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("isa", cpu_kernels.VECTOR_ISAS)
def test_kernel_computes_its_formula(
    isa: str, dtype: torch.dtype, shape: tuple[int, int, int, int, int]
) -> None:
    m, n, k, columns, chain = shape
    x, weight, bias = operands(m, n, k, dtype)
    for has_bias in (True, False):
        w, _ = panels(weight, bias if has_bias else None, columns, chain)
        sums = x.double() @ weight.double().T + (bias.double() if has_bias else 0)
        for index, activation in enumerate(ACTIVATIONS):
            expected = cpu_kernels.EXACT_ACTIVATIONS[activation](sums)
            got = panel_linear(x, w, activation=index, isa=isa)
            assert got.dtype == dtype and got.shape == (m, n)
            least = (expected.to(dtype).double() - expected).norm()
            assert (got.double() - expected).norm() < 1.01 * least + 1e-6 * (m * n) ** 0.5


@pytest.mark.parametrize("isa", cpu_kernels.VECTOR_ISAS)
def test_rows_have_their_bits_in_every_number_of_rows_and_threads(
    isa: str, dtype: torch.dtype
) -> None:
    threads = torch.get_num_threads()
    try:
        for n, k, columns, chain in ((269, 49, 64, 50), (96, 1536, 32, 1024)):
            x, weight, bias = operands(90, n, k, dtype)
            w, _ = panels(weight, bias, columns, chain)
            wanted = panel_linear(x, w, isa=isa)
            for num_threads in (1, 2, 7):
                torch.set_num_threads(num_threads)
                for m in (*range(1, 18), 33, 64, 65):
                    for first in (0, 13):
                        rows = slice(first, first + m)
                        assert torch.equal(panel_linear(x[rows], w, isa=isa), wanted[rows]), m
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan, 1e-41])
def test_a_row_keeps_to_itself(value: float, dtype: torch.dtype) -> None:
    x, weight, bias = operands(13, 40, 33, dtype)
    w, _ = panels(weight, bias, 64, 34)
    wanted = panel_linear(x, w)
    x[7] = value
    got = panel_linear(x, w)
    others = torch.arange(13) != 7
    assert torch.equal(got[others], wanted[others])
    expected = x.double() @ weight.double().T + bias.double()
    assert torch.equal(got[7].isfinite(), expected[7].isfinite())
    if abs(value) < 1:
        assert torch.equal(got[7], bias)


def test_matrices_that_are_none_are_refused() -> None:
    x, weight, _ = operands(2, 16, 8, torch.float32)
    w, _ = panels(weight, None, 16, 8)
    for wrong in ({"columns": 24}, {"columns": 0}, {"chain": 0}, {"features": 7}, {"n": 0}):
        with pytest.raises(ValueError, match="not a matrix in panels"):
            panel_linear(x, w._replace(**wrong))


# Chains of several lengths, whose order of sums a rounding to bf16 almost hides.
@pytest.mark.parametrize(
    "shape", [(48, 48), (576, 1536), (83, 37), (200, 1040), (33, 64), (512, 3072)]
)
def test_panels_of_a_prepacked_weight_give_its_bits(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    n, k = shape
    finder = PanelFinder()
    for has_bias in (True, False):
        x, weight, bias = operands(200, n, k, dtype)
        w = prepare_linear(weight, bias if has_bias else None, prepack=True)
        found = finder.find(w)
        is_ours = w.is_prepacked and w.weight.dtype == torch.int32
        assert found is not None or not is_ours
        if found is None:  # another layout, or order of sums, than is known
            continue
        assert (found.n, found.k) == (n, k)
        for m in (1, 2, 5, 16, 17, 200):
            got, wanted = panel_linear(x[:m], found), w.matmul(x[:m])
            if is_ours or dtype == torch.float32 or has_fixed_bf16():
                assert torch.equal(got, wanted), m
            else:  # oneDNN's own bits depend on m
                assert (got - wanted).norm() < 0.01 * wanted.norm()
    assert finder.find(prepare_linear(weight, bias, prepack=False)) is None


@pytest.mark.parametrize("isa", cpu_kernels.VECTOR_ISAS)
@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (5, 33, 7), (12, 96, 64), (13, 83, 37), (3, 200, 1100), (70, 65, 66)]
)
def test_plain_rows_have_the_bits_of_panels(isa: str, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    x, weight, bias = operands(m, n, k, torch.float32)
    w = our_panels(pack_weight(weight), bias, n=n, k=k, dtype=torch.float32)
    plain = w._replace(weight=weight, columns=1, features=k)
    assert torch.equal(panel_linear(x, plain, isa=isa), panel_linear(x, w, isa=isa))


@pytest.mark.parametrize("most_tried", [4096, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("prepack", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
def test_few_rows_of_a_weight_have_the_bits_of_many(
    has_bias: bool,
    prepack: bool,
    dtype: torch.dtype,
    most_tried: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # 64: in the layout of a weight of fewer outputs
    monkeypatch.setattr("bytetx.ops.panels._MOST_TRIED", most_tried)
    x, weight, bias = operands(40, 96, 1100, dtype)
    given = bias if has_bias else None
    w, few = (prepare_linear(weight, given, prepack=prepack) for _ in range(2))
    PanelFinder().find_few_rows(few)
    if w.weight.dtype == torch.int32:  # our kernel runs all rows
        assert few.few_rows is None
        return
    if prepack and (dtype == torch.float32 or has_fixed_bf16()):
        assert (few.few_rows is None) == (PanelFinder().find(few) is None)
    residual = torch.randn(40, 96).to(dtype)
    for activation in ACTIVATIONS:
        wanted = w.matmul(x, activation=activation)
        for m in range(MAX_FEW_ROWS + 2):
            assert torch.equal(few.matmul(x[:m], activation=activation), wanted[:m])
            added = few.matmul(x[:m], activation=activation, residual=residual[:m])
            assert torch.equal(added, wanted[:m] + residual[:m])
    if few.few_rows is not None:
        other = replace(few, bias=bias + 1)
        assert other.few_rows is None
        assert torch.equal(other.matmul(x[:3]), other.matmul(x)[:3])


def test_panels_have_the_bits_of_the_kernel_for_many_rows() -> None:
    x, weight, bias = operands(30, 70, 51, torch.bfloat16)
    packed = pack_weight(weight)
    w = our_panels(packed, bias, n=70, k=51, dtype=torch.bfloat16)
    for index in range(len(ACTIVATIONS)):
        wanted = bf16_linear(x, packed, bias, n=70, activation=index, is_packed=True)
        assert torch.equal(panel_linear(x, w, activation=index), wanted)


@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 33, 7), (130, 96, 384), (7, 48, 3000)])
def test_layers_of_float32(shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    x, weight, bias = operands(m, n, k, torch.float32)
    packed = pack_weight(weight)
    for index, activation in enumerate(ACTIVATIONS):
        options = {"n": n, "activation": index}
        got = f32_linear(x, packed, bias, is_packed=True, **options)
        sums = x.double() @ weight.double().T + bias
        expected = cpu_kernels.EXACT_ACTIVATIONS[activation](sums)
        assert (got - expected).norm() < 1e-6 * (m * n) ** 0.5
        assert torch.equal(got, f32_linear(x, weight, bias, is_packed=False, **options))
        assert torch.equal(got[-1:], f32_linear(x[-1:], packed, bias, is_packed=True, **options))


@pytest.mark.parametrize("isa", cpu_kernels.VECTOR_ISAS)
@pytest.mark.parametrize(("n", "block"), [(64, BLOCK), (80, 80), (21, 7), (5, 1)])
def test_gates(isa: str, dtype: torch.dtype, n: int, block: int) -> None:
    torch.manual_seed(n)
    for m in (0, 1, 3, 40):
        both = (2 * torch.randn(m, 2 * n)).to(dtype)
        both[m // 2 : m // 2 + 1] *= 20
        gates, values = both.double().view(m, n // block, 2, block).unbind(2)
        for activation in ("silu", "gelu", "gelu_tanh"):
            gated = cpu_kernels.EXACT_ACTIVATIONS[activation](gates) * values
            expected = gated.reshape(m, n)
            index = ACTIVATIONS.index(activation)
            got = gate_blocks(both, n=n, block=block, activation=index, isa=isa)
            error = (got.double() - expected).abs()
            unit = 4e-7 if dtype == torch.float32 else 4.1e-3
            assert (error <= unit * expected.abs() + 1e-6 * values.reshape(m, n).abs()).all()
