"""SharedPass: one forward pass for the texts of several tasks, each with its own head."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from bytetx.encode.finite import finish_finite
from bytetx.encode.request import Alignment, Requests
from bytetx.encode.step import Capture, Step, Task, is_head
from bytetx.nn.transformer import Transformer

# Stands in for the alignment of texts whose task needs none, beside others that do.
_NO_ALIGNMENT = Alignment(None, None, None, [])


@dataclass(frozen=True, slots=True)
class Part:
    """The rows of one task in a step: start to stop of its requests."""

    task: Task[Any]
    start: int
    stop: int


class SharedPass:
    """Runs the texts of several tasks in one step.

    Requests are numbered from 0 in the order of the parts.  Where a step is cut in two because it
    does not fit the memory, each half holds consecutive requests.
    """

    def __init__(self, parts: Sequence[Part]):
        """parts: in the order of the requests; of several, each is_head(part.task)."""
        self.parts = parts
        captures = [part.task.capture for part in parts]
        # Tasks that differ in `finish` alone run as one, and as a CUDA graph.
        is_one = len(set(captures)) == 1 and (captures[0] is not None or len(parts) == 1)
        self._capture = captures[0] if is_one else None
        self._is_one = is_one
        # By part: the number of its outputs, where parts are computed apart.
        self._num_outputs: dict[int, int] = {}

    @property
    def key(self) -> object:
        return tuple(part.task.key for part in self.parts)

    @property
    def capture(self) -> Capture | None:
        return self._capture

    def compute(self, transformer: Transformer, step: Step) -> tuple[torch.Tensor, ...]:
        if self._is_one:
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

    def are_finite(self, outputs: tuple[np.ndarray, ...], step: Step) -> np.ndarray:
        parts = self._split(outputs, step)
        return np.concatenate([task.are_finite(own, piece) for task, own, piece in parts])

    def finish(self, outputs: tuple[np.ndarray, ...], step: Step) -> list[Any]:
        parts = self._split(outputs, step)
        return [result for task, own, piece in parts for result in task.finish(own, piece)]

    def finish_parts(
        self, outputs: tuple[np.ndarray, ...], step: Step
    ) -> Iterator[tuple[np.ndarray, Sequence[Any], list[int]]]:
        """For each part: (numbers of requests, rising; their results; numbers of those without one,
        whose logits or vectors are not finite)."""
        for task, own, piece in self._split(outputs, step):
            results, is_finite = finish_finite(task, own, piece)
            numbers, failed = piece.requests.indices, []
            if is_finite is not None:
                numbers, failed = numbers[is_finite], numbers[~is_finite].tolist()
            yield numbers, results, failed

    def _split(
        self, outputs: tuple[np.ndarray, ...], step: Step
    ) -> Iterator[tuple[Task[Any], tuple[np.ndarray, ...], Step]]:
        """Each part's task with its own outputs and its own step."""
        for number, piece, texts, tokens in self._pieces(step):
            if len(self.parts) == 1:
                own = outputs
            elif self._capture is not None:
                rows = texts if self._capture.rows == "sequences" else tokens
                own = tuple(output[rows] for output in outputs)
            else:
                count = self._num_outputs[number]
                own, outputs = outputs[:count], outputs[count:]
            yield self.parts[number].task, own, piece

    def _pieces(self, step: Step) -> Iterator[tuple[int, Step, slice, slice]]:
        """(number of the part, its own step, its requests and its tokens in this one)"""
        indices = step.requests.indices
        if len(self.parts) == 1:
            yield 0, step, slice(0, len(indices)), slice(0, step.requests.total_tokens)
            return
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


def join_requests(pieces: Sequence[Requests]) -> Requests:
    """The texts of all pieces behind one another, numbered from 0."""
    num_texts = sum(map(len, pieces))
    indices = np.arange(num_texts, dtype=np.int64)
    if len(pieces) == 1:
        return replace(pieces[0], indices=indices)
    alignments = None
    if any(piece.alignments is not None for piece in pieces):
        alignments = [
            alignment
            for piece in pieces
            for alignment in (piece.alignments or [_NO_ALIGNMENT] * len(piece))
        ]
    return Requests(
        indices,
        np.concatenate([piece.seqlens for piece in pieces]),
        np.concatenate([piece.token_ids for piece in pieces]),
        np.concatenate([piece.is_truncated for piece in pieces]),
        _filled([(piece.token_type_ids, piece.total_tokens) for piece in pieces]),
        _filled([(piece.prompt_tokens, len(piece)) for piece in pieces]),
        alignments,
        _filled([(piece.unseen_tokens, len(piece)) for piece in pieces]),
        _filled([(piece.chunks, len(piece)) for piece in pieces]),
    )


def _filled(columns: Sequence[tuple[np.ndarray | None, int]]) -> np.ndarray | None:
    """int32 columns behind one another, with zeros for a missing one; None where all are."""
    if all(column is None for column, _ in columns):
        return None
    return np.concatenate(
        [np.zeros(size, dtype=np.int32) if column is None else column for column, size in columns]
    )


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
