"""Weights of 8 and 4 bits as GPUs hold them: layout, rounding, products against float64."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from cpu_kernels import EXACT_ACTIVATIONS
from torch import Tensor

from bytetx.ops import grouped_blocks
from bytetx.ops.codes import Codes
from bytetx.ops.gated import GatedWeight
from bytetx.ops.group_rows import GroupRows, held_form, join_rows
from bytetx.ops.grouped_blocks import GroupedBlocks, blocks_from_rows, prepare_grouped_blocks
from bytetx.ops.grouped_rounding import (
    group_values,
    in_whole_groups,
    output_factors,
    round_groups,
)
from bytetx.ops.linear import ACTIVATIONS, prepare_linear

# (n, k): whole blocks, rests of blocks and of groups, one strip, sizes of layers.
SHAPES = [(64, 64), (100, 72), (7, 40), (200, 2056), (1024, 96), (192, 1088), (1, 8)]
ROWS = [0, 1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 512, 513]
HALVES = [torch.float16, torch.bfloat16]
# (bits of a file's codes, what its groups have beside a scale, features of a group) of each form
# that blocks have, and of groups that are whole rows.
KINDS = [
    *[(4, "zeros", 128), (4, "least", 32), (4, "", 32), (8, "zeros", 64), (5, "least", 32)],
    *[(8, "", 32), (6, "", 16), (8, "", 0), (4, "zeros", 0)],
]
# One rounding of the result, and that of each weight, whose errors average out.
NEAR = {torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.fixture(params=[0, 1], ids=["f16", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return HALVES[request.param]


@pytest.fixture(params=[8, 4])
def bits(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def weight(
    n: int,
    k: int,
    bits: int,
    dtype: torch.dtype,
    *,
    device: str = "cpu",
    batch_invariant: bool = False,
) -> tuple[Tensor, GroupedBlocks]:
    """(the matrix, rounded): rows of many sizes, results about as large as 1."""
    torch.manual_seed(n * k + bits)
    sizes = 2.0 ** torch.randint(-8, 1, (n, 1))
    matrix = (torch.randn(n, k) * sizes / k**0.5).to(device, dtype)
    bias = torch.randn(n).to(device, dtype)
    plain = prepare_linear(matrix, bias, prepack=False, batch_invariant=batch_invariant)
    return matrix, prepare_grouped_blocks(plain, bits=bits)


def file_codes(n: int, k: int, bits: int, has: str, group: int) -> Codes:
    """Codes as a file has them, with zero points at both ends of their range."""
    torch.manual_seed(n * k + bits)
    group = group or k
    shape = (n, -(-k // group))
    scale = (torch.rand(shape) + 0.5).half().float() * 2.0 ** torch.randint(-9, -7, (n, 1))
    scale[: n // 2] *= -1
    zero: Tensor | float = float(1 << bits - 1)
    if has == "zeros":
        zero = torch.randint(0, (1 << bits) + 1, shape).float()
        zero[0], zero[-1] = 0, 1 << bits
    least = -scale * torch.randint(0, 1 << bits, shape) if has == "least" else None
    codes = torch.randint(0, 1 << bits, (n, k)).to(torch.uint8)
    codes[:, 0], codes[:, -1] = 0, (1 << bits) - 1
    return Codes(codes, scale, group, 0.0 if has == "least" else zero, least)


def coded_weight(
    n: int, k: int, kind: tuple[int, str, int], dtype: torch.dtype, *, device: str = "cpu"
) -> GroupedBlocks:
    bits, has, group = kind
    own = {"has_zeros": has == "zeros", "has_least": has == "least"}
    found = held_form(bits, group or k, k, **own)
    assert found is not None
    rows = GroupRows.of(file_codes(n, k, *kind), *found)
    whole = blocks_from_rows(rows, torch.randn(n).to(dtype), dtype)
    parts = {name: getattr(whole, name).to(device) for name in ("blocks", "factor", "bias")}
    return replace(whole, **parts)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(100, 96), (64, 256), (7, 200)])
def test_blocks_hold_a_file_s_codes(
    shape: tuple[int, int], kind: tuple[int, str, int], dtype: torch.dtype
) -> None:
    """In float16 exactly; in bfloat16 but for scales, which lose three bits there."""
    n, k = shape
    w, wanted = coded_weight(n, k, kind, dtype), file_codes(n, k, *kind).values
    if dtype == torch.float16:
        # Scales have float16's bits, least values more, which they lose.
        assert torch.equal(w.restored, wanted) or kind[1] == "least"
        assert (w.restored - wanted).abs().max() <= 2**-11 * wanted.abs().max()
    near = 2**-7 if kind[1] == "least" else 2**-8
    assert (w.restored - wanted).abs().max() <= near * wanted.abs().max()
    if kind[2] == 0:
        assert torch.equal(w.restored, wanted)
    check_products(w, [1, 5])
    some = w.shard(outputs=range(3, 7), inputs=range(32, k))
    assert torch.equal(some.restored, w.restored[3:7, 32:])


@pytest.mark.parametrize("bits, group, has", [(2, 16, "least"), (4, 16, "zeros"), (8, 8, "")])
def test_groups_that_no_form_has_room_for(bits: int, group: int, has: str) -> None:
    own = {"has_zeros": has == "zeros", "has_least": has == "least"}
    assert held_form(bits, group, 256, **own) is None


def test_features_in_the_order_of_their_groups(dtype: torch.dtype) -> None:
    codes = file_codes(64, 96, 4, "zeros", 32)
    order = torch.randperm(96)
    wanted = torch.empty(64, 96)
    wanted[:, order] = codes.values
    rows = GroupRows.of(replace(codes, order=order), 4, "zero")
    w = blocks_from_rows(rows, torch.randn(64).to(dtype), dtype)
    assert (w.restored - wanted).abs().max() <= 2**-8 * wanted.abs().max()
    check_products(w, [1, 5])
    assert torch.equal(w.shard(outputs=range(5, 64)).restored, w.restored[5:])
    with pytest.raises(ValueError, match="load the model in bfloat16"):
        w.shard(inputs=range(32))
    assert not rows.is_like(GroupRows.of(codes, 4, "zero")) and rows.is_like(rows)


def test_parts_of_one_weight_are_joined() -> None:
    parts = [GroupRows.of(file_codes(n, 96, 4, "zeros", 32), 4, "zero") for n in (64, 40)]
    assert parts[0].is_like(parts[1])
    joined = join_rows(parts)
    assert torch.equal(joined.values, torch.cat([part.values for part in parts]))
    assert torch.equal(joined.chunk(2)[0].values, joined.values[:52])


@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_hold_what_was_rounded(
    shape: tuple[int, int], bits: int, dtype: torch.dtype
) -> None:
    matrix, w = weight(*shape, bits, dtype)
    factor = output_factors(matrix)
    rows = in_whole_groups(matrix.float() / factor[:, None])
    rounded = group_values(*round_groups(rows, bits, numbers=dtype), factor)[:, : shape[1]]
    assert torch.equal(w.restored, rounded)
    error = (w.restored - matrix.float()).norm() / matrix.float().norm()
    assert error < {8: 0.012, 4: 0.1}[bits]


def test_memory_is_that_of_the_bits(bits: int) -> None:
    _, w = weight(256, 1024, bits, torch.bfloat16)
    assert w.blocks.numel() * 8 / (256 * 1024) == {8: 8.5, 4: 5.0}[bits]


def test_rows_of_zeros_and_of_one_value(bits: int, dtype: torch.dtype) -> None:
    matrix = torch.zeros(64, 64, dtype=dtype)
    matrix[1] = 3.0
    matrix[2, 5] = -1e-4
    w = prepare_grouped_blocks(prepare_linear(matrix, prepack=False), bits=bits)
    assert torch.isfinite(w.restored).all()
    assert torch.equal(w.restored[0], torch.zeros(64))
    assert torch.allclose(w.restored[1], torch.full((64,), 3.0), rtol=0.01)
    assert torch.allclose(w.restored[2], matrix[2].float(), atol=1e-5)


def test_shards_are_those_of_the_matrix(bits: int, dtype: torch.dtype) -> None:
    _, w = weight(200, 200, bits, dtype)
    some = w.shard(outputs=range(3, 140), inputs=range(32, 200))
    assert torch.equal(some.restored, w.restored[3:140, 32:])
    assert some.bias is None and w.bias is not None
    assert some.sum_bias is not None and torch.equal(some.sum_bias, w.bias[3:140])
    with pytest.raises(ValueError, match="whole groups of 32 features, got 8 to 200"):
        w.shard(inputs=range(8, 200))


def test_another_weight_is_refused() -> None:
    packed = prepare_linear(torch.zeros(8, 8), prepack=True)
    with pytest.raises(ValueError, match="plain must be a plain weight, got one in another"):
        prepare_grouped_blocks(packed, bits=4)


def check_products(w: GroupedBlocks, rows: list[int]) -> None:
    device, near = w.blocks.device, NEAR[w.dtype]
    assert w.bias is not None
    for i, m in enumerate(rows):
        x = torch.randn(m, w.k, device=device).to(w.dtype)
        sums = x.double() @ w.restored.double().T + w.bias.double()
        activation = ACTIVATIONS[i % len(ACTIVATIONS)]
        residual = torch.randn(m, w.n, device=device).to(w.dtype) if i % 2 else None
        torch.full((m, w.n), torch.nan, dtype=w.dtype, device=device)  # where results will lie
        got = w.matmul(x, activation=activation, residual=residual)
        exact = EXACT_ACTIVATIONS[activation](sums)
        exact = exact if residual is None else exact + residual.double()
        assert got.shape == (m, w.n) and got.dtype == w.dtype
        assert (got.double() - exact).norm() <= near * exact.norm()
        if w.n % 64:
            continue
        gated = GatedWeight(w, w.n // 2, 32).matmul(x, activation="silu")
        gates, values = sums.view(m, w.n // 64, 2, 32).unbind(2)
        exact = (F.silu(gates) * values).reshape(m, w.n // 2)
        assert (gated.double() - exact).norm() <= 2 * near * exact.norm()


def test_other_rows_are_refused() -> None:
    _, w = weight(64, 72, 4, torch.bfloat16)
    with pytest.raises(ValueError, match="x must be bfloat16, got float32"):
        w.matmul(torch.zeros(3, 72))
    with pytest.raises(ValueError, match="x must have shape"):
        w.matmul(torch.zeros(3, 64, dtype=torch.bfloat16))


def test_products_where_no_kernel_is(bits: int, dtype: torch.dtype) -> None:
    _, w = weight(192, 72, bits, dtype)
    check_products(w, [0, 1, 9])
    index = torch.tensor([5, 191, 192, -1, 5])
    rows = w.rows(index)
    assert torch.equal(rows[[0, 1, 4]], w.rows()[index[[0, 1, 4]]])
    assert rows[2:4].isnan().all()


@pytest.mark.gpu
@pytest.mark.feature("Arithmetic", "int8 and int4 weights of causal models on Hopper GPUs")
@pytest.mark.parametrize("shape", [*SHAPES, (4096, 4096), (2560, 14336)])
def test_kernels_against_float64(shape: tuple[int, int], bits: int, dtype: torch.dtype) -> None:
    _, w = weight(*shape, bits, dtype, device="cuda")
    near = 2**-8 if dtype == torch.bfloat16 else 2**-10
    written = w.rows().double()
    assert (written - w.restored.double()).abs().max() <= 2 * near * w.restored.abs().max()
    index = torch.tensor([w.n - 1, 0, w.n, -1, 1 << 40], device="cuda")
    rows = w.rows(index)
    assert torch.equal(rows[:2], w.rows()[index[:2]]) and rows[2:].isnan().all()
    check_products(w, ROWS)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(100, 96), (384, 512), (7, 200), (4096, 4096)])
def test_kernels_of_every_form(
    shape: tuple[int, int], kind: tuple[int, str, int], dtype: torch.dtype
) -> None:
    w = coded_weight(*shape, kind, dtype, device="cuda")
    near = 2**-8 if dtype == torch.bfloat16 else 2**-10
    assert (w.rows().double() - w.restored.double()).abs().max() <= near * w.restored.abs().max()
    check_products(w, [1, 8, 9, 33, 65, 130])


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [128, 256])
@pytest.mark.parametrize("kind", KINDS)
def test_large_tiles_of_every_form(
    kind: tuple[int, str, int], tile: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rests of tiles and of blocks, an odd number of blocks, clusters with one CTA's outputs."""
    monkeypatch.setattr(grouped_blocks, "_TILE", tile)
    for n, k in ((64, 96), (16, 64), (208, 192), (448, 1088), (1024, 512)):
        check_products(coded_weight(n, k, kind, dtype, device="cuda"), [65, 130, 300, 513])


@pytest.mark.gpu
def test_tiles_of_both_sizes(bits: int, dtype: torch.dtype) -> None:
    """So many outputs that a last wave of large tiles would be of few."""
    _, w = weight(28672, 64, bits, dtype, device="cuda")
    check_products(w, [512, 768])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_one_row_of_every_form(kind: tuple[int, str, int], dtype: torch.dtype) -> None:
    """Fewer steps than warps, an odd number of blocks, more strips than sums are kept of."""
    for n, k in ((16, 32), (100, 192), (448, 1088), (40000, 64), (512, 14336)):
        check_products(coded_weight(n, k, kind, dtype, device="cuda"), [1, 1])


@pytest.mark.gpu
def test_another_tile_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _, w = weight(64, 64, 4, torch.float16, device="cuda")
    monkeypatch.setattr(grouped_blocks, "_TILE", 64)
    with pytest.raises(ValueError, match="tiles have 128 or 256 tokens, got 64"):
        w.matmul(torch.zeros(70, 64, dtype=torch.float16, device="cuda"))


@pytest.mark.gpu
def test_mates_and_what_lies_behind_change_no_row(bits: int, dtype: torch.dtype) -> None:
    """Rows of one step with the same tiles; rows that are not finite stay alone."""
    _, w = weight(384, 512, bits, dtype, device="cuda")
    for m in (8, 16, 64, 128, 1500):
        x = torch.randn(m, w.k, device="cuda").to(dtype)
        got = w.matmul(x)
        x[1:] = torch.nan
        assert torch.equal(w.matmul(x)[0], got[0])


@pytest.mark.gpu
def test_batch_invariant_rows(bits: int, dtype: torch.dtype) -> None:
    _, w = weight(384, 512, bits, dtype, device="cuda", batch_invariant=True)
    x = torch.randn(700, w.k, device="cuda").to(dtype)
    whole = w.matmul(x)
    for m in (1, 9, 100):
        assert torch.equal(w.matmul(x[:m].contiguous()), whole[:m])


@pytest.mark.gpu
def test_rows_that_are_not_aligned(bits: int, dtype: torch.dtype) -> None:
    _, w = weight(64, 72, bits, dtype, device="cuda")
    x = torch.randn(5 * 72 + 1, device="cuda").to(dtype)[1:].view(5, 72)
    assert torch.equal(w.matmul(x), w.matmul(x.clone()))
    residual = torch.randn(5 * 64 + 1, device="cuda").to(dtype)[1:].view(5, 64)
    assert torch.equal(w.matmul(x, residual=residual), w.matmul(x) + residual)


@pytest.mark.gpu
def test_a_matrix_that_was_just_written_is_read_whole(
    bits: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GEMMs of few rows load weights before the kernel before them has ended."""
    _, w = weight(1024, 4096, bits, dtype, device="cuda")
    monkeypatch.setattr(grouped_blocks, "_MOST_FUSED_TOKENS", {"native": 0})
    x = torch.randn(8, w.k, device="cuda").to(dtype)
    wanted = w.written_out().matmul(x)
    for _ in range(20):
        torch.full((1024, 4096), torch.nan, dtype=dtype, device="cuda")  # where it will lie
        assert torch.equal(w.matmul(x), wanted)


def test_a_transposed_weight(bits: int, dtype: torch.dtype) -> None:
    matrix = torch.randn(64, 128).to(dtype)
    w = prepare_grouped_blocks(prepare_linear(matrix.T, prepack=False), bits=bits)
    whole = prepare_grouped_blocks(prepare_linear(matrix.T.contiguous(), prepack=False), bits=bits)
    assert torch.equal(w.blocks, whole.blocks)
