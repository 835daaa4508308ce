"""GGUF's tensors under the names, and in the layout, that the model's family has."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from bytetx.checkpoint.gguf.architectures import Architecture, architecture_of
from bytetx.checkpoint.gguf.blocks import BLOCK_FORMATS
from bytetx.checkpoint.gguf.file import GgufFile, GgufTensor
from bytetx.checkpoint.layer_spec import numbered
from bytetx.checkpoint.model_spec import ModelSpec
from bytetx.checkpoint.saved_tensor import (
    FLOAT_DTYPES,
    DecodedTensor,
    SavedCodes,
    SavedTensor,
    StoredTensor,
)
from bytetx.errors import CheckpointError
from bytetx.ops.codes import Codes

# GGUF's names of a layer's tensors, and bytetx's layer keys.
_LAYER = {
    "attn_norm": "attn_norm",
    "attn_q": "q",
    "attn_k": "k",
    "attn_v": "v",
    "attn_qkv": "qkv",
    "attn_q_norm": "q_norm",
    "attn_k_norm": "k_norm",
    "attn_output": "attn_out",
    "attn_output_norm": "attn_norm",  # BERT's, which is behind attention
    "post_attention_norm": "attn_out_norm",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "ffn_gate",
    "ffn_down": "ffn_out",
    "layer_output_norm": "ffn_norm",
    "post_ffw_norm": "ffn_out_norm",
}
_NORMS = ("attn_norm", "ffn_norm", "attn_out_norm", "ffn_out_norm", "q_norm", "k_norm")
_LAYER_NAME = re.compile(r"blk\.(\d{1,4})\.(\w+)\.(weight|bias)")
# Of no layer, and read with the config: factors of rotary frequencies.
_IN_CONFIG = ("rope_freqs.weight",)
_Values = Callable[[range], torch.Tensor]


def named_tensors(file: GgufFile, spec: ModelSpec) -> dict[str, StoredTensor]:
    """A file's tensors by the canonical names of the model's family.

    Raises CheckpointError for a tensor that the family, as its config is, has no place for: leaving
    it out would compute something else.
    """
    architecture = architecture_of(file)
    named: dict[str, StoredTensor] = {}
    halves: dict[str, dict[str, GgufTensor]] = {}
    for tensor in file.tensors.values():
        if tensor.name in _IN_CONFIG:
            continue
        found = _LAYER_NAME.fullmatch(tensor.name)
        if found is None:
            named[_outer_name(file, tensor, spec)] = _outer(tensor, architecture)
            continue
        layer, own, ending = int(found[1]), found[2], found[3]
        role = architecture.up_role if own == "ffn_up" else _LAYER.get(own)
        if (
            role in ("ffn_gate", "ffn_in")
            and role not in spec.layer
            and "ffn_gate_up" in spec.layer
        ):
            stem = numbered(spec.layer["ffn_gate_up"], layer)
            halves.setdefault(f"{stem}.{ending}", {})[role] = tensor
            continue
        if role is None or role not in spec.layer or layer >= spec.num_layers:
            raise _unknown(file, tensor)
        if ending == "bias" and role not in _NORMS and role not in spec.layer_spec.biases:
            raise _unknown(file, tensor)
        name = f"{spec.layer[role].replace('{i}', str(layer))}.{ending}"
        named[name] = _of_layer(tensor, role, ending, architecture=architecture, spec=spec)
    for name, both in halves.items():
        if both.keys() != {"ffn_gate", "ffn_in"}:
            raise _unknown(file, next(iter(both.values())))
        named[name] = _joined(both["ffn_gate"], both["ffn_in"])
    return named


def _outer_name(file: GgufFile, tensor: GgufTensor, spec: ModelSpec) -> str:
    """The canonical name of a tensor of no layer."""
    stem, _, ending = tensor.name.rpartition(".")
    tables = {"token_embd": "word", "position_embd": "position", "token_types": "token_type"}
    final: Mapping[str, Any] = spec.family_table.get("final", {})
    head = spec.heads.get("sequence_classification")
    stems: dict[str, str | None] = {
        "token_embd_norm": spec.embeddings.get("norm"),
        "output_norm": final.get("norm"),
        "cls": None if head is None else head.dense,
        "cls.output": None if head is None else head.out,
    }
    lm, name = spec.heads.get("lm"), None
    if stem == "output" and lm is not None:
        name = lm.decoder if ending == "weight" else lm.bias
    elif stem in tables and ending == "weight":
        name = spec.embeddings.get(tables[stem])
    elif stems.get(stem) is not None:
        name = f"{stems[stem]}.{ending}"
    if name is None:
        raise _unknown(file, tensor)
    return name


def _outer(tensor: GgufTensor, architecture: Architecture) -> StoredTensor:
    is_norm = tensor.name.endswith("_norm.weight")
    return _decoded(tensor, offset=architecture.norm_offset if is_norm else 0.0)


def _of_layer(
    tensor: GgufTensor, role: str, ending: str, *, architecture: Architecture, spec: ModelSpec
) -> StoredTensor:
    if role in _NORMS:
        return _decoded(tensor, offset=architecture.norm_offset if ending == "weight" else 0.0)
    if architecture.rearranges_heads and role in ("q", "k"):
        return _decoded(tensor, head_dim=spec.head_dim)
    if spec.layer_spec.weight_layout == "conv1d" and ending == "weight":
        return _transposed(tensor)
    return _decoded(tensor)


def _decoded(tensor: GgufTensor, *, head_dim: int = 0, offset: float = 0.0) -> StoredTensor:
    """head_dim: of rows that GGUF's converter put into pairs, head by head; 0: of none.

    offset: that was added to the numbers.
    """
    saved = _saved(tensor)
    if tensor.format.is_plain and not head_dim and not offset:
        return saved
    if head_dim and tensor.shape[0] % head_dim:
        head_dim = 0  # the loader says that the shape is wrong

    def saved_rows(rows: range) -> torch.Tensor:
        return _unpaired(saved, rows, head_dim) if head_dim else saved.read_raw(rows)

    def values(rows: range) -> torch.Tensor:
        if len(tensor.shape) == 1 and not tensor.format.is_plain:
            found = _numbers(tensor, saved.read_raw())[rows.start : rows.stop]
        else:
            found = _numbers(tensor, saved_rows(rows))
        return found.float().sub_(offset) if offset else found

    raw = {"paired" if head_dim else "blocks": saved}
    stored = _stored(tensor, raw, values, tensor.shape)
    is_matrix = len(tensor.shape) == 2 and not tensor.format.is_plain and not offset
    return _with_rows(stored, saved_rows, tensor) if is_matrix else stored


def _unpaired(saved: SavedTensor, rows: range, head_dim: int) -> torch.Tensor:
    """Saved rows in the order of the weight: features i and i + head_dim / 2 of a head lie next to
    each other in the file."""
    first, last = rows.start // head_dim, -(-rows.stop // head_dim)
    heads = saved.read_raw(range(first * head_dim, last * head_dim))
    pairs = heads.view(last - first, head_dim // 2, 2, -1)
    ordered = pairs.transpose(1, 2).reshape(heads.shape)
    return ordered[rows.start - first * head_dim : rows.stop - first * head_dim]


def _transposed(tensor: GgufTensor) -> StoredTensor:
    """[n, k] as [k, n]: of families whose files hold weights so."""

    def values(rows: range) -> torch.Tensor:
        return _numbers(tensor, _saved(tensor).read_raw()).t()[rows.start : rows.stop]

    stored = _stored(tensor, {"columns": _saved(tensor)}, values, tensor.shape[::-1])
    return replace(stored, is_whole=True)


def _joined(first: GgufTensor, second: GgufTensor) -> StoredTensor:
    """The rows of two tensors, as one."""
    split = first.shape[0]

    def parts(rows: range) -> list[tuple[GgufTensor, torch.Tensor]]:
        found = []
        for tensor, place in ((first, 0), (second, split)):
            own = range(max(rows.start - place, 0), min(rows.stop - place, tensor.shape[0]))
            if own:
                found.append((tensor, _saved(tensor).read_raw(own)))
        return found

    def values(rows: range) -> torch.Tensor:
        return torch.cat([_numbers(tensor, raw).float() for tensor, raw in parts(rows)])

    def saved_rows(rows: range) -> torch.Tensor:
        return torch.cat([raw for _, raw in parts(rows)])

    raw = {"first": _saved(first), "second": _saved(second)}
    stored = _stored(first, raw, values, (split + second.shape[0], *first.shape[1:]))
    is_alike = first.format == second.format and not first.format.is_plain
    return _with_rows(stored, saved_rows, first) if is_alike else stored


def _stored(
    tensor: GgufTensor, raw: Mapping[str, SavedTensor], values: _Values, shape: tuple[int, ...]
) -> DecodedTensor:
    # A plain dtype where it is one of weights; the loader refuses integers.
    dtype = FLOAT_DTYPES.get(tensor.format.name, torch.bfloat16)
    return DecodedTensor(tensor.path, tensor.name, shape, tensor.format.name, raw, dtype, values)


def _saved(tensor: GgufTensor) -> SavedTensor:
    """The bytes of a tensor: of a plain format its numbers, else U8 [..., bytes of a row]."""
    kind, shape = tensor.format, tensor.shape
    if not kind.is_plain:
        shape = (*shape[:-1], shape[-1] // kind.numbers * kind.num_bytes)
    dtype = kind.name if kind.is_plain else "U8"
    return SavedTensor(tensor.path, tensor.name, dtype, shape, tensor.offset, tensor.num_bytes)


def _numbers(tensor: GgufTensor, raw: torch.Tensor) -> torch.Tensor:
    """The numbers of rows as they are saved: floats, or blocks uint8 [..., bytes of a row]."""
    if tensor.format.is_plain:
        return raw
    blocks = raw.reshape(-1, tensor.format.num_bytes)
    known = BLOCK_FORMATS.get(tensor.format.name)
    values = _by_gguf(tensor, blocks) if known is None else known.values(blocks)
    return values.view(*raw.shape[:-1], -1)


def _with_rows(stored: DecodedTensor, saved_rows: _Values, tensor: GgufTensor) -> DecodedTensor:
    """A matrix whose rows are rows of blocks in the tensor's format."""
    stored, known = replace(stored, saved_rows=saved_rows), BLOCK_FORMATS.get(tensor.format.name)
    if known is None:
        return stored

    def read(rows: range, device: torch.device) -> Codes:
        blocks = saved_rows(rows).to(device).reshape(-1, tensor.format.num_bytes)
        found, n = known.codes(blocks), len(rows)
        least = None if found.least is None else found.least.reshape(n, -1)
        codes, scale = found.codes.reshape(n, -1), found.scale.reshape(n, -1)
        return replace(found, codes=codes, scale=scale, least=least)

    return replace(
        stored, codes=SavedCodes(known.bits, known.group, read, has_least=known.has_least)
    )


def _by_gguf(tensor: GgufTensor, blocks: torch.Tensor) -> torch.Tensor:
    """By the gguf package, for formats with codebooks. CheckpointError where it is missing."""
    name = tensor.format.name
    try:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        found = dequantize(blocks.numpy(), GGMLQuantizationType[name])
    except (ImportError, KeyError, NotImplementedError) as error:
        raise CheckpointError(
            f"{tensor.path}: tensor {tensor.name!r:.120} is in {name}, which bytetx reads by the "
            f"gguf package, and that says: {error}; pip install -U 'bytetx[gguf]', or give a file "
            "in a Q format"
        ) from error
    return torch.from_numpy(np.ascontiguousarray(found, dtype=np.float32))


def _unknown(file: GgufFile, tensor: GgufTensor) -> CheckpointError:
    return CheckpointError(
        f"{tensor.path}: tensor {tensor.name!r:.120} is none that bytetx knows of GGUF's "
        f"architecture {file.fields['general.architecture']!r:.60}; give the checkpoint in "
        "safetensors that it was made from"
    )
