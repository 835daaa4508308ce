"""A token of each row of logits, by the row's own parameters: checks, choice of kernel."""

import torch
from torch import Tensor

from bytetx.ops import native, triton_backend
from bytetx.ops.check import require_contiguous, require_tensor
from bytetx.ops.registry import Operation
from bytetx.ops.sampling import Filters, is_bad_row, sample, uniform

_MAX_VOCAB_SIZE = 1 << 19  # kMaxChunks * kChunk in csrc/cuda/sample_row.cuh

# Shape class: vocab_size.
# run(logits, temperature, filters, *, seeds, positions, has_greedy) as of sample_tokens.
SAMPLE = Operation("sample")


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
    chosen: Tensor = SAMPLE.choose(logits.device, logits.shape[1]).run(
        logits, temperature, filters, seeds=seeds, positions=positions, has_greedy=has_greedy
    )
    return chosen


def _takes_vocab(device: torch.device, vocab_size: int) -> bool:
    return 0 < vocab_size <= _MAX_VOCAB_SIZE


@SAMPLE.native_kernel("cuda", takes=_takes_vocab)
def _run_kernel(
    logits: Tensor,
    temperature: Tensor,
    filters: Filters,
    *,
    seeds: Tensor,
    positions: Tensor,
    has_greedy: bool,
) -> Tensor:
    _check_columns(logits, temperature, filters, seeds=seeds, positions=positions)
    out = torch.empty(logits.shape[0], dtype=torch.int32, device=logits.device)
    native.require_kernel("sample", logits.device)(
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


@SAMPLE.triton_kernel(takes=_takes_vocab)
def _run_triton(
    logits: Tensor,
    temperature: Tensor,
    filters: Filters,
    *,
    seeds: Tensor,
    positions: Tensor,
    has_greedy: bool,
) -> Tensor:
    _check_columns(logits, temperature, filters, seeds=seeds, positions=positions)
    tokens: Tensor = triton_backend.kernels(logits.device).sample(
        logits,
        temperature,
        top_k=filters.top_k,
        top_p=filters.top_p,
        min_p=filters.min_p,
        numbers=uniform(seeds, positions),
    )
    return tokens


@SAMPLE.in_torch()
def _run_torch(
    logits: Tensor,
    temperature: Tensor,
    filters: Filters,
    *,
    seeds: Tensor,
    positions: Tensor,
    has_greedy: bool,
) -> Tensor:
    columns = {"seeds": seeds, "positions": positions}
    chosen = sample(logits, temperature, filters, **columns, has_greedy=has_greedy)
    return torch.where(is_bad_row(logits), -1, chosen)


def _check_columns(
    logits: Tensor, temperature: Tensor, filters: Filters, *, seeds: Tensor, positions: Tensor
) -> None:
    limits = {"top_k": filters.top_k, "top_p": filters.top_p, "min_p": filters.min_p}
    columns = {"temperature": temperature, **limits, "seeds": seeds, "positions": positions}
    for name, column in columns.items():
        if column is not None:
            dtype = torch.int64 if name in ("top_k", "seeds", "positions") else torch.float32
            shape = logits.shape[:1]
            require_tensor(name, column, shape=shape, dtypes=(dtype,), device=logits.device)
            require_contiguous(name, column)
