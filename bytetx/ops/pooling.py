"""One vector a sequence from packed rows: checks, choice of kernel."""

import torch
from torch import Tensor

from bytetx.ops import reference
from bytetx.ops.check import require_contiguous, require_tensor

POOLING_MODES = ("cls", "mean", "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")


def pool(
    x: Tensor,
    cu_seqlens: Tensor,
    *,
    mode: str,
    first_tokens: Tensor | None = None,
    normalize: bool = False,
) -> Tensor:
    """Reduce each packed sequence to one vector, as sentence-transformers' Pooling does.

    x: [total_tokens, hidden_size], f32, bf16 or f16, contiguous.  cu_seqlens: int32
    [batch_size + 1].  mode: one of POOLING_MODES; weightedmean weighs a token by its index in the
    sequence + 1.  first_tokens: int32 [batch_size], tokens skipped at each start (an excluded
    prompt).  normalize: divide each vector by its l2 norm (at least 1e-12).
    Returns f32 [batch_size, hidden_size]; a sequence with no token left is zeros.
    Raises ValueError on an unknown mode and on shape, dtype or device mismatch.
    """
    if mode not in POOLING_MODES:
        raise ValueError(f"mode must be one of {', '.join(POOLING_MODES)}, got {mode!r}")
    require_tensor("x", x, shape=(None, None))
    require_contiguous("x", x)
    require_tensor("cu_seqlens", cu_seqlens, shape=(None,), dtypes=(torch.int32,), device=x.device)
    if first_tokens is not None:
        require_tensor(
            "first_tokens",
            first_tokens,
            shape=(cu_seqlens.numel() - 1,),
            dtypes=(torch.int32,),
            device=x.device,
        )
    return reference.pool(x, cu_seqlens, mode=mode, first_tokens=first_tokens, normalize=normalize)
