"""Texts longer than the model: one result from those of their chunks."""

from collections.abc import Callable, Generator, Hashable
from contextlib import closing
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch

from bytetx.checkpoint.tokenizer import Tokenizer
from bytetx.encode.finite import not_finite_error
from bytetx.encode.pipeline import Finished
from bytetx.encode.request import Failure, RunCounter
from bytetx.encode.step import Capture, Step, Task, is_head
from bytetx.errors import NotFiniteError, OptionError, shown
from bytetx.nn.transformer import Transformer
from bytetx.requests.inputs import InputReader

R = TypeVar("R")
S = TypeVar("S")


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


def merge_parts(
    index: int, parts: list[tuple[int, R]], merge: Callable[[list[R]], S]
) -> S | NotFiniteError:
    """merge(results of a text's chunks, in order), or why the text has no result.

    index: of the text.  parts: (the chunk's number, its result), in any order.
    """
    whole = merge([result for _, result in sorted(parts, key=lambda part: part[0])])
    if isinstance(whole, np.ndarray) and not np.isfinite(whole).all():  # in half floats
        return not_finite_error(index)
    return whole


def merge_chunks(
    finished: Generator[Finished[tuple[int, R]], None, None],
    merge: Callable[[list[R]], S],
    *,
    counter: RunCounter,
    keeps_errors: bool,
) -> Generator[Finished[S], None, None]:
    """One step a window, with one result a text, by merge_parts.

    A text of which a chunk failed is a failure.  counter, keeps_errors: as of pipeline.run.
    """
    parts: dict[int, list[tuple[int, R]]] = {}
    failures: dict[int, Failure] = {}
    with closing(finished):
        for step in finished:
            for index, part in zip(step.indices.tolist(), step.results, strict=True):
                parts.setdefault(index, []).append(part)
            failures |= {failure.index: failure for failure in step.failures}
            if not step.is_last:
                continue
            indices = sorted(parts.keys() - failures.keys())
            results: dict[int, S] = {}
            for index in indices:
                whole = merge_parts(index, parts[index], merge)
                if not isinstance(whole, NotFiniteError):
                    results[index] = whole
                elif keeps_errors:
                    failures[index] = Failure(index, whole)
                else:
                    raise whole
            counter.add_failures(failures)
            yield Finished(
                step.window,
                np.array(list(results), dtype=np.int64),
                list(results.values()),
                is_last=True,
                failures=[failures[index] for index in sorted(failures)],
            )
            parts, failures = {}, {}


def set_chunks(reader: InputReader, tokenizer: Tokenizer, *, stride: int) -> None:
    """Makes a reader cut texts. OptionError where chunks would have no tokens of their own."""
    most = tokenizer.max_tokens - tokenizer.num_special_tokens
    if stride >= most:
        raise OptionError(
            f"stride must be less than the {most} tokens of a chunk, got {shown(stride)}"
        )
    reader.cuts, reader.stride = True, stride
