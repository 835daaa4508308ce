"""Sequence classification and the cross-encoder's scores, from the first token of each text."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from bytetx.arguments import check_top_k
from bytetx.checkpoint.spec import ModelSpec
from bytetx.encode.step import Capture, Step, Task, are_finite, last_tokens
from bytetx.nn.heads import ClassificationHead
from bytetx.nn.transformer import Transformer
from bytetx.ops.pooling import largest
from bytetx.tasks.call import TaskCall, list_sink
from bytetx.tasks.context import TaskContext
from bytetx.tasks.results import Label, Results
from bytetx.tasks.task import OverflowOptions, Texts, option, task


@dataclass(frozen=True, kw_only=True)
class ClassifyOptions(OverflowOptions):
    """Options of classify."""

    top_k: int | None = option(None, "Best labels to keep; None keeps every label.", min=1)
    raw_scores: bool = option(False, "The head's own numbers, without softmax or sigmoid.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_top_k(self.top_k)


@task(item=list[Label])
def classify(
    context: TaskContext, texts: Texts, options: ClassifyOptions
) -> TaskCall[Results[list[Label]]]:
    """The checkpoint's labels for each text, best first.

    Scores are a softmax; with one label or a multi-label problem type a sigmoid each; for a
    regression, or with raw_scores, the logits themselves. With overflow="chunk" they are the mean
    of the scores of a long text's chunks.
    Raises InputError where the checkpoint has no head for sequence classification.
    """
    head = context.need_head(context.heads.sequence, "sequence classification")
    scores = raw if options.raw_scores else score_function(context.spec)
    job = ClassifyTask(head, context.labels(), scores, options.top_k)
    reader = context.reader(options)
    if not reader.cuts:
        return TaskCall("classify", texts, job, reader, list_sink)
    chunks: Task[np.ndarray] = ChunkScoresTask(job)
    return TaskCall("classify", texts, chunks, reader, list_sink, merge=job.mean)


def score_function(spec: ModelSpec) -> Callable[[np.ndarray], np.ndarray]:
    """Logits [n, num_labels] -> scores, chosen as Hugging Face's text-classification does."""
    if spec.problem_type == "regression":
        return raw
    if spec.problem_type == "multi_label_classification" or spec.num_labels == 1:
        return sigmoid
    return softmax


def raw(logits: np.ndarray) -> np.ndarray:
    return logits


def sigmoid(logits: np.ndarray) -> np.ndarray:
    small = np.exp(-np.abs(logits))  # never overflows
    scores: np.ndarray = np.where(logits >= 0, 1.0, small) / (1.0 + small)
    return scores


def softmax(logits: np.ndarray) -> np.ndarray:
    exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
    scores: np.ndarray = exponentials / exponentials.sum(axis=-1, keepdims=True)
    return scores


@dataclass(frozen=True, slots=True)
class ClassifyTask:
    """Labels of each text, best first. labels: by class id. top_k: None keeps all."""

    head: ClassificationHead
    labels: tuple[str, ...]
    scores: Callable[[np.ndarray], np.ndarray]
    top_k: int | None
    shares_pass: ClassVar[bool] = True

    @property
    def key(self) -> Hashable:
        return ("classify", id(self.head), id(self.scores), self.top_k)

    @property
    def capture(self) -> Capture:
        return Capture(("logits", id(self.head)), rows="sequences")

    def compute(self, transformer: Transformer, step: Step) -> tuple[torch.Tensor, ...]:
        if step.shared is not None and self.head.pooling == "last":
            step = last_tokens(step)
        return self.reduce(transformer.forward(step.batch), step)

    def reduce(self, hidden_states: torch.Tensor, step: Step) -> tuple[torch.Tensor, ...]:
        """(f32 [batch_size, num_labels], `largest` of each) from the last hidden states."""
        logits = _logits(self.head, hidden_states, step)
        return logits, largest(logits)

    def are_finite(self, outputs: tuple[np.ndarray, ...], step: Step) -> np.ndarray:
        return are_finite(outputs[1])

    def finish(self, outputs: tuple[np.ndarray, ...], step: Step) -> list[list[Label]]:
        return [self.best(row) for row in self.scores(outputs[0])]

    def mean(self, chunks: list[np.ndarray]) -> list[Label]:
        """The labels of a text from the scores of its chunks."""
        return self.best(chunks[0] if len(chunks) == 1 else np.mean(chunks, axis=0))

    def best(self, scores: np.ndarray) -> list[Label]:
        order = np.argsort(-scores, kind="stable")[: self.top_k]
        return [Label(self.labels[i], float(scores[i]), i) for i in order.tolist()]


@dataclass(frozen=True, slots=True)
class ChunkScoresTask:
    """Scores f32 [num_labels] of each chunk of a text."""

    task: ClassifyTask
    shares_pass: ClassVar[bool] = True

    @property
    def key(self) -> Hashable:
        return ("chunk_scores", self.task.key)

    @property
    def capture(self) -> Capture:
        return self.task.capture

    def compute(self, transformer: Transformer, step: Step) -> tuple[torch.Tensor, ...]:
        return self.task.compute(transformer, step)

    def reduce(self, hidden_states: torch.Tensor, step: Step) -> tuple[torch.Tensor, ...]:
        return self.task.reduce(hidden_states, step)

    def are_finite(self, outputs: tuple[np.ndarray, ...], step: Step) -> np.ndarray:
        return self.task.are_finite(outputs, step)

    def finish(self, outputs: tuple[np.ndarray, ...], step: Step) -> list[np.ndarray]:
        return list(self.task.scores(outputs[0].copy()))


@dataclass(frozen=True, slots=True)
class ScoreTask:
    """One number a text: the logit of a cross-encoder through its activation.

    Of a head with two labels, the logit is that of the second less that of the first.
    """

    head: ClassificationHead
    activation: Callable[[torch.Tensor], torch.Tensor]
    shares_pass: ClassVar[bool] = True

    @property
    def key(self) -> Hashable:
        return self.capture

    @property
    def capture(self) -> Capture:
        return Capture(("score", id(self.head), id(self.activation)), rows="sequences")

    def compute(self, transformer: Transformer, step: Step) -> tuple[torch.Tensor, ...]:
        if step.shared is not None and self.head.pooling == "last":
            step = last_tokens(step)
        return self.reduce(transformer.forward(step.batch), step)

    @torch.inference_mode()
    def reduce(self, hidden_states: torch.Tensor, step: Step) -> tuple[torch.Tensor, ...]:
        """(scores, logits), f32 [batch_size, 1] each, from the last hidden states."""
        logits = _logits(self.head, hidden_states, step)
        if logits.shape[1] == 2:
            logits = logits[:, 1:] - logits[:, :1]
        return self.activation(logits), logits

    def are_finite(self, outputs: tuple[np.ndarray, ...], step: Step) -> np.ndarray:
        """The logits, too: a sigmoid makes 1 of infinity."""
        both: np.ndarray = are_finite(outputs[0][:, 0]) & are_finite(outputs[1][:, 0])
        return both

    def finish(self, outputs: tuple[np.ndarray, ...], step: Step) -> list[float]:
        scores: list[float] = outputs[0][:, 0].tolist()
        return scores


@torch.inference_mode()
def _logits(head: ClassificationHead, hidden_states: torch.Tensor, step: Step) -> torch.Tensor:
    """f32 [batch_size, num_labels]."""
    return head.classify(hidden_states, step.batch).float()
