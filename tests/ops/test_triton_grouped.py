"""Triton's products with weights of 8 and 4 bits against float64: on a GPU, or interpreted."""

import pytest
import torch
from test_grouped_blocks import KINDS, NEAR, SHAPES, check_products, coded_weight, weight
from torch import Tensor

pytest.importorskip("triton")

from bytetx.ops import grouped_blocks, native, triton_backend, triton_kernels  # noqa: E402
from bytetx.ops.triton_kernels import grouped  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning")]
if DEVICE == "cuda":
    pytestmark.append(pytest.mark.gpu)
# The interpreter multiplies no bf16.
DTYPES = [torch.float16, torch.bfloat16] if DEVICE == "cuda" else [torch.float16]
ROWS = [0, 1, 7, 16, 17, 33, 65, 130, 300] if DEVICE == "cuda" else [0, 1, 17, 70]


@pytest.fixture(autouse=True)
def by_triton(monkeypatch: pytest.MonkeyPatch) -> object:
    """Triton's kernels serve in the native core's place, where they run or as Python."""
    with native.without_kernels(DEVICE):
        if DEVICE == "cpu":
            monkeypatch.setattr(triton_backend, "_lookup", lambda kind, index: triton_kernels)
        native.forget_lookups()
        yield
    monkeypatch.undo()
    native.forget_lookups()


@pytest.mark.feature("Arithmetic", "int8 and int4 weights on GPUs from Ampere on, by Triton")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_products_and_rows(shape: tuple[int, int], bits: int, dtype: torch.dtype) -> None:
    _, w = weight(*shape, bits, dtype, device=DEVICE)
    backend = grouped_blocks.GROUPED_LINEAR.choose(w.blocks.device, dtype, w.k)
    assert backend.name == "triton" and w.decodes(1)
    near = 2 * torch.finfo(dtype).eps * w.restored.abs().max()
    assert (w.rows().double() - w.restored.double()).abs().max() <= near
    index = torch.tensor([w.n - 1, 0, w.n, -1, 1 << 40], device=DEVICE)
    rows = w.rows(index)
    assert torch.equal(rows[:2], w.rows()[index[:2]]) and rows[2:].isnan().all()
    check_products(w, ROWS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_form_of_groups(kind: tuple[int, str, int], dtype: torch.dtype) -> None:
    for n, k in ((64, 96), (100, 200)):
        w = coded_weight(n, k, kind, dtype, device=DEVICE)
        near = 2 * torch.finfo(dtype).eps * w.restored.abs().max()
        assert (w.rows().double() - w.restored.double()).abs().max() <= near
        check_products(w, [1, 9, 70])


@pytest.mark.parametrize("bits", [8, 4])
def test_many_rows_go_through_the_matrix(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped_blocks, "_MOST_FUSED_TOKENS", {"triton": 8})
    _, w = weight(192, 72, bits, torch.float16, device=DEVICE)
    assert w.decodes(8) and not w.decodes(9)
    check_products(w, [9, 20])


# rows, strips, warps, stages, whether warps share k
TILES = [(1, 1, 4, 5, 1), (8, 2, 4, 4, 1), (16, 4, 4, 3, 1), (32, 8, 4, 3, 0), (64, 8, 8, 3, 0)]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("tile", TILES)
def test_every_kind_of_tile(
    tile: tuple[int, ...], bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that warps have alike and not, outputs that end within a tile."""
    monkeypatch.setattr(grouped, "_tile", lambda *args: grouped._Tile(*tile))
    for n, k in ((192 if tile[1] > 1 else 100, 256), (72, 200)):
        _, w = weight(n, k, bits, torch.float16, device=DEVICE)
        check_products(w, [1, tile[0], tile[0] + 1])


@pytest.mark.parametrize("has_pairs", [True, False])
def test_features_in_either_order(has_pairs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped, "_HAS_PAIRS", has_pairs)
    _, w = weight(192, 200, 4, torch.float16, device=DEVICE)
    check_products(w, [1, 5, 40])


def rows_of(w: grouped_blocks.GroupedBlocks, m: int) -> Tensor:
    return torch.randn(m, w.k, device=DEVICE).to(w.dtype)


@pytest.mark.parametrize("bits", [8, 4])
def test_rows_that_are_not_finite_stay_alone(bits: int) -> None:
    _, w = weight(64, 72, bits, torch.float16, device=DEVICE)
    x = rows_of(w, 20)
    got = w.matmul(x)
    x[1:] = torch.nan
    ours = w.matmul(x)
    assert torch.equal(ours[0], got[0]) and ours[1:].isnan().all()


@pytest.mark.parametrize("bits", [8, 4])
def test_addresses_that_are_not_aligned(bits: int) -> None:
    _, w = weight(64, 72, bits, torch.float16, device=DEVICE)
    x = torch.cat([torch.zeros(1, device=DEVICE).to(w.dtype), rows_of(w, 5).flatten()])[1:]
    x = x.view(5, 72)
    near = NEAR[w.dtype]
    exact = x.double() @ w.restored.double().T + w.bias.double()
    assert (w.matmul(x).double() - exact).norm() <= near * exact.norm()
