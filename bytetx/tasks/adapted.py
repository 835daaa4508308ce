"""The task of a call, by its name: the adapter of a checkpoint's task, and the prompt of it."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar, cast

import numpy as np
import torch

from bytetx.arguments import check_text
from bytetx.encode.step import Capture, Step, Task
from bytetx.errors import OptionError, shown
from bytetx.nn.transformer import Transformer
from bytetx.runtime.forking import computing
from bytetx.tasks.one_pass import OnePass

R = TypeVar("R")

QUERY, DOCUMENT = "query", "document"
# The prompts of each task, the first that a checkpoint has.
PROMPT_NAMES = {QUERY: (QUERY,), DOCUMENT: (DOCUMENT, "passage", "corpus")}


MethodT = TypeVar("MethodT", bound=Callable[..., Any])


def routed(method: MethodT) -> MethodT:
    """A method of Model that runs on the model of its task's route, where there are routes."""

    @wraps(method)
    def run(model: "NamedTaskMixin", *args: Any, **options: Any) -> Any:
        return method(model._route(options.get("task")), *args, **options)

    return cast(MethodT, run)


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


class NamedTaskMixin(OnePass):
    """What Model's methods with the option `task` share."""

    _routes: Mapping[str, Any]

    def _route(self, task: str | None) -> Any:
        """The Model of a task's route: this one, where the checkpoint has no Router.

        Raises OptionError for a task without a route.
        """
        router = self.checkpoint.router
        if router is None or not self._routes:
            return self
        return self._routes[router.resolve(task)]

    def _with_adapter(self, name: str | None, job: Task[R]) -> Task[R]:
        """The job on the model with the adapter of this task, where the checkpoint has adapters.

        Raises OptionError for a name that is not known.
        """
        tasks = self.checkpoint.tasks
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

    def _prompt_of(self, task: str | None, prompt: str | None, prompt_name: str | None) -> str:
        """The prompt that is given or named; else the task's own; else the checkpoint's default.

        A task without a prompt has none, as of sentence-transformers' encode_query.
        """
        sentence = self.checkpoint.sentence
        if prompt is not None:
            check_text("prompt", prompt)
        if task is None or prompt is not None or prompt_name is not None:
            return sentence.prompt_text(prompt, prompt_name)
        prompts = dict(sentence.prompts)
        if self.checkpoint.tasks is not None:
            prompts = {**self.checkpoint.tasks.prompts, **prompts}
        names = PROMPT_NAMES.get(task, (task,))
        return next((prompts[name] for name in names if name in prompts), "") or ""
