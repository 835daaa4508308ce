"""The activations of ops.linear.ACTIVATIONS, in f32, inside other kernels."""

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    return 1.0 - 2.0 / (1.0 + tl.exp(2.0 * x))  # right at both ends


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """x: f32."""
    if ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return x * (1.0 - 1.0 / (1.0 + tl.exp(2.0 * inner)))
    elif ACTIVATION == "silu":
        return x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "relu":
        return tl.where(x > 0, x, tl.where(x != x, x, 0.0))
    elif ACTIVATION == "tanh":
        return tanh(x)
    else:
        return x
