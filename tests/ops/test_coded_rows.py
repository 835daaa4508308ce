"""Rows of codes: rounding against a plain search in torch, and GGUF's blocks, which keep theirs."""

import cpu_kernels
import numpy as np
import pytest
import torch

from bytetx.ops.coded_rows import (
    GROUP,
    are_finite,
    convert_rows,
    round_rows,
    row_bytes,
    takes_blocks,
)
from bytetx.ops.grouped_linear import GroupedWeight, grouped_from_rows
from bytetx.ops.panel_linear import why_no_panels

pytestmark = pytest.mark.skipif(
    why_no_panels() is not None, reason=f"panel_linear: {why_no_panels()}"
)

poisoned_memory = cpu_kernels.poisoned_memory
SCHEMES = ("Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q8_0", "Q6_K")


@pytest.fixture(params=[8, 4])
def bits(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def weight_of(rows: torch.Tensor, k: int, bits: int) -> GroupedWeight:
    return grouped_from_rows(rows, None, k, bits, dtype=torch.float32)


def searched(rows: torch.Tensor, bits: int) -> torch.Tensor:
    """The values of the candidates with the least error, f64 [n, k]; k is whole groups."""
    largest = rows.abs().amax(1, keepdim=True).clamp(min=1e-30)
    factor = torch.exp2(torch.floor(torch.log2(largest)) - 9)
    w = (rows / factor).unflatten(1, (-1, GROUP)).double()
    low, high = w.amin(2, keepdim=True), w.amax(2, keepdim=True)
    best = torch.full_like(w, torch.inf)
    codes_of_best = torch.zeros_like(w)

    def attempt(scale: torch.Tensor, least: torch.Tensor) -> None:
        scale = scale.half().double()
        least = -128 * scale if bits == 8 else least.half().double()
        codes = ((w - least) / torch.where(scale == 0, 1.0, scale)).round().clamp(0, 2**bits - 1)
        values = codes * scale + least
        is_better = (values - w).square().sum(2, True) < (best - w).square().sum(2, True)
        best.copy_(torch.where(is_better, values, best))
        codes_of_best.copy_(torch.where(is_better, codes, codes_of_best))

    if bits == 8:
        for shrink in (1.0, 0.985):
            attempt(torch.maximum(high, -low) / 127 * shrink, low)
    else:
        for shrink in (1.0, 0.95, 0.9, 0.85):
            attempt((high - low) * shrink / 15, low * shrink)
        extreme = torch.where(high > -low, high, low)
        attempt(extreme / -8, extreme)
        apart = codes_of_best - codes_of_best.mean(2, keepdim=True)
        slope = (apart * w).sum(2, True) / apart.square().sum(2, True).clamp(min=1e-9)
        attempt(slope, w.mean(2, True) - slope * codes_of_best.mean(2, True))
    return best.flatten(1) * factor


@pytest.mark.parametrize("shape", [(37, 64), (1, 32), (130, 1536)])
def test_rounding_finds_the_least_error_of_its_candidates(
    shape: tuple[int, int], bits: int
) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape) * torch.logspace(-4, 2, shape[0])[:, None]
    x[shape[0] // 2] *= 1 + 30 * (torch.rand(shape[1]) > 0.97)
    wanted = (searched(x, bits) - x.double()).norm(dim=1)
    got = (weight_of(round_rows(x, bits), shape[1], bits).restored.double() - x).norm(dim=1)
    # Ties, and divisions by another order of rounding, choose other codes now and then.
    assert (got <= 1.002 * wanted + 1e-30).all()


def test_a_row_has_its_codes_among_any_others(bits: int) -> None:
    torch.manual_seed(1)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(35, 83).to(dtype)
        rows = round_rows(x, bits)
        assert rows.shape == (35, row_bytes(83, bits))
        for row in (0, 17, 34):
            assert torch.equal(round_rows(x[row : row + 1], bits)[0], rows[row])
        whole = weight_of(rows, 83, bits)
        order = torch.randperm(35)
        assert torch.equal(weight_of(rows[order], 83, bits).restored, whole.restored[order])


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_numbers_that_are_not_finite_show(value: float, bits: int) -> None:
    x = torch.randn(5, 40)
    assert are_finite(round_rows(x, bits))
    x[3, 39] = value
    rows = round_rows(x, bits)
    assert not are_finite(rows)
    assert torch.equal(rows[:3], round_rows(x[:3], bits))


def test_zeros_and_equal_numbers(bits: int) -> None:
    x = torch.zeros(3, 64)
    x[1] = 0.75
    x[2, 40] = -3.0
    got = weight_of(round_rows(x, bits), 64, bits).restored
    # With 8 bits the scale, a 127th of the number, is rounded to f16.
    torch.testing.assert_close(got, x, rtol=2**-11 if bits == 8 else 0, atol=0)


def blocks_of(scheme: str, n: int, k: int) -> torch.Tensor:
    """Rows of blocks of any codes, and scales of usual sizes; uint8 [n, bytes of a row]."""
    gguf = pytest.importorskip("gguf")
    kind = gguf.GGMLQuantizationType[scheme]
    numbers, size = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(0)
    blocks = generator.integers(0, 256, (n, k // numbers, size), dtype=np.uint8)
    places = {"Q4_1": 2, "Q4_K": 2}.get(scheme, 1)
    halves = (
        generator.normal(size=(n, k // numbers, places)) * np.logspace(-6, -1, n)[:, None, None]
    )
    where = slice(208, 210) if scheme == "Q6_K" else slice(0, 2 * places)
    blocks[..., where] = halves.astype(np.float16).view(np.uint8)
    return torch.from_numpy(blocks.reshape(n, -1))


def decoded(scheme: str, blocks: torch.Tensor) -> torch.Tensor:
    import gguf

    kind = gguf.GGMLQuantizationType[scheme]
    return torch.from_numpy(gguf.quants.dequantize(blocks.numpy(), kind))


@pytest.mark.parametrize(
    ("scheme", "bits"), [("Q4_0", 4), ("Q4_0", 8), ("Q4_1", 4), ("Q5_0", 8), ("Q8_0", 8)]
)
def test_saved_blocks_keep_their_values(scheme: str, bits: int) -> None:
    """Exactly: any codes, scales down to f16's smallest."""
    assert takes_blocks(scheme, bits)
    blocks = blocks_of(scheme, 37, 96)
    w = weight_of(convert_rows(blocks, scheme, 96, bits), 96, bits)
    assert torch.equal(w.restored, decoded(scheme, blocks))


def test_q4_k_keeps_its_codes() -> None:
    """Scales and least values are products of two numbers, which f16 rounds by 2^-11 at most."""
    n, k = 37, 512
    blocks = blocks_of("Q4_K", n, k)
    values = decoded("Q4_K", blocks).unflatten(1, (-1, GROUP))
    w = weight_of(convert_rows(blocks, "Q4_K", k, 4), k, 4)
    codes, scale, least = w._groups()
    saved = blocks.view(n, 2, 144)[..., 16:].reshape(n, 2, 4, 1, 32)
    halves = torch.cat((saved & 15, saved >> 4), 3).view(n, -1, GROUP)
    assert torch.equal(codes, halves.float())
    exact = torch.maximum((scale * 15).abs(), least.abs()) * w.factor[:, None, None]
    error = (w.restored.unflatten(1, (-1, GROUP)) - values).abs()
    assert (error <= 2**-11 * 2 * exact + 1e-12).all()
    # Where a product fits f16, the values are the file's.
    blocks.view(n, 2, 144)[..., :4] = torch.tensor([0, 0x2C, 0, 0x28], dtype=torch.uint8)
    w = weight_of(convert_rows(blocks, "Q4_K", k, 4), k, 4)
    assert torch.equal(w.restored, decoded("Q4_K", blocks))


def test_q6_k_is_rounded_as_its_numbers_are(bits: int) -> None:
    blocks = blocks_of("Q6_K", 37, 512)
    values = decoded("Q6_K", blocks)
    got, wanted = (
        weight_of(rows, 512, bits).restored
        for rows in (convert_rows(blocks, "Q6_K", 512, bits), round_rows(values, bits))
    )
    # Their factors differ, and so does the rounding of f16 scales.
    error = (wanted - values).norm(dim=1)
    assert ((got - values).norm(dim=1) <= 1.01 * error).all()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_saved_numbers_that_are_not_finite_show(scheme: str) -> None:
    blocks = blocks_of(scheme, 3, 256)
    for bits in (bits for bits in (4, 8) if takes_blocks(scheme, bits)):
        assert are_finite(convert_rows(blocks, scheme, 256, bits))
        broken = blocks.clone()
        at = 208 if scheme == "Q6_K" else 0
        broken[1, at : at + 2] = torch.tensor([0, 0x7C], dtype=torch.uint8)
        rows = convert_rows(broken, scheme, 256, bits)
        assert not are_finite(rows) and are_finite(rows[::2])


def test_other_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="whole blocks, got 33"):
        convert_rows(torch.zeros(1, 20, dtype=torch.uint8), "Q4_1", 33, 4)
    with pytest.raises(ValueError, match="f32 or bf16"):
        round_rows(torch.zeros(1, 32, dtype=torch.float16), 4)
    assert not takes_blocks("Q5_K", 8) and not takes_blocks("Q4_1", 8)
