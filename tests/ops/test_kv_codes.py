"""FP8 keys and values: the codes against a search of all of them, scales, what is out of range."""

import pytest
import torch

from bytetx.ops.kv_codes import (
    LARGEST_SCALE,
    LEAST_SCALE,
    MAX_RELATIVE_ERROR,
    NAN_SCALE,
    quantize_kv,
    restore_kv,
)

CODES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
VALUES = CODES[CODES.isfinite()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_are_the_nearest_ones(dtype: torch.dtype) -> None:
    x = (torch.randn(50, 3, 32) * torch.logspace(-3, 3, 50)[:, None, None]).to(dtype)
    codes, scales = quantize_kv(x)
    restored = restore_kv(codes, scales).double()
    factors = torch.exp2(scales.double() - 127)[..., None]
    nearest = ((x.double() / factors)[..., None] - VALUES).abs().amin(-1)
    assert torch.equal((restored / factors - x.double() / factors).abs(), nearest)
    largest = x.double().abs().amax(-1)
    # The least power of two that holds the largest number.
    assert (largest <= 448 * factors[..., 0]).all() and (largest > 224 * factors[..., 0]).all()


def test_errors_are_what_info_says() -> None:
    x = torch.randn(1000, 128)
    error = (restore_kv(*quantize_kv(x)) - x).abs()
    is_normal = x.abs() >= 2.0**-14 * x.abs().amax(-1, keepdim=True)
    assert (error <= MAX_RELATIVE_ERROR * x.abs())[is_normal].all()
    assert 0.024 < error.norm() / x.norm() < 0.028


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_restored_numbers_have_the_dtype_exactly(dtype: torch.dtype) -> None:
    restored = restore_kv(*quantize_kv(torch.randn(100, 64) * 50))
    assert torch.equal(restored.to(dtype).float(), restored)


def test_each_vector_has_its_own_scale() -> None:
    x = torch.randn(7, 2, 16)
    together = restore_kv(*quantize_kv(x))
    x[1:] *= 1000
    assert torch.equal(restore_kv(*quantize_kv(x))[0], together[0])


def test_borders() -> None:
    rows = torch.tensor(
        [[0.0, 0.0], [448.0, 1.0], [449.0, 1.0], [1e9, -1e9], [1e-30, 0.0], [65504.0, -1.0]]
    )
    codes, scales = quantize_kv(rows)
    assert scales.tolist() == [105, 127, 128, LARGEST_SCALE, LEAST_SCALE, LARGEST_SCALE]
    restored = restore_kv(codes, scales)
    assert restored[:3].tolist() == [[0.0, 0.0], [448.0, 1.0], [448.0, 1.0]]
    assert restored[3].tolist() == [57344.0, -57344.0]  # cut off
    assert restored[4].tolist() == [0.0, 0.0]
    assert restored[5, 0] == 57344.0


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_shows_in_the_whole_vector(value: float) -> None:
    x = torch.randn(3, 8)
    x[1, 2] = value
    codes, scales = quantize_kv(x)
    assert (scales == NAN_SCALE).tolist() == [False, True, False]
    restored = restore_kv(codes, scales)
    assert not restored[1].isfinite().any() and restored[::2].isfinite().all()


def test_no_vectors() -> None:
    codes, scales = quantize_kv(torch.zeros(0, 2, 8))
    assert codes.shape == (0, 2, 8) and scales.shape == (0, 2)
    assert restore_kv(codes, scales).shape == (0, 2, 8)
