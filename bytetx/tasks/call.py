"""Call: one call of a task, ready to run: its texts, its reader, its task and its result."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from bytetx.encode.request import RunStats, TextAdapter
from bytetx.encode.step import Task
from bytetx.errors import InputError
from bytetx.requests.inputs import Input, InputReader
from bytetx.tasks.results import Results

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Sink(Protocol[T_co]):
    """Collects the results of a call's texts, in any order. One thread at a time uses it."""

    def put_rows(self, indices: np.ndarray, results: Sequence[Any]) -> None:
        """Results of the texts at `indices`, int64; an array's rows are copied."""
        ...

    def fail(self, index: int, error: InputError) -> None:
        """A text without a result."""
        ...

    def result(self, num_texts: int, stats: RunStats) -> T_co:
        """The call's result, once every text has a result or an error."""
        ...


@dataclass(frozen=True, slots=True)
class TaskCall(Generic[T]):
    """A call of a one-pass task.

    title: for a progress bar.  new_sink: from the number of texts, None where nobody knows it.
    merge: one result from those of a text's chunks, where the reader cuts texts.
    why_no_stream: the reason why the results of some texts need those of all others.
    adapters: that all texts run with, or one or None for each; None: the model without any.
    """

    title: str
    texts: Iterable[Input]
    task: Task[Any]
    reader: InputReader
    new_sink: Callable[[int | None], Sink[T]]
    merge: Callable[[list[Any]], Any] | None = None
    why_no_stream: str | None = None
    adapters: TextAdapter | Sequence[TextAdapter | None] | None = None


class ListSink(Generic[T]):
    """Results in a list, for gather.  gather: the call's result from those of its texts."""

    def __init__(self, gather: Callable[[Results[Any]], T]):
        self._gather = gather
        self._items: dict[int, Any] = {}
        self._errors: dict[int, InputError] = {}

    def put_rows(self, indices: np.ndarray, results: Sequence[Any]) -> None:
        if isinstance(results, np.ndarray):
            results = results.copy()  # a caller may hold rows, and their step's memory with them
        self._items.update(zip(indices.tolist(), results, strict=True))

    def fail(self, index: int, error: InputError) -> None:
        self._errors[index] = error

    def take(self, start: int, num_texts: int) -> list[Any]:
        """Results and errors of consecutive texts, once all of them are there; it forgets them."""
        some = range(start, start + num_texts)
        return [
            self._errors.pop(index) if index in self._errors else self._items.pop(index)
            for index in some
        ]

    def result(self, num_texts: int, stats: RunStats) -> T:
        self._items.update(self._errors)
        items = [self._items[index] for index in range(num_texts)]
        return self._gather(Results(items, stats, dict(sorted(self._errors.items()))))


def list_sink(num_texts: int | None) -> ListSink[Results[Any]]:
    """The new_sink of tasks whose result is the list itself."""
    return ListSink(lambda results: results)
