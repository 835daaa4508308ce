"""Weights of 8 and 4 bits in groups: their rounding, and products against float64."""

import cpu_kernels
import pytest
import torch

from bytetx.ops.grouped_linear import GROUP, GroupedWeight, prepare_grouped_linear
from bytetx.ops.linear import ACTIVATIONS, prepare_linear
from bytetx.ops.panel_linear import panel_linear, why_no_panels

pytestmark = pytest.mark.skipif(
    why_no_panels() is not None, reason=f"panel_linear: {why_no_panels()}"
)

# (n, k): rests of groups and of strips, one of each, sizes of layers.
SHAPES = [(83, 37), (16, 1), (1, 64), (200, 129), (130, 300), (64, 1536), (48, 32)]
ROWS = [0, 1, 2, 3, 4, 5, 8, 9, 16, 17, 300]

poisoned_memory = cpu_kernels.poisoned_memory
dtype = cpu_kernels.dtype


@pytest.fixture(params=[8, 4])
def bits(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def weight(
    n: int, k: int, bits: int, dtype: torch.dtype, *, has_bias: bool = True
) -> tuple[torch.Tensor, GroupedWeight]:
    """(the matrix, rounded): results are about as large as 1."""
    torch.manual_seed(n * k + bits)
    matrix = (torch.randn(n, k) / k**0.5).to(dtype)
    bias = torch.randn(n).to(dtype) if has_bias else None
    return matrix, prepare_grouped_linear(prepare_linear(matrix, bias, prepack=False), bits=bits)


def rounded_rows(x: torch.Tensor) -> torch.Tensor:
    """Rows as a product reads them, f64: whole steps of 1/127 of the largest of each group."""
    more = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % GROUP))
    groups = more.unflatten(1, (-1, GROUP))
    largest = groups.abs().amax(2, keepdim=True)
    is_some = largest > 1e-30
    codes = (groups * torch.where(is_some, torch.full_like(largest, 127.0) / largest, 0.0)).round()
    scale = torch.where(is_some, largest / 127.0, 0.0)
    return (codes.double() * scale.double()).flatten(1)[:, : x.shape[1]]


def exact(x: torch.Tensor, w: GroupedWeight) -> torch.Tensor:
    sums = rounded_rows(x) @ w.restored.double().T
    return sums if w.bias is None else sums + w.bias.double()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("isa", cpu_kernels.VECTOR_ISAS)
def test_kernel_computes_its_formula(
    isa: str, dtype: torch.dtype, bits: int, shape: tuple[int, int]
) -> None:
    n, k = shape
    for has_bias in (True, False):
        _, w = weight(n, k, bits, dtype, has_bias=has_bias)
        for m in ROWS:
            x = torch.randn(m, k).to(dtype)
            wanted = exact(x, w)
            for index, activation in enumerate(ACTIVATIONS):
                expected = cpu_kernels.EXACT_ACTIVATIONS[activation](wanted)
                got = panel_linear(x, w.panels, activation=index, isa=isa)
                assert got.dtype == dtype and got.shape == (m, n)
                least = (expected.to(dtype).double() - expected).norm()
                assert (got.double() - expected).norm() <= 1.01 * least + 1e-6 * (m * n) ** 0.5


@pytest.mark.parametrize("isa", cpu_kernels.VECTOR_ISAS)
def test_rows_have_their_bits_in_every_number_of_rows_and_threads(
    isa: str, dtype: torch.dtype, bits: int
) -> None:
    threads = torch.get_num_threads()
    _, w = weight(269, 129, bits, dtype)
    x = torch.randn(90, w.k).to(dtype)
    wanted = panel_linear(x, w.panels, isa="avx2")
    try:
        for num_threads in (1, 2, 7):
            torch.set_num_threads(num_threads)
            for m in (*range(1, 18), 33, 77):
                for first in (0, 13):
                    rows = slice(first, first + m)
                    assert torch.equal(panel_linear(x[rows], w.panels, isa=isa), wanted[rows]), m
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan, 1e-41, 1e33])
def test_a_row_keeps_to_itself(value: float, dtype: torch.dtype, bits: int) -> None:
    _, w = weight(40, 70, bits, dtype)
    x = torch.randn(13, 70).to(dtype)
    wanted = w.matmul(x)
    x[7, 33] = value
    got = w.matmul(x)
    others = torch.arange(13) != 7
    assert torch.equal(got[others], wanted[others])
    assert bool(got[7].isfinite().all()) == bool(torch.isfinite(x[7]).all())


def test_extreme_codes_do_not_overflow(bits: int) -> None:
    """All products as large as they can be, of either sign."""
    k = 4 * GROUP
    matrix = torch.full((17, k), 1.0)
    matrix[:, ::GROUP] = -1.0  # so that the group's codes are the least and the greatest
    matrix[1::2] *= -1
    w = prepare_grouped_linear(prepare_linear(matrix, prepack=False), bits=bits)
    for sign in (1.0, -1.0):
        x = torch.full((5, k), sign)
        torch.testing.assert_close(w.matmul(x).double(), exact(x, w), rtol=1e-6, atol=1e-5)
        torch.testing.assert_close(w.matmul(x), x @ matrix.T, rtol=0.01, atol=0.1)


@pytest.mark.parametrize("size", [1e-34, 1e-9, 1.0, 1e6, 1e30])
def test_weights_of_any_size_keep_their_digits(size: float, bits: int) -> None:
    torch.manual_seed(0)
    rows = torch.randn(40, 96) * size * torch.logspace(-3, 3, 40)[:, None]
    rows[7] = 0
    w = prepare_grouped_linear(prepare_linear(rows, prepack=False), bits=bits)
    # Steps of 1/255 of a range of 4 deviations each way, and of 1/15, are rounded evenly.
    error = (w.restored - rows).double().norm(dim=1) / rows.double().norm(dim=1).clamp(min=1e-300)
    assert error.max() < (0.01 if bits == 8 else 0.12)
    assert torch.equal(w.restored[7], torch.zeros(96))


def saved_groups(kind: str) -> torch.Tensor:
    """Values as a GGUF file's blocks of 32 give them, f32 [24, 96]."""
    torch.manual_seed(1)
    x = torch.randn(24, 3, 32) * torch.logspace(-2, 0, 24)[:, None, None] * 0.05
    if kind == "Q8_0":
        d = x.abs().amax(2, keepdim=True) / 127
        return ((x / d).round() * d.half().float()).flatten(1)
    if kind == "Q4_0":
        extreme = x.gather(2, x.abs().argmax(2, keepdim=True))
        d = extreme / -8
        return ((x / d + 8.5).floor().clamp(0, 15) - 8).mul(d.half().float()).flatten(1)
    low, high = x.amin(2, keepdim=True), x.amax(2, keepdim=True)
    d = (high - low) / 15
    codes = ((x - low) / d + 0.5).floor().clamp(0, 15)
    return (codes * d.half().float() + low.half().float()).flatten(1)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
def test_saved_groups_keep_their_values(kind: str) -> None:
    values = saved_groups(kind)
    plain = prepare_linear(values, prepack=False)
    w = prepare_grouped_linear(plain, bits=8 if kind == "Q8_0" else 4)
    assert torch.equal(w.restored, values)


def test_fewer_bytes(bits: int) -> None:
    matrix, w = weight(256, 512, bits, torch.float32, has_bias=False)
    groups = {8: 8.5, 4: 5}[bits] / 8 * matrix.numel()
    assert w.num_bytes == groups + 4 * 256  # a factor of each output


def test_rows_of_a_table(dtype: torch.dtype, bits: int) -> None:
    _, w = weight(83, 37, bits, dtype, has_bias=False)
    ids = torch.tensor([0, 82, 5, 16, 15, 5], dtype=torch.int32)
    assert torch.equal(w.rows(ids), w.restored[ids.long()].to(dtype))
    assert w.rows(ids[:0]).shape == (0, 37)
    for wrong in (83, -1):
        with pytest.raises(ValueError, match=rf"\[0, 83\), got {wrong}"):
            w.rows(torch.tensor([1, wrong], dtype=torch.int32))


def test_shards_make_the_whole(bits: int) -> None:
    _, w = weight(96, 128, bits, torch.float32)
    x = torch.randn(5, 128)
    halves = [w.shard(outputs=part) for part in (range(0, 39), range(39, 96))]
    assert torch.equal(torch.cat([half.matmul(x) for half in halves], 1), w.matmul(x))
    rows = [w.shard(inputs=part) for part in (range(0, 64), range(64, 128))]
    sums = [one.matmul(part.contiguous()) for one, part in zip(rows, x.chunk(2, 1), strict=True)]
    bias = rows[0].sum_bias
    assert bias is not None
    torch.testing.assert_close(sums[0] + sums[1] + bias, w.matmul(x), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="whole groups of 32 features, got 0 to 40"):
        w.shard(inputs=range(0, 40))


def test_other_rows_and_weights_are_refused(bits: int) -> None:
    matrix, w = weight(48, 64, bits, torch.float32)
    with pytest.raises(ValueError, match="x must"):
        w.matmul(torch.randn(2, 63))
    with pytest.raises(ValueError, match="x must"):
        w.matmul(torch.randn(2, 64, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="contiguous"):
        w.matmul(torch.randn(64, 2).T)
    with pytest.raises(ValueError, match="plain weight"):
        prepare_grouped_linear(prepare_linear(matrix, prepack=True), bits=bits)
    for wrong in ({"columns": 32}, {"features": 96}, {"factor": None}):
        with pytest.raises(ValueError, match="not a matrix in panels"):
            panel_linear(torch.randn(1, 64), w.panels._replace(**wrong))
