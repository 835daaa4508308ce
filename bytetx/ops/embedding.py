"""Embedding gather, sum and norm from packed ids: checks, choice of kernel."""

from torch import Tensor

from bytetx.ops import reference


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
) -> Tensor:
    """word[input_ids] + position[position_ids] + token_type[token_type_ids], then layer norm.

    input_ids, position_ids, token_type_ids: int32 [total_tokens]; an id of a table that is None is
    not read.  word [vocab_size, embedding_size], position, token_type: [rows, embedding_size].
    norm_weight, norm_bias: [embedding_size], or both None for no norm.
    inputs_embeds: [total_tokens, embedding_size] in place of word[input_ids].
    Returns [total_tokens, embedding_size] in word's dtype; sums and statistics in f32.
    Raises ValueError naming the first id outside its table (on CUDA that is torch's device-side
    assertion: check ids on the host before they are sent).
    """
    if not input_ids.is_cuda:
        if inputs_embeds is None:
            check_ids("input_ids", input_ids, word.shape[0])
        if position is not None:
            check_ids("position_ids", position_ids, position.shape[0])
        if token_type is not None:
            check_ids("token_type_ids", token_type_ids, token_type.shape[0])
    return reference.embed(
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


def check_ids(name: str, ids: Tensor, table_size: int) -> None:
    """Raise ValueError naming the first of `ids` that is not in [0, table_size)."""
    is_bad = (ids < 0) | (ids >= table_size)
    if bool(is_bad.any()):
        index = int(is_bad.nonzero()[0])
        raise ValueError(
            f"{name}[{index}] is {int(ids[index])}, but the table has {table_size} rows "
            f"(ids 0 to {table_size - 1})"
        )
