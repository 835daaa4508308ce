"""Dense, sparse and token vectors of each text from one forward pass (BGE-M3)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from bytetx.encode.request import RunStats
from bytetx.encode.step import Step
from bytetx.errors import InputError
from bytetx.nn.transformer import Transformer
from bytetx.tasks.embed import EmbedTask
from bytetx.tasks.embed_sparse import SpladeTask, TokenWeightTask
from bytetx.tasks.embed_tokens import TokenVectorTask
from bytetx.tasks.results import Embeddings
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
    """What embed, embed_sparse and embed_tokens give for the same texts.

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
    sparse: SpladeTask | TokenWeightTask
    tokens: TokenVectorTask

    @property
    def capture(self) -> None:
        """None: some outputs have a row for each text, others one for each token."""
        return None

    def compute(self, transformer: Transformer, step: Step) -> tuple[torch.Tensor, ...]:
        hidden_states = transformer.forward(step.batch)
        dense = self.dense.reduce(hidden_states, step)
        tokens = self.tokens.reduce(hidden_states, step)
        return (*dense, *tokens, *self.sparse.reduce(hidden_states, step))

    def finish(self, outputs: tuple[np.ndarray, ...], step: Step) -> list[_Vectors]:
        dense, tokens, *sparse = outputs
        parts = zip(
            self.dense.finish((dense,), step),
            self.sparse.finish(tuple(sparse), step),
            self.tokens.finish((tokens,), step),
            strict=True,
        )
        return [(row.copy(), weights, matrix) for row, weights, matrix in parts]


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
