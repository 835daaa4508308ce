"""The product whose epilogue rotates heads, against float64 and against the two kernels in turn."""

import pytest
import torch

from bytetx.ops import native
from bytetx.ops.linear import prepare_linear
from bytetx.ops.linear import run_kernel as run_linear
from bytetx.ops.linear_plan import LinearPlan, plan_rotary, tilings
from bytetx.ops.linear_rotary import HeadRotation, linear_rotary, run_kernel

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
NUM_POSITIONS = 300
TILINGS = ("128x192", "192x128", "128x128")


@pytest.fixture(autouse=True)
def needs_kernel() -> None:
    reason = native.why_no_kernel("linear_rotary", CUDA)
    if reason is not None:
        pytest.skip(reason)


def make(
    m: int, heads: int, num_turned: int, k: int, dtype: torch.dtype, *, has_bias: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, HeadRotation]:
    x = torch.randn(m, k).to(dtype).cuda()
    weight = (torch.randn(heads * 64, k) * k**-0.5).to(dtype).cuda()
    bias = torch.randn(heads * 64).to(dtype).cuda() if has_bias else None
    angles = torch.randn(NUM_POSITIONS, 32) * 30
    positions = torch.randint(NUM_POSITIONS, (m,)).int().cuda()
    return (
        x,
        weight,
        bias,
        HeadRotation(angles.cos().cuda(), angles.sin().cuda(), positions, num_turned, 64),
    )


def exact(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, rotation: HeadRotation
) -> torch.Tensor:
    d = x.double() @ weight.double().T
    d = d if bias is None else d + bias.double()
    turned = d.unflatten(1, (-1, 64))[:, : rotation.num_heads]
    cos, sin = (
        t.double()[rotation.position_ids.long()][:, None] for t in (rotation.cos, rotation.sin)
    )
    a, b = turned[..., :32].clone(), turned[..., 32:].clone()
    turned[..., :32], turned[..., 32:] = a * cos - b * sin, b * cos + a * sin
    return d


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["f16", "bf16"])
@pytest.mark.parametrize("tiling", TILINGS)
@pytest.mark.parametrize(
    ("m", "heads", "num_turned", "k", "has_bias"),
    [
        (1, 3, 2, 64, True),
        (127, 36, 24, 768, False),
        (1000, 36, 24, 768, True),
        (513, 5, 5, 136, True),
        (385, 7, 0, 320, False),
        (4000, 18, 17, 384, True),
    ],
)
def test_the_kernel_has_the_bits_of_two(
    m: int, heads: int, num_turned: int, k: int, has_bias: bool, tiling: str, dtype: torch.dtype
) -> None:
    x, weight, bias, rotation = make(m, heads, num_turned, k, dtype, has_bias=has_bias)
    w = prepare_linear(weight, bias, prepack=False)
    index = next(one.index for one in tilings() if one.name == tiling)
    ours = run_kernel(x, w, rotation, tiling=index)
    in_turn = run_linear(x, w, plan=LinearPlan(index))
    rotation.turn(in_turn)
    assert torch.equal(ours, in_turn)
    wanted = exact(x, weight, bias, rotation)
    assert (ours - wanted).abs().max() <= 3 * torch.finfo(dtype).eps * wanted.abs().max()


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("m", [0, 1, 40, 3000])
def test_every_number_of_rows(m: int, batch_invariant: bool) -> None:
    x, weight, bias, rotation = make(m, 36, 24, 768, torch.float16)
    w = prepare_linear(weight, bias, prepack=False, batch_invariant=batch_invariant)
    ours, wanted = linear_rotary(x, w, rotation), exact(x, weight, bias, rotation)
    assert ours.shape == wanted.shape
    assert torch.allclose(ours.double(), wanted, atol=8e-3, rtol=2e-3)
    if batch_invariant and m > 1:
        one = HeadRotation(rotation.cos, rotation.sin, rotation.position_ids[:1], 24, 64)
        assert torch.equal(linear_rotary(x[:1].clone(), w, one), ours[:1])


def test_other_heads_turn_behind_the_product() -> None:
    x, weight, bias, rotation = make(600, 36, 24, 768, torch.float16)
    w = prepare_linear(weight, bias, prepack=False)
    interleaved = HeadRotation(
        rotation.cos, rotation.sin, rotation.position_ids, 24, 64, is_interleaved=True
    )
    partial = HeadRotation(
        rotation.cos[:, :16].contiguous(),
        rotation.sin[:, :16].contiguous(),
        rotation.position_ids,
        12,
        128,
    )
    for other in (interleaved, partial):
        wanted = w.matmul(x)
        other.turn(wanted)
        assert torch.equal(linear_rotary(x, w, other), wanted)


def test_what_the_kernel_refuses() -> None:
    x, weight, bias, rotation = make(600, 36, 24, 768, torch.float16)
    w = prepare_linear(weight, bias, prepack=False)
    small = next(one.index for one in tilings() if one.is_small_m)
    with pytest.raises(ValueError, match="linear_rotary has no tiling"):
        run_kernel(x, w, rotation, tiling=small)
    with pytest.raises(ValueError, match="rotated_columns"):
        run_kernel(
            x, w, HeadRotation(rotation.cos, rotation.sin, rotation.position_ids, 37, 64), tiling=0
        )
    assert plan_rotary(32768, 2304, 768, dtype="fp16", batch_invariant=False).tiling is not None
