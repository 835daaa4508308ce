"""Step and Task: what one forward pass is given, and what a room under tasks/ makes of it."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

import numpy as np
import torch

from bytetx.encode.request import Requests
from bytetx.nn.transformer import Transformer
from bytetx.packed import PackedBatch

R_co = TypeVar("R_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Step:
    """The requests of one forward pass and their packed tokens, in the same order.

    prompt_tokens: int32 [batch_size] on the batch's device, tokens of the prompt at each start;
    None means 0 everywhere.
    """

    requests: Requests
    batch: PackedBatch
    prompt_tokens: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Capture:
    """What a CUDA graph of a task's compute needs to know.

    key: equal for two tasks of one model that do the same work. It may hold ids of objects that
    the task refers to, for a captured graph keeps its task alive.  rows: what a row of every
    output stands for; a padded batch has more of them than the requests, and they are cut off.
    """

    key: Hashable
    rows: Literal["sequences", "tokens"]


class Task(Protocol[R_co]):
    """What to compute for a step, and how to make each request's result of it."""

    @property
    def capture(self) -> Capture | None:
        """None: compute reads the requests or its outputs are large; it runs without a graph.

        Otherwise compute must be the same kernels for every batch of the same padded sizes: it
        reads the step's device tensors and nothing that is known on the host, `requests` included.
        """
        ...

    def compute(self, transformer: Transformer, step: Step) -> tuple[torch.Tensor, ...]:
        """The forward pass and the head; tensors stay on the device, nothing waits for it."""
        ...

    def finish(self, outputs: tuple[np.ndarray, ...], step: Step) -> Sequence[R_co]:
        """One result a request of the step, from compute's tensors on the host."""
        ...
