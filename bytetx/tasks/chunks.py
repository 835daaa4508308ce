"""Texts longer than the model: one result from those of their chunks."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from bytetx.checkpoint.tokenizer import Tokenizer
from bytetx.encode.request import Requests
from bytetx.encode.step import Capture, Step, Task, is_head, not_finite_error
from bytetx.errors import InputError, OptionError, shown
from bytetx.nn.transformer import Transformer
from bytetx.requests.inputs import InputReader
from bytetx.tasks.call import Sink

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class ChunkTask(Generic[R]):
    """A task on chunks: each result is (the chunk's number in its text, the result)."""

    task: Task[R]

    @property
    def key(self) -> Hashable:
        return ("chunks", self.task.key)

    @property
    def shares_pass(self) -> bool:
        return is_head(self.task)

    @property
    def capture(self) -> Capture | None:
        return self.task.capture

    def compute(self, transformer: Transformer, step: Step) -> tuple[torch.Tensor, ...]:
        return self.task.compute(transformer, step)

    def reduce(self, hidden_states: torch.Tensor, step: Step) -> tuple[torch.Tensor, ...]:
        assert is_head(self.task)  # shares_pass says so
        return self.task.reduce(hidden_states, step)

    def are_finite(self, outputs: tuple[np.ndarray, ...], step: Step) -> np.ndarray:
        return self.task.are_finite(outputs, step)

    def finish(self, outputs: tuple[np.ndarray, ...], step: Step) -> list[tuple[int, R]]:
        results = self.task.finish(outputs, step)
        if isinstance(results, np.ndarray):
            results = results.copy()  # they outlive the pinned memory of their step
        chunks = step.requests.chunks
        numbers = [0] * len(step.requests) if chunks is None else chunks.tolist()
        return list(zip(numbers, results, strict=True))


class ChunkSink:
    """Makes one result of those of a text's chunks, as soon as all are there."""

    def __init__(self, sink: Sink[Any], merge: Callable[[list[Any]], Any], *, keeps_errors: bool):
        """keeps_errors: a text that has no result is the sink's; else its error is raised."""
        self._sink, self._merge, self._keeps_errors = sink, merge, keeps_errors
        self._num_chunks: dict[int, int] = {}
        self._chunks: dict[int, list[tuple[int, Any]]] = {}
        self.failed: set[int] = set()  # texts

    def expect(self, requests: Requests) -> None:
        """Texts, by their chunks, before any of these runs."""
        indices, counts = np.unique(requests.indices, return_counts=True)
        self._num_chunks.update(zip(indices.tolist(), counts.tolist(), strict=True))

    def put_rows(self, indices: np.ndarray, results: Sequence[tuple[int, Any]]) -> None:
        for index, chunk in zip(indices.tolist(), results, strict=True):
            if index not in self._num_chunks:  # another chunk of its text failed
                continue
            chunks = self._chunks.setdefault(index, [])
            chunks.append(chunk)
            if len(chunks) == self._num_chunks[index]:
                self._put(index, [result for _, result in sorted(chunks, key=lambda one: one[0])])

    def _put(self, index: int, results: list[Any]) -> None:
        whole = self._merge(results)
        if isinstance(whole, np.ndarray) and not np.isfinite(whole).all():  # in half floats
            if not self._keeps_errors:
                raise not_finite_error(index)
            self.fail(index, not_finite_error(index))
            return
        del self._num_chunks[index], self._chunks[index]
        self._sink.put_rows(np.array([index]), [whole])

    def fail(self, index: int, error: InputError) -> None:
        if self._num_chunks.pop(index, None) is not None:
            self._chunks.pop(index, None)
            self.failed.add(index)
            self._sink.fail(index, error)


def set_chunks(reader: InputReader, tokenizer: Tokenizer, *, stride: int) -> None:
    """Makes a reader cut texts. OptionError where chunks would have no tokens of their own."""
    most = tokenizer.max_tokens - tokenizer.num_special_tokens
    if stride >= most:
        raise OptionError(
            f"stride must be less than the {most} tokens of a chunk, got {shown(stride)}"
        )
    reader.cuts, reader.stride = True, stride
