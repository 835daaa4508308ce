"""The gated delta rule over packed sequences, in chunks."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64
_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class DeltaPast:
    """The state that earlier steps left of each sequence.

    memory: f32 [num_slots, num_v_heads, k_dim, v_dim].  slots, kv_seqlens: as of ConvPast.
    """

    memory: Tensor
    slots: Tensor
    kv_seqlens: Tensor


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    seqlens: np.ndarray,
    *,
    past: DeltaPast | None = None,
) -> Tensor:
    """o_t = S_t q_t of S_t = e^d_t S_(t-1) (I - b_t k_t k_t') + b_t v_t k_t', S_0 = 0.

    q, k: [total_tokens, num_k_heads, k_dim]; unit vectors are taken of both, and q is divided by
    the root of k_dim.  v: [total_tokens, num_v_heads, v_dim]; as many heads of it share one of k.
    decay, beta: f32 [total_tokens, num_v_heads].  seqlens: int32 [batch_size], on the host.
    past: where sequences continue; its memory becomes that behind this step's tokens.
    Returns f32 [total_tokens, num_v_heads, v_dim], zeros in rows behind the last sequence.
    Loops over chunks, never over tokens: each chunk's triangular system is solved at once.
    Source: Gated Delta Networks (arXiv 2412.06464), section 3; DeltaNet's chunks (2406.06484).
    """
    total_tokens, num_heads, v_dim = v.shape
    out = torch.zeros((total_tokens, num_heads, v_dim), device=v.device)
    longest = int(seqlens.max(initial=0))
    if longest == 0:
        return out
    size = min(CHUNK, 1 << (longest - 1).bit_length())
    order = np.argsort(-seqlens, kind="stable")  # those of many chunks first
    lengths = seqlens[order].astype(np.int64)
    num_chunks = -(-lengths // size)
    firsts = np.cumsum(num_chunks) - num_chunks
    starts = (np.cumsum(seqlens) - seqlens).astype(np.int64)[order]
    step = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    rows = torch.from_numpy(np.repeat(starts, lengths) + step).to(v.device)
    places = torch.from_numpy(np.repeat(firsts * size, lengths) + step).to(v.device)
    total_chunks = int(num_chunks.sum())

    def chunks(x: Tensor) -> Tensor:
        """[total_tokens, heads, ...] -> f32 [chunks, heads, size, ...], zeros at their ends."""
        padded = torch.zeros((total_chunks * size, *x.shape[1:]), device=x.device)
        padded[places] = x[rows].float()
        return padded.view(total_chunks, size, *x.shape[1:]).transpose(1, 2)

    group = num_heads // k.shape[1]
    q, k = (_units(chunks(x)).repeat_interleave(group, dim=1) for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    v, b = chunks(v), chunks(beta)[..., None]
    sums = chunks(decay).cumsum(-1)  # running sums of logarithms within a chunk
    later = torch.ones(size, size, dtype=torch.bool, device=v.device).triu(1)
    between = (sums[..., :, None] - sums[..., None, :]).masked_fill_(later, -torch.inf).exp_()
    k_t, faded = k.transpose(-1, -2), sums.exp()[..., None]
    system = (k * b) @ k_t * between
    solved = torch.linalg.solve_triangular(
        system, torch.cat([v * b, k * b * faded], -1), upper=False, unitriangular=True
    )
    new, read = solved.split([v_dim, k.shape[-1]], dim=-1)
    within = q @ k_t * between
    q, end = q * faded, sums[..., -1:]
    k_t = (k * (end - sums).exp()[..., None]).transpose(-1, -2)
    kept = end.exp()[..., None]
    memory = _memory(past, order, seqlens, v.new_zeros(len(order), num_heads, k.shape[-1], v_dim))
    mixed = torch.empty_like(v)
    for c in range(int(num_chunks[0])):
        count = int((num_chunks > c).sum())
        own = torch.from_numpy(firsts[:count] + c).to(v.device)
        before = memory[:count]
        values = new[own] - read[own] @ before
        mixed[own] = q[own] @ before + within[own] @ values
        memory[:count] = before * kept[own] + k_t[own] @ values
    if past is not None:
        past.memory[past.slots[torch.from_numpy(order).to(v.device)]] = memory
    out[rows] = mixed.transpose(1, 2).flatten(0, 1)[places]
    return out


def _units(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS)


def _memory(
    past: DeltaPast | None, order: np.ndarray, seqlens: np.ndarray, zeros: Tensor
) -> Tensor:
    """Each sequence's memory before the step, in the given order; zeros of one that starts."""
    if past is None:
        return zeros
    at = torch.from_numpy(order).to(zeros.device)
    lengths = torch.from_numpy(seqlens[order]).to(zeros.device)
    starts = past.kv_seqlens[at] <= lengths
    return past.memory[past.slots[at]].masked_fill_(starts[:, None, None, None], 0)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of each head of x, times silu(gate), in gate's dtype.

    x: f32 [total_tokens, heads, v_dim].  gate: [total_tokens, heads * v_dim].  weight: [v_dim].
    """
    x = x.to(gate.dtype).float()
    normed = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)).to(gate.dtype) * weight
    return (normed.flatten(1) * F.silu(gate.float())).to(gate.dtype)
