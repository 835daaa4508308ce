"""Layer norm with a fused residual: checks, choice of kernel."""

from torch import Tensor

from bytetx.ops import reference
from bytetx.ops.check import require_out


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    eps: float,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """norm(x + residual) * weight + bias over each row; sum and statistics in f32.

    x, residual, out: [total_tokens, hidden_size], f32, bf16 or f16, contiguous; `out` may be x or
    residual.  weight, bias: [hidden_size], x's dtype or f32.
    Returns out, a new tensor where it is None.
    Raises ValueError on shape, dtype or device mismatch.
    """
    reference_out = reference.layer_norm(x, weight, bias, eps=eps, residual=residual)
    if out is None:
        return reference_out
    require_out("out", out, like=x, shape=x.shape)
    return out.copy_(reference_out)
