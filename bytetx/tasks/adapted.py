"""Calls of tasks with adapters: of one for all texts, or of one for each."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import torch

from bytetx.encode.request import TextAdapter
from bytetx.encode.step import Step, Task, is_head
from bytetx.errors import OptionError, shown
from bytetx.nn.adapters import Adapters, LoadedAdapter, check_count
from bytetx.nn.transformer import Transformer
from bytetx.packed import prefix_sums, upload
from bytetx.sequence_tree import rows_of
from bytetx.tasks.call import TaskCall
from bytetx.tasks.context import TaskContext
from bytetx.tasks.task import PromptOptions, TaskOptions, TaskSpec

T = TypeVar("T")


def adapted_call(
    spec: TaskSpec,
    context: TaskContext,
    adapters: Adapters,
    inputs: Sequence[Any],
    options: TaskOptions,
) -> TaskCall[Any]:
    """A call of a one-pass task whose options name adapters.

    Raises OptionError for an unknown name, or a list that is not as long as the texts.
    """
    named = options.adapter
    if getattr(options, "task", None) is not None and context.checkpoint.tasks is not None:
        raise OptionError("adapter and task exclude each other where tasks have adapters; give one")
    if not isinstance(named, list | tuple):
        found = adapters.get(named)
        call = spec.start(_context_of(context, found), *inputs, options)
        return replace(call, adapters=found.adapter)
    most = len(named) + 1  # one more is enough to refuse them
    given = [list(islice(one, most)) if isinstance(one, Iterator) else one for one in inputs]
    loaded = {}
    for name in named:
        if name is not None:
            loaded[name] = adapters.get(name)
    found_of = [None if name is None else loaded[name] for name in named]
    # Adapters without heads of their own have the same call.
    contexts = {id(found): _context_of(context, found) for found in (*found_of, None)}
    calls = {
        id(own): spec.start(own, *given, options)
        for own in {id(contexts[id(found)]): contexts[id(found)] for found in found_of}.values()
    }
    first = next(iter(calls.values()), None) or spec.start(context, *given, options)
    check_count(named, first.texts)
    each = [None if found is None else found.adapter for found in found_of]
    task = first.task
    if len({call.task.key for call in calls.values()}) > 1:
        if not all(is_head(call.task) for call in calls.values()):
            raise OptionError(
                f"{spec.name} takes one adapter a call where adapters have heads of their own, "
                f"got {shown(list(named))}; make a call for each"
            )
        owned = zip(each, found_of, strict=True)
        task = PerAdapterTask(
            {id(one): calls[id(contexts[id(found)])].task for one, found in owned}
        )
    return replace(first, adapters=each, task=task)


def task_call(call: TaskCall[T], adapters: Adapters, options: PromptOptions) -> TaskCall[T]:
    """A call with the adapters of its texts' tasks, of a checkpoint that has some.

    Raises OptionError for an unknown task, or a list that is not as long as the texts.
    """
    named = options.task
    if isinstance(named, list | tuple):
        check_count(named, call.texts, name="task")
    return replace(call, adapters=adapters.of_tasks(named))


def _context_of(context: TaskContext, found: LoadedAdapter | None) -> TaskContext:
    """The context of an adapter: that of the model, unless the adapter has its own heads."""
    if found is None or found.heads is context.checkpoint.heads:
        return context
    return context.with_heads(found.heads)


@dataclass(frozen=True, slots=True, eq=False)
class PerAdapterTask:
    """One task for each adapter of a call, on hidden states of one pass; each has its own head.

    tasks: by id() of the adapter, or of None.  They differ in their heads alone.
    """

    tasks: dict[int, Task[Any]]
    # Outputs of a task, by the same key: the same in every step.
    _num_outputs: dict[int, int] = field(default_factory=dict)

    @property
    def key(self) -> Hashable:
        return ("per adapter", id(self))

    @property
    def capture(self) -> None:
        """None: only the host knows which rows are whose."""
        return None

    @property
    def shares_pass(self) -> bool:
        return True

    def compute(self, transformer: Transformer, step: Step) -> tuple[torch.Tensor, ...]:
        return self.reduce(transformer.forward(step.batch), step)

    def reduce(self, hidden_states: torch.Tensor, step: Step) -> tuple[torch.Tensor, ...]:
        outputs: list[torch.Tensor] = []
        for owner, texts in self._texts_of(step):
            task = self.tasks[owner]
            assert is_head(task)  # adapted_call has seen to it
            piece, tokens = _piece(step, texts)
            own = task.reduce(hidden_states[tokens], piece)
            self._num_outputs[owner] = len(own)
            outputs += own
        return tuple(outputs)

    def are_finite(self, outputs: tuple[np.ndarray, ...], step: Step) -> np.ndarray:
        finite = np.ones(len(step.requests), dtype=bool)
        for owner, texts, own, piece in self._pieces(outputs, step):
            finite[texts] = self.tasks[owner].are_finite(own, piece)
        return finite

    def finish(self, outputs: tuple[np.ndarray, ...], step: Step) -> list[Any]:
        results: list[Any] = [None] * len(step.requests)
        for owner, texts, own, piece in self._pieces(outputs, step):
            found = self.tasks[owner].finish(own, piece)
            for text, result in zip(texts.tolist(), found, strict=True):
                results[text] = result.copy() if isinstance(result, np.ndarray) else result
        return results

    def _texts_of(self, step: Step) -> list[tuple[int, np.ndarray]]:
        """(key of a task, its texts), of those that have texts in the step."""
        adapters = step.requests.adapters
        given: list[TextAdapter | None] = [None] * len(step.requests)
        if adapters is not None:
            given = adapters.tolist()
        owners = np.array([id(adapter) for adapter in given], dtype=np.int64)
        texts = ((owner, np.flatnonzero(owners == owner)) for owner in self.tasks)
        return [(owner, own) for owner, own in texts if len(own)]

    def _pieces(
        self, outputs: tuple[np.ndarray, ...], step: Step
    ) -> list[tuple[int, np.ndarray, tuple[np.ndarray, ...], Step]]:
        found = []
        for owner, texts in self._texts_of(step):
            own, outputs = outputs[: self._num_outputs[owner]], outputs[self._num_outputs[owner] :]
            found.append((owner, texts, own, _piece(step, texts)[0]))
        return found


def _piece(step: Step, texts: np.ndarray) -> tuple[Step, torch.Tensor]:
    """Some texts of a step as a step of their own, and the rows of their tokens, int64."""
    batch, prompts, all_requests = step.batch, step.prompt_tokens, step.requests
    requests = all_requests.take(texts)
    rows = rows_of(all_requests.cu_seqlens[texts], all_requests.seqlens[texts])
    tokens = upload(torch.from_numpy(rows), batch.device)
    types = batch.token_type_ids
    own = replace(
        batch,
        input_ids=batch.input_ids[tokens],
        position_ids=batch.position_ids[tokens],
        token_type_ids=None if types is None else types[tokens],
        cu_seqlens=upload(torch.from_numpy(prefix_sums(requests.seqlens)), batch.device),
        seqlens=batch.seqlens[torch.from_numpy(texts)],
        max_seqlen=int(requests.seqlens.max(initial=0)),
        on_host=None,
        shared=None,
        adapters=None,
    )
    if prompts is not None:
        prompts = prompts[upload(torch.from_numpy(texts), prompts.device)]
    return Step(requests, own, prompts), tokens
