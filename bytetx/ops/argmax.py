"""The most likely token of each row of logits: checks, choice of kernel."""

import torch
from torch import Tensor

from bytetx.ops import native, triton_backend
from bytetx.ops.check import require_contiguous, require_tensor
from bytetx.ops.registry import Operation
from bytetx.ops.sampling import greedy, is_bad_row

# Shape class: whether there are columns.  run(logits, slot_indices, last_tokens) as of argmax.
ARGMAX = Operation("argmax")


def argmax(
    logits: Tensor, *, slot_indices: Tensor | None = None, last_tokens: Tensor | None = None
) -> Tensor:
    """int32 [n]: the first largest of each row of logits [n, vocab_size], -1 for a bad row.

    logits: f32, bf16 or f16, contiguous.  A bad row holds NaN or inf, or nothing but -inf.
    slot_indices: int32 [n], last_tokens: int32, or neither: last_tokens[slot_indices[i]] becomes
    the token of row i, 0 for a bad row; of rows with the same slot index, that of any one.
    Raises ValueError on shape, dtype or device mismatch.
    """
    require_tensor("logits", logits, shape=(None, None))
    require_contiguous("logits", logits)
    if (slot_indices is None) != (last_tokens is None):
        raise ValueError("slot_indices and last_tokens must be given both, or neither")
    if slot_indices is not None and last_tokens is not None:
        int32, device = (torch.int32,), logits.device
        shape = logits.shape[:1]
        require_tensor("slot_indices", slot_indices, shape=shape, dtypes=int32, device=device)
        require_tensor("last_tokens", last_tokens, shape=(None,), dtypes=int32, device=device)
    chosen: Tensor = ARGMAX.choose(logits.device, logits.shape[1] > 0).run(
        logits, slot_indices, last_tokens
    )
    return chosen


@ARGMAX.native_kernel("cuda")
def _run_kernel(logits: Tensor, slot_indices: Tensor | None, last_tokens: Tensor | None) -> Tensor:
    out = torch.empty(logits.shape[0], dtype=torch.int32, device=logits.device)
    native.require_kernel("argmax", logits.device)(
        logits=logits,
        slot_indices=slot_indices,
        out=out,
        last_tokens=last_tokens,
        num_rows=logits.shape[0],
        vocab_size=logits.shape[1],
        dtype=native.DTYPE_CODES[logits.dtype],
        launch=native.launch_args(logits.device),
    )
    return out


@ARGMAX.triton_kernel(takes=lambda device, has_columns: has_columns)
def _run_triton(logits: Tensor, slot_indices: Tensor | None, last_tokens: Tensor | None) -> Tensor:
    tokens: Tensor = triton_backend.kernels(logits.device).argmax(
        logits, slot_indices=slot_indices, last_tokens=last_tokens
    )
    return tokens


@ARGMAX.in_torch()
def _run_torch(logits: Tensor, slot_indices: Tensor | None, last_tokens: Tensor | None) -> Tensor:
    out = torch.where(is_bad_row(logits), -1, greedy(logits))
    if slot_indices is not None and last_tokens is not None:
        last_tokens.index_copy_(0, slot_indices.long(), out.clamp(min=0))
    return out
