"""Suite `decode`: attention over paged keys, what writes them, and choices, against torch.

A time of attention is of one layer's call in a step of the model: a graph holds whole steps, each a
plan and one call a layer, and its time is divided by all calls, so that the plan counts as it is
paid, once a step. Every layer has a cache of its own, and as many steps with further caches follow
as it takes for all of them to exceed the L2 twice: no call, ours or a rival's, finds its keys
there, as none does in a model, whose weights pass through the L2 between one step and the next. The
floor is of bytes at the rate of a copy; a kernel that hardly writes can go below it, for an H200
reads faster than it copies.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bytetx.bench import sampling
from bytetx.bench.gpu import DTYPES, Gpu, Run, Work, gpu_suite, graph_us, num_rotated
from bytetx.bench.lengths import dense, prefix_sums
from bytetx.bench.suite import Measurement, Suite
from bytetx.ops.norm import rms_norm
from bytetx.ops.paged import paged_attention
from bytetx.ops.paged_plan import EarlyRead, plan_paged_attention
from bytetx.ops.rotary_kv import rotary_write_kv

_PAGE_SIZE = 16
_NUM_POSITIONS = 4096
_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Heads:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int  # calls that share one plan


MODELS = {
    "qwen3-0.6b": Heads(16, 8, 128, 28),
    "llama-8b": Heads(32, 8, 128, 32),
    "gpt2": Heads(12, 12, 64, 12),
}


@dataclass(frozen=True, slots=True)
class Shape:
    """One case: each sequence's rows of this step and its keys with them; or rows to write."""

    name: str
    model: str
    seqlens: np.ndarray  # int64 [batch_size]
    kv_seqlens: np.ndarray
    is_write: bool = False
    dtype: str = "bf16"

    @property
    def heads(self) -> Heads:
        return MODELS[self.model]

    @property
    def total_tokens(self) -> int:
        return int(self.seqlens.sum())


def decode_suite(*, patterns: list[str]) -> Suite:
    """The suite's selected cases.  patterns: parts or globs of case names; empty means all.

    Raises BytetxError where there is no GPU, or no case fits.
    """
    cases: list[Shape | sampling.Shape] = [*shapes(), *sampling.shapes()]
    return gpu_suite("decode", cases, _measure_any, patterns=patterns, unit="us")


def shapes() -> list[Shape]:
    """Decode rows, prompts and pieces of them, mixed steps, and the writing of keys."""
    draw = np.random.default_rng(0)

    def ragged(batch: int) -> np.ndarray:
        return draw.integers(100, 2049, batch)

    found = []
    for model in MODELS:
        for batch in (1, 16, 64, 256):
            for keys in (1024, 4096, 16384):
                if batch * keys <= 1 << 18:
                    found.append(_decode(f"b{batch}-kv{keys}", model, dense(keys, batch)))
            found.append(_decode(f"b{batch}-ragged", model, ragged(batch)))
    outlier = np.array([8192] + [1] * 63)
    found.append(_decode("b64-one-8192", "qwen3-0.6b", outlier))
    for model in ("qwen3-0.6b", "llama-8b"):
        prompts = ragged(16)
        found += [
            Shape(f"prefill-{model}-8x1024", model, dense(1024, 8), dense(1024, 8)),
            Shape(f"prefill-{model}-4x4096", model, dense(4096, 4), dense(4096, 4)),
            Shape(f"prefill-{model}-ragged", model, prompts, prompts),
            Shape(f"chunks-{model}-16x512-after-4096", model, dense(512, 16), dense(4608, 16)),
        ]
        rows = np.array([1] * 64 + [1024, 1024])
        found.append(Shape(f"mixed-{model}", model, rows, np.maximum(rows, ragged(66))))
        for tokens in (64, 8192):
            rows = dense(tokens, 1)
            found.append(Shape(f"write-{model}-{tokens}", model, rows, rows, is_write=True))
    return found


def _decode(name: str, model: str, kv_seqlens: np.ndarray) -> Shape:
    return Shape(f"decode-{model}-{name}", model, dense(1, len(kv_seqlens)), kv_seqlens)


def _measure_any(shape: Shape | sampling.Shape, gpu: Gpu) -> Measurement:
    if isinstance(shape, sampling.Shape):
        return sampling.measure(shape, gpu)
    return measure(shape, gpu)


def measure(shape: Shape, gpu: Gpu) -> Measurement:
    torch.manual_seed(0)
    runs, calls = _write_runs(shape) if shape.is_write else _attention_runs(shape)
    found = graph_us(runs, calls=calls)
    work = work_of(shape)
    heads = shape.heads
    return Measurement(
        ours=found.pop("ours"),
        rivals=found,
        floor=gpu.rates.floor_us(work),
        shape={
            "batch_size": len(shape.seqlens),
            "total_tokens": shape.total_tokens,
            "max_kv_seqlen": int(shape.kv_seqlens.max()),
            "num_heads": heads.num_heads,
            "num_kv_heads": heads.num_kv_heads,
            "head_dim": heads.head_dim,
            "bytes": work.num_bytes,
            "flop": work.flop,
        },
    )


def work_of(shape: Shape) -> Work:
    """Keys and values read once, q and out once; or q read and written, k and v twice."""
    heads, itemsize = shape.heads, DTYPES[shape.dtype].itemsize
    rows = shape.total_tokens * heads.num_heads * heads.head_dim * itemsize
    key_bytes = heads.num_kv_heads * heads.head_dim * itemsize
    if shape.is_write:
        return Work(2 * rows + 4 * shape.total_tokens * key_bytes)
    pairs = shape.seqlens * (2 * shape.kv_seqlens - shape.seqlens + 1) / 2
    flop = 4 * float(pairs.sum()) * heads.num_heads * heads.head_dim
    return Work(2 * rows + 2 * int(shape.kv_seqlens.sum()) * key_bytes, flop)


def _attention_runs(shape: Shape) -> tuple[dict[str, Run], int]:
    heads, dtype = shape.heads, DTYPES[shape.dtype]
    num_pages = -(-shape.kv_seqlens // _PAGE_SIZE)
    size = (2, int(num_pages.sum()), _PAGE_SIZE, heads.num_kv_heads, heads.head_dim)
    num_buffers = num_rotated(2 * int(np.prod(size)))
    num_steps = -(-num_buffers // heads.num_layers)
    caches = [torch.randn(size, device="cuda", dtype=dtype) for _ in range(num_buffers)]
    q_size = (shape.total_tokens, heads.num_heads, heads.head_dim)
    q = torch.randn(q_size, device="cuda", dtype=dtype)
    early_read = EarlyRead.KEYS if shape.seqlens.max() == 1 else EarlyRead.TABLES  # as in a decoder
    cu_seqlens = prefix_sums(shape.seqlens)
    kv_seqlens = torch.from_numpy(shape.kv_seqlens).int().cuda()
    max_seqlen, max_kv_seqlen = int(shape.seqlens.max()), int(shape.kv_seqlens.max())
    page_table = _random_pages(num_pages)

    def ours() -> None:
        in_turn = cycle(caches)
        for _ in range(num_steps):
            plan = plan_paged_attention(
                cu_seqlens,
                kv_seqlens,
                max_seqlen=max_seqlen,
                max_kv_seqlen=max_kv_seqlen,
                total_tokens=shape.total_tokens,
                num_heads=heads.num_heads,
                num_kv_heads=heads.num_kv_heads,
                head_dim=heads.head_dim,
            )
            for k, v in islice(in_turn, heads.num_layers):
                paged_attention(
                    q,
                    k,
                    v,
                    cu_seqlens=cu_seqlens,
                    kv_seqlens=kv_seqlens,
                    max_seqlen=max_seqlen,
                    max_kv_seqlen=max_kv_seqlen,
                    page_table=page_table,
                    plan=plan,
                    early_read=early_read,
                )

    num_calls = num_steps * heads.num_layers
    runs: dict[str, Run] = {"ours": ours}
    for name, rival in (("flash-attention-2", _flash), ("sdpa", _sdpa)):
        attend = rival(shape, q)
        if attend is not None:
            runs[name] = partial(_in_turn, attend, caches, num_calls)
    return runs, num_calls


def _random_pages(num_pages: np.ndarray) -> Tensor:
    """A page table whose sequences have so many pages, each of them once."""
    table = torch.zeros(len(num_pages), int(num_pages.max()), dtype=torch.int32)
    order = torch.randperm(int(num_pages.sum())).int().split(num_pages.tolist())
    for row, own in zip(table, order, strict=True):
        row[: len(own)] = own
    return table.cuda()


def _in_turn(
    attend: Callable[[Tensor, Tensor], object], caches: list[Tensor], num_calls: int
) -> None:
    """Rivals get keys in order, without pages: the first rows of each cache are as good as any."""
    for cache in islice(cycle(caches), num_calls):
        k, v = cache.flatten(1, 2)
        attend(k, v)


def _flash(shape: Shape, q: Tensor) -> Callable[[Tensor, Tensor], object] | None:
    """FlashAttention-2's varlen kernel as torch ships it; keys packed, as it knows no pages."""
    bounds = prefix_sums(shape.seqlens), prefix_sums(shape.kv_seqlens)
    longest = int(shape.seqlens.max()), int(shape.kv_seqlens.max())
    total_keys = int(shape.kv_seqlens.sum())

    def attend(k: Tensor, v: Tensor) -> object:
        return torch.ops.aten._flash_attention_forward(
            *(q, k[:total_keys], v[:total_keys], *bounds, *longest, 0.0, True, False)
        )

    return attend


def _sdpa(shape: Shape, q: Tensor) -> Callable[[Tensor, Tensor], object] | None:
    """torch's own choice, where all sequences are equal and have one row each."""
    batch, keys = len(shape.kv_seqlens), int(shape.kv_seqlens[0])
    if shape.seqlens.max() > 1 or (shape.kv_seqlens != keys).any():
        return None
    queries = q.view(batch, 1, *q.shape[1:]).transpose(1, 2)

    def attend(k: Tensor, v: Tensor) -> object:
        k, v = (t[: batch * keys].unflatten(0, (batch, keys)).transpose(1, 2) for t in (k, v))
        return F.scaled_dot_product_attention(queries, k, v, enable_gqa=True)

    return attend


def _write_runs(shape: Shape) -> tuple[dict[str, Run], int]:
    """Norms of the heads, rotary and the way into the pages: in one, and step by step in torch."""
    heads, dtype, tokens = shape.heads, DTYPES[shape.dtype], shape.total_tokens
    parts = [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads]
    size = (tokens, sum(parts), heads.head_dim)
    num_buffers = num_rotated(2 * int(np.prod(size)))
    rows = [torch.randn(size, device="cuda", dtype=dtype) for _ in range(num_buffers)]
    page = (tokens // _PAGE_SIZE, _PAGE_SIZE, heads.num_kv_heads, heads.head_dim)
    caches = [torch.empty(2, *page, device="cuda", dtype=dtype) for _ in range(num_buffers)]
    angles = torch.randn(_NUM_POSITIONS, heads.head_dim // 2, device="cuda")
    positions = torch.randint(_NUM_POSITIONS, (tokens,), device="cuda").int()
    slots = torch.randperm(tokens, device="cuda").int()
    q_norm, k_norm = torch.rand(2, heads.head_dim, device="cuda").to(dtype)
    cos_table, sin_table = angles.cos(), angles.sin()

    def ours() -> None:
        for qkv, cache in zip(rows, caches, strict=True):
            q, k, v = qkv.split(parts, dim=1)
            rotary_write_kv(
                q,
                k,
                v,
                cos_table,
                sin_table,
                positions,
                cache[0],
                cache[1],
                slots,
                q_norm=q_norm,
                k_norm=k_norm,
                eps=_EPS,
            )

    def theirs() -> None:
        cos, sin = (F.embedding(positions, t).repeat(1, 2)[:, None] for t in (cos_table, sin_table))
        for qkv, cache in zip(rows, caches, strict=True):
            q, k, v = qkv.split(parts, dim=1)
            for x, weight in ((q, q_norm), (k, k_norm)):
                x = rms_norm(x.reshape(-1, heads.head_dim), weight, eps=_EPS).view(x.shape)
                a, b = x.chunk(2, dim=-1)
                x = (x * cos + torch.cat((-b, a), -1) * sin).to(dtype)
            for target, source in zip(cache.flatten(1, 2), (x, v), strict=True):
                target[slots] = source

    return {"ours": ours, "torch": theirs}, num_buffers
