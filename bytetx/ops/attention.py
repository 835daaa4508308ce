"""Attention over packed sequences: checks, choice of kernel."""

import math

import torch
from torch import Tensor

from bytetx.ops import reference
from bytetx.ops.check import require_out, require_tensor


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    *,
    max_seqlen: int,
    softmax_scale: float | None = None,
    relative_bias: Tensor | None = None,
    bias_positions: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attention over packed sequences; no token sees another sequence.

    q, k, v: [total_tokens, num_heads, head_dim], f32, bf16 or f16, heads and features contiguous in
    each row (views into one packed qkv buffer are normal).  cu_seqlens: int32 [batch_size + 1] on
    q's device, starts at 0, ends at total_tokens.  max_seqlen: tokens, host int.
    softmax_scale: 1 / sqrt(head_dim) where None.
    relative_bias: f32 [num_heads, 2 * span - 1], span >= max_seqlen; score(i, j) of a head gets
    relative_bias[head, position(j) - position(i) + span - 1], where position is the index in the
    sequence, or bias_positions: int32 [total_tokens], values in [0, span).
    out: contiguous [total_tokens, num_heads, head_dim], or None for a new tensor.
    Returns out, q's dtype; accumulates in f32.
    Raises ValueError on shape, dtype or device mismatch.
    Source: FlashAttention-2 (arXiv 2307.08691), section 3; zero padding as in ByteTransformer
    (arXiv 2210.03052).
    """
    _check(q, k, v, cu_seqlens, max_seqlen, relative_bias, bias_positions)
    if softmax_scale is None:
        softmax_scale = 1.0 / math.sqrt(q.shape[2])
    if out is not None:
        require_out("out", out, like=q, shape=q.shape)
    attended = reference.varlen_attention(
        q,
        k,
        v,
        cu_seqlens,
        softmax_scale=softmax_scale,
        relative_bias=relative_bias,
        bias_positions=bias_positions,
    )
    return attended if out is None else out.copy_(attended)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    relative_bias: Tensor | None,
    bias_positions: Tensor | None,
) -> None:
    require_tensor("q", q, shape=(None, None, None))
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t is not q:
            require_tensor(name, t, shape=q.shape, dtypes=(q.dtype,), device=q.device)
        if t.stride(2) != 1 or t.stride(1) != t.shape[2]:
            raise ValueError(
                f"{name} must be contiguous within a row (strides [any, {t.shape[2]}, 1]), "
                f"got strides {list(t.stride())}"
            )
    require_tensor("cu_seqlens", cu_seqlens, shape=(None,), dtypes=(torch.int32,), device=q.device)
    if cu_seqlens.numel() == 0:
        raise ValueError("cu_seqlens must have batch_size + 1 entries, got 0")
    if relative_bias is not None:
        require_tensor(
            "relative_bias",
            relative_bias,
            shape=(q.shape[1], None),
            dtypes=(torch.float32,),
            device=q.device,
        )
        if (relative_bias.shape[1] + 1) // 2 < max_seqlen:
            raise ValueError(
                f"relative_bias must have at least 2 * max_seqlen - 1 = {2 * max_seqlen - 1} "
                f"columns, got {relative_bias.shape[1]}"
            )
    if bias_positions is not None:
        require_tensor(
            "bias_positions",
            bias_positions,
            shape=(q.shape[0],),
            dtypes=(torch.int32,),
            device=q.device,
        )
