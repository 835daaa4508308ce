"""E4M3 rows: the definition, the norms that write them, and the kernels bit for bit."""

import pytest
import torch
from torch import Tensor

from bytetx.ops import native
from bytetx.ops.norm import layer_norm, rms_norm
from bytetx.ops.quantize import empty_fp8_rows, quantize_rows

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def exact(x: Tensor) -> tuple[Tensor, Tensor]:
    """The definition, with both quotients and the product rounded to f32 as it says."""
    amax = x.double().abs().amax(1).clamp(min=2.0**-100)
    inverse = (torch.full_like(amax, 448) / amax).float()
    scaled = (x.double() * inverse.double()[:, None]).float()
    return scaled.clamp(-448, 448).to(torch.float8_e4m3fn), (amax / 448).float()


def assert_equal_rows(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    assert got[0].dtype == torch.float8_e4m3fn
    assert torch.equal(got[0].view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(got[1], expected[1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16, 384, 768, 1024, 1040, 4096, 8192, 20, 14336, 28672])
def test_quantized_rows_are_exact(device: str, dtype: torch.dtype, width: int) -> None:
    x = torch.randn(131, width, device=device).to(dtype)
    x[5] = 0
    x[6] *= 1e-5  # subnormal in f16
    x[7, 3] = 60000
    assert_equal_rows(quantize_rows(x), exact(x))
    rows, scale = quantize_rows(x)
    error = (rows.double() * scale.double()[:, None] - x.double()).abs()
    largest = x.double().abs().amax(1, keepdim=True)
    # 3 bits of mantissa: half a step is 1/16 of a value, and 2^-10 / 448 of the row's largest.
    assert (error <= x.double().abs() / 16 * 1.001 + largest * 2**-10 / 448 * 1.001).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [384, 1024, 2048, 50])
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_norm_writes_what_quantizing_its_result_gives(
    device: str, dtype: torch.dtype, width: int, op: str
) -> None:
    x, residual = torch.randn(2, 77, width, device=device).to(dtype)
    weight, bias = torch.randn(2, width, device=device).to(dtype)
    kw = {"eps": 1e-5, "residual": residual}
    sum_out, fp8_out = torch.full_like(x, torch.nan), empty_fp8_rows(x)
    fp8_out[1].fill_(torch.nan)
    more = {"sum_out": sum_out, "fp8_out": fp8_out}
    if op == "layer_norm":
        plain, got = layer_norm(x, weight, bias, **kw), layer_norm(x, weight, bias, **kw, **more)
    else:
        plain, got = rms_norm(x, weight, **kw), rms_norm(x, weight, **kw, **more)
    assert torch.equal(plain, got)
    assert torch.equal(sum_out, (x.float() + residual.float()).to(dtype))
    assert_equal_rows(fp8_out, quantize_rows(got))


@pytest.mark.gpu
def test_fp8_rows_come_from_kernels() -> None:
    assert native.kernel("quantize_rows", torch.device("cuda", 0)) is not None


@pytest.mark.parametrize("device", DEVICES)
def test_sum_may_be_the_residual_itself(device: str) -> None:
    """The way of a pre-norm block: the stream of residuals is updated in place."""
    x, stream = torch.randn(2, 33, 768, device=device)
    weight = torch.randn(768, device=device)
    expected, total = rms_norm(x, weight, eps=1e-6, residual=stream), x + stream
    got = rms_norm(x, weight, eps=1e-6, residual=stream, out=x, sum_out=stream)
    assert got is x
    assert torch.equal(got, expected) and torch.equal(stream, total)


def test_sum_needs_a_residual_and_a_place_of_its_own() -> None:
    x, weight = torch.randn(3, 8), torch.randn(8)
    with pytest.raises(ValueError, match="residual is None"):
        rms_norm(x, weight, eps=1e-6, sum_out=torch.empty_like(x))
    out = torch.empty_like(x)
    with pytest.raises(ValueError, match="two tensors"):
        layer_norm(x, weight, None, eps=1e-6, residual=x, out=out, sum_out=out)
    with pytest.raises(ValueError, match="fp8_out\\[0\\]"):
        layer_norm(x, weight, None, eps=1e-6, fp8_out=(out, out[:, 0]))
