"""Calls of the engine and their outcomes; both can cross a process."""

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a task.

    model: the name it is served under.  task: of engine.TASKS.  inputs, options: values that JSON
    has, as that task takes them.  priority: lower numbers run first.
    """

    model: str
    task: str
    inputs: Any
    options: Mapping[str, Any] = field(default_factory=dict)
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Counts and seconds of one call: means over its texts, as RunStats says."""

    num_texts: int = 0
    num_tokens: int = 0
    num_truncated: int = 0
    tokenize_seconds: float = 0.0
    queue_seconds: float = 0.0
    compute_seconds: float = 0.0

    def added(self, other: "Timings") -> "Timings":
        """Return the timings of both calls of one request together."""
        texts = self.num_texts + other.num_texts

        def mean(name: str) -> float:
            ours, theirs = getattr(self, name), getattr(other, name)
            return float(ours * self.num_texts + theirs * other.num_texts) / max(texts, 1)

        return Timings(
            texts,
            self.num_tokens + other.num_tokens,
            self.num_truncated + other.num_truncated,
            mean("tokenize_seconds"),
            mean("queue_seconds"),
            mean("compute_seconds"),
        )

    def row(self) -> tuple[int, int, int, float, float, float]:
        """Timings(*row) is this one; far faster than dataclasses.astuple."""
        return (
            self.num_texts,
            self.num_tokens,
            self.num_truncated,
            self.tokenize_seconds,
            self.queue_seconds,
            self.compute_seconds,
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results of a call: rows that JSON has, and arrays, as its task says."""

    timings: Timings
    rows: Any = None
    arrays: tuple[np.ndarray, ...] = ()


class Piece(NamedTuple):
    """New text of one output of a prompt.

    output: its number, below n.  num_tokens: the new tokens.  logprobs: one row for each token,
    where asked for, as of OutputLogprobs.
    finish_reason: None until the output ends: stop, length or abort.
    num_prompt_tokens: of the whole prompt.  is_reasoning: whether the prompt has opened the
    reasoning of its answers.
    """

    output: int
    text: str
    num_tokens: int
    logprobs: list[Any] | None
    finish_reason: str | None
    num_prompt_tokens: int
    is_reasoning: bool = False


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts of a served model that routes need without holding it.

    info: of Model.info().  tasks: names of engine.TASKS that it can run.  main_task: what POST /
    does.  created: seconds since 1970, of loading.  parent: of an adapter, the model's name.
    tool_calls, reasoning: names of AnswerFormat.
    is_loaded: of a model that comes into memory and leaves it; None: it is always there.
    """

    name: str
    model_id: str
    info: Mapping[str, Any]
    tasks: tuple[str, ...]
    main_task: str
    has_chat_template: bool
    gives_token_vectors: bool
    similarity: str
    created: int
    parent: str | None = None
    tool_calls: str = ""
    reasoning: str = ""
    is_loaded: bool | None = None

    @property
    def max_tokens(self) -> int:
        return int(self.info["max_tokens"])


class ServeBackend(Protocol):
    """Where calls are answered: in this process, or in the engine's own."""

    @property
    def models(self) -> tuple[ModelFacts, ...]:
        """The served models; the first one serves requests that name none."""
        ...

    @property
    def is_healthy(self) -> bool:
        """False where no call can be answered now."""
        ...

    async def run(self, call: Call) -> Outcome:
        """Raises ServeError."""
        ...

    def generate(self, call: Call) -> AsyncGenerator[Piece, None]:
        """Pieces of all outputs of one prompt; raises ServeError while they are read."""
        ...
