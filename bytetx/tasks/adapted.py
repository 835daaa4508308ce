"""Named tasks of a checkpoint: their adapters and prompts."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bytetx.encode.step import Capture, Step, Task
from bytetx.nn.transformer import Transformer

QUERY, DOCUMENT = "query", "document"
# The prompts of each task, the first that a checkpoint has.
PROMPT_NAMES = {QUERY: (QUERY,), DOCUMENT: (DOCUMENT, "passage", "corpus")}


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
