"""A token of each row of logits, by the row's own parameters: checks, choice of kernel."""

import torch
from torch import Tensor

from bytetx.ops import native
from bytetx.ops.check import require_contiguous, require_tensor
from bytetx.ops.sampling import Filters, is_bad_row, sample, uniform
from bytetx.ops.triton_backend import triton_kernels

_MAX_VOCAB_SIZE = 1 << 19  # kMaxChunks * kChunk in csrc/cuda/sample_row.cuh


def sample_tokens(
    logits: Tensor,
    temperature: Tensor,
    filters: Filters,
    *,
    seeds: Tensor,
    positions: Tensor,
    has_greedy: bool = True,
) -> Tensor:
    """int32 [n]: what sample() gives each row of logits [n, vocab_size], -1 for a bad row.

    logits: f32, bf16 or f16, contiguous.  temperature, filters, seeds, positions, has_greedy: as
    sample()'s.  A bad row holds NaN or inf, or nothing but -inf.
    The kernel's sums differ from sample()'s in rounding: a number of the stream that lies within
    some 1e-6 of the edge between two tokens may give the other one.
    Raises ValueError on shape, dtype or device mismatch.
    """
    require_tensor("logits", logits, shape=(None, None))
    require_contiguous("logits", logits)
    kernel = native.kernel("sample", logits.device)
    takes_it = logits.dtype in native.DTYPE_CODES and 0 < logits.shape[1] <= _MAX_VOCAB_SIZE
    triton = triton_kernels(logits.device) if kernel is None else None
    if not takes_it or (kernel is None and triton is None):
        chosen = sample(
            *(logits, temperature, filters),
            seeds=seeds,
            positions=positions,
            has_greedy=has_greedy,
        )
        return torch.where(is_bad_row(logits), -1, chosen)
    limits = {"top_k": filters.top_k, "top_p": filters.top_p, "min_p": filters.min_p}
    columns = {"temperature": temperature, **limits, "seeds": seeds, "positions": positions}
    for name, column in columns.items():
        if column is not None:
            dtype = torch.int64 if name in ("top_k", "seeds", "positions") else torch.float32
            shape = logits.shape[:1]
            require_tensor(name, column, shape=shape, dtypes=(dtype,), device=logits.device)
            require_contiguous(name, column)
    if kernel is None:
        assert triton is not None
        numbers = uniform(seeds, positions)
        tokens: Tensor = triton.sample(logits, temperature, **limits, numbers=numbers)
        return tokens
    out = torch.empty(logits.shape[0], dtype=torch.int32, device=logits.device)
    kernel(
        logits=logits,
        temperature=temperature,
        top_k=filters.top_k,
        top_p=filters.top_p,
        min_p=filters.min_p,
        seeds=seeds,
        positions=positions,
        out=out,
        num_rows=logits.shape[0],
        vocab_size=logits.shape[1],
        dtype=native.DTYPE_CODES[logits.dtype],
        launch=native.launch_args(logits.device),
    )
    return out
