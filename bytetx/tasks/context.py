"""TaskContext: the parts of a loaded checkpoint that tasks are made of."""

from collections.abc import Hashable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch

from bytetx.arguments import check_text
from bytetx.checkpoint.control_tokens import ChatEncoder
from bytetx.checkpoint.spec import ModelSpec
from bytetx.checkpoint.tokenizer import Tokenizer
from bytetx.encode.step import Capture, Step, Task
from bytetx.errors import InputError, OptionError, shown
from bytetx.nn.checkpoint_heads import Heads
from bytetx.nn.heads import MaskedLMHead
from bytetx.nn.loading import LoadedCheckpoint
from bytetx.nn.splade import prepare_splade_head
from bytetx.nn.transformer import Transformer
from bytetx.requests.decisions import MARK, SPLIT, DecisionPrompts
from bytetx.requests.inputs import InputReader
from bytetx.runtime.forking import computing
from bytetx.tasks.chunks import set_chunks
from bytetx.tasks.task import (
    OverflowOptions,
    PromptOptions,
    TaskOptions,
    TextOptions,
)

R = TypeVar("R")

QUERY, DOCUMENT = "query", "document"
# The prompts of each task, the first that a checkpoint has.
PROMPT_NAMES = {QUERY: (QUERY,), DOCUMENT: (DOCUMENT, "passage", "corpus")}


class TaskContext:
    """A checkpoint with its tokenizer and heads."""

    def __init__(self, checkpoint: LoadedCheckpoint):
        self.checkpoint = checkpoint
        self.tokenizer: Tokenizer | None = checkpoint.tokenizer
        self.spec: ModelSpec = checkpoint.spec
        self.heads: Heads = checkpoint.heads

    def with_heads(self, heads: Heads) -> "TaskContext":
        """The same with other heads."""
        other = copy(self)
        other.heads = heads
        other.__dict__.pop("splade_head", None)
        return other

    def cutting_left(self) -> "TaskContext":
        """The same for texts and pairs that lose their beginning where they are truncated."""
        other = copy(self)
        if self.tokenizer is not None:
            other.tokenizer = self.tokenizer.limited(self.tokenizer.max_tokens, direction="left")
        return other

    def reader(self, options: TaskOptions) -> InputReader:
        """A reader of texts that does what the options say of long and of bad ones."""
        truncate = isinstance(options, TextOptions) and options.truncate
        overflow = options.overflow if isinstance(options, OverflowOptions) else None
        reader = InputReader(
            self.spec,
            self.tokenizer,
            truncate=bool(truncate) or overflow == "truncate",
            keeps_errors=options.on_error == "return",
        )
        if isinstance(options, OverflowOptions) and overflow == "chunk":
            set_chunks(reader, self.need_tokenizer(), stride=options.stride)
        return reader

    def labels(self) -> tuple[str, ...]:
        """Names of the classes, by id."""
        return tuple(self.spec.id2label[i] for i in range(self.spec.num_labels))

    def need_head(self, head: R | None, name: str) -> R:
        """The head. Raises InputError where the checkpoint has none."""
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

    def need_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises InputError where the checkpoint has none."""
        if self.tokenizer is None:
            raise InputError("this checkpoint has no tokenizer, which this task needs")
        return self.tokenizer

    def with_adapter(self, options: PromptOptions, job: Task[R]) -> Task[R]:
        """The job on the model with the adapter of `options.task`, where the checkpoint has some.

        Raises OptionError for a task that is not known.
        """
        name, tasks = options.task, self.checkpoint.tasks
        if name is None or self.checkpoint.router is not None:  # the route was chosen
            return job
        if tasks is None:
            if not isinstance(name, str) or name not in PROMPT_NAMES:
                raise OptionError(
                    f"task must be {' or '.join(map(repr, PROMPT_NAMES))} (this checkpoint has no "
                    f"adapters of other tasks), got {shown(name)}"
                )
            return job
        with computing(self.checkpoint.device):
            return AdaptedTask(job, tasks.transformer(name), name)

    def prompt(self, options: PromptOptions) -> str:
        """The prompt that is given or named; else the task's own; else the checkpoint's default.

        A task without a prompt has none, as of sentence-transformers' encode_query.
        """
        sentence, task = self.checkpoint.sentence, options.task
        if options.prompt is not None:
            check_text("prompt", options.prompt)
        if task is options.prompt is options.prompt_name is None:
            return self._default_prompt
        if task is None or options.prompt is not None or options.prompt_name is not None:
            return sentence.prompt_text(options.prompt, options.prompt_name)
        prompts = dict(sentence.prompts)
        if self.checkpoint.tasks is not None:
            prompts = {**self.checkpoint.tasks.prompts, **prompts}
        names: Sequence[str] = PROMPT_NAMES.get(task, (task,))
        return next((prompts[name] for name in names if name in prompts), "") or ""

    @cached_property
    def _default_prompt(self) -> str:
        return self.checkpoint.sentence.prompt_text(None, None)

    @cached_property
    def output_size(self) -> int:
        """Numbers of a token's last hidden state."""
        return self.spec.output_size

    @cached_property
    def decision_prompts(self) -> DecisionPrompts:
        """The maker of the prompts of decide. Raises InputError where there is no tokenizer."""
        checkpoint = self.checkpoint
        return DecisionPrompts(
            checkpoint.decisions,
            checkpoint.decision_template,
            checkpoint.chat_template,
            ChatEncoder(self.need_tokenizer(), (MARK, SPLIT)),
        )

    def no_head_error(self, lacks: str) -> InputError:
        """The error of a checkpoint that cannot do a task. lacks: the rest of the sentence."""
        names = ", ".join(self.spec.architectures) or "no architecture"
        return InputError(f"this checkpoint ({names}) {lacks}")

    @cached_property
    def splade_head(self) -> MaskedLMHead | None:
        """The masked language model head, prepared for SPLADE's weights."""
        head = self.heads.masked_lm
        return None if head is None else prepare_splade_head(head)


@dataclass(frozen=True, slots=True)
class AdaptedTask:
    """A task that runs on another Transformer than the runner's: that with an adapter.

    name: of the adapter; captured graphs hold its weights, so that each has its own.
    """

    task: Task[Any]
    transformer: Transformer
    name: str

    @property
    def key(self) -> Hashable:
        return (self.name, self.task.key)

    @property
    def capture(self) -> Capture | None:
        capture = self.task.capture
        return None if capture is None else Capture((self.name, capture.key), rows=capture.rows)

    def compute(self, transformer: Transformer, step: Step) -> tuple[torch.Tensor, ...]:
        return self.task.compute(self.transformer, step)

    def are_finite(self, outputs: tuple[np.ndarray, ...], step: Step) -> np.ndarray:
        return self.task.are_finite(outputs, step)

    def finish(self, outputs: tuple[np.ndarray, ...], step: Step) -> Sequence[Any]:
        return self.task.finish(outputs, step)
