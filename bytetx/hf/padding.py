"""Padded tensors to packed rows and back, without a loop over rows; and ids outside their tables.

Such an id is an error at once on a CPU, at a later call on a GPU.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from bytetx.errors import InputError
from bytetx.nn.transformer import Transformer
from bytetx.ops.padding import count_tokens
from bytetx.packed import PackedBatch

_INT32 = torch.iinfo(torch.int32)


@dataclass(frozen=True, slots=True)
class MaskFacts:
    """The host's knowledge of a padded batch's mask.

    seqlens: int32 [num_rows] on the host, each row's tokens.  starts_with_padding, has_holes: see
    Layout.  device_seqlens: seqlens on the mask's device, None where there are no pads.
    """

    num_rows: int
    num_columns: int
    seqlens: torch.Tensor
    total_tokens: int
    starts_with_padding: bool = False
    has_holes: bool = False
    device_seqlens: torch.Tensor | None = None

    @property
    def has_pads(self) -> bool:
        return self.total_tokens < self.num_rows * self.num_columns

    @property
    def max_seqlen(self) -> int:
        return int(self.seqlens.max()) if self.seqlens.numel() else 0


@dataclass(frozen=True, slots=True)
class Layout:
    """The position of each packed token in the caller's tensor of [num_rows, num_columns].

    token_indices: int64 [total_tokens], flat positions; None where every position is a token.
    columns: int64 [total_tokens], index of each token in its row (in its sequence, if packed).
    cu_seqlens: int32 [batch_size + 1] on the device; seqlens: int32 [batch_size] on the host.
    starts_with_padding: whether a row that has tokens does not start with one.
    has_holes: whether a row's tokens are not contiguous.
    is_packed: the caller's tensor is one row of packed sequences, [1, total_tokens].
    """

    num_rows: int
    num_columns: int
    token_indices: torch.Tensor | None
    columns: torch.Tensor
    cu_seqlens: torch.Tensor
    seqlens: torch.Tensor
    starts_with_padding: bool = False
    has_holes: bool = False
    is_packed: bool = False

    @property
    def total_tokens(self) -> int:
        return self.columns.shape[0]

    @property
    def has_pads(self) -> bool:
        return self.token_indices is not None

    @property
    def max_seqlen(self) -> int:
        return int(self.seqlens.max()) if self.seqlens.numel() else 0

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """[num_rows, num_columns, ...] (rows may be broadcast from 1) -> [total_tokens, ...]."""
        flat = x.expand(self.num_rows, *x.shape[1:]).flatten(0, 1)
        return flat if self.token_indices is None else flat.index_select(0, self.token_indices)

    def scatter(self, x: torch.Tensor) -> torch.Tensor:
        """[total_tokens, hidden_size] -> [num_rows, num_columns, hidden_size], zeros at pads.

        The result is a tensor of the caller's own mode: outside of inference mode it may take
        part in autograd (a trained head on a frozen encoder), which x may not.
        """
        shape = (self.num_rows, self.num_columns, x.shape[1])
        if self.token_indices is None:
            return as_callers_tensor(x).view(shape)
        padded = torch.zeros((shape[0] * shape[1], shape[2]), dtype=x.dtype, device=x.device)
        return padded.index_copy_(0, self.token_indices, x).view(shape)

    def first_rows(self, x: torch.Tensor) -> torch.Tensor:
        """The first token's row of every sequence: [batch_size, hidden_size], zeros for none."""
        if x.shape[0] == 0:
            return torch.zeros((self.seqlens.shape[0], x.shape[1]), dtype=x.dtype, device=x.device)
        starts = self.cu_seqlens[:-1].long().clamp(max=x.shape[0] - 1)
        rows = x.index_select(0, starts)
        if bool((self.seqlens == 0).any()):
            rows = rows * (self.cu_seqlens.diff() > 0).unsqueeze(1)
        return as_callers_tensor(rows)


def as_callers_tensor(x: torch.Tensor) -> torch.Tensor:
    """x itself, or a copy that autograd may keep where the caller is not in inference mode."""
    return x.clone() if x.is_inference() and not torch.is_inference_mode_enabled() else x


def as_int32(name: str, ids: torch.Tensor) -> torch.Tensor:
    """ids as int32; what is too large stays too large for every table, instead of wrapping round.

    Raises InputError where ids are no integers.
    """
    if ids.dtype == torch.int32:
        return ids
    if ids.is_floating_point() or ids.is_complex():
        raise InputError(f"{name} must be integers, got {ids.dtype}; pass {name}.long()")
    if ids.dtype == torch.int64:
        ids = ids.clamp(_INT32.min, _INT32.max)
    return ids.to(torch.int32)


def read_mask(mask: torch.Tensor | None, num_rows: int, num_columns: int) -> MaskFacts:
    """The facts of a mask [num_rows, num_columns], non-zero = token, or None.

    Waits once for a GPU that holds the mask.
    """
    if mask is None:
        seqlens = torch.full((num_rows,), num_columns, dtype=torch.int32)
        return MaskFacts(num_rows, num_columns, seqlens, num_rows * num_columns)
    counts = count_tokens(mask if mask.stride(1) == 1 else mask.contiguous())
    seqlens, num_runs, starts = counts.cpu()
    total_tokens = int(seqlens.sum())
    if total_tokens == num_rows * num_columns:
        return MaskFacts(num_rows, num_columns, seqlens, total_tokens)
    return MaskFacts(
        num_rows,
        num_columns,
        seqlens,
        total_tokens,
        starts_with_padding=bool(((seqlens > 0) & (starts == 0)).any()),
        has_holes=bool((num_runs > 1).any()),
        device_seqlens=counts[0],
    )


def padded_layout(
    mask: torch.Tensor | None, num_rows: int, num_columns: int, device: torch.device
) -> Layout:
    """The layout of a padded batch; mask [num_rows, num_columns], non-zero = token, or None.

    Waits for a GPU once, for the lengths.
    """
    if mask is not None:
        mask = mask.to(device)
    facts = read_mask(mask, num_rows, num_columns)
    if mask is None or not facts.has_pads:
        return _full_layout(num_rows, num_columns, device)
    is_token = mask.bool().flatten()
    token_indices = torch.nonzero_static(is_token, size=facts.total_tokens).squeeze(1)
    assert facts.device_seqlens is not None  # the mask has pads
    return Layout(
        num_rows=num_rows,
        num_columns=num_columns,
        token_indices=token_indices,
        columns=token_indices % num_columns,
        cu_seqlens=F.pad(facts.device_seqlens.cumsum(0), (1, 0)).to(torch.int32),
        seqlens=facts.seqlens,
        starts_with_padding=facts.starts_with_padding,
        has_holes=facts.has_holes,
    )


def packed_layout(cu_seqlens: torch.Tensor, total_tokens: int, device: torch.device) -> Layout:
    """The layout of a batch that is packed already; cu_seqlens: int [batch_size + 1].

    Waits for a GPU once, for the lengths.  Raises InputError where cu_seqlens is no prefix sum of
    lengths that ends at total_tokens.
    """
    if cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point() or cu_seqlens.numel() < 2:
        raise InputError(
            f"cu_seqlens must be integers [batch_size + 1], got {cu_seqlens.dtype} "
            f"{list(cu_seqlens.shape)}"
        )
    host = cu_seqlens.cpu().to(torch.int64)
    seqlens = host.diff()
    if int(host[0]) != 0 or int(host[-1]) != total_tokens or bool((seqlens < 0).any()):
        raise InputError(
            f"cu_seqlens must rise from 0 to the number of tokens, {total_tokens}; "
            f"got {host[:8].tolist()}{' ...' if host.numel() > 8 else ''} ending at {int(host[-1])}"
        )
    starts = torch.repeat_interleave(host[:-1], seqlens)
    return Layout(
        num_rows=1,
        num_columns=total_tokens,
        token_indices=None,
        columns=(torch.arange(total_tokens) - starts).to(device),
        cu_seqlens=cu_seqlens.to(device=device, dtype=torch.int32),
        seqlens=seqlens.to(torch.int32),
        is_packed=True,
    )


def _full_layout(num_rows: int, num_columns: int, device: torch.device) -> Layout:
    ends = torch.arange(num_rows + 1, dtype=torch.int32, device=device) * num_columns
    return Layout(
        num_rows=num_rows,
        num_columns=num_columns,
        token_indices=None,
        columns=torch.arange(num_columns, device=device).repeat(num_rows),
        cu_seqlens=ends,
        seqlens=torch.full((num_rows,), num_columns, dtype=torch.int32),
    )


def position_ids_of(
    layout: Layout,
    *,
    input_ids: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    position_offset: int,
) -> torch.Tensor:
    """int32 [total_tokens] by the family's Hugging Face rule, on the caller's tensor.

    The caller's own position_ids [1 or num_rows, num_columns] win.  BERT, DistilBERT, ELECTRA
    (offset 0): the column.  RoBERTa's kin and MPNet: tokens that are not the pad token
    (position_offset - 1) are counted; where there are only embeddings, or the input is packed, the
    index in the sequence.
    """
    if position_ids is not None:
        return as_int32("position_ids", layout.gather(position_ids))
    if position_offset == 0 or input_ids is None or layout.is_packed:
        return (layout.columns + position_offset).to(torch.int32)
    pad_token_id = position_offset - 1
    is_counted = input_ids != pad_token_id
    counted = is_counted.cumsum(1) * is_counted + pad_token_id
    return layout.gather(counted).to(torch.int32)


NAMES = ("input_ids", "position_ids", "token_type_ids")  # the order of an op's bad_ids


@dataclass(frozen=True, slots=True)
class Words:
    """on_device: int32 [3] that kernels write.  on_host: pinned, what it was after a call."""

    on_device: torch.Tensor
    on_host: torch.Tensor

    def send(self) -> None:
        """Copies them to the host, after what was launched before."""
        self.on_host.copy_(self.on_device, non_blocking=True)


class BadIds:
    """Bad ids that GPUs found in one model's calls; each thread has its own words on each GPU.

    A call does not wait for the GPU: the words are copied to the host after it, and the thread's
    next call reads them.  Their addresses never change, because a CUDA graph may write them.
    """

    def __init__(self) -> None:
        self._words: dict[tuple[int, int], Words] = {}

    def run_forward(
        self,
        transformer: Transformer,
        batch: PackedBatch,
        *,
        on_layer: Callable[[torch.Tensor], None] | None = None,
        on_kv: Callable[[torch.Tensor, torch.Tensor], None] | None = None,
    ) -> torch.Tensor:
        """Runs transformer.forward.

        Bad ids raise InputError: on a CPU before it, on a GPU at a later call.
        """
        words = None
        if batch.device.type == "cuda":
            words = self.words_on(batch.device)
        else:
            _check_on_host(batch, transformer)
        if words is not None:
            batch = replace(batch, bad_ids=words.on_device)
        x = transformer.forward(batch, on_layer=on_layer, on_kv=on_kv)
        if words is not None:
            words.send()
        return x

    def words_on(self, device: torch.device) -> Words | None:
        """The calling thread's on this GPU; None where none can be had."""
        key = _key_of(device)
        if key not in self._words:
            if torch.cuda.is_current_stream_capturing():  # pinned memory cannot be had now
                return None
            with torch.inference_mode(False):
                self._words[key] = Words(
                    torch.zeros(3, dtype=torch.int32, device=device),
                    torch.zeros(3, dtype=torch.int32, pin_memory=True),
                )
            torch.cuda.current_stream(device).synchronize()  # once, for the thread's other streams
        return self._words[key]

    def raise_found(self, transformer: Transformer) -> None:
        """Raises InputError, once, where an earlier call of this thread had a bad id."""
        device = transformer.embeddings.word.device
        words = self._words.get(_key_of(device)) if device.type == "cuda" else None
        if words is None:
            return
        found = words.on_host.tolist()
        if not any(found):
            return
        if not torch.cuda.is_current_stream_capturing():
            words.on_device.zero_()
            words.send()
            torch.cuda.current_stream(device).synchronize()  # older copies may not have ended
        sizes = _table_sizes(transformer)
        named = [
            f"{name} with {bad}, where ids are 0 to {size - 1}"
            for name, bad, size in zip(NAMES, found, sizes, strict=True)
            if bad and size is not None
        ]
        raise InputError(
            f"an earlier call of this model on this thread got {' and '.join(named)}; its outputs "
            "are NaN in those rows and what depends on them. This call did not run: repeat it"
        )


def require_ids(name: str, ids: torch.Tensor, size: int) -> None:
    """Raises InputError where one of the ids, on the host, is outside a table of `size` rows."""
    if not ids.numel():
        return
    low, high = map(int, ids.aminmax())
    if low < 0 or high >= size:
        rows = f"the table has {size} rows (ids 0 to {size - 1})"
        raise InputError(f"{name} holds {low if low < 0 else high}, but {rows}")


def _check_on_host(batch: PackedBatch, transformer: Transformer) -> None:
    """Raises InputError for the first id of a batch on the CPU that is outside its table."""
    given = (
        None if batch.inputs_embeds is not None else batch.input_ids,
        batch.position_ids,
        batch.token_type_ids,
    )
    for name, ids, size in zip(NAMES, given, _table_sizes(transformer), strict=True):
        if size is not None and ids is not None:
            require_ids(name, ids, size)


def _table_sizes(transformer: Transformer) -> tuple[int | None, int | None, int | None]:
    """Rows of the tables that ids are looked up in."""
    table = transformer.embeddings
    tables = (table.word, table.position, table.token_type)
    word, position, token_type = (None if t is None else t.shape[0] for t in tables)
    return word, position, token_type


def _key_of(device: torch.device) -> tuple[int, int]:
    index = torch.cuda.current_device() if device.index is None else device.index
    return threading.get_ident(), index
