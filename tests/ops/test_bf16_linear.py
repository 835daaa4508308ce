"""Linear layers of bf16 on a CPU: the kernel against float64, and the bits of its rows."""

import cpu_kernels
import pytest
import torch

from bytetx.ops.bf16_linear import bf16_linear, why_no_bf16_linear
from bytetx.ops.linear import ACTIVATIONS, linear, prepare_linear
from bytetx.ops.panel_linear import pack_weight

pytestmark = pytest.mark.skipif(
    why_no_bf16_linear() is not None, reason=f"bf16_linear: {why_no_bf16_linear()}"
)

BF16 = torch.bfloat16
# (m, n, k): one row, rests of tiles of 6 and 12 rows and 16 and 32 outputs, odd k and k no multiple
# of a vector, more rows than a block, and a model's sizes.
SHAPES = [(1, 32, 2), (5, 33, 7), (13, 100, 61), (49, 31, 1), (130, 96, 384), (60, 384, 1536)]

poisoned_memory = cpu_kernels.poisoned_memory


def operands(m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(x [m, k], weight [n, k], bias [n]); results are about as large as 1."""
    torch.manual_seed(m * n + k)
    weight = torch.randn(n, k) / k**0.5
    return torch.randn(m, k).to(BF16), weight.to(BF16), torch.randn(n).to(BF16)


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("isa", cpu_kernels.VECTOR_ISAS)
def test_kernel_computes_its_formula(
    isa: str, shape: tuple[int, int, int], is_packed: bool
) -> None:
    m, n, k = shape
    x, weight, bias = operands(m, n, k)
    given = pack_weight(weight) if is_packed else weight
    for has_bias in (True, False):
        sums = x.double() @ weight.double().T + (bias.double() if has_bias else 0)
        for index, activation in enumerate(ACTIVATIONS):
            expected = cpu_kernels.EXACT_ACTIVATIONS[activation](sums)
            got = bf16_linear(
                x,
                given,
                bias if has_bias else None,
                n=n,
                activation=index,
                is_packed=is_packed,
                isa=isa,
            )
            # The one rounding to bf16 that any result has, and a little for f32 inside.
            least = (expected.to(BF16).double() - expected).norm()
            assert (got.double() - expected).norm() < 1.01 * least + 1e-6, activation


def test_sums_have_one_order_on_every_processor() -> None:
    x, weight, bias = operands(40, 70, 130)
    for isa in cpu_kernels.VECTOR_ISAS:
        options = {"n": 70, "activation": 0, "is_packed": False}
        wanted = bf16_linear(x, weight, bias, isa=cpu_kernels.VECTOR_ISAS[0], **options)
        assert torch.equal(bf16_linear(x, weight, bias, isa=isa, **options), wanted)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_shows(value: float) -> None:
    x, weight, bias = operands(13, 40, 33)
    x[7, 32] = value
    for index, activation in enumerate(ACTIVATIONS):
        got = bf16_linear(x, weight.abs() + 1, bias, n=40, activation=index, is_packed=False)
        expected = cpu_kernels.EXACT_ACTIVATIONS[activation](
            x.double() @ (weight.abs() + 1).double().T + bias.double()
        )
        assert torch.equal(got.isfinite(), expected.isfinite()), activation


@pytest.mark.parametrize("isa", cpu_kernels.VECTOR_ISAS)
def test_rows_have_their_bits_in_every_number_of_rows_and_threads(isa: str) -> None:
    threads = torch.get_num_threads()
    try:
        for n, k in ((269, 49), (96, 384), (64, 1536)):
            x, weight, bias = operands(300, n, k)
            panels = pack_weight(weight)

            def run(rows: torch.Tensor, given: torch.Tensor, is_packed: bool) -> torch.Tensor:
                options = {"n": n, "activation": 1, "is_packed": is_packed, "isa": isa}  # noqa: B023
                return bf16_linear(rows.contiguous(), given, bias, **options)  # noqa: B023

            wanted = run(x, panels, True)
            for num_threads in (1, 2, 7):
                torch.set_num_threads(num_threads)
                for m in (*range(1, 60, 3), 97, 144, 145, 263):
                    for first in (0, 37):
                        rows = slice(first, first + m)
                        assert torch.equal(run(x[rows], panels, True), wanted[rows]), m
                        assert torch.equal(run(x[rows], weight, False), wanted[rows]), m
    finally:
        torch.set_num_threads(threads)


def test_a_compiled_layer_has_the_bits_of_the_plain_one() -> None:
    x, weight, bias = operands(20, 48, 64)
    for prepack in (True, False):
        w = prepare_linear(weight, bias, prepack=prepack)

        def run(rows: torch.Tensor) -> torch.Tensor:
            return linear(rows, w, activation="gelu")  # noqa: B023

        compiled = torch.compile(run, backend="eager")
        assert torch.equal(compiled(x), run(x))
