"""Embedding gather, sum and norm from packed ids: checks, choice of kernel."""

from typing import Any

import torch
from torch import Tensor

from bytetx.ops import native, reference, triton_backend
from bytetx.ops.check import is_operand, require_contiguous, require_tensor
from bytetx.ops.native import empty_rows, has_row_kernel
from bytetx.ops.registry import Operation

Ids = tuple[Tensor, Tensor | None, Tensor | None]  # input, position and token type ids
Tables = tuple[Tensor, Tensor | None, Tensor | None]

# Shape classes: dtype and width of the tables.
# run(ids, tables, *, norm_weight, norm_bias, eps, inputs_embeds, bad_ids) as of embed.
EMBED = Operation("embed")


def embed(
    input_ids: Tensor,
    position_ids: Tensor | None,
    token_type_ids: Tensor | None,
    *,
    word: Tensor,
    position: Tensor | None = None,
    token_type: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    eps: float = 1e-12,
    inputs_embeds: Tensor | None = None,
    bad_ids: Tensor | None = None,
) -> Tensor:
    """word[input_ids] + position[position_ids] + token_type[token_type_ids], then layer norm.

    input_ids, position_ids, token_type_ids: int32 [total_tokens]; ids of a table that is None are
    not read.  word [vocab_size, embedding_size], position, token_type: [rows, embedding_size], all
    of one dtype.  norm_weight, norm_bias: [embedding_size]; no norm where norm_weight is None.
    inputs_embeds: [total_tokens, embedding_size] in place of word[input_ids].
    bad_ids: int32 [3] on a GPU, for ids that no host checked: where one is outside its table, such
    an id of input_ids, position_ids or token_type_ids (never 0) is written there, and the token's
    row is NaN.  The caller owns it, sets it to zero and reads it when it waits for the GPU anyway.
    Returns [total_tokens, embedding_size] in word's dtype; sums and statistics in f32.
    Raises ValueError on shape, dtype or device mismatch, and on a CPU naming the first id outside
    its table. Without bad_ids, a GPU's kernel never reads outside a table but takes the nearest row
    and says nothing (the reference there ends in torch's device-side assertion): whoever packs ids
    checks them on the host before they are sent. A compiled graph does not write bad_ids.
    """
    _check_ids(input_ids, position_ids, token_type_ids, position, token_type)
    _check_tables(
        word,
        {"position": position, "token_type": token_type},
        norm_weight,
        norm_bias,
        inputs_embeds,
        input_ids,
    )
    if torch.compiler.is_compiling():
        embedded: Tensor = torch.ops.bytetx.embed(
            input_ids,
            position_ids,
            token_type_ids,
            word=word,
            position=position,
            token_type=token_type,
            norm_weight=norm_weight,
            norm_bias=norm_bias,
            eps=eps,
            inputs_embeds=inputs_embeds,
        )
        return embedded
    if bad_ids is not None:
        require_tensor("bad_ids", bad_ids, shape=(3,), dtypes=(torch.int32,), device=word.device)
        if not word.is_cuda:
            raise ValueError("bad_ids must be None on a CPU, where an id outside its table raises")
    embedded = EMBED.choose(word.device, word.dtype, word.shape[1]).run(
        (input_ids, position_ids, token_type_ids),
        (word, position, token_type),
        norm_weight=norm_weight,
        norm_bias=norm_bias,
        eps=eps,
        inputs_embeds=inputs_embeds,
        bad_ids=bad_ids,
    )
    return embedded


@EMBED.native_kernel(takes=has_row_kernel)
def run_kernel(
    ids: Ids,
    tables: Tables,
    *,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    eps: float,
    inputs_embeds: Tensor | None,
    bad_ids: Tensor | None = None,
    isa: str = "auto",
) -> Tensor:
    """The native kernel on checked (input, position, token type) ids and tables."""
    word, position, token_type = tables
    total_tokens, embedding_size = ids[0].shape[0], word.shape[1]
    if word.is_cuda:
        out = word.new_empty((total_tokens, embedding_size))
    else:
        out = empty_rows(total_tokens, (embedding_size,), word.dtype)
    native.require_kernel("embed", word.device)(
        input_ids=ids[0],
        position_ids=ids[1],
        token_type_ids=ids[2],
        word=word,
        position=position,
        token_type=token_type,
        inputs_embeds=inputs_embeds,
        norm_weight=norm_weight,
        norm_bias=norm_bias,
        out=out,
        bad_ids=bad_ids,
        total_tokens=total_tokens,
        hidden_size=embedding_size,
        num_words=word.shape[0],
        num_positions=0 if position is None else position.shape[0],
        num_token_types=0 if token_type is None else token_type.shape[0],
        eps=eps,
        dtype=native.DTYPE_CODES[word.dtype],
        launch=native.launch_args(word.device, isa),
    )
    return out


@EMBED.triton_kernel(takes=triton_backend.holds_rows)
def _run_triton(ids: Ids, tables: Tables, **options: Any) -> Tensor:
    rows: Tensor = triton_backend.kernels(ids[0].device).embed(ids, tables, **options)
    return rows


@EMBED.in_torch()
def _run_torch(ids: Ids, tables: Tables, **options: Any) -> Tensor:
    word, position, token_type = tables
    return reference.embed(*ids, word=word, position=position, token_type=token_type, **options)


def _check_ids(
    input_ids: Tensor,
    position_ids: Tensor | None,
    token_type_ids: Tensor | None,
    position: Tensor | None,
    token_type: Tensor | None,
) -> None:
    int32 = (torch.int32,)
    require_tensor("input_ids", input_ids, shape=(None,), dtypes=int32)
    require_contiguous("input_ids", input_ids)
    optional = (
        ("position_ids", position_ids, position),
        ("token_type_ids", token_type_ids, token_type),
    )
    index = input_ids.get_device()
    for name, ids, table in optional:
        if table is not None and not is_operand(ids, input_ids.shape, torch.int32, index):
            device = input_ids.device
            require_tensor(name, ids, shape=input_ids.shape, dtypes=int32, device=device)
            assert ids is not None
            require_contiguous(name, ids)


def _check_tables(
    word: Tensor,
    others: dict[str, Tensor | None],
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    inputs_embeds: Tensor | None,
    input_ids: Tensor,
) -> None:
    require_tensor("word", word, shape=(None, None), device=input_ids.device)
    tables = {"word": word, **others}
    width = word.shape[1]
    index, dtype = word.get_device(), word.dtype
    vectors = (norm_weight, norm_bias)
    if (
        inputs_embeds is None
        and all(t is None or _is_table(t, width, dtype, index) for t in tables.values())
        and all(t is None or is_operand(t, (width,), dtype, index) for t in vectors)
    ):
        return
    shapes = {name: (t, (None, width)) for name, t in tables.items()} | {
        "norm_weight": (norm_weight, (width,)),
        "norm_bias": (norm_bias, (width,)),
        "inputs_embeds": (inputs_embeds, (input_ids.shape[0], width)),
    }
    for name, (t, shape) in shapes.items():
        if t is not None:
            require_tensor(name, t, shape=shape, dtypes=(dtype,), device=word.device)
            require_contiguous(name, t)


def _is_table(t: object, width: int, dtype: torch.dtype, device_index: int) -> bool:
    rows = t.shape[0] if isinstance(t, Tensor) and t.dim() == 2 else 0
    return is_operand(t, (rows, width), dtype, device_index)


def _fake_embed(input_ids: Tensor, *_: object, word: Tensor, **__: object) -> Tensor:
    return word.new_empty((input_ids.shape[0], word.shape[1]))


native.register(embed, without=["bad_ids"], fake=_fake_embed)
