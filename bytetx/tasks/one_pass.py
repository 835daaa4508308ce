"""What Model's one-pass tasks share: the reader of inputs, the run, results and needed parts."""

from collections.abc import Generator, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

from bytetx.arguments import check_iterable
from bytetx.checkpoint.spec import ModelSpec
from bytetx.checkpoint.tokenizer import Tokenizer
from bytetx.encode.model_runner import Runner
from bytetx.encode.pipeline import EngineOptions, Finished, in_order, run, run_at_once
from bytetx.encode.request import RunCounter
from bytetx.encode.scheduler import WINDOW_FILL, windows
from bytetx.errors import InputError, shown
from bytetx.nn.loading import Heads, LoadedCheckpoint
from bytetx.requests.inputs import Input, InputReader
from bytetx.tasks.call import Call, ListSink, as_they_are
from bytetx.tasks.chunks import ChunkTask, chosen_overflow, merge_chunks, set_chunks
from bytetx.tasks.progress import num_texts, with_progress
from bytetx.tasks.results import Results, Stream

R = TypeVar("R")
T = TypeVar("T")

_FEW = 64  # inputs; with more, what a window ahead costs is nothing beside them


def keeps_bad_texts(on_error: str) -> bool:
    """Whether a bad text's error takes the place of its result. InputError for another value."""
    if on_error not in ("raise", "return"):
        raise InputError(f"on_error must be 'raise' or 'return', got {shown(on_error)}")
    return on_error == "return"


class OnePass:
    """The base of Model and of its groups of methods; Model's constructor sets the attributes."""

    checkpoint: LoadedCheckpoint
    spec: ModelSpec
    tokenizer: Tokenizer | None
    heads: Heads
    token_budget: int
    _runner: Runner

    def _reader(self, *, truncate: bool, on_error: str) -> InputReader:
        keeps_errors = keeps_bad_texts(on_error)
        return InputReader(self.spec, self.tokenizer, truncate=truncate, keeps_errors=keeps_errors)

    def _overflow_reader(
        self, *, overflow: str | None, stride: int, truncate: bool, on_error: str
    ) -> InputReader:
        """A reader that does what the options say of texts that are too long."""
        chosen = chosen_overflow(overflow, truncate=truncate, stride=stride)
        reader = self._reader(truncate=chosen == "truncate", on_error=on_error)
        if chosen == "chunk":
            set_chunks(reader, self._need_tokenizer(), stride=stride)
        return reader

    def _perform(self, call: Call[T], *, show_progress: bool = False) -> T:
        """Runs a call in this thread."""
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

    def _stream(self, call: Call[Any], *, show_progress: bool = False) -> Stream[Any]:
        """Runs a call while its results are read."""
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
        """What pipeline.run takes of this model and of a call."""
        return {
            "runner": self._runner,
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

    @staticmethod
    def _list_sink(num_texts: int | None) -> ListSink[Results[Any]]:
        """The new_sink of tasks that give a list."""
        return ListSink(as_they_are)

    def _labels(self) -> tuple[str, ...]:
        return tuple(self.spec.id2label[i] for i in range(self.spec.num_labels))

    def _need_head(self, head: R | None, name: str) -> R:
        if head is None and name == "language model" and self.spec.is_bidirectional:
            raise InputError(
                "config.json says that every token of this checkpoint sees its whole sequence "
                "(is_causal false, or the name of such a class), so it predicts no next token; use "
                "embed, or load a causal checkpoint"
            )
        if head is None:
            raise InputError(
                f"this checkpoint ({', '.join(self.spec.architectures) or 'no architecture'}) has "
                f"no {name} head; load one that was fine-tuned for it"
            )
        return head

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise InputError("this checkpoint has no tokenizer, which this task needs")
        return self.tokenizer
