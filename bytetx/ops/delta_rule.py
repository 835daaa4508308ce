"""The gated delta rule over packed sequences, in chunks."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bytetx.ops import triton_backend
from bytetx.ops.check import require_tensor
from bytetx.ops.delta_chunk import CHUNK
from bytetx.ops.registry import Operation

_EPS = 1e-6
_MAX_DIM = 128  # features of a head of q, k or v that a program of Triton's holds

# Shape class: dtype, k_dim, v_dim.
DELTA_RULE = Operation("gated_delta_rule")
# Shape class: dtype, width.  run(x, gate, weight, eps) on checked arguments.
GATED_NORM = Operation("gated_norm")


@dataclass(frozen=True, slots=True)
class DeltaPast:
    """The state that earlier steps left of each sequence.

    memory: f32 [num_slots, num_v_heads, k_dim, v_dim].  slots, kv_seqlens: as of ConvPast.
    """

    memory: Tensor
    slots: Tensor
    kv_seqlens: Tensor


@dataclass(frozen=True, slots=True)
class DeltaGates:
    """The decay of the state before each token, and the share of its value that is written.

    The logarithms of the first are softplus(decay + decay_bias) * rates, the others
    sigmoid(beta).

    decay, beta: [total_tokens, num_v_heads] in v's dtype, rows with any stride.
    rates, decay_bias: f32 [num_v_heads], the rates below 0.
    """

    decay: Tensor
    beta: Tensor
    rates: Tensor
    decay_bias: Tensor


def has_delta_kernel(device: torch.device, dtype: torch.dtype, k_dim: int, v_dim: int) -> bool:
    """Whether the rule launches by sizes alone there; the torch form reads lengths on the host."""
    return DELTA_RULE.choose(device, dtype, k_dim, v_dim).name != "torch"


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: DeltaGates,
    cu_seqlens: Tensor,
    seqlens: Tensor,
    *,
    max_seqlen: int,
    past: DeltaPast | None = None,
) -> Tensor:
    """o_t = S_t q_t of S_t = e^d_t S_(t-1) (I - b_t k_t k_t') + b_t v_t k_t', S_0 = 0.

    q, k: [total_tokens, num_k_heads, k_dim]; unit vectors are taken of both, and q is divided by
    the root of k_dim.  v: [total_tokens, num_v_heads, v_dim]; as many heads of it share one of k.
    Tokens have any stride, their features none.  cu_seqlens: int32 [batch_size + 1].
    seqlens: int32 [batch_size], on the host; read where has_delta_kernel is False.
    max_seqlen: no sequence is longer; of 1, a step with a past takes a kernel of its own.
    past: where sequences continue; its memory becomes that behind this step's tokens.
    Returns [total_tokens, num_v_heads, v_dim] in v's dtype, zeros behind the last sequence.
    Raises ValueError on shape, dtype or device mismatch.
    Source: Gated Delta Networks (arXiv 2412.06464), section 3; DeltaNet's chunks (2406.06484).
    """
    (total_tokens, heads, v_dim), (_, k_heads, k_dim) = v.shape, k.shape
    device, dtype = v.device, v.dtype
    for name, x, shape in (
        ("q", q, (total_tokens, k_heads, k_dim)),
        ("k", k, (total_tokens, k_heads, k_dim)),
        ("v", v, (total_tokens, heads, v_dim)),
        ("decay", gates.decay, (total_tokens, heads)),
        ("beta", gates.beta, (total_tokens, heads)),
    ):
        require_tensor(name, x, shape=shape, dtypes=(dtype,), device=device)
        if x.stride(-1) != 1 or (x.ndim == 3 and x.stride(1) != x.shape[2]):
            raise ValueError(f"{name} must have rows of adjacent features, got {x.stride()}")
    if heads % k_heads:
        raise ValueError(f"heads of v must share those of k alike, got {heads} and {k_heads}")
    for name, x in (("rates", gates.rates), ("decay_bias", gates.decay_bias)):
        require_tensor(name, x, shape=(heads,), dtypes=(torch.float32,), device=device)
    require_tensor("cu_seqlens", cu_seqlens, shape=(None,), dtypes=(torch.int32,), device=device)
    batch_size = cu_seqlens.shape[0] - 1
    if past is not None:
        sizes = (None, heads, k_dim, v_dim)
        floats, ints = (torch.float32,), (torch.int32,)
        require_tensor("past.memory", past.memory, shape=sizes, dtypes=floats, device=device)
        for name, x in (("slots", past.slots), ("kv_seqlens", past.kv_seqlens)):
            require_tensor(f"past.{name}", x, shape=(batch_size,), dtypes=ints, device=device)
    mixed: Tensor = DELTA_RULE.choose(device, dtype, k_dim, v_dim).run(
        q, k, v, gates, cu_seqlens, seqlens, max_seqlen, past
    )
    return mixed


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of each head of x, times silu(gate), in gate's dtype.

    x: [total_tokens, heads, width].  gate: [total_tokens, heads * width], rows with any stride.
    weight: [width].  Statistics are in f32.  Raises ValueError on shape, dtype or device mismatch.
    """
    (total_tokens, heads, width), device, dtype = x.shape, x.device, x.dtype
    require_tensor("x", x, shape=(None, None, None))
    shape = (total_tokens, heads * width)
    require_tensor("gate", gate, shape=shape, dtypes=(dtype,), device=device)
    require_tensor("weight", weight, shape=(width,), dtypes=(dtype,), device=device)
    if not x.is_contiguous() or gate.stride(1) != 1:
        raise ValueError("x must be contiguous, and gate have rows of adjacent features")
    normed: Tensor = GATED_NORM.choose(device, dtype, width).run(x, gate, weight, eps)
    return normed


def _is_held(device: torch.device, dtype: torch.dtype, k_dim: int, v_dim: int) -> bool:
    return max(k_dim, v_dim) <= _MAX_DIM


@DELTA_RULE.triton_kernel(beside="", takes=_is_held)
def _run_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: DeltaGates,
    cu_seqlens: Tensor,
    seqlens: Tensor,
    max_seqlen: int,
    past: DeltaPast | None,
) -> Tensor:
    mixed: Tensor = triton_backend.kernels(v.device).gated_delta_rule(
        q,
        k,
        v,
        gates.decay,
        gates.beta,
        gates.rates,
        gates.decay_bias,
        cu_seqlens,
        has_one_token=max_seqlen == 1,
        past=() if past is None else (past.memory, past.slots, past.kv_seqlens),
    )
    return mixed


@DELTA_RULE.in_torch()
def _run_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: DeltaGates,
    cu_seqlens: Tensor,
    seqlens: Tensor,
    max_seqlen: int,
    past: DeltaPast | None,
) -> Tensor:
    """Loops over chunks, never over tokens: each chunk's triangular system is solved at once."""
    decay = F.softplus(gates.decay.float() + gates.decay_bias) * gates.rates
    return _in_chunks(q, k, v, decay, gates.beta.float().sigmoid(), seqlens.numpy(), past)


def _in_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    seqlens: np.ndarray,
    past: DeltaPast | None,
) -> Tensor:
    """decay: logarithms, as beta f32 [total_tokens, num_v_heads]."""
    total_tokens, num_heads, v_dim = v.shape
    out = torch.zeros_like(v)
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
    out[rows] = mixed.transpose(1, 2).flatten(0, 1)[places].to(out.dtype)
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


@GATED_NORM.triton_kernel(beside="", takes=triton_backend.holds_rows)
def _norm_in_triton(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    normed: Tensor = triton_backend.kernels(x.device).gated_norm(x, gate, weight, eps)
    return normed


@GATED_NORM.in_torch()
def _norm_in_torch(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight
    return (normed.flatten(1) * F.silu(gate.float())).to(x.dtype)
