"""Suite `attention`: packed attention on a GPU, ours and FlashAttention-2 as torch ships it."""

import math
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from bytetx.bench.bert import flash_attention
from bytetx.bench.gpu import DTYPES, Gpu, Work, gpu_suite, graph_us
from bytetx.bench.lengths import Lengths, dense, prefix_sums
from bytetx.bench.suite import Measurement, Suite
from bytetx.ops.attention import varlen_attention
from bytetx.ops.attention_plan import plan_attention

# Calls that share one plan, as in an encoder; times are of one call, its part of the plan included.
_NUM_LAYERS = 12
_NUM_BUFFERS = 4  # operands taken in turn, so that no call finds its own in the cache


@dataclass(frozen=True, slots=True)
class Shape:
    """One case: the lengths in tokens, and the model's heads."""

    name: str
    lengths: np.ndarray  # int64 [batch_size]
    num_heads: int = 12
    head_dim: int = 64
    dtype: str = "fp16"
    causal: bool = False


def attention_suite(*, patterns: list[str]) -> Suite:
    """The suite's selected cases.  patterns: parts or globs of case names; empty means all.

    Raises BytetxError where there is no GPU, or no case fits.
    """
    return gpu_suite("attention", shapes(), measure, patterns=patterns, unit="us")


def shapes() -> list[Shape]:
    """The length profiles that the project's targets are stated for."""
    draw = Lengths()
    generative = partial(Shape, num_heads=16, head_dim=128, dtype="bf16", causal=True)
    return [
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


def measure(shape: Shape, gpu: Gpu) -> Measurement:
    total, longest = int(shape.lengths.sum()), int(shape.lengths.max())
    cu_seqlens = prefix_sums(shape.lengths)
    torch.manual_seed(0)
    size = (total, 3, shape.num_heads, shape.head_dim)
    buffers = [
        torch.randn(size, device="cuda", dtype=DTYPES[shape.dtype]) for _ in range(_NUM_BUFFERS)
    ]
    layers = [buffers[i % _NUM_BUFFERS].unbind(1) for i in range(_NUM_LAYERS)]

    def ours() -> None:
        plan = plan_attention(
            cu_seqlens, total_tokens=total, head_dim=shape.head_dim, causal=shape.causal
        )
        for q, k, v in layers:
            varlen_attention(
                q, k, v, cu_seqlens, max_seqlen=longest, causal=shape.causal, plan=plan
            )

    def flash() -> None:
        for q, k, v in layers:
            flash_attention(q, k, v, cu_seqlens, max_seqlen=longest, causal=shape.causal)

    found = graph_us({"ours": ours, "flash-attention-2": flash}, calls=_NUM_LAYERS)
    work = _work(shape)
    return Measurement(
        ours=found.pop("ours"),
        rivals=found,
        floor=gpu.rates.floor_us(work),
        shape={
            "batch_size": len(shape.lengths),
            "total_tokens": total,
            "max_seqlen": longest,
            "num_heads": shape.num_heads,
            "head_dim": shape.head_dim,
            "causal": int(shape.causal),
            "flop": work.flop,
        },
    )


def _work(shape: Shape) -> Work:
    """Every operand moved once; the products of the scores and of the values."""
    features = shape.num_heads * shape.head_dim
    return Work(
        num_bytes=4 * int(shape.lengths.sum()) * features * DTYPES[shape.dtype].itemsize,
        flop=4 * float((shape.lengths**2).sum()) * features / (2 if shape.causal else 1),
    )
