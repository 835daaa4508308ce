"""Staged results into parquet, one row group at a time, so that memory does not grow with rows."""

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bytetx.files.reader import import_parquet

if TYPE_CHECKING:
    import pyarrow as pa

_GROUP_ROWS = 4096


def vectors_to_parquet(vectors: np.ndarray, errors: Path | None, out: Path) -> None:
    """vectors [n, dim] float32 -> columns index, embedding (null for an error) and error.

    errors: the list of errors, {"index", "error"} on each line; None where there are none.
    An embedding is a plain list: fixed-size ones with nulls are not to be had back before
    pyarrow 26, nor by every other reader.
    """
    import pyarrow as pa

    dim = vectors.shape[1]
    schema = pa.schema(
        [
            ("index", pa.int64()),
            ("embedding", pa.list_(pa.float32())),
            ("error", pa.string()),
        ]
    )
    error_of = {}
    if errors is not None:
        with errors.open(encoding="utf-8") as file:
            error_of = {row["index"]: row["error"] for row in map(json.loads, file)}
    with import_parquet(str(out)).ParquetWriter(out, schema) as writer:
        for start in range(0, len(vectors), _GROUP_ROWS):
            group = np.ascontiguousarray(vectors[start : start + _GROUP_ROWS])
            index = range(start, start + len(group))
            texts = [error_of.get(i) for i in index]
            is_whole = np.array([text is None for text in texts])
            # A null offset says that the list which begins there is null.
            offsets = np.concatenate([[0], np.cumsum(dim * is_whole)]).astype(np.int32)
            begins = pa.array(offsets, mask=~np.append(is_whole, True))
            embedding = pa.ListArray.from_arrays(begins, group[is_whole].reshape(-1))
            columns = [pa.array(index, pa.int64()), embedding, pa.array(texts, pa.string())]
            writer.write_batch(pa.record_batch(columns, schema=schema))


def lines_to_parquet(lines: Path, out: Path, *, task: str) -> None:
    """JSON lines of a task -> columns index, the task's own (null for an error) and error."""
    import pyarrow as pa

    schema = pa.schema([("index", pa.int64()), *_task_fields(task), ("error", pa.string())])
    with (
        lines.open(encoding="utf-8") as file,
        import_parquet(str(out)).ParquetWriter(out, schema) as writer,
    ):
        for group in _groups(map(json.loads, file)):
            writer.write_batch(pa.RecordBatch.from_pylist(group, schema=schema))


def _groups(rows: Iterable[Any]) -> Iterator[list[Any]]:
    rows = iter(rows)
    while group := list(islice(rows, _GROUP_ROWS)):
        yield group


def _task_fields(task: str) -> "list[tuple[str, pa.DataType]]":
    """The columns of one task's results, as its jsonl lines have them."""
    import pyarrow as pa

    label = pa.struct([("label", pa.string()), ("score", pa.float64())])
    hit = pa.struct([("index", pa.int64()), ("score", pa.float64()), ("document", pa.string())])
    numbers = [(name, pa.int64()) for name in ("start", "end", "index", "word_id")]
    words = [("entity", pa.string()), ("score", pa.float64()), ("word", pa.string())]
    fill = pa.struct(
        [
            ("mask_index", pa.int64()),
            ("score", pa.float64()),
            ("token", pa.int64()),
            ("token_str", pa.string()),
            ("sequence", pa.string()),
        ]
    )
    return {
        "classify": [("labels", pa.list_(label))],
        "rerank": [("query", pa.string()), ("hits", pa.list_(hit))],
        "tag": [("entities", pa.list_(pa.struct([*words, *numbers])))],
        "fill-mask": [("fills", pa.list_(fill))],
        "score": [
            ("log_likelihood", pa.float64()),
            ("num_tokens", pa.int64()),
            ("perplexity", pa.float64()),
        ],
        "generate": [
            ("text", pa.string()),
            ("finish_reason", pa.string()),
            ("num_prompt_tokens", pa.int64()),
            ("num_tokens", pa.int64()),
        ],
    }[task]
