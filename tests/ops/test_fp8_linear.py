"""Linear layers of E4M3 rows: the definition, and the Hopper kernel against float64."""

import pytest
import torch
from captured import assert_replays_give_the_same_bits
from torch import Tensor

from bytetx.ops import native, reference
from bytetx.ops.fp8_linear import (
    Fp8LinearWeight,
    fp8_linear,
    has_fp8_linear,
    plan_fp8_linear,
    prepare_fp8_linear,
    run_kernel,
    tilings,
)
from bytetx.ops.gated import GATES
from bytetx.ops.linear import ACTIVATIONS
from bytetx.ops.quantize import quantize_rows

CUDA = torch.device("cuda")
FP8 = torch.float8_e4m3fn
HALVES = [torch.float16, torch.bfloat16]
ROWS = [1, 63, 64, 65, 127, 129, 300, 8193]
# (n, k) of the four GEMMs of MiniLM, BERT-base and BERT-large, and what is ragged.
SHAPES = [
    *((1152, 384), (384, 384), (1536, 384), (384, 1536)),
    *((2304, 768), (768, 768), (3072, 768), (768, 3072)),
    *((3072, 1024), (1024, 1024), (4096, 1024), (1024, 4096)),
    *((32, 16), (96, 48), (224, 144)),
]


def random_layer(
    m: int, n: int, k: int, dtype: torch.dtype, device: torch.device | str
) -> tuple[Tensor, Tensor, Fp8LinearWeight]:
    """Rows with outliers and one of zeros, their scales, a weight."""
    torch.manual_seed(m + n + k)
    x = torch.randn(m, k, device=device)
    x[m // 2, k // 3] = 60
    x[m // 3] = 0
    weight = (torch.randn(n, k, device=device) / k**0.5).to(dtype)
    bias = torch.randn(n, device=device).to(dtype)
    return *quantize_rows(x), prepare_fp8_linear(weight, bias)


def exact(rows: Tensor, scale: Tensor | None, w: Fp8LinearWeight, activation: str) -> Tensor:
    d = rows.double() @ w.rows.double().T * w.scale.double()
    d = d if scale is None else d * scale.double()[:, None]
    return reference.activate(d if w.bias is None else d + w.bias.double(), activation)


def assert_near(d: Tensor, x: Tensor, sums: Tensor, out_scale: float | None) -> None:
    """Half an ulp of the result, and what the matrix unit loses on the way to it.

    It cuts what it adds to about 14 bits of the largest: a little of the row's largest sum is lost
    at each of k / 32 steps, to both sides where signs are mixed as here.
    """
    if out_scale is None:
        half_ulp, least = torch.finfo(d.dtype).eps / 2, 2.0**-24
        got = d.double()
    else:
        half_ulp, least = 2.0**-4, out_scale * 2.0**-10
        got, x = d.double() * out_scale, x.clamp(-448 * out_scale, 448 * out_scale)
    error, largest = (got - x).abs(), sums.abs().amax(1, keepdim=True)
    worst = (error / (x.abs() * half_ulp * 1.1 + least + largest * 2.0**-7)).max().item()
    assert worst <= 1, worst
    if out_scale is None:
        assert error.norm() <= (half_ulp + 2.0**-8) * sums.norm()


@pytest.mark.parametrize("dtype", HALVES)
def test_reference_is_its_definition(dtype: torch.dtype) -> None:
    for n, k in ((32, 16), (20, 24), (384, 96)):
        rows, scale, w = random_layer(37, n, k, dtype, "cpu")
        for activation in ACTIVATIONS:
            d = fp8_linear(rows, scale, w, activation=activation)
            assert d.dtype == dtype
            assert_near(d, exact(rows, scale, w, activation), exact(rows, scale, w, "none"), None)
        d = fp8_linear(rows, None, w, activation="gelu", out_scale=2.0)
        assert d.dtype == FP8
        assert_near(d, exact(rows, None, w, "gelu"), exact(rows, None, w, "none"), 2.0)


def test_wrong_arguments_are_named() -> None:
    rows, scale, w = random_layer(5, 32, 16, torch.float16, "cpu")
    with pytest.raises(ValueError, match="rows must be float8_e4m3fn"):
        fp8_linear(rows.half(), scale, w)
    with pytest.raises(ValueError, match="scale must have shape \\[5\\]"):
        fp8_linear(rows, scale[:3], w)
    with pytest.raises(ValueError, match="activation must be one of"):
        fp8_linear(rows, scale, w, activation="swish")
    with pytest.raises(ValueError, match="out_scale must be above 0"):
        fp8_linear(rows, scale, w, out_scale=0.0)
    with pytest.raises(ValueError, match="weight must be float16 or bfloat16"):
        prepare_fp8_linear(torch.ones(32, 16))


def test_a_weights_scales_round_it_best() -> None:
    torch.manual_seed(3)
    weight = torch.cat([torch.randn(40, 96), torch.zeros(1, 96)]).half()

    def square_error(rows: Tensor, scale: Tensor) -> Tensor:
        return (rows.double() * scale.double()[:, None] - weight.double()).square().sum(1)

    w = prepare_fp8_linear(weight)
    found, plain = square_error(w.rows, w.scale), square_error(*quantize_rows(weight))
    assert (found <= plain * (1 + 1e-6)).all()
    assert found.sum() < 0.95 * plain.sum()
    assert w.rows.float().isfinite().all() and found[-1] == 0


@pytest.fixture
def has_kernel() -> None:
    reason = native.why_no_kernel("fp8_linear", CUDA)
    if reason is not None:
        pytest.skip(reason)


def poison_free_memory() -> None:
    """Fill the memory that the allocator hands out next with NaN, in f16 as in E4M3."""
    torch.full((1 << 23,), 0xFF, dtype=torch.uint8, device=CUDA)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name, *_ in native.fp8_linear_tilings()])
@pytest.mark.parametrize("m", ROWS)
@pytest.mark.usefixtures("has_kernel")
def test_every_tiling(name: str, m: int) -> None:
    tiling = next(tiling.index for tiling in tilings() if tiling.name == name)
    for n, k in SHAPES if m < 1000 else SHAPES[::3]:
        dtype = HALVES[(n + m) % 2]
        rows, scale, w = random_layer(m, n, k, dtype, CUDA)
        assert has_fp8_linear(w)
        sums = exact(rows, scale, w, "none")
        most = sums.abs().max().item() / 448
        for activation, out_scale in (("none", None), ("gelu", None), ("gelu", most)):
            poison_free_memory()
            d = run_kernel(rows, scale, w, tiling, activation=activation, out_scale=out_scale)
            assert_near(d, reference.activate(sums, activation), sums, out_scale)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name, *_ in native.fp8_linear_tilings()])
@pytest.mark.usefixtures("has_kernel")
def test_rows_in_bands_where_weights_are_large(name: str) -> None:
    """Several bands whose last one is lower, and tiles that m and n cut."""
    tiling = next(tiling.index for tiling in tilings() if tiling.name == name)
    rows, scale, w = random_layer(5000, 8224, 3088, torch.bfloat16, CUDA)
    sums = exact(rows, scale, w, "none")
    poison_free_memory()
    assert_near(run_kernel(rows, scale, w, tiling), sums, sums, None)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.usefixtures("has_kernel")
def test_every_epilogue(dtype: torch.dtype, activation: str) -> None:
    for m in (1, 77, 5000):
        rows, scale, w = random_layer(m, 768, 384, dtype, CUDA)
        bare = Fp8LinearWeight(w.rows, w.scale, None, dtype)
        for layer, scales in ((w, scale), (bare, scale), (w, None)):
            sums = exact(rows, scales, layer, "none")
            x = reference.activate(sums, activation)
            # Half the scale that cuts nothing off; a row of zeros without bias takes any.
            half = max(0.5 * sums.abs().max().item() / 448, 2.0**-20)
            for out_scale in (None, half):
                poison_free_memory()
                options = {"activation": activation, "out_scale": out_scale}
                d = fp8_linear(rows, scales, layer, **options)
                assert_near(d, x, sums, out_scale)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("activation", GATES)
@pytest.mark.usefixtures("has_kernel")
def test_gates_and_values_in_turn(dtype: torch.dtype, activation: str) -> None:
    for m, n, k in ((1, 64, 48), (77, 448, 384), (5000, 1536, 384)):
        rows, scale, w = random_layer(m, n, k, dtype, CUDA)
        gates, values = exact(rows, scale, w, "none").view(m, -1, 2, 32).unbind(2)
        x = (reference.activate(gates, activation) * values).reshape(m, n // 2)
        for tiling in tilings():
            poison_free_memory()
            d = run_kernel(
                rows, scale, w, tiling.index, activation=activation, is_gated=True
            ).double()
            # Each factor is as far off as a sum is.
            most = gates.abs().flatten(1).amax(1, keepdim=True) + 1
            most = most * (values.abs().flatten(1).amax(1, keepdim=True) + 1)
            error = (d - x).abs()
            assert (error <= x.abs() * torch.finfo(dtype).eps + 2.0**-6 * most).all()


@pytest.mark.gpu
@pytest.mark.usefixtures("has_kernel")
def test_batch_mates_and_tilings_change_no_bit() -> None:
    rows, scale, w = random_layer(4000, 768, 3072, torch.float16, CUDA)
    expected = fp8_linear(rows, scale, w, activation="gelu")
    for m in (1, 100, 700, 3999):
        assert torch.equal(fp8_linear(rows[:m], scale[:m], w, activation="gelu"), expected[:m])
    for tiling in tilings():
        d = run_kernel(rows, scale, w, tiling.index, activation="gelu")
        assert torch.equal(d, expected)


@pytest.mark.gpu
@pytest.mark.usefixtures("has_kernel")
def test_what_is_not_finite_stays_in_its_row() -> None:
    rows, scale, w = random_layer(300, 768, 384, torch.float16, CUDA)
    clean = fp8_linear(rows, scale, w, activation="gelu", out_scale=0.1)
    rows.view(torch.uint8)[7, 5] = 0x7F
    dirty = fp8_linear(rows, scale, w, activation="gelu", out_scale=0.1)
    others = torch.arange(300, device=CUDA) != 7
    assert dirty[7].float().isnan().all()
    assert torch.equal(dirty[others].view(torch.uint8), clean[others].view(torch.uint8))


@pytest.mark.gpu
@pytest.mark.usefixtures("has_kernel")
def test_a_captured_graph_gives_the_same_bits() -> None:
    rows, scale, w = random_layer(500, 1536, 384, torch.float16, CUDA)
    back = prepare_fp8_linear(torch.randn(384, 1536, device=CUDA).half())

    def run() -> Tensor:
        return fp8_linear(fp8_linear(rows, scale, w, activation="gelu", out_scale=0.1), None, back)

    assert_replays_give_the_same_bits(run)


@pytest.mark.gpu
@pytest.mark.usefixtures("has_kernel")
def test_no_rows_and_shapes_that_no_kernel_takes() -> None:
    rows, scale, w = random_layer(50, 768, 768, torch.float16, CUDA)
    assert fp8_linear(rows[:0], scale[:0], w).shape == (0, 768)
    for n, k in ((33, 64), (64, 40)):
        rows, scale, w = random_layer(50, n, k, torch.float16, CUDA)
        assert not has_fp8_linear(w)
        sums = exact(rows, scale, w, "none")
        assert_near(fp8_linear(rows, scale, w), sums, sums, None)


def test_plan_fills_the_gpu() -> None:
    if not tilings():
        pytest.skip("no native core")
    assert plan_fp8_linear(65536, 2304, 768).name == "128x128single"
    assert plan_fp8_linear(256, 4096, 14336).name == "64x128single"
    assert plan_fp8_linear(1, 768, 768).name == "64x64"
