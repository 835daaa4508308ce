"""SharedPass: one forward pass for the texts of several tasks, each with its own head."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from bytetx.encode.request import Requests
from bytetx.encode.step import Capture, Step, Task, finish_finite, is_head
from bytetx.nn.transformer import Transformer


@dataclass(frozen=True, slots=True)
class Part:
    """The rows of one task in a step, from the request `start` on."""

    task: Task[Any]
    start: int


class SharedPass:
    """Runs the texts of several tasks in one step.

    Requests are numbered from 0 in the order of the parts.  Where a step is cut in two because it
    does not fit the memory, each half holds consecutive requests.
    """

    def __init__(self, parts: Sequence[Part]):
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
    )
    return Step(requests, own, None if prompts is None else prompts[texts])
