"""The tensors of a static embedding: a vector for each token, or one that several tokens share."""

from collections.abc import Mapping

import torch

from bytetx.checkpoint.saved_tensor import FLOAT_DTYPES, DecodedTensor, SavedTensor, StoredTensor
from bytetx.errors import CheckpointError

# Names of the table: sentence-transformers', and model2vec's, whose file may hold two more.
ST_TABLE, TABLE = "embedding.weight", "embeddings"
_MAPPING, _WEIGHTS = "mapping", "weights"
_INTEGERS = ("I8", "I16", "I32", "I64", "U8")


def table_names(header: Mapping[str, SavedTensor]) -> tuple[dict[str, str], tuple[int, int]]:
    """(names of the tensors in the file, by what ModelSpec.embeddings calls them; (tokens, numbers
    of a vector)).

    "word" [rows, size]; "word_places" [tokens], the row of each token; "word_scales" [tokens], what
    each token's row is multiplied by.
    Raises CheckpointError where there is no table, or tensors have other shapes and dtypes.
    """
    word = next((name for name in (ST_TABLE, TABLE) if name in header), None)
    if word is None:
        some = next(iter(header.values()), None)
        raise CheckpointError(
            f"{'model.safetensors' if some is None else some.path} must hold {TABLE} (model2vec) "
            f"or {ST_TABLE} (sentence-transformers), the table of a static embedding; it holds "
            f"{', '.join(list(header)[:12]) or 'nothing'}"
        )
    names, table = {"word": word}, header[word]
    if len(table.shape) != 2 or 0 in table.shape:
        raise _wrong(table, "[rows, size], neither of them 0,", (*FLOAT_DTYPES, "I8"))
    _check(table, table.shape, (*FLOAT_DTYPES, "I8"))
    num_tokens, size = table.shape
    if word == ST_TABLE:
        return names, (num_tokens, size)
    if (mapping := header.get(_MAPPING)) is not None:
        if len(mapping.shape) != 1 or 0 in mapping.shape:
            raise _wrong(mapping, "[tokens], not 0,", _INTEGERS)
        num_tokens = mapping.shape[0]
        _check(mapping, (num_tokens,), _INTEGERS)
        names["word_places"] = _MAPPING
    if (weights := header.get(_WEIGHTS)) is not None:
        _check(weights, (num_tokens,), tuple(FLOAT_DTYPES))
        names["word_scales"] = _WEIGHTS
    return names, (num_tokens, size)


def as_floats(found: Mapping[str, SavedTensor]) -> dict[str, StoredTensor]:
    """The tensors of the file, where a table of int8 is one of whole numbers, as model2vec computes
    with it."""
    tensors: dict[str, StoredTensor] = dict(found)
    table = found.get(TABLE)
    if table is not None and table.dtype == "I8":
        tensors[TABLE] = DecodedTensor(
            table.path,
            TABLE,
            table.shape,
            "I8",
            {TABLE: table},
            torch.float32,
            lambda rows: table.read_raw(rows).float(),
        )
    return tensors


def _check(tensor: SavedTensor, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> None:
    if tensor.dtype not in dtypes or tensor.shape != shape:
        raise _wrong(tensor, str(list(shape)), dtypes)


def _wrong(tensor: SavedTensor, needs: str, dtypes: tuple[str, ...]) -> CheckpointError:
    return CheckpointError(
        f"{tensor.path}: tensor {tensor.name!r:.120} is {tensor.dtype} {list(tensor.shape)}, and "
        f"must be {needs} of {' or '.join(dtypes)}"
    )
