"""The linear layer with residual and layer norm behind it, where no kernel joins them."""

import pytest
import torch
import torch.nn.functional as F

from bytetx.ops.linear import prepare_linear
from bytetx.ops.norm import linear_norm


@pytest.mark.parametrize("has_biases", [False, True])
@pytest.mark.parametrize("m", [0, 1, 37])
def test_it_is_linear_and_then_layer_norm(m: int, has_biases: bool) -> None:
    torch.manual_seed(0)
    x, residual, weight = torch.randn(m, 24), torch.randn(m, 384), torch.randn(384, 24)
    bias, norm_weight, norm_bias = torch.randn(3, 384)
    if not has_biases:
        bias = norm_bias = None
    w = prepare_linear(weight, bias, prepack=False)
    norm = {"norm_weight": norm_weight, "norm_bias": norm_bias, "eps": 1e-5}
    ours = linear_norm(x, w, residual=residual, **norm)
    expected = F.layer_norm(F.linear(x, weight, bias) + residual, (384,), norm_weight, norm_bias)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def test_a_residual_of_another_shape_is_refused() -> None:
    w = prepare_linear(torch.randn(384, 24), torch.randn(384), prepack=False)
    norm = {"norm_weight": torch.ones(384), "norm_bias": torch.zeros(384), "eps": 1e-5}
    with pytest.raises(ValueError, match="residual"):
        linear_norm(torch.randn(3, 24), w, residual=torch.randn(4, 384), **norm)
