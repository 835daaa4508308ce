"""Runs a call in the caller's thread: at once, or while its results are read."""

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from bytetx.arguments import check_iterable
from bytetx.encode.model_runner import Runner
from bytetx.encode.pipeline import EngineOptions, Finished, in_order, run, run_at_once
from bytetx.encode.request import RunCounter
from bytetx.encode.scheduler import WINDOW_FILL, windows
from bytetx.errors import OptionError
from bytetx.requests.inputs import Input, InputReader
from bytetx.tasks.call import Call
from bytetx.tasks.chunks import ChunkTask, merge_chunks
from bytetx.tasks.progress import num_texts, with_progress
from bytetx.tasks.results import Stream

T = TypeVar("T")

_FEW = 64  # inputs; with more, what a window ahead costs is nothing beside them


@dataclass(frozen=True, slots=True)
class SyncRun:
    """Calls of one model.

    token_budget: tokens of one forward pass.
    """

    runner: Runner
    token_budget: int

    def perform(self, call: Call[T], *, show_progress: bool = False) -> T:
        """All results of a call."""
        counter = RunCounter()
        sink = call.new_sink(num_texts(check_iterable("texts", call.texts)))
        few = None if show_progress or call.merge is not None else self._few(call)
        if few is None:
            steps: Iterable[Finished[Any]] = self._steps(call, counter, show_progress=show_progress)
        else:
            steps = run_at_once(
                few, call.reader.read, call.task, **self._engine(call.reader, counter)
            )
        for step in steps:
            if len(step.indices):
                sink.put_rows(step.indices, step.results)
            for failure in (*step.failures, *(step.window.failures if step.is_last else ())):
                sink.fail(failure.index, failure.error)
        stats = counter.stats()
        return sink.result(stats.num_texts, stats)

    def stream(self, call: Call[Any], *, show_progress: bool = False) -> Stream[Any]:
        """The results of a call, computed while they are read.

        Raises OptionError where results depend on all texts.
        """
        if call.why_no_stream is not None:
            raise OptionError(call.why_no_stream)
        counter = RunCounter()
        steps = self._steps(call, counter, show_progress=show_progress)
        return Stream(in_order(steps), counter.stats)

    def _steps(
        self, call: Call[Any], counter: RunCounter, *, show_progress: bool
    ) -> Generator[Finished[Any], None, None]:
        texts, reader, task, merge = call.texts, call.reader, call.task, call.merge
        check_iterable("texts", texts)
        cut = windows(texts, estimate_tokens=reader.estimate_tokens, token_budget=self.token_budget)
        start = partial(run, cut, reader.read, **self._engine(reader, counter))
        if merge is None:
            steps = start(task)
        else:
            chunks = start(ChunkTask(task))
            steps = merge_chunks(chunks, merge, counter=counter, keeps_errors=reader.keeps_errors)
        if not show_progress:
            return steps
        return with_progress(steps, counter.num_done, title=call.title, total=num_texts(texts))

    def _engine(self, reader: InputReader, counter: RunCounter) -> EngineOptions:
        """The arguments of pipeline.run that this model and a call have."""
        return {
            "runner": self.runner,
            "token_budget": self.token_budget,
            "counter": counter,
            "keeps_errors": reader.keeps_errors,
        }

    def _few(self, call: Call[Any]) -> Sequence[Input] | None:
        """A call's inputs where they are so few that they are one window, as `windows` cuts."""
        texts = call.texts
        if not isinstance(texts, list | tuple) or not 0 < len(texts) <= _FEW:
            return None
        num_tokens = sum(map(call.reader.estimate_tokens, texts))
        return texts if num_tokens < self.token_budget * WINDOW_FILL else None
