"""The CUDA layer norm against float64, for every dtype and every tiling it chooses among."""

import pytest
import torch
from captured import captured
from torch.nn.functional import layer_norm

from bytetx.ops import native, norm

# One warp a row, one CTA a row, too long for registers, no multiple of 16 bytes.
HIDDEN_SIZES = [8, 384, 768, 1024, 1032, 2048, 4096, 8192, 16384, 20000, 1, 7, 30, 1025]
EPS = 1e-5


def run_native(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor,
    out: torch.Tensor,
) -> None:
    if native.kernel("layer_norm", x.device) is None:
        pytest.skip(native.why_no_kernel("layer_norm", x.device))
    norm.run_kernel("layer_norm", x, weight, bias, eps=EPS, residual=residual, out=out)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("hidden_size", HIDDEN_SIZES)
@pytest.mark.parametrize("has_residual", [False, True])
def test_layer_norm_is_as_exact_as_torch(
    dtype: torch.dtype, hidden_size: int, has_residual: bool
) -> None:
    rows = 1003  # no multiple of the rows of a CTA
    x, other = torch.randn(2, rows, hidden_size, device="cuda", dtype=dtype) + 3
    weight, bias = torch.randn(2, hidden_size, device="cuda", dtype=dtype)
    residual = other if has_residual else None
    out = torch.full_like(x, torch.nan)
    run_native(x, residual, weight, bias, out)

    def reference(in_dtype: torch.dtype) -> torch.Tensor:
        h = x.to(in_dtype) + (residual.to(in_dtype) if has_residual else 0)
        norm = layer_norm(h, (hidden_size,), weight.to(in_dtype), bias.to(in_dtype), EPS)
        return norm.double()

    exact = reference(torch.float64)
    rounding = (exact.to(dtype).double() - exact).abs().max()
    ours, torchs = (out.double() - exact).abs().max(), (reference(dtype) - exact).abs().max()
    # Where torch happens to be exact (one feature), a few f32 roundings of the result are allowed.
    noise = 8 * torch.finfo(torch.float32).eps * exact.abs().max()
    assert ours <= 2 * torchs + rounding + noise


@pytest.mark.gpu
def test_layer_norm_in_place_and_empty() -> None:
    x = torch.randn(37, 768, device="cuda")
    weight, bias = torch.randn(2, 768, device="cuda")
    expected = torch.empty_like(x)
    run_native(x, None, weight, bias, expected)
    run_native(x[:0], None, weight, bias, x)
    run_native(x, None, weight, bias, x)
    assert torch.equal(x, expected)


@pytest.mark.gpu
def test_layer_norm_row_does_not_depend_on_its_mates() -> None:
    x = torch.randn(64, 1024, device="cuda", dtype=torch.bfloat16)
    weight, bias = torch.randn(2, 1024, device="cuda", dtype=torch.bfloat16)
    together, alone = torch.empty_like(x), torch.empty_like(x)
    run_native(x, None, weight, bias, together)
    for row in range(64):
        run_native(x[row : row + 1], None, weight, bias, alone[row : row + 1])
    assert torch.equal(together, alone)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("hidden_size", [256, 384, 512, 768, 1024])
@pytest.mark.parametrize("is_rms", [False, True])
def test_a_row_has_the_same_bits_in_a_batch_of_any_size(
    dtype: torch.dtype, hidden_size: int, is_rms: bool
) -> None:
    rows = 80_000  # more than the L2 has room for; a warp after another; a CTA each
    x, residual = torch.randn(2, rows, hidden_size, device="cuda", dtype=dtype)
    weight, bias = torch.randn(2, hidden_size, device="cuda", dtype=dtype)

    def run(some: slice) -> tuple[torch.Tensor, torch.Tensor]:
        sums = torch.empty_like(x[some])
        options = {"eps": EPS, "residual": residual[some], "sum_out": sums}
        if is_rms:
            return norm.rms_norm(x[some], weight, **options), sums
        return norm.layer_norm(x[some], weight, bias, **options), sums

    whole = run(slice(0, rows))
    for some in (slice(0, 3), slice(rows - 264, rows), slice(700, 2001)):
        for part, all_rows in zip(run(some), whole, strict=True):
            assert torch.equal(part, all_rows[some])


@pytest.mark.gpu
def test_layer_norm_runs_in_a_cuda_graph() -> None:
    x = torch.randn(129, 768, device="cuda", dtype=torch.float16)
    weight, bias = torch.randn(2, 768, device="cuda", dtype=torch.float16)
    out, expected = torch.empty_like(x), torch.empty_like(x)
    run_native(x, None, weight, bias, expected)
    graph, _ = captured(lambda: run_native(x, None, weight, bias, out))
    out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(out, expected)
