"""Sparse vectors: SPLADE's weights of the vocabulary, or a weight for each token of the text."""

from collections.abc import Collection, Hashable
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch

from bytetx.arguments import check_positive
from bytetx.encode.step import Capture, Step, Task, are_finite
from bytetx.nn.heads import MaskedLMHead
from bytetx.nn.loading import NO_LIMIT
from bytetx.nn.sentence_modules import AutoEncoder
from bytetx.nn.splade import SpladeSpec, splade
from bytetx.nn.transformer import Transformer
from bytetx.ops.linear import LinearWeight, linear
from bytetx.tasks.call import TaskCall
from bytetx.tasks.context import TaskContext
from bytetx.tasks.embed import DenseOptions, EmbedTask, dense_task
from bytetx.tasks.task import PromptOptions, TextOptions, Texts, option, task
from bytetx.tasks.vectors import PackedSparse, SparseEmbeddings, SparseSink, SparseVector


@dataclass(frozen=True, slots=True)
class SpladeTask:
    """Weights of the vocabulary from a masked language model head."""

    head: MaskedLMHead
    spec: SpladeSpec
    max_active_dims: int | None
    shares_pass: ClassVar[bool] = True

    @property
    def key(self) -> Hashable:
        return ("splade", id(self.head), self.spec, self.max_active_dims)

    @property
    def capture(self) -> None:
        """None: only the host knows where texts end, and only the device how many weights are."""
        return None

    def compute(self, transformer: Transformer, step: Step) -> tuple[torch.Tensor, ...]:
        return self.reduce(transformer.forward(step.batch), step)

    def reduce(self, hidden_states: torch.Tensor, step: Step) -> tuple[torch.Tensor, ...]:
        """(indices, values, counts, largest), as of SparseRows, from the last hidden states."""
        rows = splade(
            self.head,
            hidden_states,
            step.requests.seqlens,
            spec=self.spec,
            max_active_dims=self.max_active_dims,
        )
        return rows.indices, rows.values, rows.counts, rows.largest

    def are_finite(self, outputs: tuple[np.ndarray, ...], step: Step) -> np.ndarray:
        return are_finite(outputs[3])

    def finish(self, outputs: tuple[np.ndarray, ...], step: Step) -> PackedSparse:
        indices, values, counts, _ = outputs
        indptr = np.zeros(len(counts) + 1, dtype=np.int64)
        np.cumsum(counts, out=indptr[1:])
        return PackedSparse(indices, values, indptr)


@dataclass(frozen=True, slots=True)
class TokenWeightTask:
    """A weight for each token of the text: relu(linear(x)), of equal tokens the largest one.

    linear: [1, hidden_size].  skipped_ids: tokens without a weight.
    Source: BGE-M3 (arXiv 2402.03216), section 3.2.
    """

    weight: LinearWeight
    skipped_ids: Collection[int]
    max_active_dims: int | None
    shares_pass: ClassVar[bool] = True

    @property
    def key(self) -> Hashable:
        return ("token_weights", id(self.weight), self.max_active_dims)

    @property
    def capture(self) -> Capture:
        return Capture(("token_weights", id(self.weight)), rows="tokens")

    def compute(self, transformer: Transformer, step: Step) -> tuple[torch.Tensor, ...]:
        return self.reduce(transformer.forward(step.batch), step)

    @torch.inference_mode()
    def reduce(self, hidden_states: torch.Tensor, step: Step) -> tuple[torch.Tensor, ...]:
        """f32 [total_tokens, 1] from the last hidden states."""
        return (linear(hidden_states, self.weight).float(),)

    def are_finite(self, outputs: tuple[np.ndarray, ...], step: Step) -> np.ndarray:
        return are_finite(outputs[0][:, 0], step.requests.seqlens)

    def finish(self, outputs: tuple[np.ndarray, ...], step: Step) -> list[SparseVector]:
        weights = np.split(outputs[0][:, 0], step.requests.cu_seqlens[1:-1])
        texts = zip(step.requests.split(), weights, strict=True)
        return [self._vector(token_ids, values) for token_ids, values in texts]

    def _vector(self, token_ids: np.ndarray, weights: np.ndarray) -> SparseVector:
        is_kept = (weights > 0) & ~np.isin(token_ids, list(self.skipped_ids))
        indices, places = np.unique(token_ids[is_kept], return_inverse=True)
        values = np.zeros(len(indices), dtype=np.float32)
        np.maximum.at(values, places, weights[is_kept])
        if self.max_active_dims is not None and len(indices) > self.max_active_dims:
            best = np.sort(np.argsort(-values, kind="stable")[: self.max_active_dims])
            indices, values = indices[best], values[best]
        return SparseVector(indices.astype(np.int32), values)


@dataclass(frozen=True, slots=True)
class LatentTask:
    """The largest latents of a SparseAutoEncoder over a dense vector.

    dense: its last module gives the latents.  k: how many of them are kept, where above 0.
    size: of all latents.
    """

    dense: EmbedTask
    k: int
    size: int
    shares_pass: ClassVar[bool] = True

    @property
    def key(self) -> Hashable:
        return ("latents", self.dense.key, self.k)

    @property
    def capture(self) -> Capture:
        return Capture(("latents", self.dense.capture.key, self.k), rows="sequences")

    def compute(self, transformer: Transformer, step: Step) -> tuple[torch.Tensor, ...]:
        return self.reduce(transformer.forward(step.batch), step)

    @torch.inference_mode()
    def reduce(self, hidden_states: torch.Tensor, step: Step) -> tuple[torch.Tensor, ...]:
        """Indices int32 and values f32, [batch_size, k], and f32 [batch_size] of all latents."""
        latents, extreme = self.dense.reduce(hidden_states, step)
        values, indices = latents.topk(self.k, dim=1)
        return indices.int(), values, extreme

    def are_finite(self, outputs: tuple[np.ndarray, ...], step: Step) -> np.ndarray:
        return are_finite(outputs[2])

    def finish(self, outputs: tuple[np.ndarray, ...], step: Step) -> list[SparseVector]:
        vectors = []
        for indices, values in zip(*outputs[:2], strict=True):
            order = np.argsort(indices)
            order = order[values[order] > 0]
            vectors.append(SparseVector(indices[order], values[order]))
        return vectors


@dataclass(frozen=True, slots=True)
class StaticWeightTask:
    """The weight of each token of the vocabulary that a text has; runs no transformer.

    weights: f32 [vocab_size].
    """

    weights: np.ndarray
    max_active_dims: int | None

    @property
    def key(self) -> Hashable:
        return ("static_weights", id(self.weights), self.max_active_dims)

    @property
    def capture(self) -> None:
        """None: there is nothing to run on the device."""
        return None

    def compute(self, transformer: Transformer, step: Step) -> tuple[torch.Tensor, ...]:
        return self.reduce(step.batch.cu_seqlens, step)

    def reduce(self, hidden_states: torch.Tensor, step: Step) -> tuple[torch.Tensor, ...]:
        return (hidden_states.new_empty(0),)

    def are_finite(self, outputs: tuple[np.ndarray, ...], step: Step) -> np.ndarray:
        """All: the weights are checked when they are loaded."""
        return np.ones(len(step.requests), dtype=bool)

    def finish(self, outputs: tuple[np.ndarray, ...], step: Step) -> list[SparseVector]:
        return [self._vector(token_ids) for token_ids in step.requests.split()]

    def _vector(self, token_ids: np.ndarray) -> SparseVector:
        indices = np.unique(token_ids)
        indices = indices[self.weights[indices] != 0]
        most = self.max_active_dims
        if most is not None and len(indices) > most:
            sizes = np.abs(self.weights[indices])
            indices = indices[np.sort(np.argsort(-sizes, kind="stable")[:most])]
        return SparseVector(indices.astype(np.int32), self.weights[indices])


SparseTask = SpladeTask | TokenWeightTask | LatentTask | StaticWeightTask


@dataclass(frozen=True, kw_only=True)
class SparseOptions(PromptOptions, TextOptions):
    """Options of embed_sparse."""

    max_active_dims: int | None = option(
        None, "Keep so many of the largest weights; None is the checkpoint's own number.", min=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_active_dims is not None:
            check_positive("max_active_dims", self.max_active_dims)


@task(item=SparseVector)
def embed_sparse(
    context: TaskContext, texts: Texts, options: SparseOptions
) -> TaskCall[SparseEmbeddings]:
    """A sparse vector over the vocabulary for each text, as SparseEncoder gives it.

    A checkpoint with a masked language model head gives SPLADE's weights, pooled as it says (max
    over tokens of log1p(relu(logits)) where it says nothing); BGE-M3 gives a weight for each token
    of the text; a SparseAutoEncoder gives its largest latents. A failed text's row is empty, its
    error in `errors`.
    Raises InputError where the checkpoint gives no sparse vectors.
    """
    vectors = sparse_task(context, options.max_active_dims)
    rows: Task[SparseVector] = vectors
    reader = context.reader(options)
    context.set_prompts(reader, options)
    size = context.spec.vocab_size
    if isinstance(vectors, StaticWeightTask):  # no model limits a text
        size = len(vectors.weights)
        reader.spec = replace(context.spec, vocab_size=size, max_positions=NO_LIMIT)
        reader.allows_no_tokens = True
    elif isinstance(vectors, LatentTask):
        size = vectors.size
    return TaskCall("embed_sparse", texts, rows, reader, lambda _: SparseSink(size))


def sparse_task(context: TaskContext, max_active_dims: int | None) -> SparseTask:
    """The kind of sparse vectors that a checkpoint gives; InputError where it gives none."""
    sentence = context.checkpoint.sentence
    most = max_active_dims or sentence.max_active_dims
    modules, static = context.checkpoint.modules, context.checkpoint.static_weights
    if static is not None:
        return StaticWeightTask(static, most)
    if modules and isinstance(modules[-1], AutoEncoder):
        k = min(most or modules[-1].k, modules[-1].out_features)
        dense = dense_task(context, DenseOptions(), with_latents=True)
        return LatentTask(dense, k, modules[-1].out_features)
    weight = context.checkpoint.token_weight
    if weight is not None and sentence.splade is None:
        tokenizer = context.need_tokenizer()
        special = (tokenizer.unk_token_id, *tokenizer.frame_ids)
        skipped = frozenset(token_id for token_id in special if token_id is not None)
        return TokenWeightTask(weight, skipped, most)
    if context.splade_head is None:
        raise context.no_head_error(
            "gives no sparse vectors: it has neither a masked language model head (SPLADE) nor "
            "BGE-M3's sparse_linear; use embed"
        )
    return SpladeTask(context.splade_head, sentence.splade or SpladeSpec(), most)
