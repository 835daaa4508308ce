"""What Model's one-pass tasks share: the reader of inputs, the run, results and needed parts."""

from collections.abc import Callable, Generator
from functools import partial
from typing import Any, TypeVar

from bytetx.arguments import check_iterable
from bytetx.checkpoint.spec import ModelSpec
from bytetx.checkpoint.tokenizer import Tokenizer
from bytetx.encode.model_runner import Runner
from bytetx.encode.pipeline import Finished, in_order, run
from bytetx.encode.request import RunCounter
from bytetx.encode.scheduler import windows
from bytetx.encode.step import Task
from bytetx.errors import InputError
from bytetx.nn.loading import Heads, LoadedCheckpoint
from bytetx.requests.inputs import InputReader
from bytetx.tasks.chunks import ChunkTask, chosen_overflow, merge_chunks, set_chunks
from bytetx.tasks.options import Texts
from bytetx.tasks.progress import num_texts, with_progress
from bytetx.tasks.results import Results, Stream

R = TypeVar("R")
S = TypeVar("S")


class OnePass:
    """The base of Model and of its groups of methods; Model's constructor sets the attributes."""

    checkpoint: LoadedCheckpoint
    spec: ModelSpec
    tokenizer: Tokenizer | None
    heads: Heads
    token_budget: int
    _runner: Runner

    def _reader(self, *, truncate: bool, on_error: str) -> InputReader:
        if on_error not in ("raise", "return"):
            raise InputError(f"on_error must be 'raise' or 'return', got {on_error!r}")
        keeps_errors = on_error == "return"
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

    def _run(
        self,
        texts: Texts,
        task: Task[R],
        reader: InputReader,
        counter: RunCounter,
        *,
        title: str,
        show_progress: bool,
        merge: Callable[[list[R]], S] | None = None,
    ) -> Generator[Finished[Any], None, None]:
        """Results are those of the task; or with merge, which makes one from those of a text's
        chunks, what it gives."""
        check_iterable("texts", texts)
        cut = windows(texts, estimate_tokens=reader.estimate_tokens, token_budget=self.token_budget)
        start = partial(
            run,
            cut,
            reader.read,
            runner=self._runner,
            token_budget=self.token_budget,
            counter=counter,
            keeps_errors=reader.keeps_errors,
        )
        steps = start(task) if merge is None else merge_chunks(start(ChunkTask(task)), merge)
        if not show_progress:
            return steps
        return with_progress(steps, counter.num_done, title=title, total=num_texts(texts))

    def _results(
        self,
        texts: Texts,
        task: Task[R],
        reader: InputReader,
        *,
        stream: bool,
        title: str,
        show_progress: bool,
        merge: Callable[[list[R]], S] | None = None,
    ) -> Results[Any] | Stream[Any]:
        counter = RunCounter()
        steps = self._run(
            texts, task, reader, counter, title=title, show_progress=show_progress, merge=merge
        )
        blocks = in_order(steps)
        if stream:
            return Stream(blocks, counter.stats)
        items = [result for block in blocks for result in block]
        errors = {i: item for i, item in enumerate(items) if isinstance(item, InputError)}
        return Results(items, counter.stats(), errors)

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
