"""The activations of ops.linear.ACTIVATIONS, in f32, inside other kernels."""

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    return 1.0 - 2.0 / (1.0 + tl.exp(2.0 * x))  # right at both ends


@triton.jit
def _gelu_for_half(x):
    """GELU by erf to what f16 and bf16 hold: max(x, 0) - z 2^p(z), z = |x|, p of degree 7.

    x Phi(x) = max(x, 0) - z Phi(-z), and log2 of Phi(-z) is smooth. The native epilogue has the
    same polynomial.
    """
    z = tl.minimum(tl.abs(x), 16.0, propagate_nan=tl.PropagateNan.ALL)
    positive = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    tail = z * -9.49181142e-07 + 4.83114799e-05
    tail = tail * z - 8.53212232e-04
    tail = tail * z + 8.28841711e-03
    tail = tail * z - 5.36470223e-02
    tail = tail * z - 4.58670703e-01
    tail = tail * z - 1.15120256e00
    tail = tail * z - 9.99996832e-01
    return positive - z * tl.exp2(tail)


@triton.jit
def activated(x, ACTIVATION: tl.constexpr, IS_HALF: tl.constexpr = False):
    """x: f32.  IS_HALF: the result will be rounded to f16 or bf16."""
    if ACTIVATION == "gelu" and IS_HALF:
        return _gelu_for_half(x)
    elif ACTIVATION == "gelu":
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
