"""The GEMM that adds other ranks' parts to its products, against float64, on one GPU."""

import random

import pytest
import torch
from comm_layers import assert_right
from torch import Tensor
from torch.nn import functional as F

from bytetx.ops import native
from bytetx.ops.comm_kernels import gemm_add_parts
from bytetx.ops.linear import prepare_linear

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def needs_kernel() -> None:
    reason = native.why_no_kernel("gemm_add_parts", torch.device("cuda", 0))
    if reason is not None:
        pytest.skip(reason)


def randn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def sums(x: Tensor, w: Tensor, arrays: list[Tensor], to: torch.dtype) -> Tensor:
    total = F.linear(x.to(to), w.to(to))
    for array in arrays:
        total = total + array.to(to)
    return total


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tiling", ["128x192", "128x128"])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_adds_residual_bias_and_the_parts_of_others(
    size: int, tiling: str, dtype: torch.dtype
) -> None:
    random.seed(size)
    torch.manual_seed(size)
    for number in range(12):
        rows, rank = (1, 130, 700, 3000)[number % 4], random.randrange(size)
        n, k = 32 * random.randint(1, 60), 8 * random.randint(1, 150)
        x, w = randn(rows, k, dtype=dtype), randn(n, k, dtype=dtype) / k**0.5
        residual, bias = randn(rows, n, dtype=dtype), randn(n, dtype=dtype) if number % 2 else None
        parts = randn(size, rows, n, dtype=dtype)
        parts[rank] = float("nan")  # is never read
        out = torch.full((rows, n), float("nan"), device="cuda", dtype=dtype)
        half = rows // 2 // 256 * 256
        for piece in ((0, half), (half, rows)):
            gemm_add_parts(
                x,
                prepare_linear(w, prepack=False),
                rows=piece,
                residual=residual,
                bias=bias,
                parts=parts.view(-1, n),
                rank=rank,
                size=size,
                out=out,
                tiling=tiling,
            )
            assert out[piece[1] :].isnan().all()
        arrays = [residual, *(parts[r] for r in range(size) if r != rank)]
        arrays += [] if bias is None else [bias]
        exact, plain = sums(x, w, arrays, torch.float64), sums(x, w, arrays, dtype)
        assert_right(out, exact, plain, f"{rows} x {n} x {k}, rank {rank} of {size}")


def test_misuse_is_named() -> None:
    x, w = randn(8, 64, dtype=torch.float16), randn(64, 64, dtype=torch.float16)
    weight, out = prepare_linear(w, prepack=False), torch.empty_like(x)
    options = {"rows": (0, 8), "residual": x, "bias": None, "parts": x, "out": out}
    with pytest.raises(ValueError, match="gemm_add_parts needs a rank below the number of ranks"):
        gemm_add_parts(x, weight, **options, rank=1, size=1, tiling="128x128")
    with pytest.raises(ValueError, match="has the tilings 128x128 and 128x192, got 192x128"):
        gemm_add_parts(x, weight, **options, rank=0, size=1, tiling="192x128")
