"""The messages of rank 0 to its workers as bytes, and the batch of a step as one tensor.

A message is a byte for its kind, fixed fields, and at most one field of bytes after them.
Nothing is unpickled: anything else is a ValueError.
"""

import json
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch

from bytetx.errors import InputError
from bytetx.packed import PackedBatch, Past
from bytetx.parallel.grid import Grid, parse_grid
from bytetx.parallel.row_scheme import RowScheme

DeviceType = Literal["cpu", "cuda"]
Head = Literal["lm", "masked_lm"]


@dataclass(frozen=True, slots=True)
class Join:
    """Join the group at the store.

    device_type: rank i has GPU i.  workspace_bytes, grid: as of tp.join_group.
    """

    device_type: DeviceType
    workspace_bytes: int
    rows: RowScheme | None
    grid: Grid | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """Load this rank's shard of a checkpoint, and reply when it is there.

    families: the folder of the caller's own families.
    """

    folder: Path
    dtype: torch.dtype
    families: Path | None = None


@dataclass(frozen=True, slots=True)
class NewCache:
    """Make a paged cache of this rank's heads.  has_codes: as of allocate_cache."""

    cache_id: int
    num_pages: int
    page_size: int
    has_codes: bool


@dataclass(frozen=True, slots=True)
class DropCache:
    cache_id: int


@dataclass(frozen=True, slots=True)
class Logits:
    """Run a head on rows that rank 0 broadcasts: [num_rows, their features]."""

    head: Head
    num_rows: int


@dataclass(frozen=True, slots=True)
class Decode:
    """Run a decode step of these sizes; see Executor.decode_step."""

    cache_id: int
    num_rows: int
    num_pages: int
    is_greedy: bool
    is_captured: bool


@dataclass(frozen=True, slots=True)
class Forward:
    """Run a forward pass.

    seqlens: int32.  numbers: the batch's other int32s, as of flat_batch, where they are few and on
    rank 0's host; None: a broadcast of them follows, as one device tensor.
    past: (cache_id, max_pages, page_size, max_kv_seqlen).
    has_prompts: the past has the prompts' lengths.
    wants_layers: rank 0 gathers every layer's output.
    allows_capture: see PackedBatch.
    """

    total_tokens: int
    seqlens: bytes
    max_seqlen: int
    has_token_types: bool
    has_bias_positions: bool
    past: tuple[int, int, int, int] | None
    has_prompts: bool
    wants_layers: bool
    allows_capture: bool = True
    numbers: bytes | None = None


Message = Join | Load | NewCache | DropCache | Logits | Decode | Forward


def encode(message: Message) -> bytes:
    """A message as bytes. Raises TypeError for anything else."""
    form = _FORMS.get(type(message))
    if form is None:
        raise TypeError(f"a message must be one of {_NAMES}, got a {type(message).__name__}")
    return form.write(message)


def decode(data: bytes) -> Message:
    """The message that encode was given. Raises ValueError where data is none."""
    form = _FORMS_BY_TAG.get(data[0]) if data else None
    if form is None:
        raise ValueError(f"no message begins with {data[:1]!r}")
    try:
        message: Message = form.read(data)
        return message
    except (struct.error, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"no message: {error}") from error


class _MessageForm(NamedTuple):
    """How a kind of message is written and read."""

    write: Callable[[Any], bytes]
    read: Callable[[bytes], Any]


def _flat_form(tag: int, kind: type, layout: str) -> _MessageForm:
    """The form of a message whose fields are integers and booleans, in their order."""
    packer = struct.Struct(f"<B{layout}")
    names = [field.name for field in fields(kind)]
    fields_of = attrgetter(*names) if len(names) > 1 else lambda m: (getattr(m, names[0]),)

    def write(message: Any) -> bytes:
        return packer.pack(tag, *fields_of(message))

    def read(data: bytes) -> Any:
        return kind(*packer.unpack(data)[1:])

    return _MessageForm(write, read)


# A socket takes some hundred MB/s; a collective of devices starts as late as some 100 KB arrive.
_MAX_NUMBERS_BYTES = 1 << 20
_HEADS: tuple[str, ...] = get_args(Head)
_LOGITS = struct.Struct("<BBQ")
_FORWARD = struct.Struct("<BQI?????IIII??I")


def _write_logits(message: Logits) -> bytes:
    return _LOGITS.pack(_TAGS[Logits], _HEADS.index(message.head), message.num_rows)


def _read_logits(data: bytes) -> Logits:
    _, head, num_rows = _LOGITS.unpack(data)
    return Logits(_HEADS[head], num_rows)


def _write_forward(message: Forward) -> bytes:
    past = message.past
    fixed = _FORWARD.pack(
        _TAGS[Forward],
        message.total_tokens,
        message.max_seqlen,
        message.has_token_types,
        message.has_bias_positions,
        message.has_prompts,
        message.wants_layers,
        message.allows_capture,
        *(past or (0, 0, 0, 0)),
        past is not None,
        message.numbers is not None,
        len(message.seqlens),
    )
    return b"".join([fixed, message.seqlens, message.numbers or b""])


def _read_forward(data: bytes) -> Forward:
    (_, tokens, longest, types, positions, prompts, layers, captures, *rest) = _FORWARD.unpack_from(
        data
    )
    *cache, has_past, has_numbers, n = rest
    end = _FORWARD.size + n
    seqlens, numbers = data[_FORWARD.size : end], data[end:]
    if len(seqlens) != n or n % 4:
        raise ValueError(f"{len(seqlens)} of {n} bytes are no int32 lengths")
    lengths = np.frombuffer(seqlens, dtype="<i4")
    if (lengths < 0).any() or lengths.sum(dtype=np.int64) != tokens:
        raise ValueError(f"{len(lengths)} lengths do not sum to {tokens} tokens")
    past = (cache[0], cache[1], cache[2], cache[3]) if has_past else None
    message = Forward(tokens, seqlens, longest, types, positions, past, prompts, layers, captures)
    if not has_numbers and not numbers:
        return message
    if not has_numbers or len(numbers) != 4 * flat_size(message):
        raise ValueError(f"{len(numbers)} bytes are not the numbers of {tokens} tokens")
    return replace(message, numbers=numbers)


# Join and Load are sent once per model: JSON of a list whose items are checked one by one.
def _write_join(message: Join) -> bytes:
    rows = message.rows
    scheme = None if rows is None else [rows.shard_from_tokens, rows.tiles]
    grid = None if message.grid is None else str(message.grid)
    return _write_json(Join, [message.device_type, message.workspace_bytes, scheme, grid])


def _read_join(data: bytes) -> Join:
    device_type, workspace_bytes, scheme, grid = json.loads(data[1:])
    if device_type not in get_args(DeviceType):
        raise ValueError(f"device type {device_type!r}")
    rows = None
    if scheme is not None:
        first, tiles = scheme
        rows = RowScheme(_integer(first), tuple((_integer(a), _integer(b)) for a, b in tiles))
    axes = None if grid is None else parse_grid(grid)
    return Join(device_type, _integer(workspace_bytes), rows, axes)


def _write_load(message: Load) -> bytes:
    families = None if message.families is None else os.fsencode(message.families).hex()
    folder = os.fsencode(message.folder).hex()
    return _write_json(Load, [_DTYPES[message.dtype], folder, families])


def _read_load(data: bytes) -> Load:
    dtype, folder, families = json.loads(data[1:])
    known = {name: dtype for dtype, name in _DTYPES.items()}
    own = None if families is None else _path(families)
    return Load(_path(folder), known[dtype], own)


def _path(name: str) -> Path:
    return Path(os.fsdecode(bytes.fromhex(name)))


def _write_json(kind: type, items: list[Any]) -> bytes:
    return bytes([_TAGS[kind]]) + json.dumps(items).encode()


def _integer(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a size")
    return value


_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_KINDS = (Join, Load, NewCache, DropCache, Logits, Decode, Forward)
_NAMES = ", ".join(kind.__name__ for kind in _KINDS)
_TAGS = {kind: tag for tag, kind in enumerate(_KINDS)}
_FORMS = {
    Join: _MessageForm(_write_join, _read_join),
    Load: _MessageForm(_write_load, _read_load),
    NewCache: _flat_form(_TAGS[NewCache], NewCache, "QQI?"),
    DropCache: _flat_form(_TAGS[DropCache], DropCache, "Q"),
    Logits: _MessageForm(_write_logits, _read_logits),
    Decode: _flat_form(_TAGS[Decode], Decode, "QII??"),
    Forward: _MessageForm(_write_forward, _read_forward),
}
_FORMS_BY_TAG = {_TAGS[kind]: form for kind, form in _FORMS.items()}


def forward_message(batch: PackedBatch, *, cache_id: int | None, wants_layers: bool) -> Forward:
    if batch.inputs_embeds is not None:
        raise InputError("inputs_embeds cannot be given to a model loaded with tp")
    past, host = batch.past, batch.host
    message = Forward(
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
        batch.allows_capture,
    )
    if host is None or 4 * flat_size(message) > _MAX_NUMBERS_BYTES:
        return message
    return replace(message, numbers=flat_batch(host).numpy().tobytes())


def numbers_of(message: Forward) -> torch.Tensor | None:
    """The result of rank 0's flat_batch, on the host; None where it is not in the message."""
    if message.numbers is None:
        return None
    return torch.from_numpy(np.frombuffer(message.numbers, dtype=np.int32).copy())


def flat_batch(batch: PackedBatch) -> torch.Tensor:
    """The batch's tensors but for the lengths, concatenated, int32."""
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
    columns = iter(flat.split(_sizes(message)))
    seqlens = torch.from_numpy(np.frombuffer(message.seqlens, dtype=np.int32).copy())
    ids, positions, cu_seqlens = next(columns), next(columns), next(columns)
    types = next(columns) if message.has_token_types else None
    bias_positions = next(columns) if message.has_bias_positions else None
    past = None
    if message.past is not None:
        _, max_pages, page_size, max_kv_seqlen = message.past
        slots, kv_seqlens, table = next(columns), next(columns), next(columns)
        prompts = next(columns) if message.has_prompts else None
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
        allows_capture=message.allows_capture,
    )


def _sizes(message: Forward) -> list[int]:
    num_seqs, tokens = len(message.seqlens) // 4, message.total_tokens
    sizes = [tokens, tokens, num_seqs + 1]
    sizes += [tokens] * (message.has_token_types + message.has_bias_positions)
    if message.past is not None:
        sizes += [tokens, num_seqs, num_seqs * message.past[1]]
        sizes += [num_seqs] * message.has_prompts
    return sizes
