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
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import flash_attn3, sampling
from benchmarks.flash_attn3 import FlashAttention3
from benchmarks.gpu import DTYPES, Gpu, Run, Work, gpu_suite, graph_us, num_rotated
from benchmarks.lengths import dense, prefix_sums
from benchmarks.right_runs import right_runs
from benchmarks.suite import Measurement, Suite, measured
from bytetx.ops.norm import rms_norm
from bytetx.ops.paged import paged_attention
from bytetx.ops.paged_plan import EarlyRead, plan_paged_attention
from bytetx.ops.rotary_kv import rotary_write_kv

_PAGE_SIZE = 16
_FA3_PAGE_SIZES = (16, 256)  # ours, and the one that FlashAttention-3 is fastest with
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


def suite(*, patterns: list[str], fa3: Path | None = None) -> Suite:
    """fa3: FlashAttention-3's library.  Raises BytetxError where it does not load."""
    cases: list[Shape | sampling.Shape] = [*shapes(), *sampling.shapes()]
    run = partial(_measure_any, fa3=flash_attn3.load(fa3))
    return gpu_suite("decode", cases, run, patterns=patterns, unit="us")


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


def _measure_any(
    shape: Shape | sampling.Shape, gpu: Gpu, *, fa3: FlashAttention3 | None
) -> Measurement:
    if isinstance(shape, sampling.Shape):
        return sampling.measure(shape, gpu)
    return measure(shape, gpu, fa3=fa3)


def measure(shape: Shape, gpu: Gpu, *, fa3: FlashAttention3 | None = None) -> Measurement:
    torch.manual_seed(0)
    notes: list[str] = []
    if shape.is_write:
        runs, calls = _write_runs(shape)
    else:
        step = Step(shape)
        runs, calls = _attention_runs(step)
        if fa3 is None:
            notes.append(flash_attn3.NOT_GIVEN)
        else:
            runs |= _flash3_runs(step, fa3, notes)
    found = graph_us(runs, calls=calls)
    work = work_of(shape)
    heads = shape.heads
    sizes = {
        "batch_size": len(shape.seqlens),
        "total_tokens": shape.total_tokens,
        "max_kv_seqlen": int(shape.kv_seqlens.max()),
        "num_heads": heads.num_heads,
        "num_kv_heads": heads.num_kv_heads,
        "head_dim": heads.head_dim,
        "bytes": work.num_bytes,
        "flop": work.flop,
    }
    return measured(found, gpu.rates.floor_us(work), sizes, notes)


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


class Step:
    """The operands of a step's attention: rows of q, and keys and values in every layer's cache."""

    def __init__(self, shape: Shape, *, device: torch.device | str = "cuda"):
        heads, dtype = shape.heads, DTYPES[shape.dtype]
        self.shape, self.heads = shape, heads
        self.num_pages = {size: -(-shape.kv_seqlens // size) for size in _FA3_PAGE_SIZES}
        # Long enough for pages of either size, so that everyone reads the same memory.
        num_keys = max(size * int(count.sum()) for size, count in self.num_pages.items())
        size = (2, num_keys, heads.num_kv_heads, heads.head_dim)
        row_bytes = 2 * heads.num_kv_heads * heads.head_dim * dtype.itemsize
        num_buffers = num_rotated(row_bytes * int(shape.kv_seqlens.sum()))
        self.num_steps = -(-num_buffers // heads.num_layers)
        self.caches = [torch.randn(size, device=device, dtype=dtype) for _ in range(num_buffers)]
        q_size = (shape.total_tokens, heads.num_heads, heads.head_dim)
        self.q = torch.randn(q_size, device=device, dtype=dtype)
        self.cu_seqlens = prefix_sums(shape.seqlens, device)
        self.kv_seqlens = torch.from_numpy(shape.kv_seqlens).int().to(device)
        self.max_seqlen, self.max_kv_seqlen = int(shape.seqlens.max()), int(shape.kv_seqlens.max())
        self.page_tables = {
            size: _random_pages(count).to(device) for size, count in self.num_pages.items()
        }

    @property
    def num_calls(self) -> int:
        return self.num_steps * self.heads.num_layers

    def paged(self, page_size: int) -> list[tuple[Tensor, Tensor]]:
        """Each cache's (k, v) as pages: [num_pages, page_size, num_kv_heads, head_dim]."""
        num_keys = page_size * int(self.num_pages[page_size].sum())
        pages = [cache[:, :num_keys].unflatten(1, (-1, page_size)) for cache in self.caches]
        return [(k, v) for k, v in pages]

    def ours(self, page_size: int = _PAGE_SIZE) -> Tensor:
        """All layers of all steps; the last call's result [total_tokens, num_heads, head_dim]."""
        heads, is_decode = self.heads, self.max_seqlen == 1
        plan = partial(
            plan_paged_attention,
            total_tokens=self.shape.total_tokens,
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
        )
        early_read = EarlyRead.KEYS if is_decode else EarlyRead.TABLES  # as in a decoder
        attend = partial(paged_attention, early_read=early_read)
        return self._all_layers(plan, attend, page_size)

    def flash3(self, fa3: FlashAttention3, page_size: int) -> Tensor:
        """The same of FlashAttention-3, its scheduler's metadata once a step, as vLLM has it."""
        heads = (self.heads.num_heads, self.heads.num_kv_heads, self.heads.head_dim)
        plan = partial(fa3.paged_plan, heads=heads, page_size=page_size, dtype=self.q.dtype)
        return self._all_layers(plan, fa3.paged, page_size)

    def _all_layers(
        self, plan: Callable[..., object], attend: Callable[..., Tensor], page_size: int
    ) -> Tensor:
        in_turn, lengths = cycle(self.paged(page_size)), (self.cu_seqlens, self.kv_seqlens)
        longest = {"max_seqlen": self.max_seqlen, "max_kv_seqlen": self.max_kv_seqlen}
        for _ in range(self.num_steps):
            made = plan(*lengths, **longest)
            for k, v in islice(in_turn, self.heads.num_layers):
                out = attend(
                    self.q,
                    k,
                    v,
                    cu_seqlens=self.cu_seqlens,
                    kv_seqlens=self.kv_seqlens,
                    page_table=self.page_tables[page_size],
                    plan=made,
                    **longest,
                )
        return out


def _attention_runs(step: Step) -> tuple[dict[str, Run], int]:
    runs: dict[str, Run] = {"ours": step.ours}
    for name, rival in (("flash-attention-2", _flash), ("sdpa", _sdpa)):
        attend = rival(step.shape, step.q)
        if attend is not None:
            runs[name] = partial(_in_turn, attend, step.caches, step.num_calls)
    return runs, step.num_calls


def _flash3_runs(step: Step, fa3: FlashAttention3, notes: list[str]) -> dict[str, Run]:
    """Return those whose result is ours on the same pages; `notes` gets a line for others."""
    kept: dict[str, Run] = {}
    for page_size in _FA3_PAGE_SIZES:
        name = f"{flash_attn3.NAME}-page-{page_size}"
        theirs = partial(step.flash3, fa3, page_size)
        runs: dict[str, Callable[[], Tensor]] = {
            "ours": partial(step.ours, page_size),
            name: theirs,
        }
        if name in right_runs(runs, None, notes):
            kept[name] = theirs
    return kept


def _random_pages(num_pages: np.ndarray) -> Tensor:
    """A page table whose sequences have so many pages, each of them once."""
    table = torch.zeros(len(num_pages), int(num_pages.max()), dtype=torch.int32)
    order = torch.randperm(int(num_pages.sum())).int().split(num_pages.tolist())
    for row, own in zip(table, order, strict=True):
        row[: len(own)] = own
    return table


def _in_turn(
    attend: Callable[[Tensor, Tensor], object], caches: list[Tensor], num_calls: int
) -> None:
    """Rivals get keys in order, without pages: the first rows of each cache are as good as any."""
    for cache in islice(cycle(caches), num_calls):
        k, v = cache
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
