"""Linear layers on tiles of AMX: the kernels on emulated tiles, and on the processor's where it has
them (test_int8_linear.py, test_bf16_linear.py run them there, too)."""

import cpu_kernels
import pytest
import tile_library
import torch

from bytetx.ops import native
from bytetx.ops.bf16_linear import bf16_linear
from bytetx.ops.int8_linear import prepare_int8_linear, run_int8_linear
from bytetx.ops.linear import ACTIVATIONS, prepare_linear
from bytetx.ops.panel_linear import pack_weight

pytestmark = pytest.mark.skipif(
    tile_library.why_no_emulation() is not None, reason=f"{tile_library.why_no_emulation()}"
)

BF16 = torch.bfloat16
poisoned_memory = cpu_kernels.poisoned_memory

# (m, n, k): rests of tiles of 16 rows and blocks of 32, of panels of 32 outputs, and of tiles of 64
# or 32 features; fewer than a tile of each; more rows than share a pass; more steps than rows.
SHAPES = [
    *[(1, 32, 64), (1, 1, 1), (5, 33, 7), (16, 32, 32), (17, 64, 65), (31, 31, 127), (33, 100, 61)],
    *[(48, 48, 96), (49, 31, 130), (130, 96, 384), (300, 70, 192), (20, 40, 2200)],
]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    library = tile_library.build_library(tmp_path_factory.mktemp("tiles"))
    names = [
        f"{kernel}_linear{what}" for kernel in ("int8", "bf16") for what in ("", "_workspace_bytes")
    ]
    return {name: tile_library.emulated_kernel(library, name) for name in names}


@pytest.fixture
def emulated(kernels: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """While it is in place, ops run on the emulated tiles; undo() ends that."""
    monkeypatch.setattr(native, "require_kernel", lambda name, device: kernels[name])
    return monkeypatch


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_int8_has_the_bits_of_other_instructions(
    emulated: pytest.MonkeyPatch, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    m, n, k = shape
    torch.manual_seed(m * n + k)
    bias = torch.randn(n).to(dtype)
    w = prepare_int8_linear(prepare_linear(torch.randn(n, k).to(dtype), bias, prepack=False))
    x = (torch.randn(m, k) + torch.randn(1)).to(dtype)
    x[m // 2, k // 2] = torch.nan if m == 31 else -torch.inf if m == 49 else 3.0
    got = [run_int8_linear(x, w, activation=i) for i in range(len(ACTIVATIONS))]
    emulated.undo()
    wanted = [run_int8_linear(x, w, activation=i, isa="avx512_vnni") for i in range(len(got))]
    for one, other in zip(got, wanted, strict=True):
        assert torch.equal(one.nan_to_num(nan=7e7), other.nan_to_num(nan=7e7))
    assert got[0].isfinite().all(1).sum() == m - (m in (31, 49))


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_bf16_computes_its_formula(
    emulated: pytest.MonkeyPatch, shape: tuple[int, int, int], is_packed: bool
) -> None:
    m, n, k = shape
    torch.manual_seed(m * n + k)
    x, bias = torch.randn(m, k).to(BF16), torch.randn(n).to(BF16)
    weight = (torch.randn(n, k) / k**0.5).to(BF16)
    given = pack_weight(weight) if is_packed else weight
    for has_bias in (True, False):
        sums = x.double() @ weight.double().T + (bias.double() if has_bias else 0)
        for index, activation in enumerate(ACTIVATIONS):
            expected = cpu_kernels.EXACT_ACTIVATIONS[activation](sums)
            got = bf16_linear(
                x, given, bias if has_bias else None, n=n, activation=index, is_packed=is_packed
            )
            # The one rounding to bf16 that any result has; a GELU is 4e-5 off at most.
            least = (expected.to(BF16).double() - expected).norm()
            most = 4e-5 * (m * n) ** 0.5 if activation == "gelu" else 0
            assert (got.double() - expected).norm() < 1.01 * least + most + 1e-6, activation


def test_bf16_rows_have_their_bits_in_every_number_of_rows_and_threads(
    emulated: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    n, k = 70, 97
    x, weight = torch.randn(290, k).to(BF16), torch.randn(n, k).to(BF16)
    panels, bias = pack_weight(weight), torch.randn(n).to(BF16)

    def run(rows: torch.Tensor) -> torch.Tensor:
        return bf16_linear(rows.contiguous(), panels, bias, n=n, activation=1, is_packed=True)

    threads, wanted = torch.get_num_threads(), run(x)
    try:
        for num_threads in (1, 2, 5):
            torch.set_num_threads(num_threads)
            for m in (1, 2, 15, 16, 17, 32, 33, 48, 100, 257):
                for first in (0, 33):
                    assert torch.equal(run(x[first : first + m]), wanted[first : first + m])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_shows_in_bf16(emulated: pytest.MonkeyPatch, value: float) -> None:
    torch.manual_seed(1)
    x, weight = torch.randn(20, 33).to(BF16), torch.rand(40, 33).to(BF16) + 1
    x[7, 32] = value
    for index, activation in enumerate(ACTIVATIONS):
        got = bf16_linear(x, weight, None, n=40, activation=index, is_packed=False)
        sums = x.double() @ weight.double().T
        expected = cpu_kernels.EXACT_ACTIVATIONS[activation](sums)
        assert torch.equal(got.isfinite(), expected.isfinite()), activation


@pytest.mark.parametrize("kernel", ["int8", "bf16"])
def test_a_workspace_that_is_too_small_is_refused(
    kernels: dict[str, object], emulated: pytest.MonkeyPatch, kernel: str
) -> None:
    short = f"{kernel}_linear_workspace_bytes"
    emulated.setitem(kernels, short, lambda **sizes: 64)
    x, weight = torch.randn(20, 64).to(BF16), torch.randn(40, 64).to(BF16)
    with pytest.raises(ValueError, match="the workspace is too small"):
        if kernel == "bf16":
            bf16_linear(x, weight, None, n=40, activation=0, is_packed=False)
        else:
            w = prepare_int8_linear(prepare_linear(weight, prepack=False))
            run_int8_linear(x, w, activation=0)
