"""TaskContext: the parts of a loaded checkpoint that tasks are made of."""

from collections.abc import Sequence
from copy import copy
from functools import cached_property
from typing import TypeVar

from bytetx.arguments import check_text
from bytetx.checkpoint.answer_format import AnswerFormat, find_answer_format
from bytetx.checkpoint.byte_level import special_tokens
from bytetx.checkpoint.control_tokens import ChatEncoder
from bytetx.checkpoint.spec import ModelSpec
from bytetx.checkpoint.tokenizer import Tokenizer
from bytetx.errors import InputError, OptionError, shown
from bytetx.nn.checkpoint_heads import Heads
from bytetx.nn.heads import MaskedLMHead
from bytetx.nn.loading import LoadedCheckpoint
from bytetx.nn.splade import prepare_splade_head
from bytetx.requests.decisions import MARK, SPLIT, DecisionPrompts
from bytetx.requests.inputs import InputReader
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

    def set_prompts(self, reader: InputReader, options: PromptOptions) -> None:
        """Give a reader the prompt of all texts, or that of each text where each has its task.

        A prompt is the one that is given or named; else the task's own; else the checkpoint's
        default, unless the task is "query" or "document", as sentence-transformers' encode_query
        has it.
        Raises OptionError for a task that is not known.
        """
        task = options.task
        if task is options.prompt is options.prompt_name is self.checkpoint.tasks is None:
            reader.prompt = self._default_prompt
            return
        if options.prompt is not None:
            check_text("prompt", options.prompt)
        if isinstance(task, list | tuple):
            known = {one: self.prompt(options, one) for one in dict.fromkeys(map(_checked, task))}
            reader.prompts = [known[one] for one in task]
        else:
            reader.prompt = self.prompt(options, task)

    def prompt(self, options: PromptOptions, task: object) -> str:
        """The prompt of a text with this task, or without one; see set_prompts."""
        sentence, tasks = self.checkpoint.sentence, self.checkpoint.tasks
        is_named = options.prompt is not None or options.prompt_name is not None
        if tasks is not None and (task is not None or options.adapter is None):
            task = tasks.resolve(task)
        elif task is not None and self.checkpoint.router is None and not _has_prompts(task):
            raise OptionError(
                f"task must be {' or '.join(map(repr, PROMPT_NAMES))} (this checkpoint has no "
                f"adapters of other tasks), got {shown(task)}"
            )
        if is_named:
            return sentence.prompt_text(options.prompt, options.prompt_name)
        if task is None:
            return self._default_prompt
        assert isinstance(task, str)
        prompts = dict(sentence.prompts)
        names: Sequence[str] = PROMPT_NAMES.get(task, (task,))
        default = ""
        if tasks is not None:
            prompts = {**tasks.prompts, **prompts}
            names, default = (tasks.prompt_names.get(task, task),), self._default_prompt
        return next((prompts[name] for name in names if name in prompts), default) or ""

    @cached_property
    def _default_prompt(self) -> str:
        return self.checkpoint.sentence.prompt_text(None, None)

    @cached_property
    def output_size(self) -> int:
        """Numbers of a token's last hidden state."""
        return self.spec.output_size

    @cached_property
    def answer_format(self) -> AnswerFormat:
        """How answers to chats hold reasoning and calls of tools."""
        template = self.checkpoint.chat_template
        if template is None or self.tokenizer is None:
            return AnswerFormat()
        special = special_tokens(self.tokenizer.backend)
        return find_answer_format(template.sources, {text: i for i, text in special.items()})

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


def _has_prompts(task: object) -> bool:
    return isinstance(task, str) and task in PROMPT_NAMES


def _checked(task: object) -> str | None:
    """The name of a task, or None. Raises OptionError for what is neither."""
    if task is not None and not isinstance(task, str):
        raise OptionError(f"task must be a name, or a list of names and None, got {shown(task)}")
    return task
