"""A paged cache for tests: random pages in random order, NaN wherever no key of the step lies.

With codes the cache is FP8, and the truth is what its codes stand for.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bytetx.ops.kv_codes import NAN_SCALE, quantize_kv, restore_kv
from bytetx.ops.paged import paged_attention, write_kv
from bytetx.packed import Past

_NAN_CODE = 0x7F


@dataclass(frozen=True, slots=True)
class Step:
    """One step over sequences with pasts: q rows, and all keys and values in order as the truth."""

    q: Tensor  # [total_tokens, num_heads, head_dim]
    keys: tuple[Tensor, ...]  # of each sequence [kv_seqlen, num_kv_heads, head_dim]
    values: tuple[Tensor, ...]
    seqlens: tuple[int, ...]
    k_cache: Tensor
    v_cache: Tensor
    past: Past
    k_scales: Tensor | None = None
    v_scales: Tensor | None = None

    @property
    def cu_seqlens(self) -> Tensor:
        return torch.tensor([0, *self.seqlens]).cumsum(0).int()

    def attend(self, **options: object) -> Tensor:
        return paged_attention(self.q, self.k_cache, self.v_cache, **self.lengths(), **options)

    def lengths(self) -> dict[str, object]:
        """The keyword arguments of paged_attention that say where what lies."""
        return {
            "cu_seqlens": self.cu_seqlens,
            "page_table": self.past.page_table,
            "kv_seqlens": self.past.kv_seqlens,
            "max_seqlen": max(self.seqlens),
            "max_kv_seqlen": self.past.max_kv_seqlen,
            "k_scales": self.k_scales,
            "v_scales": self.v_scales,
        }


def make_step(
    lengths: list[tuple[int, int]],
    *,
    dtype: torch.dtype = torch.float32,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    page_size: int = 16,
    window: int = 0,
    given_back: bool = False,
    has_codes: bool = False,
) -> Step:
    """lengths: (new tokens, keys with them) of each sequence.

    given_back: pages that lie wholly before the window are -1 in the table.
    has_codes: the cache is FP8; q has the dtype.
    """
    seqlens, kv_seqlens = (np.array(n, dtype=np.int32) for n in zip(*lengths, strict=True))
    num_pages = [-(-int(n) // page_size) for n in kv_seqlens]
    free = torch.randperm(sum(num_pages) + 3).tolist()
    pages = [[free.pop() for _ in range(n)] for n in num_pages]
    past = pack_past(pages, kv_seqlens, seqlens, page_size=page_size)
    shape = (2, sum(num_pages) + 3, page_size, num_kv_heads, head_dim)
    cache, scales = torch.full(shape, torch.nan, dtype=dtype), (None, None)
    if has_codes:
        cache = torch.full(shape, _NAN_CODE, dtype=torch.uint8)
        sizes = (shape[1], num_kv_heads, page_size)
        scales = torch.full((2, *sizes), NAN_SCALE, dtype=torch.uint8).unbind()
    keys, values = [], []
    for own, new, total in zip(pages, seqlens.tolist(), kv_seqlens.tolist(), strict=True):
        first = max(0, total - new - window + 1) if window else 0
        k, v = torch.randn(2, total, num_kv_heads, head_dim).to(dtype)
        slots = torch.tensor(own).repeat_interleave(page_size)[:total] * page_size
        slots = (slots + torch.arange(total) % page_size).int()
        slots[: first // page_size * page_size] = -1
        write_kv(k, v, cache[0], cache[1], slots, *scales)
        if given_back:
            own[: first // page_size] = [-1] * (first // page_size)
        keys.append(restore_kv(*quantize_kv(k)) if has_codes else k)
        values.append(restore_kv(*quantize_kv(v)) if has_codes else v)
    past = pack_past(pages, kv_seqlens, seqlens, page_size=page_size)
    q = torch.randn(int(seqlens.sum()), num_heads, head_dim).to(dtype)
    sequences = (tuple(keys), tuple(values), tuple(seqlens.tolist()))
    return Step(q, *sequences, cache[0], cache[1], past, *scales)


def attend_exactly(
    step: Step,
    dtype: torch.dtype,
    *,
    device: torch.device | str = "cpu",
    window: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    """Plain torch on the keys in order, in `dtype` throughout."""
    parts = []
    group = step.q.shape[1] // step.k_cache.shape[2]
    scale = step.q.shape[2] ** -0.5 if scale is None else scale
    for q, k, v in zip(step.q.split(step.seqlens), step.keys, step.values, strict=True):
        q, k, v = (t.to(device, dtype) for t in (q, k, v))
        k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        at = torch.arange(len(k), device=device)
        distance = at[None, :] - at[len(k) - len(q) :, None]
        if alibi_slopes is not None:
            scores = scores + alibi_slopes.to(device, dtype)[:, None, None] * distance
        is_hidden = distance > 0
        if window:
            is_hidden |= distance <= -window
        weights = scores.masked_fill(is_hidden, -torch.inf).softmax(-1)
        parts.append(torch.einsum("hij,jhd->ihd", weights, v))
    return torch.cat(parts)


def assert_exact(got: Tensor, step: Step, **options: object) -> None:
    """Relative rms error of a sequence's head <= 2 * plain torch's in the same dtype + one unit.

    Taken over the whole step, and for each one against torch's worst: in a single row the rounding
    of one large score decides, so that neither side wins everywhere.
    """
    options |= {"device": got.device}
    exact = attend_exactly(step, torch.float64, **options)
    theirs = attend_exactly(step, got.dtype, **options).double()
    assert got.isfinite().all()
    ours, plain = relative_errors(got, exact, step), relative_errors(theirs, exact, step)
    unit = torch.finfo(got.dtype).eps
    assert ours.square().mean().sqrt() <= 2 * plain.square().mean().sqrt() + unit
    assert ours.max() <= 2 * plain.max() + unit


def relative_errors(got: Tensor, exact: Tensor, step: Step) -> Tensor:
    """[sequences that have rows, num_heads]"""
    parts = zip((got.double() - exact).split(step.seqlens), exact.split(step.seqlens), strict=True)
    return torch.stack([norm(error) / norm(size) for error, size in parts if len(size) > 0])


def norm(x: Tensor) -> Tensor:
    return x.square().sum((0, 2)).sqrt()


def pack_past(
    pages: Sequence[Sequence[int]], kv_seqlens: np.ndarray, seqlens: np.ndarray, *, page_size: int
) -> Past:
    """The Past of sequences that hold these pages, without a loop over tokens; on the CPU.

    pages: the pages of each sequence in order, at least as many as its keys need; -1 for pages
    before its window that were given back.  kv_seqlens: int32 [batch_size], this step's tokens
    included.  seqlens: int32 [batch_size], this step's tokens.
    """
    page_table = np.full((len(pages), max(map(len, pages), default=0)), -1, dtype=np.int32)
    for row, own in zip(page_table, pages, strict=True):
        row[: len(own)] = own
    sequence = np.repeat(np.arange(len(pages)), seqlens)
    ends = np.cumsum(seqlens)
    positions = np.arange(len(sequence)) + np.repeat(kv_seqlens - ends, seqlens)
    page, offset = np.divmod(positions, page_size)
    slots = page_table[sequence, page] * page_size + offset
    return Past(
        page_table=torch.from_numpy(page_table),
        kv_seqlens=torch.from_numpy(np.asarray(kv_seqlens, dtype=np.int32)),
        slot_mapping=torch.from_numpy(slots.astype(np.int32)),
        page_size=page_size,
        max_kv_seqlen=int(kv_seqlens.max(initial=0)),
    )
