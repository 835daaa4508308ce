"""The tasks as batch jobs see them: how the model runs a stream, and how its answers are spelled."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

from bytetx.errors import InputError
from bytetx.files.job import RunStats, Stream
from bytetx.files.reader import RankRequest, Value
from bytetx.files.writer import Encoder, LineEncoder, VectorEncoder


@dataclass(frozen=True, slots=True)
class Task:
    """One task with its options.

    name: the command's.  options: what changes the answers; a job resumes with the same ones only.
    open: from the loaded model and whether vectors are stored as rows: how to run, how to encode.
    """

    name: str
    options: dict[str, Any]
    open: Callable[[Any, bool], tuple[Callable[[Iterator[Any]], Stream], Encoder]]


def embed_task(options: dict[str, Any]) -> Task:
    """options: keyword arguments of Model.embed."""

    def open(model: Any, as_rows: bool) -> tuple[Callable[[Iterator[Value]], Stream], Encoder]:
        # One empty text: what is wrong with the options shows now, and the size of a vector.
        dim = model.embed([""], **options).vectors.shape[1]
        encoder = VectorEncoder(dim) if as_rows else LineEncoder(_vector_json(dim))
        return lambda texts: model.embed(texts, stream=True, on_error="return", **options), encoder

    return Task("embed", options, open)


def _vector_json(dim: int) -> Callable[[Any], str]:
    # Nine significant digits give every float32 back exactly; json's 17 would double the file.
    template = '{"embedding": [' + ", ".join(["%.9g"] * dim) + "]}"

    def to_json(vector: Any) -> str:
        text = template % tuple(vector.tolist())
        if "n" in text[15:]:  # nan or inf
            raise ValueError("not finite")
        return text

    return to_json


def line_task(name: str, method: str, key: str, options: dict[str, Any]) -> Task:
    """A task whose answers are lists of records. method: Model's; key: of the list in the line."""

    def to_json(answer: Any) -> str:
        return json.dumps({key: _plain(answer)}, ensure_ascii=False, allow_nan=False)

    def open(model: Any, as_rows: bool) -> tuple[Callable[[Iterator[Value]], Stream], Encoder]:
        run = getattr(model, method)
        stream = lambda texts: run(texts, stream=True, on_error="return", **options)  # noqa: E731
        return stream, LineEncoder(to_json)

    return Task(name, options, open)


def rerank_task(options: dict[str, Any]) -> Task:
