"""One vector per sequence from packed rows: checks, choice of kernel."""

from typing import Any

import torch
from torch import Tensor

from bytetx.ops import native, reference, triton_backend
from bytetx.ops.check import is_operand, require_contiguous, require_tensor
from bytetx.ops.native import has_row_kernel
from bytetx.ops.registry import Operation

# Shape classes: dtype and width of the rows.
# run(x, cu_seqlens, *, mode, first_tokens, normalize, max_seqlen) as of pool.
POOL = Operation("pool")

POOLING_MODES = ("cls", "mean", "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
# The order is PoolMode's in csrc/ops.h; the names are sentence-transformers'.


def pool(
    x: Tensor,
    cu_seqlens: Tensor,
    *,
    mode: str,
    first_tokens: Tensor | None = None,
    normalize: bool = False,
    max_seqlen: int | None = None,
) -> Tensor:
    """Reduce each packed sequence to one vector, as sentence-transformers' Pooling does.

    x: [total_tokens, hidden_size], f32, bf16 or f16, contiguous.  cu_seqlens: int32
    [batch_size + 1].  mode: one of POOLING_MODES; weightedmean weighs a token by its index in the
    sequence + 1.  first_tokens: int32 [batch_size], tokens skipped at each start (an excluded
    prompt).  normalize: divide each vector by its l2 norm (at least 1e-12); where that
    overflows, the vector is NaN.
    max_seqlen: tokens; no sequence is longer. None where only the device knows the lengths: a GPU
    then looks for long ones, at about 2 us.
    Returns f32 [batch_size, hidden_size]; a sequence with no token left is zeros.  Rows of x that
    belong to no sequence (padding after the last) are never read.
    Raises ValueError on an unknown mode, on shape, dtype or device mismatch, and on a CPU where
    cu_seqlens does not run from 0 to total_tokens; a GPU's kernel reads rows of x and no others.
    """
    _check(x, cu_seqlens, mode, first_tokens)
    if torch.compiler.is_compiling():
        pooled: Tensor = torch.ops.bytetx.pool(
            x,
            cu_seqlens,
            mode=mode,
            first_tokens=first_tokens,
            normalize=normalize,
            max_seqlen=max_seqlen,
        )
        return pooled
    vectors: Tensor = POOL.choose(x.device, x.dtype, x.shape[1]).run(
        x,
        cu_seqlens,
        mode=mode,
        first_tokens=first_tokens,
        normalize=normalize,
        max_seqlen=max_seqlen,
    )
    return vectors


@POOL.native_kernel(takes=has_row_kernel)
def run_kernel(
    x: Tensor,
    cu_seqlens: Tensor,
    *,
    mode: str,
    first_tokens: Tensor | None,
    normalize: bool,
    max_seqlen: int | None = None,
    isa: str = "auto",
) -> Tensor:
    """The native kernel on checked arguments; isa: a key of native.ISA_CODES."""
    batch_size = cu_seqlens.shape[0] - 1
    total_tokens, hidden_size = x.shape
    longest = total_tokens if max_seqlen is None else max_seqlen
    device = x.device
    out = torch.empty((batch_size, hidden_size), dtype=torch.float32, device=device)
    workspace_bytes = native.require_kernel("pool_workspace_bytes", device)(
        total_tokens=total_tokens, max_seqlen=longest, hidden_size=hidden_size
    )
    workspace = None
    if workspace_bytes:
        workspace = torch.empty(workspace_bytes, dtype=torch.uint8, device=device)
    native.require_kernel("pool", device)(
        x=x,
        cu_seqlens=cu_seqlens,
        first_tokens=first_tokens,
        out=out,
        workspace=workspace,
        workspace_bytes=workspace_bytes,
        batch_size=batch_size,
        total_tokens=total_tokens,
        max_seqlen=longest,
        hidden_size=hidden_size,
        mode=POOLING_MODES.index(mode),
        normalize=normalize,
        dtype=native.DTYPE_CODES[x.dtype],
        launch=native.launch_args(device, isa),
    )
    return out


@POOL.triton_kernel()
def _run_triton(
    x: Tensor, cu_seqlens: Tensor, *, max_seqlen: int | None = None, **options: Any
) -> Tensor:
    vectors: Tensor = triton_backend.kernels(x.device).pool(x, cu_seqlens, **options)
    return vectors


@POOL.in_torch()
def _run_torch(
    x: Tensor, cu_seqlens: Tensor, *, max_seqlen: int | None = None, **options: Any
) -> Tensor:
    return reference.pool(x, cu_seqlens, **options)


def _check(x: Tensor, cu_seqlens: Tensor, mode: str, first_tokens: Tensor | None) -> None:
    if mode not in POOLING_MODES:
        raise ValueError(f"mode must be one of {', '.join(POOLING_MODES)}, got {mode!r}")
    require_tensor("x", x, shape=(None, None))
    require_contiguous("x", x)
    int32 = (torch.int32,)
    bounds = cu_seqlens.shape if isinstance(cu_seqlens, Tensor) and cu_seqlens.dim() == 1 else None
    if bounds is None or not is_operand(cu_seqlens, bounds, torch.int32, x.get_device()):
        require_tensor("cu_seqlens", cu_seqlens, shape=(None,), dtypes=int32, device=x.device)
        require_contiguous("cu_seqlens", cu_seqlens)
    if cu_seqlens.shape[0] == 0:
        raise ValueError("cu_seqlens must have batch_size + 1 entries, got 0")
    if first_tokens is not None:
        shape = (cu_seqlens.shape[0] - 1,)
        require_tensor("first_tokens", first_tokens, shape=shape, dtypes=int32, device=x.device)
        require_contiguous("first_tokens", first_tokens)


def _fake_pool(x: Tensor, cu_seqlens: Tensor, **_: object) -> Tensor:
    return x.new_empty((cu_seqlens.shape[0] - 1, x.shape[1]), dtype=torch.float32)


native.register(pool, fake=_fake_pool)


def mean_words(
    word: Tensor, ids: Tensor, cu_seqlens: Tensor, *, scales: Tensor | None = None
) -> Tensor:
    """The mean of the words of each sequence, without a row for each token in between.

    word: f32 [vocab_size, size].  ids: int32 [total_tokens], below vocab_size.  cu_seqlens: int32
    [batch_size + 1], from 0 to total_tokens.  scales: f32 [total_tokens], of each word.
    Returns f32 [batch_size, size]; a sequence without tokens is zeros.
    """
    # Sums: the mode of means, which takes no scales, is slower than a division.
    sums: Tensor = torch.embedding_bag(word, ids, cu_seqlens, False, 0, False, scales, True)[0]
    return sums.div_(cu_seqlens.diff().clamp_(min=1)[:, None])


def largest(x: Tensor) -> Tensor:
    """f32 [n]: the largest magnitude of each row of x [n, size]; NaN or inf where a row has one.

    x: of floating numbers, size at least 1.
    """
    if x.is_cuda:  # one kernel
        norms: Tensor = torch.linalg.vector_norm(x, ord=torch.inf, dim=-1, dtype=torch.float32)
        return norms
    # 3 ms for 16 384 rows of 384 numbers on one core, where vector_norm takes 48.
    return torch.maximum(x.amax(dim=-1), x.amin(dim=-1).neg()).float()
