"""SPLADE: masked-LM logits of packed tokens to one sparse vector per sequence, block by block."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F

from bytetx.nn.heads import MaskedLMHead
from bytetx.ops.linear import prepare_linear
from bytetx.ops.pooling import largest, pool
from bytetx.packed import upload

# Logits held at once. A GPU's GEMM needs thousands of rows. On two cores, 4k tokens of BERT-base
# take 1.5 s with 64 MiB, 2.2 s with 4 MiB and 1.8 s with 512 MiB.
_BLOCK_BYTES = {"cuda": 1 << 30, "cpu": 1 << 26}
_MIN_BLOCK_ROWS = 64
_ALIGNED_COLUMNS = 64

POOLING_STRATEGIES = ("max", "sum")
SPARSE_ACTIVATIONS = ("relu", "log1p_relu")


@dataclass(frozen=True, slots=True)
class SpladeSpec:
    """SpladePooling of sentence-transformers: how the logits of tokens become one weight.

    strategy: max or sum over the tokens of a text.  activation: relu is log1p(relu(logit));
    log1p_relu applies log1p to that once more.
    """

    strategy: str = "max"
    activation: str = "relu"


@dataclass(frozen=True, slots=True)
class SparseRows:
    """Sparse vectors one after the other, on the device.

    indices: int32 [nnz], rising in each vector.  values: f32 [nnz].  counts: int64 [num_rows].
    largest: f32 [num_rows], largest of what the activation and the choice of weights see.
    """

    indices: torch.Tensor
    values: torch.Tensor
    counts: torch.Tensor
    largest: torch.Tensor


def prepare_splade_head(head: MaskedLMHead) -> MaskedLMHead:
    """On a GPU, the head with a vocabulary that is padded to a multiple of 64; else itself.

    Rows of 30522 logits do not start at multiples of 16 bytes: their product and their maximum are
    several times slower. A decoder that ranks share, or that a CPU has prepacked, stays.
    """
    w, blocks = head.decoder, head.blocks
    is_whole = blocks is None or (blocks.shard is None and blocks.hidden is None)
    if head.placement is None and is_whole and w.weight.is_cuda:
        return pad_vocabulary(head)
    return head


def pad_vocabulary(head: MaskedLMHead) -> MaskedLMHead:
    """Adds tokens whose logits are 0, and whose weights are, too; the decoder is copied."""
    w = head.decoder
    extra = -w.n % _ALIGNED_COLUMNS
    if extra == 0:
        return head
    weight = F.pad(w.weight, (0, 0, 0, extra))
    bias = None if w.bias is None else F.pad(w.bias, (0, extra))
    decoder = prepare_linear(weight, bias, prepack=False, batch_invariant=w.batch_invariant)
    return replace(head, decoder=decoder)


@torch.inference_mode()
def splade(
    head: MaskedLMHead,
    hidden_states: torch.Tensor,
    seqlens: np.ndarray,
    *,
    spec: SpladeSpec,
    max_active_dims: int | None,
) -> SparseRows:
    """The weights of the vocabulary's tokens for each packed sequence.

    hidden_states: [total_tokens, hidden_size].  seqlens: int32 [batch_size], on the host.
    max_active_dims: keep only so many of a vector's largest weights; None keeps all that are
    above 0.

    Neither a padded tensor of logits nor the logits of all tokens exist at any time. The number of
    weights is known on the device alone, and the host waits for it: once per step on a GPU, where
    all vectors of a step fit a block.
    """
    device = hidden_states.device
    itemsize, vocab_size = hidden_states.element_size(), head.decoder.n
    block_bytes = _BLOCK_BYTES[device.type]
    num_rows = max(_MIN_BLOCK_ROWS, block_bytes // (vocab_size * itemsize))
    most_pooled = max(1, block_bytes // (vocab_size * 4))
    done: list[tuple[torch.Tensor, ...]] = []
    waiting: list[torch.Tensor] = []
    extremes = [torch.zeros(0, device=device)]
    for block in _blocks(seqlens, num_rows):
        weights, extreme = _weights(head, hidden_states, block, spec)
        waiting.append(weights)
        extremes.append(extreme)
        if sum(map(len, waiting)) >= most_pooled:
            done.append(_compress(torch.cat(waiting), max_active_dims))
            waiting = []
    if waiting or not done:
        rows = torch.cat(waiting) if waiting else torch.zeros((0, vocab_size), device=device)
        done.append(_compress(rows, max_active_dims))
    columns = done[0] if len(done) == 1 else map(torch.cat, zip(*done, strict=True))
    indices, values, counts = columns
    return SparseRows(indices, values, counts, torch.cat(extremes))


@dataclass(frozen=True, slots=True)
class _Block:
    """Whole sequences, or one that is longer than a block and is cut into chunks of num_rows.

    start: index of its first row among all rows.  seqlens: int64, tokens of its sequences.
    """

    start: int
    seqlens: np.ndarray
    num_rows: int


def _blocks(seqlens: np.ndarray, num_rows: int) -> Iterator[_Block]:
    ends = np.cumsum(seqlens, dtype=np.int64)
    first, start = 0, 0
    while first < len(seqlens):
        last = int(np.searchsorted(ends, start + num_rows, side="right"))
        last = max(last, first + 1)
        yield _Block(start, seqlens[first:last].astype(np.int64), num_rows)
        first, start = last, int(ends[last - 1])


def _weights(
    head: MaskedLMHead, hidden_states: torch.Tensor, block: _Block, spec: SpladeSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """f32 [num_sequences, vocab_size] of a block, and `largest` of each before it is activated."""
    total, is_max = int(block.seqlens.sum()), spec.strategy == "max"
    chunks = []
    # The cuts depend on the sequence alone, and so does the order in which a sum is taken.
    for row in range(0, max(total, 1), block.num_rows):
        some = slice(block.start + row, block.start + min(row + block.num_rows, total))
        logits = head.forward(hidden_states[some])
        x = logits if is_max else _activate(logits.float(), spec)
        seqlens = block.seqlens if total <= block.num_rows else np.array([len(x)])
        chunks.append(_reduce(x, seqlens, is_max=is_max))
    reduced = chunks[0]
    for chunk in chunks[1:]:
        reduced = torch.maximum(reduced, chunk) if is_max else reduced + chunk
    extreme = largest(reduced)
    # The activation only rises, so that it may follow the maximum.
    return (_activate(reduced, spec) if is_max else reduced), extreme


def _activate(logits: torch.Tensor, spec: SpladeSpec) -> torch.Tensor:
    """In place on f32."""
    weights = logits.relu_().log1p_()
    return weights.log1p_() if spec.activation == "log1p_relu" else weights


def _reduce(x: torch.Tensor, seqlens: np.ndarray, *, is_max: bool) -> torch.Tensor:
    """The maximum or the sum of each sequence's rows: f32 [num_sequences, vocab_size]."""
    if x.is_cuda:
        cu_seqlens = np.zeros(len(seqlens) + 1, dtype=np.int64)
        np.cumsum(seqlens, out=cu_seqlens[1:])
        offsets = upload(torch.from_numpy(cu_seqlens), x.device)
        if is_max:
            return pool(x, offsets.int(), mode="max", max_seqlen=int(seqlens.max()))
        return torch.segment_reduce(x, "sum", offsets=offsets, axis=0, unsafe=True)
    rows = x.split(seqlens.tolist())
    if is_max:
        reduced = [r.amax(dim=0) if len(r) else x.new_zeros(x.shape[1]) for r in rows]
    else:
        reduced = [r.sum(dim=0) for r in rows]
    return torch.stack(reduced).float()


def _compress(weights: torch.Tensor, max_active_dims: int | None) -> tuple[torch.Tensor, ...]:
    """Weights f32 [n, vocab_size] without their zeros: (indices, values, counts) of SparseRows."""
    if max_active_dims is not None and max_active_dims < weights.shape[1]:
        values, columns = weights.topk(max_active_dims, dim=1)
        weights = torch.zeros_like(weights).scatter_(1, columns, values)
    is_active = weights > 0
    rows_columns = is_active.nonzero()
    rows, columns = rows_columns[:, 0], rows_columns[:, 1]
    return columns.int(), weights[rows, columns], is_active.sum(dim=1)
