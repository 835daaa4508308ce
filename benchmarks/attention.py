"""Suite `attention`: packed attention on a GPU, ours and FlashAttention-2 and -3."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks import flash_attn3
from benchmarks.bert import flash_attention
from benchmarks.flash_attn3 import FlashAttention3
from benchmarks.gpu import DTYPES, Gpu, Work, gpu_suite, graph_us
from benchmarks.lengths import Lengths, dense, prefix_sums
from benchmarks.right_runs import right_runs
from benchmarks.suite import Measurement, Suite, measured
from bytetx.ops.attention import varlen_attention
from bytetx.ops.attention_plan import plan_attention

# Calls that share one plan, as in an encoder; times are of one call, its part of the plan included.
_NUM_LAYERS = 12
_NUM_BUFFERS = 4  # operands taken in turn, so that no call finds its own in the cache
# ModernBERT's local_attention of 128: a token sees itself and 64 tokens on each side.
_WINDOW = 65


@dataclass(frozen=True, slots=True)
class Shape:
    """One case: the lengths in tokens, and the model's heads."""

    name: str
    lengths: np.ndarray  # int64 [batch_size]
    num_heads: int = 12
    head_dim: int = 64
    dtype: str = "fp16"
    causal: bool = False
    window: int = 0  # as varlen_attention has it


def suite(*, patterns: list[str], fa3: Path | None = None) -> Suite:
    """fa3: FlashAttention-3's library.  Raises BytetxError where it does not load."""
    run = partial(measure, fa3=flash_attn3.load(fa3))
    return gpu_suite("attention", shapes(), run, patterns=patterns, unit="us")


def shapes() -> list[Shape]:
    """The length profiles that the project's targets are stated for."""
    draw = Lengths()
    generative = partial(Shape, num_heads=16, head_dim=128, dtype="bf16", causal=True)
    found = [
        Shape("mean-9", draw.lognormal(9, 0.8, 2048, 1, 512)),
        Shape("mean-20", draw.lognormal(20, 0.8, 2048, 1, 512)),
        Shape("a06-64", draw.uniform(64, 1024)),
        Shape("mean-78", draw.lognormal(78, 0.8, 512, 1, 512)),
        Shape("ln128", draw.lognormal(128, 0.8, 256, 4, 512)),
        Shape("a06-256", draw.uniform(256, 256)),
        Shape("a06-512", draw.uniform(512, 128)),
        Shape("dense-512", dense(512, 128)),
        Shape("a06-1024", draw.uniform(1024, 64)),
        Shape("dense-4096", dense(4096, 16)),
        Shape("longdoc", draw.lognormal(300 * math.exp(1.1**2 / 2), 1.1, 64, 1, 8192)),
        generative("causal-dense-2048", dense(2048, 16)),
        generative("causal-sharegpt", draw.lognormal(161, 1.35, 128, 4, 1024)),
        Shape("one-128", dense(128, 1)),
        Shape("one-512", dense(512, 1)),
    ]
    ln128 = next(shape.lengths for shape in found if shape.name == "ln128")
    windowed = {
        "one-8192": dense(8192, 1),
        "long": np.array([8192, 4000, 2000, 700]),
        "ln128": ln128,
    }
    return found + [
        Shape(f"window-128-{name}", lengths, window=_WINDOW) for name, lengths in windowed.items()
    ]


def measure(shape: Shape, gpu: Gpu, *, fa3: FlashAttention3 | None = None) -> Measurement:
    total, longest = int(shape.lengths.sum()), int(shape.lengths.max())
    cu_seqlens = prefix_sums(shape.lengths)
    torch.manual_seed(0)
    size = (total, 3, shape.num_heads, shape.head_dim)
    buffers = [
        torch.randn(size, device="cuda", dtype=DTYPES[shape.dtype]) for _ in range(_NUM_BUFFERS)
    ]
    layers = [buffers[i % _NUM_BUFFERS].unbind(1) for i in range(_NUM_LAYERS)]

    causal, window = shape.causal, shape.window

    def ours() -> Tensor:
        plan = plan_attention(
            cu_seqlens, total_tokens=total, head_dim=shape.head_dim, causal=causal, window=window
        )
        attend = partial(varlen_attention, plan=plan)
        return in_turn(attend)

    def in_turn(attend: Callable[..., Tensor]) -> Tensor:
        for q, k, v in layers:
            out = attend(q, k, v, cu_seqlens, max_seqlen=longest, causal=causal, window=window)
        return out

    runs: dict[str, Callable[[], Tensor]] = {
        "ours": ours,
        "flash-attention-2": partial(in_turn, flash_attention),
    }
    notes: list[str] = []
    if fa3 is None:
        notes.append(flash_attn3.NOT_GIVEN)
    else:
        runs[flash_attn3.NAME] = partial(in_turn, fa3.varlen)
    found = graph_us(right_runs(runs, None, notes), calls=_NUM_LAYERS)
    work = _work(shape)
    sizes = {
        "batch_size": len(shape.lengths),
        "total_tokens": total,
        "max_seqlen": longest,
        "num_heads": shape.num_heads,
        "head_dim": shape.head_dim,
        "causal": int(shape.causal),
        "window": shape.window,
        "flop": work.flop,
    }
    return measured(found, gpu.rates.floor_us(work), sizes, notes)


def _work(shape: Shape) -> Work:
    """Every operand moved once; the products of the scores that the mask keeps, and of the values.

    A causal mask without a window is counted as half of all pairs.
    """
    features = shape.num_heads * shape.head_dim
    return Work(
        num_bytes=4 * int(shape.lengths.sum()) * features * DTYPES[shape.dtype].itemsize,
        flop=4 * _num_pairs(shape) * features,
    )


def _num_pairs(shape: Shape) -> float:
    """Pairs of a token and one that it sees."""
    lengths = shape.lengths.astype(np.float64)
    if shape.window == 0:
        return float((lengths**2).sum()) / (2 if shape.causal else 1)
    # Token i has min(i, window - 1) of the window before it, and behind it the same mirrored.
    before = np.minimum(lengths, shape.window) - 1  # of the last token, at most
    one_side = before * (before + 1) / 2 + (lengths - 1 - before) * before
    return float((lengths + (1 if shape.causal else 2) * one_side)[lengths > 0].sum())
