"""The 8-bit linear layer on tiles of AMX: its kernel on emulated tiles; where the processor has
them, test_int8_linear.py runs it there, too."""

import cpu_kernels
import pytest
import tile_library
import torch

from bytetx.ops import native
from bytetx.ops.int8_linear import prepare_int8_linear, run_int8_linear
from bytetx.ops.linear import ACTIVATIONS, prepare_linear

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
    names = ("int8_linear", "int8_linear_workspace_bytes")
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


def test_a_workspace_that_is_too_small_is_refused(
    kernels: dict[str, object], emulated: pytest.MonkeyPatch
) -> None:
    emulated.setitem(kernels, "int8_linear_workspace_bytes", lambda **sizes: 64)
    x, weight = torch.randn(20, 64).to(BF16), torch.randn(40, 64).to(BF16)
    w = prepare_int8_linear(prepare_linear(weight, prepack=False))
    with pytest.raises(ValueError, match="the workspace is too small"):
        run_int8_linear(x, w, activation=0)
