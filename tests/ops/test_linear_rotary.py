"""linear_rotary on any device: the product and the rotation in turn."""

import pytest
import torch

from bytetx.ops.linear import prepare_linear
from bytetx.ops.linear_rotary import HeadRotation, linear_rotary
from bytetx.ops.rotary_kv import rotary


@pytest.mark.parametrize("m", [0, 1, 37])
@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_product_with_its_first_heads_turned(
    m: int, is_interleaved: bool, dtype: torch.dtype
) -> None:
    w = prepare_linear(torch.randn(6 * 64, 96).to(dtype), torch.randn(384).to(dtype), prepack=True)
    x, angles = torch.randn(m, 96).to(dtype), torch.randn(50, 32) * 30
    cos, sin, positions = angles.cos(), angles.sin(), torch.randint(50, (m,)).int()
    rotation = HeadRotation(cos, sin, positions, 4, 64, is_interleaved=is_interleaved)
    wanted = w.matmul(x)
    heads = wanted.unflatten(1, (6, 64))[:, :4]
    rotary(heads, cos, sin, positions, is_interleaved=is_interleaved)
    assert torch.equal(linear_rotary(x, w, rotation), wanted)
