"""PackedBatch, the batch type of bytetx, and conversions to and from padded tensors."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from bytetx.adapter_rows import AdapterRows
from bytetx.errors import InputError
from bytetx.sequence_tree import SequenceTree

TokenIds = Sequence[int] | np.ndarray

# cu_seqlens is int32.
_MAX_TOKENS = 2**31 - 1


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The host's tensor on a device; pinned first, or a copy to a GPU would wait for the GPU."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class Past:
    """Where the keys and values of a step's sequences lie in the paged cache.

    A step mixes prefill chunks and decode rows: sequence i has seqlens[i] query rows, the last
    seqlens[i] of its kv_seqlens[i] keys.
    page_table: int32 [batch_size, max_pages], the pages of each sequence in order; entries past its
        last key, or before a sliding window, are not read.
    kv_seqlens: int32 [batch_size], keys of each sequence, this step's tokens included.
    slot_mapping: int32 [total_tokens], where each token's key and value go:
        page * page_size + offset, or -1 for nowhere.
    page_size: tokens, a power of two.   max_kv_seqlen: the largest of kv_seqlens.   Host ints.
    prompt_seqlens: int32 [batch_size], tokens of each sequence's full prompt, where a step's
        rotation depends on them (RotaryTables.of); None counts a sequence's keys as its prompt.
    allows_early_read: whether earlier steps wrote all keys before this step's tokens, so that they
        may be read while those of this step are being written.
    state_slots: int32 [batch_size], where layers without attention remember each sequence; None of
        models without such layers.
    """

    page_table: torch.Tensor
    kv_seqlens: torch.Tensor
    slot_mapping: torch.Tensor
    page_size: int
    max_kv_seqlen: int
    prompt_seqlens: torch.Tensor | None = None
    allows_early_read: bool = False
    state_slots: torch.Tensor | None = None

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "Past":
        """This past with its tensors on `device`."""
        names = ("page_table", "kv_seqlens", "slot_mapping", "prompt_seqlens", "state_slots")
        moved = {
            name: tensor.to(device, non_blocking=non_blocking)
            for name in names
            if (tensor := getattr(self, name)) is not None
        }
        return replace(self, **moved)


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """A batch of variable-length sequences as one row of real tokens; no pad token exists.

    input_ids, position_ids: int32 [total_tokens]; positions already carry the family's offset.
    token_type_ids: int32 [total_tokens], or None where the family has no token types.
    cu_seqlens: int32 [batch_size + 1], prefix sums of the lengths, starts at 0.
    seqlens: int32 [batch_size], always on the host, so that reading a length never waits for a GPU.
    max_seqlen: tokens of the longest sequence, host int (0 for an empty batch).
    inputs_embeds: [total_tokens, embedding_size], replaces the word embedding where it is given.
    bias_positions: int32 [total_tokens], positions for a relative attention bias, where they are
        not simply the index in the sequence (a padded mask with holes).
    bad_ids: int32 [3] on a GPU, what bytetx.ops.embedding.embed writes there of ids that no host
        checked; None where the host did.
    past: where the sequences' keys and values lie, in a step of generation; else None.
    on_host: the same batch in host memory, where it is at hand: other ranks are sent it, or a part
        of it is packed again, without a wait for the device.
    allows_capture: whether the ranks of a group may capture the pass as a CUDA graph.
    tree: which sequences continue others, where some do; then seqlens and cu_seqlens count a
        sequence's own tokens, max_seqlen and positions those of its ancestors, too.
    tree_tables: int32 by window, the tree's plan of attention; None: it is still to be made.
    computed: the sequences of the tree that are keys alone, in their order; on the device.
    shared: the same tokens with each common prefix once; a forward pass computes it instead.
    adapters: of its rows, where some have one.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    token_type_ids: torch.Tensor | None
    cu_seqlens: torch.Tensor
    seqlens: torch.Tensor
    max_seqlen: int
    inputs_embeds: torch.Tensor | None = None
    bias_positions: torch.Tensor | None = None
    bad_ids: torch.Tensor | None = None
    past: Past | None = None
    on_host: "PackedBatch | None" = None
    allows_capture: bool = True
    tree: SequenceTree | None = None
    tree_tables: Mapping[int, torch.Tensor] | None = None
    computed: "tuple[ComputedTokens, ...]" = ()
    shared: "SharedPrefixes | None" = None
    adapters: AdapterRows | None = None

    @property
    def host(self) -> "PackedBatch | None":
        """This batch in host memory, as far as that needs no copy."""
        return self if self.device.type == "cpu" else self.on_host

    @property
    def batch_size(self) -> int:
        return self.seqlens.shape[0]

    @property
    def total_tokens(self) -> int:
        return self.input_ids.shape[0]

    @property
    def device(self) -> torch.device:
        return self.input_ids.device

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "PackedBatch":
        """This batch with its device tensors on `device`; `seqlens` stays on the host."""
        moved = {
            name: tensor.to(device, non_blocking=non_blocking)
            for name in _DEVICE_FIELDS
            if (tensor := getattr(self, name)) is not None
        }
        if self.past is not None:
            moved["past"] = self.past.to(device, non_blocking=non_blocking)
        if self.shared is not None:
            moved["shared"] = self.shared.to(device, non_blocking=non_blocking)
        return replace(self, **moved)


@dataclass(frozen=True, slots=True, eq=False)
class ComputedTokens:
    """A causal model's work on a text's first tokens, for texts that continue them.

    kv: [num_layers, 2, num_tokens, num_kv_heads, head_dim], keys after rotation, and values.
    hidden_states: [num_tokens, output_size], the last ones.
    """

    kv: torch.Tensor
    hidden_states: torch.Tensor

    def first(self, num_tokens: int) -> "ComputedTokens":
        """Views of the first tokens, which see none of the others."""
        return ComputedTokens(self.kv[:, :, :num_tokens], self.hidden_states[:num_tokens])

    @property
    def num_bytes(self) -> int:
        return self.kv.nbytes + self.hidden_states.nbytes

    def is_finite(self) -> torch.Tensor:
        """bool [], on the device."""
        return self.kv.isfinite().all() & self.hidden_states.isfinite().all()


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """A batch whose sequences' common prefixes are sequences of their own, computed once.

    batch: with a tree.  rows: int64, for each token of the batch that it stands for, its row here,
    where those of sequences that are keys alone come last.
    kept_rows: int64 each, rows whose keys, values and hidden states a pass adds to `kept`, in the
    same order; `kept` is shared by all copies of this object.
    hidden_states: [batch.total_tokens or more, output_size], where they were computed already.
    """

    batch: PackedBatch
    rows: torch.Tensor
    kept_rows: tuple[torch.Tensor, ...] = ()
    kept: list[ComputedTokens] = field(default_factory=list)
    hidden_states: torch.Tensor | None = None

    @property
    def num_rows(self) -> int:
        """Rows of the whole tree, those that were computed before among them."""
        tree = self.batch.tree
        return self.batch.total_tokens if tree is None else tree.total_keys

    def only(self, tokens: torch.Tensor) -> "SharedPrefixes":
        """The same, of which a pass gives the hidden states of some of the tokens alone: those of
        all are many times what it computes.  tokens: int64, on the device."""
        return replace(self, rows=self.rows[tokens])

    def are_kept_finite(self) -> tuple[torch.Tensor, ...]:
        """bool [] each, on the device: whether what a pass kept is finite."""
        return tuple(one.is_finite() for one in self.kept)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "SharedPrefixes":
        """The same on `device`."""
        return replace(
            self,
            batch=self.batch.to(device, non_blocking=non_blocking),
            rows=self.rows.to(device, non_blocking=non_blocking),
            kept_rows=tuple(rows.to(device, non_blocking=non_blocking) for rows in self.kept_rows),
        )

    def pin(self) -> "SharedPrefixes":
        """The same in pinned memory, from which copies to a GPU wait for nothing."""
        pinned = {
            name: tensor.pin_memory()
            for name in _DEVICE_FIELDS
            if (tensor := getattr(self.batch, name)) is not None
        }
        return replace(
            self,
            batch=replace(self.batch, **pinned),
            rows=self.rows.pin_memory(),
            kept_rows=tuple(rows.pin_memory() for rows in self.kept_rows),
        )


_DEVICE_FIELDS = (
    "input_ids",
    "position_ids",
    "token_type_ids",
    "cu_seqlens",
    "inputs_embeds",
    "bias_positions",
)


def pack(
    token_ids: Sequence[TokenIds],
    *,
    token_type_ids: Sequence[TokenIds] | None = None,
    has_token_types: bool = False,
    position_offset: int = 0,
    device: torch.device | str = "cpu",
) -> PackedBatch:
    """Packs sequences of token ids, without a loop over tokens.

    token_ids: one sequence of ints a text; length 0 is allowed.
    token_type_ids: the same lengths as token_ids; None means 0 everywhere.
    has_token_types: whether the family has token types at all (False leaves the field None).
    position_offset: position id of a sequence's first token (RoBERTa: padding_idx + 1).  Where it
        is not 0, the token position_offset - 1 (the pad token, which a text can spell out) keeps
        that number as its position and is not counted, as Hugging Face has it.
    Raises InputError naming the sequence where lengths differ or an id is no int32.
    """
    seqlens = _lengths(token_ids, name="token_ids")
    types = None
    if has_token_types and token_type_ids is not None:
        _check_same_lengths(_lengths(token_type_ids, name="token_type_ids"), seqlens)
        types = _concatenate(token_type_ids, name="token_type_ids")
    return pack_columns(
        _concatenate(token_ids, name="token_ids"),
        seqlens,
        token_type_ids=types,
        has_token_types=has_token_types,
        position_offset=position_offset,
        device=device,
    )


def pack_columns(
    ids: np.ndarray,
    seqlens: np.ndarray,
    *,
    token_type_ids: np.ndarray | None = None,
    has_token_types: bool = False,
    position_offset: int = 0,
    device: torch.device | str = "cpu",
) -> PackedBatch:
    """`pack` for ids that lie behind one another already; on a CPU the batch shares their memory.

    ids: int32 [total_tokens].  seqlens: int32 [batch_size].  token_type_ids: int32 [total_tokens].
    """
    cu_seqlens = prefix_sums(seqlens)
    types = None
    if has_token_types:
        types = np.zeros(len(ids), dtype=np.int32) if token_type_ids is None else token_type_ids
    positions = positions_of(ids, seqlens, cu_seqlens, position_offset=position_offset)
    batch = PackedBatch(
        input_ids=torch.from_numpy(ids),
        position_ids=torch.from_numpy(positions),
        token_type_ids=None if types is None else torch.from_numpy(types),
        cu_seqlens=torch.from_numpy(cu_seqlens),
        seqlens=torch.from_numpy(seqlens),
        max_seqlen=int(seqlens.max(initial=0)),
    )
    return batch if torch.device(device).type == "cpu" else batch.to(device)


def prefix_sums(seqlens: np.ndarray) -> np.ndarray:
    """int32 [batch_size + 1]: where each sequence begins, and where the last one ends."""
    cu_seqlens = np.zeros(len(seqlens) + 1, dtype=np.int32)
    seqlens.cumsum(out=cu_seqlens[1:])
    return cu_seqlens


def positions_of(
    ids: np.ndarray, seqlens: np.ndarray, cu_seqlens: np.ndarray, *, position_offset: int
) -> np.ndarray:
    """int32 [total_tokens]: the position of each token, counted as the family counts."""
    positions = np.arange(position_offset, position_offset + cu_seqlens[-1], dtype=np.int32)
    if len(seqlens) > 1:
        positions -= np.repeat(cu_seqlens[:-1], seqlens)
    if position_offset and (is_pad := ids == position_offset - 1).any():
        _skip_pads(positions, is_pad, cu_seqlens, pad_token_id=position_offset - 1)
    return positions


def split(x: torch.Tensor, batch: PackedBatch) -> list[torch.Tensor]:
    """Views of packed rows, one [seqlen, ...] tensor per sequence."""
    return list(torch.split(x, batch.seqlens.tolist()))


def unpack(x: torch.Tensor, batch: PackedBatch, *, fill: float = 0.0) -> torch.Tensor:
    """Packed rows [total_tokens, ...] as a right-padded [batch_size, max_seqlen, ...] tensor.

    For callers that need padding (Hugging Face outputs, tests); bytetx itself never does.
    """
    padded = x.new_full((batch.batch_size, batch.max_seqlen, *x.shape[1:]), fill)
    lengths = batch.seqlens.to(x.device).unsqueeze(1)
    padded[torch.arange(batch.max_seqlen, device=x.device) < lengths] = x
    return padded


def _skip_pads(
    positions: np.ndarray, is_pad: np.ndarray, cu_seqlens: np.ndarray, *, pad_token_id: int
) -> None:
    """Lowers each position by the pad tokens before it in its sequence; a pad's is its own id."""
    num_before = np.zeros(len(is_pad) + 1, dtype=np.int32)
    np.cumsum(is_pad, out=num_before[1:])
    positions -= num_before[:-1] - np.repeat(num_before[cu_seqlens[:-1]], np.diff(cu_seqlens))
    positions[is_pad] = pad_token_id


def _lengths(sequences: Sequence[TokenIds], *, name: str) -> np.ndarray:
    try:
        lengths = list(map(len, sequences))
    except TypeError as error:
        raise InputError(
            f"{name} must hold one sequence of token ids a text ([[101, 102], ...]): {error}"
        ) from error
    if sum(lengths) > _MAX_TOKENS:
        raise InputError(f"{name} holds {sum(lengths)} tokens, a batch at most {_MAX_TOKENS}")
    return np.asarray(lengths, dtype=np.int32)


def _concatenate(sequences: Sequence[TokenIds], *, name: str) -> np.ndarray:
    """All ids behind one another, int32.  An array takes integers only: numpy would round 1.5
    and read "12" as a number, in silence."""
    ids = array("i")
    for index, sequence in enumerate(sequences):
        try:
            if isinstance(sequence, list):
                ids.fromlist(sequence)
            elif isinstance(sequence, np.ndarray | torch.Tensor):
                ids.fromlist(sequence.tolist())
            else:
                ids.fromlist(list(sequence))
        except (TypeError, OverflowError) as error:
            raise InputError(
                f"{name}[{index}] must hold integers that fit int32: {error}"
            ) from None
    return np.asarray(ids)


def _check_same_lengths(lengths: np.ndarray, expected: np.ndarray) -> None:
    if len(lengths) != len(expected):
        raise InputError(
            f"token_type_ids must have one sequence for each of token_ids ({len(expected)}), "
            f"got {len(lengths)}"
        )
    if (different := np.flatnonzero(lengths != expected)).size:
        index = int(different[0])
        raise InputError(
            f"token_type_ids[{index}] must be as long as token_ids[{index}] "
            f"({expected[index]}), got {lengths[index]}"
        )
