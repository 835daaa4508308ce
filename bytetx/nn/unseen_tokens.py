"""A forward pass where the last tokens of each sequence see the others, and no token sees them.

ColBERT expands a query so: its mask tokens attend to the query's own tokens, not to themselves.
"""

from dataclasses import dataclass

import numpy as np
import torch

from bytetx.checkpoint.spec import ModelSpec
from bytetx.nn.transformer import Transformer
from bytetx.packed import PackedBatch


def why_no_unseen_tokens(transformer: Transformer, *, length: int) -> str | None:
    """Why a model cannot hide tokens of sequences of `length` tokens; None where it can.

    The pass moves unseen tokens to rows of their own: attention must depend on a token's position
    through its embedding or rotation alone, not on its index in the sequence.
    """
    spec: ModelSpec = transformer.spec
    layer_spec = transformer.layers.layer_spec
    if spec.is_causal:
        return "a causal model"
    if transformer.is_shared:
        return "a model loaded with tp or on a grid"
    if transformer.layers.relative_bias is not None:
        return "a model with a relative attention bias"
    windows = (layer_spec.window_of(i) for i in range(spec.num_layers))
    if any(0 < window < 2 * length for window in windows):
        return f"a model with windows, for {length} tokens"
    return None


@torch.inference_mode()
def forward_with_unseen(
    transformer: Transformer, batch: PackedBatch, num_unseen: np.ndarray
) -> torch.Tensor:
    """Hidden states [total_tokens, hidden_size] in the order of the batch.

    num_unseen: int32 [batch_size], on the host; fewer than the tokens of each sequence.
    The unseen tokens of a sequence of n others become sequences of n rows, the last filled up with
    copies, and their keys and values are replaced by those of the n tokens.
    """
    layout = _layout(batch.seqlens.numpy(), num_unseen)
    device = batch.input_ids.device
    rows, targets, sources, order = (
        torch.from_numpy(index).to(device)
        for index in (layout.rows, layout.targets, layout.sources, layout.order)
    )
    cu_seqlens = np.zeros(len(layout.seqlens) + 1, dtype=np.int32)
    np.cumsum(layout.seqlens, out=cu_seqlens[1:])
    types = batch.token_type_ids
    moved = PackedBatch(
        input_ids=batch.input_ids[rows],
        position_ids=batch.position_ids[rows],
        token_type_ids=None if types is None else types[rows],
        cu_seqlens=torch.from_numpy(cu_seqlens).to(device),
        seqlens=torch.from_numpy(layout.seqlens),
        max_seqlen=int(layout.seqlens.max(initial=0)),
    )

    def replace_kv(k: torch.Tensor, v: torch.Tensor) -> None:
        for x in (k, v):
            x.index_copy_(0, targets, x[sources])

    return transformer.forward(moved, on_kv=replace_kv)[order]


@dataclass(frozen=True, slots=True)
class _SeenRows:
    """rows: int64, the batch's row that each row of the pass takes.  seqlens: int32 of the pass.

    targets, sources: int64, rows of the pass that get keys and values, and those that give them.
    order: int64 [total_tokens], the row of the pass of each row of the batch.
    """

    rows: np.ndarray
    seqlens: np.ndarray
    targets: np.ndarray
    sources: np.ndarray
    order: np.ndarray


def _layout(seqlens: np.ndarray, num_unseen: np.ndarray) -> _SeenRows:
    rows, lengths, targets, sources, order = [], [], [], [], []
    # The first row of a sequence in the batch, and of its rows in the pass.
    start, done = 0, 0
    for length, unseen in zip(seqlens.tolist(), num_unseen.tolist(), strict=True):
        seen = length - unseen
        copies = -(-unseen // seen)
        filled = np.minimum(np.arange(copies * seen) + seen, length - 1)
        rows += [np.arange(start, start + seen), start + filled]
        lengths += [seen] * (1 + copies)
        targets.append(np.arange(done + seen, done + (1 + copies) * seen))
        sources.append(np.tile(np.arange(done, done + seen), copies))
        order.append(np.arange(done, done + length))
        start, done = start + length, done + (1 + copies) * seen
    return _SeenRows(
        np.concatenate(rows),
        np.array(lengths, dtype=np.int32),
        np.concatenate(targets),
        np.concatenate(sources),
        np.concatenate(order),
    )
