"""Rotary, KV writes and both in one kernel on a GPU, against float64."""

import pytest
import torch
from exact_rotary import turn
from torch import Tensor

from bytetx.ops.paged import write_kv
from bytetx.ops.rotary_kv import NORM_ROTARY, rotary, rotary_write_kv

pytestmark = pytest.mark.gpu

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
# head_dim, rotary_dim: whole heads, parts of them, and pairs that do not go into 16 bytes.
SIZES = [(128, 128), (64, 64), (64, 16), (80, 20), (80, 80), (96, 24), (256, 64), (24, 6), (72, 64),
         (5, 4), (512, 512)]  # fmt: skip
NUM_POSITIONS, NUM_HEADS, NUM_KV_HEADS = 300, 6, 2


@pytest.fixture(params=DTYPES.values(), ids=DTYPES)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


def tables(rotary_dim: int, total_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    angles = torch.randn(NUM_POSITIONS, rotary_dim // 2) * 30
    positions = torch.randint(NUM_POSITIONS, (total_tokens,)).int()
    return angles.cos().cuda(), angles.sin().cuda(), positions.cuda()


def assert_rounded(got: Tensor, exact: Tensor) -> None:
    """One rounding of an f32 result that is a few units of its largest term off."""
    slack = torch.finfo(got.dtype).eps * exact.abs() + 2e-6 * exact.abs().amax(-1, keepdim=True)
    assert ((got.double() - exact).abs() <= slack).all()


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), SIZES)
def test_rotary(head_dim: int, rotary_dim: int, is_interleaved: bool, dtype: torch.dtype) -> None:
    qkv = torch.randn(37, 10, head_dim).to(dtype).cuda()
    before = qkv.clone()
    cos, sin, positions = tables(rotary_dim, 37)
    x = qkv[:, 1:4]
    assert rotary(x, cos, sin, positions, is_interleaved=is_interleaved) is x
    assert_rounded(x, turn(before[:, 1:4], cos, sin, positions, is_interleaved))
    assert torch.equal(qkv[:, 4:], before[:, 4:]) and torch.equal(qkv[:, 0], before[:, 0])


@pytest.mark.parametrize("row", [(8, 128), (12, 64), (1, 80), (3, 24), (2, 5), (1, 1)])
def test_write_kv(row: tuple[int, int], dtype: torch.dtype) -> None:
    qkv = torch.randn(70, 3, *row).to(dtype).cuda()
    before = torch.randn(2, 6, 16, *row).to(dtype).cuda()
    cache, slots = before.clone(), torch.randperm(96)[:70].int().cuda()
    slots[::9] = -1
    write_kv(qkv[:, 1], qkv[:, 2], cache[0], cache[1], slots)
    kept = slots >= 0
    expected = before.flatten(1, 2)
    expected[:, slots[kept].long()] = qkv[kept, 1:].transpose(0, 1)
    assert torch.equal(cache.flatten(1, 2), expected)


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), SIZES)
def test_all_in_one(
    head_dim: int, rotary_dim: int, is_interleaved: bool, has_norm: bool, dtype: torch.dtype
) -> None:
    heads = [NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS]
    qkv = torch.randn(37, sum(heads), head_dim).to(dtype).cuda()
    q, k, v = qkv.split(heads, dim=1)
    exact = [t.double() for t in (q, k, v)]
    norms, eps = {}, 1e-6
    if has_norm:
        weights = (torch.rand(2, head_dim) + 0.5).to(dtype).cuda()
        norms = {"q_norm": weights[0], "k_norm": weights[1], "eps": eps}
        exact[:2] = [norm(t, w, eps) for t, w in zip(exact[:2], weights, strict=True)]
    positions = tables(rotary_dim, 37)
    exact[:2] = [turn(t, *positions, is_interleaved) for t in exact[:2]]
    cache = torch.full((2, 3, 16, NUM_KV_HEADS, head_dim), 7.0, dtype=dtype).cuda()
    expected, slots = cache.flatten(1, 2).double(), torch.randperm(48)[:37].int().cuda()
    slots[::5] = -1
    kept = slots >= 0
    expected[:, slots[kept].long()] = torch.stack(exact[1:])[:, kept]
    options = norms | {"is_interleaved": is_interleaved}
    assert rotary_write_kv(q, k, v, *positions, *cache, slots, **options) is q
    assert_rounded(q, exact[0])
    assert_rounded(cache.flatten(1, 2), expected)


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), SIZES)
def test_without_a_cache_q_and_k_are_in_place(
    head_dim: int, rotary_dim: int, is_interleaved: bool, has_norm: bool, dtype: torch.dtype
) -> None:
    heads = [NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS]
    qkv = torch.randn(37, sum(heads), head_dim).to(dtype).cuda()
    q, k, v = qkv.split(heads, dim=1)
    exact, before = [q.double(), k.double()], v.clone()
    norms: tuple[Tensor | None, Tensor | None] = (None, None)
    if has_norm:
        norms = tuple((torch.rand(2, head_dim) + 0.5).to(dtype).cuda())
        exact = [norm(t, w, 1e-6) for t, w in zip(exact, norms, strict=True)]
    positions = tables(rotary_dim, 37)
    exact = [turn(t, *positions, is_interleaved) for t in exact]
    run = NORM_ROTARY.choose(q.device).run
    found = run(q, k, *positions, is_interleaved=is_interleaved, norms=norms, eps=1e-6)
    assert found[0] is q and found[1] is k
    assert_rounded(q, exact[0])
    assert_rounded(k, exact[1])
    assert torch.equal(v, before)
    # The same bits as where k goes to a cache.
    other = torch.randn(37, sum(heads), head_dim).to(dtype).cuda()
    again, twin = other.clone(), other.clone()
    run(*again.split(heads, dim=1)[:2], *positions, norms=norms, eps=1e-6, is_interleaved=False)
    cache = torch.zeros(2, 3, 16, NUM_KV_HEADS, head_dim, dtype=dtype, device="cuda")
    slots = torch.arange(37).int().cuda()
    q_norm, k_norm = norms
    rotary_write_kv(
        *twin.split(heads, dim=1), *positions, *cache, slots, q_norm=q_norm, k_norm=k_norm, eps=1e-6
    )
    assert torch.equal(again[:, :NUM_HEADS], twin[:, :NUM_HEADS])
    assert torch.equal(again.split(heads, dim=1)[1], cache[0].flatten(0, 1)[:37])


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(128, 128), (64, 16)])
def test_a_row_is_the_same_among_many(
    head_dim: int, rotary_dim: int, is_interleaved: bool, has_norm: bool, dtype: torch.dtype
) -> None:
    heads = [NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS]
    total, few = 14000, 20  # threads with several heads each, and with one
    qkv = torch.randn(total, sum(heads), head_dim).to(dtype).cuda()
    weights = (torch.rand(2, head_dim) + 0.5).to(dtype).cuda()
    norms = {"q_norm": weights[0], "k_norm": weights[1], "eps": 1e-6} if has_norm else {}
    cos, sin, positions = tables(rotary_dim, total)
    slots = torch.arange(total).int().cuda()

    def run(rows: slice) -> tuple[Tensor, Tensor]:
        q, k, v = qkv[rows].clone().split(heads, dim=1)
        cache = torch.zeros(2, total // 16, 16, NUM_KV_HEADS, head_dim, dtype=dtype, device="cuda")
        places = (cos, sin, positions[rows], *cache, slots[rows])
        q = rotary_write_kv(q, k, v, *places, is_interleaved=is_interleaved, **norms)
        return q, cache.flatten(1, 2)[:, rows]

    for first in (0, total - few):
        rows = slice(first, first + few)
        q, cache = run(slice(0, total))
        alone, alone_cache = run(rows)
        assert torch.equal(q[rows], alone) and torch.equal(cache[:, rows], alone_cache)


def test_no_tokens() -> None:
    x, table = torch.zeros(0, 2, 64).half().cuda(), torch.zeros(50, 32).cuda()
    none, cache = torch.zeros(0).int().cuda(), torch.zeros(2, 1, 4, 2, 64).half().cuda()
    assert rotary_write_kv(x, x, x, table, table, none, *cache, none) is x
