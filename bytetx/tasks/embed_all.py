"""Dense, sparse and token vectors of each text from one forward pass (BGE-M3)."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from bytetx.encode.request import RunStats
from bytetx.encode.step import Step, Task
from bytetx.errors import InputError
from bytetx.nn.transformer import Transformer
from bytetx.tasks.call import Call, ListSink
from bytetx.tasks.embed import EmbedTask
from bytetx.tasks.embed_sparse import SparseMixin, SparseTask
from bytetx.tasks.embed_tokens import TokenVectorMixin, TokenVectorTask
from bytetx.tasks.options import OnError, Texts
from bytetx.tasks.results import Embeddings, Results
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


class EmbedAllMixin(SparseMixin, TokenVectorMixin):
    """Model.embed_all."""

    def embed_all(
        self,
        texts: Texts,
        *,
        task: str | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        truncate: bool = False,
        on_error: OnError = "raise",
        show_progress: bool = False,
    ) -> AllEmbeddings:
        """Dense, sparse and token vectors from one forward pass, of a checkpoint such as BGE-M3.

        Each is what embed, embed_sparse and embed_tokens give of the same texts and prompt.
        task, prompt, prompt_name: as in embed.
        Raises InputError where the checkpoint does not give all three.
        """
        call = self._all_call(
            texts,
            task=task,
            prompt=prompt,
            prompt_name=prompt_name,
            truncate=truncate,
            on_error=on_error,
        )
        return self._perform(call, show_progress=show_progress)

    def _all_call(
        self,
        texts: Texts,
        *,
        task: str | None,
        prompt: str | None,
        prompt_name: str | None,
        truncate: bool,
        on_error: OnError,
    ) -> Call[AllEmbeddings]:
        """Model.embed_all, ready to run."""
        if self.checkpoint.sentence.multi_vector is not None:
            raise InputError("embed_all is for BGE-M3's layers; use embed_tokens with this model")
        dense = self._embed_task()
        sparse = self._sparse_task(None)
        token_size, tokens = self._token_task("document", None)
        job: Task[_Vectors] = EmbedAllTask(dense, sparse, tokens)
        reader = self._reader(truncate=truncate, on_error=on_error)
        reader.prompt = self._prompt_of(task, prompt, prompt_name)
        dense_size = dense.size(self.spec.output_size)

        def gather(results: Results[_Vectors | InputError]) -> AllEmbeddings:
            return join_all(
                results,
                dense_size=dense_size,
                token_size=token_size,
                vocab_size=self.spec.vocab_size,
                stats=results.stats,
            )

        adapted = self._with_adapter(task, job)
        return Call("embed_all", texts, adapted, reader, lambda _: ListSink(gather))


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
