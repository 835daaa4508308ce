"""Step, Task and SharedPass: the input of a forward pass, and what one or more tasks compute.

Texts whose logits or vectors are not finite are errors of their own.  A task gives `largest` of
its logits or vectors as one more output of its step, from before anything that could hide them (a
quantiser, a threshold, a top-k, an activation), so that it is computed on the device and leaves it
with the results.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeGuard, TypeVar

import numpy as np
import torch

from bytetx.encode.request import Requests
from bytetx.errors import NotFiniteError
from bytetx.nn.transformer import Transformer
from bytetx.packed import PackedBatch, SharedPrefixes, prefix_sums, upload

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


@dataclass(slots=True, eq=False)
class Step:
    """The requests of one forward pass and their packed tokens, in the same order.

    _batch: or what packs it, where it may not be needed.
    prompt_tokens: int32 [batch_size] on the batch's device, tokens of the prompt at each start;
    None means 0 everywhere.
    """

    requests: Requests
    _batch: PackedBatch | Callable[[], PackedBatch]
    prompt_tokens: torch.Tensor | None

    @property
    def shared(self) -> SharedPrefixes | None:
        """The batch's shared prefixes, where it has some."""
        return self._batch.shared if isinstance(self._batch, PackedBatch) else None

    @property
    def batch(self) -> PackedBatch:
        if not isinstance(self._batch, PackedBatch):
            self._batch = self._batch()
        return self._batch


@dataclass(frozen=True, slots=True)
class Capture:
    """How a task's compute can be captured as a CUDA graph.

    key: equal for two tasks of one model that do the same work. It may contain ids of objects that
    the task refers to, because a captured graph keeps its task alive.  rows: the unit of the rows
    of all outputs; the rows of padding are cut off.
    """

    key: Hashable
    rows: Literal["sequences", "tokens"]


class Computation(Protocol):
    """The tensors that a forward pass computes from a step."""

    @property
    def capture(self) -> Capture | None:
        """None where compute reads the requests or has large outputs; it runs without a graph.

        Otherwise compute must launch the same kernels for every batch of the same padded sizes: it
        reads only the step's device tensors, and nothing on the host, such as `requests`.
        """
        ...

    def compute(self, transformer: Transformer, step: Step) -> tuple[torch.Tensor, ...]:
        """The forward pass and the head; tensors stay on the device, and nothing waits for it."""
        ...


class Task(Computation, Protocol[R_co]):
    """A computation on a step, and the way from its outputs to each request's result."""

    @property
    def key(self) -> Hashable:
        """Equal for two tasks of one model whose compute and finish do the same.

        It may contain ids of objects that the task refers to.
        """
        ...

    def are_finite(self, outputs: tuple[np.ndarray, ...], step: Step) -> np.ndarray:
        """bool [num_requests]: whether the logits or vectors of each request are finite.

        From compute's tensors on the host, as what `largest` says of them.  The results of
        other requests are not given to anybody.
        """
        ...

    def finish(self, outputs: tuple[np.ndarray, ...], step: Step) -> Sequence[R_co]:
        """One result for each request of the step, from compute's tensors on the host."""
        ...


class StepFreeTask(Task[R_co], Protocol[R_co]):
    """A task that some models do in less time than a step takes to be made."""

    def without_step(self, transformer: Transformer, requests: Requests) -> np.ndarray | None:
        """Finite rows of the requests, on a CPU; None where they need a step."""
        ...


class HeadTask(Task[R_co], Protocol[R_co]):
    """A task whose compute is a head on the last hidden states; such tasks can share a pass."""

    def reduce(self, hidden_states: torch.Tensor, step: Step) -> tuple[torch.Tensor, ...]:
        """compute's outputs, from those of transformer.forward(step.batch)."""
        ...

    @property
    def shares_pass(self) -> bool:
        """False where compute is more than `reduce` of these hidden states."""
        ...


def last_tokens(step: Step) -> Step:
    """A step with shared prefixes as one of the last tokens of its texts alone.

    Pooling the last token of each text is the same in both.
    """
    batch, seqlens = step.batch, step.requests.seqlens
    assert batch.shared is not None
    ends = torch.from_numpy(step.requests.cu_seqlens[1:][seqlens > 0] - 1)
    ones = np.minimum(seqlens, 1)
    short = replace(
        batch,
        cu_seqlens=upload(torch.from_numpy(prefix_sums(ones)), batch.device),
        seqlens=torch.from_numpy(ones),
        max_seqlen=1,
        on_host=None,
        shared=batch.shared.only(upload(ends, batch.device)),
    )
    return Step(step.requests, short, step.prompt_tokens)


def is_head(task: Task[R_co]) -> TypeGuard[HeadTask[R_co]]:
    """Whether the task can share a forward pass with others."""
    return bool(getattr(task, "shares_pass", False))


def needs_no_step(task: Task[R_co]) -> TypeGuard[StepFreeTask[R_co]]:
    """Whether the task can do without a step, on some models."""
    return hasattr(task, "without_step")


def are_finite(numbers: np.ndarray, num_rows: np.ndarray | None = None) -> np.ndarray:
    """bool [num_texts]: whether all numbers of each text are finite.

    numbers: of each row, [total_rows].  num_rows: int [num_texts], rows of each text, one after the
    other; None means one each.
    """
    rows: np.ndarray = np.isfinite(numbers)
    if num_rows is None:
        return rows
    texts = np.ones(len(num_rows), dtype=bool)
    if not rows.all():
        texts[np.repeat(np.arange(len(num_rows)), num_rows)[~rows]] = False
    return texts


def finish_finite(
    task: Task[R], outputs: tuple[np.ndarray, ...], step: Step
) -> tuple[np.ndarray, Sequence[R], list[int]]:
    """The results of the texts whose numbers are finite.

    Returns (indices of these texts, their results, indices of the others), from step.requests.
    """
    indices, is_finite = step.requests.indices, task.are_finite(outputs, step)
    if is_finite.all():
        return indices, task.finish(outputs, step), []
    with np.errstate(all="ignore"):  # results that are not finite are dropped below
        results = task.finish(outputs, step)
    if isinstance(results, np.ndarray):
        results = results[is_finite]
    else:
        results = [results[text] for text in np.flatnonzero(is_finite).tolist()]
    return indices[is_finite], results, indices[~is_finite].tolist()


def not_finite_error(index: int) -> NotFiniteError:
    """index: of the text in its call."""
    return NotFiniteError(
        f"text {index} gave numbers that are not finite (NaN or infinity), so it has no result; "
        "other texts are not affected: load the model in a dtype of wider range (bfloat16 or "
        "float32), or check the checkpoint's weights"
    )


@dataclass(frozen=True, slots=True)
class TaskRows:
    """The rows of one task in a step, from the request `start` on."""

    task: Task[Any]
    start: int


class SharedPass:
    """Runs the texts of several tasks in one step.

    Requests are numbered from 0 in the order of the parts.  Where a step is cut in two because it
    does not fit the memory, each half holds consecutive requests.
    """

    def __init__(self, parts: Sequence[TaskRows]):
        """parts: two or more in the order of the requests, with is_head(part.task) of each."""
        self.parts = parts
        captures = {part.task.capture for part in parts}
        # Tasks that differ in `finish` alone run as one, and as a CUDA graph.
        self.capture: Capture | None = captures.pop() if len(captures) == 1 else None
        # By part: the number of its outputs, where parts are computed apart.
        self._num_outputs: dict[int, int] = {}

    def compute(self, transformer: Transformer, step: Step) -> tuple[torch.Tensor, ...]:
        if self.capture is not None:
            return self.parts[0].task.compute(transformer, step)
        hidden_states = transformer.forward(step.batch)
        outputs: list[torch.Tensor] = []
        for number, piece, _, tokens in self._pieces(step):
            task = self.parts[number].task
            assert is_head(task)  # the constructor says so
            own = task.reduce(hidden_states[tokens], piece)
            self._num_outputs[number] = len(own)
            outputs += own
        return tuple(outputs)

    def finish_parts(
        self, outputs: tuple[np.ndarray, ...], step: Step
    ) -> Iterator[tuple[np.ndarray, Sequence[Any], list[int]]]:
        """finish_finite of each part's task on its own outputs, with numbers of requests."""
        for number, piece, texts, tokens in self._pieces(step):
            if self.capture is not None:
                rows = texts if self.capture.rows == "sequences" else tokens
                own = tuple(output[rows] for output in outputs)
            else:
                count = self._num_outputs[number]
                own, outputs = outputs[:count], outputs[count:]
            yield finish_finite(self.parts[number].task, own, piece)

    def _pieces(self, step: Step) -> Iterator[tuple[int, Step, slice, slice]]:
        """(number of the part, its own step, its requests and its tokens in this one)"""
        indices = step.requests.indices
        starts = np.array([part.start for part in self.parts])
        first = int(np.searchsorted(starts, indices[0], side="right")) - 1
        last = int(np.searchsorted(starts, indices[-1], side="right")) - 1
        bounds = np.searchsorted(indices, starts[first + 1 : last + 1]).tolist()
        bounds = [0, *bounds, len(indices)]
        tokens = step.requests.cu_seqlens[bounds].tolist()
        pieces = step.requests.cut(bounds)
        for i, requests in enumerate(pieces):
            texts, rows = slice(bounds[i], bounds[i + 1]), slice(tokens[i], tokens[i + 1])
            yield first + i, _piece(step, requests, texts, rows), texts, rows


def _piece(step: Step, requests: Requests, texts: slice, tokens: slice) -> Step:
    """Some consecutive texts of a step as a step of their own; views of its tensors."""
    batch, prompts = step.batch, step.prompt_tokens
    cu_seqlens = batch.cu_seqlens[texts.start : texts.stop + 1]
    types = batch.token_type_ids
    own = replace(
        batch,
        input_ids=batch.input_ids[tokens],
        position_ids=batch.position_ids[tokens],
        token_type_ids=None if types is None else types[tokens],
        cu_seqlens=cu_seqlens if tokens.start == 0 else cu_seqlens - tokens.start,
        seqlens=batch.seqlens[texts],
        max_seqlen=int(requests.seqlens.max(initial=0)),
        on_host=None,
        shared=None,
        adapters=None,
    )
    return Step(requests, own, None if prompts is None else prompts[texts])
