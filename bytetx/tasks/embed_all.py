"""Dense, sparse and token vectors of each text from one forward pass (BGE-M3)."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from bytetx.encode.request import RunStats
from bytetx.encode.step import Step, Task
from bytetx.errors import InputError
from bytetx.nn.transformer import Transformer
from bytetx.tasks.call import ListSink, TaskCall
from bytetx.tasks.context import TaskContext
from bytetx.tasks.embed import DenseOptions, EmbedTask, dense_task
from bytetx.tasks.embed_sparse import SparseTask, sparse_task
from bytetx.tasks.embed_tokens import TokenOptions, TokenVectorTask, token_task
from bytetx.tasks.results import Embeddings, Results
from bytetx.tasks.task import PromptOptions, TextOptions, Texts, task
from bytetx.tasks.vectors import (
    SparseEmbeddings,
    SparseVector,
    TokenEmbeddings,
    join_sparse,
    join_tokens,
)

_Vectors = tuple[np.ndarray, SparseVector, np.ndarray]


@dataclass(frozen=True, slots=True)
class AllEmbeddings:
    """Results of embed, embed_sparse and embed_tokens for the same texts.

    errors: InputError of each text that failed, by its index.
    """

    dense: Embeddings
    sparse: SparseEmbeddings
    tokens: TokenEmbeddings
    stats: RunStats
    errors: Mapping[int, InputError] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EmbedAllTask:
    """Three tasks on the hidden states of one pass."""

    dense: EmbedTask
    sparse: SparseTask
    tokens: TokenVectorTask

    @property
    def key(self) -> Hashable:
        return ("embed_all", self.dense.key, self.sparse.key, self.tokens.key)

    @property
    def shares_pass(self) -> bool:
        return self.tokens.shares_pass

    @property
    def capture(self) -> None:
        """None: some outputs have a row for each text, others one for each token."""
        return None

    def compute(self, transformer: Transformer, step: Step) -> tuple[torch.Tensor, ...]:
        return self.reduce(transformer.forward(step.batch), step)

    def reduce(self, hidden_states: torch.Tensor, step: Step) -> tuple[torch.Tensor, ...]:
        """The outputs of the three, from the last hidden states."""
        dense = self.dense.reduce(hidden_states, step)
        tokens = self.tokens.reduce(hidden_states, step)
        return (*dense, *tokens, *self.sparse.reduce(hidden_states, step))

    def are_finite(self, outputs: tuple[np.ndarray, ...], step: Step) -> np.ndarray:
        dense, tokens, sparse = outputs[:2], outputs[2:4], outputs[4:]
        every: np.ndarray = self.dense.are_finite(dense, step)
        every &= self.tokens.are_finite(tokens, step)
        every &= self.sparse.are_finite(sparse, step)
        return every

    def finish(self, outputs: tuple[np.ndarray, ...], step: Step) -> list[_Vectors]:
        parts = zip(
            self.dense.finish(outputs[:2], step),
            self.sparse.finish(outputs[4:], step),
            self.tokens.finish(outputs[2:4], step),
            strict=True,
        )
        return [(row.copy(), weights, matrix) for row, weights, matrix in parts]


@dataclass(frozen=True, kw_only=True)
class AllOptions(PromptOptions, TextOptions):
    """Options of embed_all."""


@task()
def embed_all(context: TaskContext, texts: Texts, options: AllOptions) -> TaskCall[AllEmbeddings]:
    """Dense, sparse and token vectors from one forward pass, of a checkpoint such as BGE-M3.

    Each is what embed, embed_sparse and embed_tokens give of the same texts and prompt.
    Raises InputError where the checkpoint does not give all three.
    """
    if context.checkpoint.sentence.multi_vector is not None:
        raise InputError("embed_all is for BGE-M3's layers; use embed_tokens with this model")
    dense = dense_task(context, DenseOptions())
    sparse = sparse_task(context, None)
    token_size, tokens = token_task(context, TokenOptions())
    job: Task[_Vectors] = EmbedAllTask(dense, sparse, tokens)
    reader = context.reader(options)
    context.set_prompts(reader, options)
    dense_size, vocab_size = dense.size, context.spec.vocab_size

    def gather(results: Results[_Vectors | InputError]) -> AllEmbeddings:
        return join_all(
            results,
            dense_size=dense_size,
            token_size=token_size,
            vocab_size=vocab_size,
            stats=results.stats,
        )

    return TaskCall("embed_all", texts, job, reader, lambda _: ListSink(gather))


def join_all(
    results: Sequence[_Vectors | InputError],
    *,
    dense_size: int,
    token_size: int,
    vocab_size: int,
    stats: RunStats,
) -> AllEmbeddings:
    """The results of each kind in one array; a text that failed is NaN, or has no vectors."""
    errors = {i: result for i, result in enumerate(results) if isinstance(result, InputError)}
    vectors = np.full((len(results), dense_size), np.nan, dtype=np.float32)
    for row, result in enumerate(results):
        if not isinstance(result, InputError):
            vectors[row] = result[0]
    weights = [r if isinstance(r, InputError) else r[1] for r in results]
    matrices = [r if isinstance(r, InputError) else r[2] for r in results]
    empty = np.empty((0, token_size), dtype=np.float32)
    return AllEmbeddings(
        Embeddings(vectors, stats, errors),
        join_sparse(weights, size=vocab_size, stats=stats),
        join_tokens(matrices, empty=empty, stats=stats),
        stats,
        errors,
    )
