"""Step and Task: the input of one forward pass, and what a task computes from it."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeGuard, TypeVar

import numpy as np
import torch

from bytetx.encode.request import Requests
from bytetx.nn.transformer import Transformer
from bytetx.packed import PackedBatch

R_co = TypeVar("R_co", covariant=True)


class Step:
    """The requests of one forward pass and their packed tokens, in the same order.

    prompt_tokens: int32 [batch_size] on the batch's device, tokens of the prompt at each start;
    None means 0 everywhere.
    """

    __slots__ = ("_batch", "prompt_tokens", "requests")

    def __init__(
        self,
        requests: Requests,
        batch: PackedBatch | Callable[[], PackedBatch],
        prompt_tokens: torch.Tensor | None,
    ):
        """batch: or what packs it, where it may not be needed."""
        self.requests, self.prompt_tokens = requests, prompt_tokens
        self._batch = batch

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


class Task(Protocol[R_co]):
    """A computation on a step, and the way from its outputs to each request's result."""

    @property
    def key(self) -> Hashable:
        """Equal for two tasks of one model whose compute and finish do the same.

        It may contain ids of objects that the task refers to.
        """
        ...

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

    def are_finite(self, outputs: tuple[np.ndarray, ...], step: Step) -> np.ndarray:
        """bool [num_requests]: whether the logits or vectors of each request are finite.

        From compute's tensors on the host, as what `finite.largest` says of them.  The results of
        other requests are not given to anybody.
        """
        ...

    def finish(self, outputs: tuple[np.ndarray, ...], step: Step) -> Sequence[R_co]:
        """One result for each request of the step, from compute's tensors on the host."""
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


def is_head(task: Task[R_co]) -> TypeGuard[HeadTask[R_co]]:
    """Whether the task can share a forward pass with others."""
    return bool(getattr(task, "shares_pass", False))
