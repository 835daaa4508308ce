"""What rank 0 asks of the other ranks, and a step's batch on its way to them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from bytetx.errors import InputError
from bytetx.packed import PackedBatch, Past
from bytetx.parallel.launch import Meeting
from bytetx.parallel.row_scheme import RowScheme


@dataclass(frozen=True, slots=True)
class Join:
    """Meet the others; meeting: None where torchrun's store is the place.

    device_type: cpu or cuda; rank i has GPU i.  workspace_bytes: as of tp.join_group.
    """

    meeting: Meeting | None
    device_type: str
    workspace_bytes: int
    rows: RowScheme | None


@dataclass(frozen=True, slots=True)
class Load:
    """Load a share of a checkpoint, and answer when it is there."""

    folder: Path
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class NewCache:
    """Make a paged cache of this rank's heads."""

    cache_id: int
    num_pages: int
    page_size: int


@dataclass(frozen=True, slots=True)
class DropCache:
    cache_id: int


@dataclass(frozen=True, slots=True)
class Logits:
    """Run a head on rows that rank 0 broadcasts: [num_rows, their features]."""

    head: Literal["lm", "masked_lm"]
    num_rows: int


@dataclass(frozen=True, slots=True)
class Decode:
    """Run a decode step of these sizes; see Transformer.decode_step."""

    cache_id: int
    num_rows: int
    num_pages: int
    is_greedy: bool
    is_captured: bool


@dataclass(frozen=True, slots=True)
class Forward:
    """Run a forward pass; the batch's device tensors follow by a broadcast, in one piece.

    seqlens: int32 on the host.  past: (cache_id, max_pages, page_size, max_kv_seqlen).
    has_prompts: the past has the prompts' lengths.
    wants_layers: rank 0 looks at every layer's output.
    """

    total_tokens: int
    seqlens: bytes
    max_seqlen: int
    has_token_types: bool
    has_bias_positions: bool
    past: tuple[int, int, int, int] | None
    has_prompts: bool
    wants_layers: bool


def forward_message(batch: PackedBatch, *, cache_id: int | None, wants_layers: bool) -> Forward:
    if batch.inputs_embeds is not None:
        raise InputError("inputs_embeds cannot be given to a model that ranks share")
    past = batch.past
    return Forward(
        batch.total_tokens,
        batch.seqlens.numpy().tobytes(),
        batch.max_seqlen,
        batch.token_type_ids is not None,
        batch.bias_positions is not None,
        None
        if past is None or cache_id is None
        else (cache_id, past.page_table.shape[1], past.page_size, past.max_kv_seqlen),
        past is not None and past.prompt_seqlens is not None,
        wants_layers,
    )


def flat_batch(batch: PackedBatch) -> torch.Tensor:
    """The batch's device tensors behind one another, int32."""
    tensors = [batch.input_ids, batch.position_ids, batch.cu_seqlens]
    tensors += [t for t in (batch.token_type_ids, batch.bias_positions) if t is not None]
    if (past := batch.past) is not None:
        tensors += [past.slot_mapping, past.kv_seqlens, past.page_table.flatten()]
        tensors += [] if past.prompt_seqlens is None else [past.prompt_seqlens]
    return torch.cat(tensors)


def flat_size(message: Forward) -> int:
    return sum(_sizes(message))


def batch_of(message: Forward, flat: torch.Tensor) -> PackedBatch:
    """The batch that flat_batch was called with."""
    pieces = iter(flat.split(_sizes(message)))
    seqlens = torch.from_numpy(np.frombuffer(message.seqlens, dtype=np.int32).copy())
    ids, positions, cu_seqlens = next(pieces), next(pieces), next(pieces)
    types = next(pieces) if message.has_token_types else None
    bias_positions = next(pieces) if message.has_bias_positions else None
    past = None
    if message.past is not None:
        _, max_pages, page_size, max_kv_seqlen = message.past
        slots, kv_seqlens, table = next(pieces), next(pieces), next(pieces)
        prompts = next(pieces) if message.has_prompts else None
        table = table.view(len(seqlens), max_pages)
        past = Past(table, kv_seqlens, slots, page_size, max_kv_seqlen, prompts)
    return PackedBatch(
        input_ids=ids,
        position_ids=positions,
        token_type_ids=types,
        cu_seqlens=cu_seqlens,
        seqlens=seqlens,
        max_seqlen=message.max_seqlen,
        bias_positions=bias_positions,
        past=past,
    )


def _sizes(message: Forward) -> list[int]:
    num_seqs, tokens = len(message.seqlens) // 4, message.total_tokens
    sizes = [tokens, tokens, num_seqs + 1]
    sizes += [tokens] * (message.has_token_types + message.has_bias_positions)
    if message.past is not None:
        sizes += [tokens, num_seqs, num_seqs * message.past[1]]
        sizes += [num_seqs] * message.has_prompts
    return sizes
