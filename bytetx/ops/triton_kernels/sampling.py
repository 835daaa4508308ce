"""A token of each row of logits: the largest, or by temperature, top-k, top-p and min-p.

To sample, a program reads its row again and again instead of sorting it: which logit is the least
that a limit keeps is found by bisection over the bits of f32, 31 passes through the L2 cache.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bytetx.ops.triton_kernels.launch import address_or, launch, next_power_of_2

_BLOCK = 8192
_BITS = tl.constexpr(31)  # bits of the distance between two numbers of one sign
_LEAST = tl.constexpr(-2139095041)  # _ordered(-inf)


@triton.jit
def _scaled(row, at, width, top, temperature, BLOCK: tl.constexpr):
    """How far a block's logits are below the largest, over the temperature; -inf behind the end."""
    columns = at + tl.arange(0, BLOCK)
    x = tl.load(row + columns, mask=columns < width, other=float("-inf")).to(tl.float32)
    return (x - top) / temperature


@triton.jit
def _ordered(x):
    """int32 in the order of the numbers x, none of which is above 0."""
    bits = tl.where(x == 0, 0, x.to(tl.int32, bitcast=True))  # -0 is 0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _least_kept(
    row, width, top, temperature, floor, limit, COUNTS: tl.constexpr, BLOCK: tl.constexpr
):
    """The least number t, as int32, above which less than `limit` lies.

    Of the numbers that are `floor` or more: COUNTS: how many they are, else their weights' sum.
    """
    low, high = floor, floor * 0
    for _ in range(_BITS):
        middle = low + (high - low) // 2
        above = 0.0
        for at in range(0, width, BLOCK):
            x = _scaled(row, at, width, top, temperature, BLOCK)
            order = _ordered(x)
            share = tl.where(x == x, 1.0, 0.0) if COUNTS else tl.exp(x)
            above += tl.sum(tl.where((order > middle) & (order >= floor), share, 0.0), 0)
        is_enough = above < limit
        high = tl.where(is_enough, middle, high)
        low = tl.where(is_enough | (low >= high), low, middle + 1)
    return high


@triton.jit
def _weight(row, width, top, temperature, floor, BLOCK: tl.constexpr):
    """The sum of the weights of all numbers that are `floor` or more."""
    total = 0.0
    for at in range(0, width, BLOCK):
        x = _scaled(row, at, width, top, temperature, BLOCK)
        total += tl.sum(tl.where(_ordered(x) >= floor, tl.exp(x), 0.0), 0)
    return total


@triton.jit
def _largest(row, width, BLOCK: tl.constexpr):
    """The largest logit, the first token that has it, and whether the row is a bad one."""
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    tokens = tl.zeros((BLOCK,), tl.int32)
    bad = tl.zeros((BLOCK,), tl.int32)
    for at in range(0, width, BLOCK):
        columns = at + tl.arange(0, BLOCK)
        x = tl.load(row + columns, mask=columns < width, other=float("-inf")).to(tl.float32)
        bad += tl.where((x != x) | (x == float("inf")), 1, 0)
        tokens = tl.where(x > best, columns, tokens)
        best = tl.where(x > best, x, best)
    top = tl.max(best, 0)
    token = tl.min(tl.where(best == top, tokens, 2147483647), 0)
    return top, token, (tl.sum(bad, 0) > 0) | (top == float("-inf"))


@triton.jit
def _argmax_kernel(
    logits, slot_indices, out, last_tokens, width, HAS_SLOTS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    _, token, is_bad = _largest(logits + row * width, width, BLOCK)
    tl.store(out + row, tl.where(is_bad, -1, token))
    if HAS_SLOTS:
        slot = tl.load(slot_indices + row)
        tl.store(last_tokens + slot, tl.where(is_bad, 0, token))


def argmax(logits: Tensor, *, slot_indices: Tensor | None, last_tokens: Tensor | None) -> Tensor:
    """ops.sampling.argmax on checked arguments."""
    num_rows, width = logits.shape
    out = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    if num_rows == 0:
        return out
    launch(
        _argmax_kernel,
        (num_rows,),
        logits,
        address_or(slot_indices, out),
        out,
        address_or(last_tokens, out),
        width,
        HAS_SLOTS=last_tokens is not None,
        BLOCK=min(_BLOCK, next_power_of_2(width)),
        num_warps=8,
    )
    return out


@triton.jit
def _sample_kernel(
    logits,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    numbers,
    out,
    width,
    HAS_TOP_K: tl.constexpr,
    HAS_TOP_P: tl.constexpr,
    HAS_MIN_P: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0)
    row = logits + place.to(tl.int64) * width
    top, token, is_bad = _largest(row, width, BLOCK)
    temperature = tl.load(temperatures + place)
    if is_bad | (temperature == 0):
        tl.store(out + place, tl.where(is_bad, -1, token))
        return
    floor = tl.full((), _LEAST, tl.int32)
    if HAS_MIN_P:
        floor = tl.maximum(floor, _ordered(tl.log(tl.load(min_ps + place))))
    if HAS_TOP_K:
        count = tl.load(top_ks + place).to(tl.float32)
        if count > 0:
            least = tl.full((), _LEAST, tl.int32)
            kept = _least_kept(row, width, top, temperature, least, count, True, BLOCK)
            floor = tl.maximum(floor, kept)
    total = _weight(row, width, top, temperature, floor, BLOCK)
    if HAS_TOP_P:
        share = tl.load(top_ps + place)
        if share < 1:
            kept = _least_kept(row, width, top, temperature, floor, share * total, False, BLOCK)
            floor = tl.maximum(floor, kept)
            total = _weight(row, width, top, temperature, floor, BLOCK)
    # In order of the vocabulary: the first token whose running sum is above this share of all.
    target = tl.load(numbers + place) * total.to(tl.float64)
    reached = target * 0
    chosen = token  # where rounding keeps every sum below it
    is_open = target == target
    for at in range(0, width, BLOCK):
        columns = at + tl.arange(0, BLOCK)
        x = _scaled(row, at, width, top, temperature, BLOCK)
        weights = tl.where(_ordered(x) >= floor, tl.exp(x), 0.0)
        sums = tl.cumsum(weights, 0)
        rest = (target - reached).to(tl.float32)
        first = tl.min(tl.where((sums > rest) & (weights > 0), columns, 2147483647), 0)
        last = tl.max(tl.where(weights > 0, columns, -1), 0)
        is_here = is_open & (first < 2147483647)
        chosen = tl.where(is_here, first, tl.where(is_open & (last >= 0), last, chosen))
        is_open = is_open & (first == 2147483647)
        reached += tl.sum(weights, 0).to(tl.float64)
    tl.store(out + place, chosen)


def sample(
    logits: Tensor,
    temperature: Tensor,
    *,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    numbers: Tensor,
) -> Tensor:
    """ops.sample_tokens.sample_tokens on checked arguments.

    numbers: f64 [n] in [0, 1), those of sampling.uniform.
    """
    num_rows, width = logits.shape
    out = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    if num_rows == 0:
        return out
    launch(
        _sample_kernel,
        (num_rows,),
        logits,
        temperature,
        address_or(top_k, out),
        address_or(top_p, temperature),
        address_or(min_p, temperature),
        numbers,
        out,
        width,
        HAS_TOP_K=top_k is not None,
        HAS_TOP_P=top_p is not None,
        HAS_MIN_P=min_p is not None,
        BLOCK=min(_BLOCK, next_power_of_2(width)),
        num_warps=8,
    )
    return out
