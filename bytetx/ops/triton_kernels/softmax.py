"""Online softmax, which the attention kernels share: scores come any keys at a time, and the sum of
their values is kept with the largest score and the sum of weights so far."""

import triton
import triton.language as tl

from bytetx.ops.triton_kernels.activation import tanh

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def begin_rows(BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """(sum of values, largest score, sum of weights) of rows that have seen no key."""
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    return acc, top, tl.zeros((BLOCK_M,), tl.float32)


@triton.jit
def begin_rows_at_sinks(sink, BLOCK_M: tl.constexpr):
    """(largest score, sum of weights) of rows that have seen their sink alone.

    sink: its score, in units of log 2; it has no value.
    """
    return tl.full((BLOCK_M,), 0.0, tl.float32) + sink, tl.full((BLOCK_M,), 1.0, tl.float32)


@triton.jit
def soft_capped(s, softcap):
    return softcap * tanh(s / softcap)


@triton.jit
def add_keys(acc, top, total, s, v, to_log2, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """Adds keys with scores s [rows, keys] and values v [keys, features].

    to_log2: positive; s times it is in units of log 2, as top is: one fused multiply-add a score.
    MASKED: scores may be -inf, and a row may have seen no key yet.
    """
    new_top = tl.maximum(top, tl.max(s, 1) * to_log2)
    base = new_top
    if MASKED:
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
    p = tl.exp2(s * to_log2 - base[:, None])
    shrink = tl.exp2(top - base)
    total = total * shrink + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return acc, new_top, total


@triton.jit
def add_key(acc, top, total, s, v, is_seen):
    """Adds one key, s [rows] in units of log 2 and v [features], in f32, to the rows that see it.

    The weight of an unseen key is 0, and 0 * NaN is NaN: for tiles of which a row is not finite.
    """
    s = tl.where(is_seen, s, float("-inf"))
    new_top = tl.where(s > top, s, top)
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    p = tl.exp2(s - base)
    shrink = tl.exp2(top - base)
    total = tl.where(is_seen, total * shrink + p, total)
    acc = tl.where(is_seen[:, None], acc * shrink[:, None] + p[:, None] * v[None, :], acc)
    return acc, new_top, total


@triton.jit
def count_not_finite(result, mask):
    """How many numbers of result that the mask has are NaN or infinite."""
    is_finite = tl.abs(result) < float("inf")  # NaN is not, either
    return tl.sum(tl.sum(tl.where(mask & ~is_finite, 1, 0), 1), 0)
